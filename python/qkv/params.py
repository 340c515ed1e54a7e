"""SamplingParams: how a prompt is continued. Everything is checked when the object is made."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from . import structured

# Below this a temperature divides logits by so little that only the best token is left: greedy.
GREEDY_TEMPERATURE = 1e-6
MAX_LOGPROBS = 256
MAX_SAMPLES = 1024
_INT32_MAX = 2**31 - 1
# What the engine's float32 arithmetic can do something with.
_SMALL, _LARGE, _LARGEST_BIAS = 1e-6, 1e6, 1e30


def integer(name: str, value: Any, low: int, high: int = _INT32_MAX) -> int:
    """The value as an int; TypeError or ValueError names it and its bounds."""
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: an integer is needed")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: an integer is needed") from None
    if not low <= number <= high:
        raise ValueError(f"{name}={_written(number)}: must be within {low} and {high}")
    return number


def _written(number: int) -> str:
    """Python refuses to write out integers of thousands of digits."""
    try:
        return str(number)
    except ValueError:
        return f"an integer of {number.bit_length()} bits"


def real(name: str, value: Any) -> float:
    if isinstance(value, (bool, str, bytes)):
        raise TypeError(f"{name}={value!r}: a number is needed")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r}: a number is needed") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}={number}: must be finite")
    return number


def _within(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    number = real(name, value)
    if number > high or number < low or (open_low and number == low):
        left = "(" if open_low else "["
        raise ValueError(f"{name}={number}: must be in {left}{low:g}, {high:g}]")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: True or False is needed")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _tuple(name, value)
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"{name}: {item!r} is not a string")
        if not item:
            raise ValueError(f"{name}: an empty string would match everywhere")
    return items


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r}: a sequence is needed")
    return tuple(value)


def _words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    items = (value,) if isinstance(value, str) else _tuple("bad_words", value)
    words: list[str | tuple[int, ...]] = []
    for item in items:
        if isinstance(item, str):
            words.extend(_strings("bad_words", item))
            continue
        ids = tuple(
            integer("bad_words id", token, 0, _INT32_MAX) for token in _tuple("bad_words", item)
        )
        if not ids:
            raise ValueError("bad_words: an empty sequence would match everywhere")
        words.append(ids)
    return tuple(words)


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias={value!r}: a mapping from token id to number is needed")
    bias: dict[int, float] = {}
    for token, amount in value.items():
        key = integer("logit_bias id", token, 0, _INT32_MAX)
        if isinstance(amount, (float, np.floating)) and amount == -math.inf:
            bias[key] = -math.inf
        else:
            bias[key] = _within(f"logit_bias[{key}]", amount, -_LARGEST_BIAS, _LARGEST_BIAS)
    return bias


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a prompt is continued.

    max_tokens           output tokens at most; 0 computes only what is asked of the prompt
    min_tokens           no end-of-text token and no stop before this many
    temperature          0 (below 1e-6): the most likely token ("greedy")
    top_p, top_k, min_p  keep the smallest set of tokens with this probability, the k best (0: all),
                         those with at least min_p times the best one's probability
    n                    samples of each prompt (greedy ones are all the same)
    seed                 64 bits; None: derived from the prompt and its key, so that a row gives the
                         same text wherever it stands in a batch (and the same prompt twice the
                         same text twice: n or keys make them differ)
    stop                 strings that end the output; the text is cut before them
    stop_token_ids       token ids that do so, besides the model's own
    ignore_eos           go on after the model's end-of-text token
    logprobs             None, or how many alternatives to report for each output token (at most
                         256); the chosen token's own log-probability is always there
    prompt_logprobs      None, or the same for the prompt's tokens
    repetition_penalty, presence_penalty, frequency_penalty, logit_bias, bad_words
                         as vLLM and OpenAI define them
    skip_special_tokens  leave special tokens out of the text
    structured_outputs   the form of the output, one of {"json": a schema}, {"json_object": True},
                         {"regex": ...}, {"choice": [texts]}, {"grammar": in Lark's syntax}; needs
                         llguidance (extra `structured`). The output ends where the form does; what
                         max_tokens cuts off is cut. One that does not compile is its row's error
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: Sequence[str | Sequence[int]] = ()
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "max_tokens": integer("max_tokens", self.max_tokens, 0, _INT32_MAX),
            "min_tokens": integer("min_tokens", self.min_tokens, 0, _INT32_MAX),
            "temperature": real("temperature", self.temperature),
            "top_p": _within("top_p", self.top_p, 0.0, 1.0, open_low=True),
            # vLLM and SGLang write "all tokens" as -1.
            "top_k": max(integer("top_k", self.top_k, -1, _INT32_MAX), 0),
            "min_p": _within("min_p", self.min_p, 0.0, 1.0),
            "n": integer("n", self.n, 1, MAX_SAMPLES),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": tuple(
                integer("stop_token_ids", token, 0, _INT32_MAX)
                for token in _tuple("stop_token_ids", self.stop_token_ids)
            ),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "repetition_penalty": _within(
                "repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True
            ),
            "presence_penalty": _within("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "logit_bias": _bias(self.logit_bias),
            "bad_words": _words(self.bad_words),
            "skip_special_tokens": flag("skip_special_tokens", self.skip_special_tokens),
            "structured_outputs": structured.check(self.structured_outputs),
        }
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                checked[name] = integer(name, value, 0, MAX_LOGPROBS)
        if self.seed is not None:
            checked["seed"] = integer("seed", self.seed, 0, 2**64 - 1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_together()

    def _check_together(self) -> None:
        if self.temperature < 0.0:
            raise ValueError(f"temperature={self.temperature}: must be at least 0")
        if self.temperature > _LARGE:
            raise ValueError(f"temperature={self.temperature}: must be at most {_LARGE:g}")
        # Without this, what a float32 makes of them would be 0.
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) < _SMALL:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {_SMALL:g}")
        if self.temperature < GREEDY_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if self.structured_outputs is not None and (self.ignore_eos or self.min_tokens > 0):
            raise ValueError(
                "structured_outputs ends where its form does: not with ignore_eos or min_tokens"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens=0: nothing to do unless prompt_logprobs is given")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def with_(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """From names and values, as in a JSON file; an unknown name raises with the list."""
        return cls(**cls._checked_names(values))

    def merged(self, values: Mapping[str, Any]) -> "SamplingParams":
        """A copy in which these names, as in a JSON file, have other values."""
        return replace(self, **self._checked_names(values))

    @classmethod
    def _checked_names(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"unknown sampling parameter {name!r}; known: {', '.join(known)}")
        values = dict(values)
        if isinstance(values.get("logit_bias"), Mapping):  # JSON has only strings for keys
            values["logit_bias"] = {int(key): v for key, v in values["logit_bias"].items()}
        return values
