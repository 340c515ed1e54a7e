"""The Ray Data stage on a local Ray with two workers: no row lost or doubled, none changed, also
when a worker dies in the middle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import SamplingParams
from qkv.dataset import Rows, answers

ray = pytest.importorskip("ray", reason="ray (extra `ray`) is not installed")
pytest.importorskip("ray.data", reason="Ray Data's requirements are not installed")

from qkv.integrations import ray as qkv_ray  # noqa: E402

pytestmark = pytest.mark.slow  # Ray's own processes take seconds to start

N = 60
PARAMS = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True)
ROWS = Rows(prompt="question", id="uid")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def questions() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"uid": f"q{i}", "question": f"the fox number {i}", "text": i} for i in range(N)
    ]
    found[7]["question"] = ""
    return found


def answered(model: Path, data: Any, **options: Any) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"workers": 2, "threads": 1, "batch_size": 10, "kv_tokens": 512}
    stage = qkv_ray.answer(data, model, PARAMS, rows=ROWS, **(settings | options))
    found: list[dict[str, Any]] = stage.take_all()
    return found


def plain(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["id"]: json.dumps(row, sort_keys=True) for row in rows}


@pytest.fixture(scope="module")
def expected(tiny: Callable[..., Path]) -> dict[str, str]:
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=2048) as engine:
        return plain(list(answers(engine, questions(), ROWS, PARAMS)))


def test_rows_are_those_of_one_engine(
    cluster: None, tiny: Callable[..., Path], expected: dict[str, str]
) -> None:
    found = answered(tiny("llama"), ray.data.from_items(questions(), override_num_blocks=6))
    assert len(found) == N and plain(found) == expected
    (empty,) = [row for row in found if row["id"] == "q7"]
    assert empty["state"] == "error" and "empty" in empty["error"]
    assert {row["input_text"] for row in found} == set(range(N))


def test_a_worker_that_dies_is_replaced(
    cluster: None, tiny: Callable[..., Path], tmp_path: Path, expected: dict[str, str]
) -> None:
    marker = tmp_path / "killed"

    def die_once(output: qkv.RequestOutput) -> dict[str, Any]:
        if output.key == "q23":
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return {}
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    data = ray.data.from_items(questions(), override_num_blocks=6)
    found = answered(tiny("llama"), data, on_finish=die_once)
    assert marker.exists()
    assert len(found) == N and plain(found) == expected


def test_what_it_needs(cluster: None, tiny: Callable[..., Path]) -> None:
    data = ray.data.from_items(questions())
    with pytest.raises(ValueError, match="a column that names the rows"):
        qkv_ray.answer(data, tiny("llama"), rows=Rows(prompt="question"))
    with pytest.raises(ValueError, match="workers"):
        qkv_ray.answer(data, tiny("llama"), rows=ROWS, workers=0)
    with pytest.raises(qkv.CheckpointError, match="nowhere"):
        qkv_ray.answer(data, "nowhere", rows=ROWS)


def test_block_size_comes_from_the_plan(tiny: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": "bf16"}
    few = qkv_ray._planned_rows(tiny("llama"), 0.01, 512, PARAMS, options)
    more = qkv_ray._planned_rows(tiny("llama"), 0.02, 512, PARAMS, options)
    narrow = qkv_ray._planned_rows(tiny("llama"), 0.01, 512, PARAMS, {"kv_cache_dtype": "fp8_e4m3"})
    assert 16 <= few < more <= 1024 and few < narrow
