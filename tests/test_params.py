"""SamplingParams: what is refused, by name, value and bound."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from qkv import SamplingParams


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"temperature": -0.5}, ValueError, ["temperature", "-0.5", "0"]),
        ({"temperature": float("nan")}, ValueError, ["temperature", "nan", "finite"]),
        ({"temperature": float("inf")}, ValueError, ["temperature", "inf"]),
        ({"temperature": "hot"}, TypeError, ["temperature", "hot"]),
        ({"temperature": True}, TypeError, ["temperature", "True"]),
        ({"top_p": 0.0}, ValueError, ["top_p", "0.0", "(0, 1]"]),
        ({"top_p": 1.5}, ValueError, ["top_p", "1.5", "(0, 1]"]),
        ({"top_k": -2}, ValueError, ["top_k", "-2"]),
        ({"top_k": 1.5}, TypeError, ["top_k", "1.5"]),
        ({"min_p": -0.1}, ValueError, ["min_p", "-0.1", "[0, 1]"]),
        ({"max_tokens": -1}, ValueError, ["max_tokens", "-1", "0"]),
        ({"max_tokens": 0}, ValueError, ["max_tokens", "prompt_logprobs"]),
        ({"max_tokens": 4, "min_tokens": 5}, ValueError, ["min_tokens=5", "max_tokens=4"]),
        ({"n": 0}, ValueError, ["n=0", "1"]),
        ({"n": "2"}, TypeError, ["n=", "integer"]),
        ({"seed": -1}, ValueError, ["seed", "-1"]),
        ({"seed": 2**64}, ValueError, ["seed", str(2**64 - 1)]),
        ({"logprobs": 257}, ValueError, ["logprobs", "257", "256"]),
        ({"prompt_logprobs": -1}, ValueError, ["prompt_logprobs", "-1"]),
        ({"presence_penalty": 2.5}, ValueError, ["presence_penalty", "2.5", "[-2, 2]"]),
        ({"frequency_penalty": -2.5}, ValueError, ["frequency_penalty", "-2.5"]),
        ({"repetition_penalty": 0.0}, ValueError, ["repetition_penalty", "(0, 2]"]),
        ({"repetition_penalty": 2.1}, ValueError, ["repetition_penalty", "2.1"]),
        ({"stop": ""}, ValueError, ["stop", "empty"]),
        ({"stop": ["a", ""]}, ValueError, ["stop", "empty"]),
        ({"stop": [1]}, TypeError, ["stop", "1"]),
        ({"stop": 5}, TypeError, ["stop", "5"]),
        ({"stop_token_ids": [-3]}, ValueError, ["stop_token_ids", "-3"]),
        ({"stop_token_ids": 7}, TypeError, ["stop_token_ids", "7"]),
        ({"ignore_eos": 1}, TypeError, ["ignore_eos", "1"]),
        ({"logit_bias": [1]}, TypeError, ["logit_bias"]),
        ({"logit_bias": {-1: 1.0}}, ValueError, ["logit_bias", "-1"]),
        ({"logit_bias": {3: float("nan")}}, ValueError, ["logit_bias[3]", "nan"]),
        ({"bad_words": [[]]}, ValueError, ["bad_words", "empty"]),
        ({"bad_words": [""]}, ValueError, ["bad_words", "empty"]),
        # Beyond what a double, a float or a printable integer can hold.
        ({"temperature": 10**400}, ValueError, ["temperature", "finite"]),
        ({"temperature": 1e30}, ValueError, ["temperature=1e+30", "1e+06"]),
        ({"top_p": 1e-300}, ValueError, ["top_p=1e-300", "1e-06"]),
        ({"repetition_penalty": 1e-30}, ValueError, ["repetition_penalty=1e-30", "1e-06"]),
        ({"logit_bias": {3: 10**400}}, ValueError, ["logit_bias[3]", "finite"]),
        ({"logit_bias": {3: 1e300}}, ValueError, ["logit_bias[3]=1e+300", "1e+30"]),
        ({"max_tokens": 10**5000}, ValueError, ["max_tokens", "16610 bits", "2147483647"]),
        ({"max_tokens": -(10**5000)}, ValueError, ["max_tokens", "16610 bits"]),
    ],
)
def test_refused(values: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        SamplingParams(**values)
    for word in words:
        assert word in str(caught.value)


def test_a_ban_may_be_a_numpy_number() -> None:
    bias = SamplingParams(logit_bias={3: np.float32(-np.inf)}).logit_bias
    assert bias == {3: -np.inf}


def test_unknown_name() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"temprature.*temperature"):
        SamplingParams.from_mapping({"temprature": 1.0})


def test_normalized() -> None:
    params = SamplingParams(
        temperature=1e-7, top_k=-1, stop="END", bad_words=["x", (4, 5)], stop_token_ids=[7, 8]
    )
    assert params.greedy and params.temperature == 0.0
    assert params.top_k == 0
    assert params.stop == ("END",)
    assert params.bad_words == ("x", (4, 5))
    assert params.stop_token_ids == (7, 8)
    assert not SamplingParams(temperature=1e-5).greedy


def test_greedy_with_samples_is_allowed() -> None:
    assert SamplingParams(temperature=0.0, n=3).n == 3


def test_frozen_and_hashable() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    assert hash(params) == hash(SamplingParams(stop=("a",), logit_bias={1: 2.0}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_p = 0.5  # type: ignore[misc]


def test_changes_are_checked() -> None:
    params = SamplingParams(max_tokens=10)
    assert params.with_(max_tokens=20).max_tokens == 20
    with pytest.raises(ValueError, match="min_tokens"):
        params.with_(min_tokens=11)


def test_from_json() -> None:
    params = SamplingParams.from_mapping({"max_tokens": 3, "logit_bias": {"5": -1}, "stop": "a"})
    assert params.logit_bias == {5: -1.0}
    assert params == SamplingParams(max_tokens=3, logit_bias={5: -1.0}, stop=["a"])


def test_bias_may_ban() -> None:
    ban = {3: -float("inf")}
    assert SamplingParams(logit_bias=ban).logit_bias == ban
    with pytest.raises(ValueError, match="finite"):
        SamplingParams(logit_bias={3: float("inf")})
