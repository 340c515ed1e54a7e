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


def test_a_core_is_left_for_reading(
    cluster: None, tiny: Callable[..., Path], tmp_path: Path, expected: dict[str, str]
) -> None:
    """Engines took all cores, and the task that reads a file waited for one of them for ever."""
    for cores, here, threads, reserved in (
        (2, 1, 2, 1),
        (2, 2, 1, 0.5),
        (1, 1, 1, 0),
        (16, 1, 16, 15),
        (16, 2, 8, 7),
        (16, 1, 4, 4),
    ):
        assert qkv_ray._reserved(cores, here, threads) == reserved
    ray.data.from_items(questions()).write_parquet(str(tmp_path / "questions"))
    data = ray.data.read_parquet(str(tmp_path / "questions"))
    found = answered(tiny("llama"), data, workers=None, threads=None)
    assert plain(found) == expected


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


def test_blocks_with_odd_columns(tiny: Callable[..., Path]) -> None:
    """Columns keep types and values that Python has not; a row's name that is none, or another's,
    is its error and not the job's."""
    import pyarrow  # noqa: PLC0415

    def score(output: qkv.RequestOutput) -> dict[str, Any]:
        return {"x": "text" if output.index else 1}

    worker = qkv_ray._Worker(
        model=str(tiny("llama")),
        params=PARAMS.with_(stop=["e"], stop_token_ids=list(range(100, 400))),
        rows=Rows(prompt="q", id="uid"),
        on_finish=score,
        engine_options={"threads": 1, "kv_tokens": 512},
    )
    pairs = pyarrow.map_(pyarrow.string(), pyarrow.int32())
    block = pyarrow.table(
        {
            "uid": pyarrow.array([5, 5, None, 7, 2**64 - 1], pyarrow.uint64()),
            "q": pyarrow.array(["a", "b", "c", "d", "e"]),
            "id": pyarrow.array(["s", "t", "u", "v", "w"]),
            "when": pyarrow.array([0, 0, 0, 2**62, 0], pyarrow.timestamp("ms")),
            "pairs": pyarrow.array([[("k", 1)]] * 5, pairs),
            "text": pyarrow.array([1, 2, 3, 4, 5]),
            "input_text": pyarrow.array([1, 2, 3, 4, 5]),
        }
    )
    found = worker(block)
    for name in ("uid", "q", "when", "pairs", "text"):
        assert found.column("input_text" if name == "text" else name) == block.column(name)
    assert found.column("id") == block.column("uid")
    assert found.column("input_id") == block.column("id")
    assert found.schema.field("stop_reason").type == pyarrow.string()
    assert found.column("score_x").to_pylist() == ["1", None, None, None, '"text"']
    errors = found.column("error").to_pylist()
    assert errors[0] is None and errors[4] is None
    for place, words in ((1, "was used before"), (2, "no id"), (3, "the column 'when'")):
        assert words in errors[place]
    empty = worker(block.slice(0, 0))
    assert empty.num_rows == 0 and empty.schema.field("text").type == pyarrow.string()
