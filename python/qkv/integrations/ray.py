"""A Ray Data stage (extra `ray`): rows of a data set in, rows with answers out, on many machines.

    import ray, qkv
    from qkv.integrations import ray as qkv_ray

    questions = ray.data.read_parquet("questions.parquet")
    answers = qkv_ray.answer(questions, "model", qkv.SamplingParams(max_tokens=64),
                             rows=qkv.dataset.Rows(prompt="question", id="uid"))
    answers.write_parquet("answers")

Each worker is a process with one engine, which loads the model once and takes blocks of rows. A
worker that dies is started again by Ray and its block is computed again: no row is lost, none
stands there twice, and each is the same bits as before. The columns are those of `qkv generate`
(dataset/prompt.py). The model must lie under the same path on every machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..dataset.loop import answers
from ..dataset.prompt import Rows
from ..params import SamplingParams, integer
from ..planner import GIB, plan
from ..run import Hook

if TYPE_CHECKING:
    from ray.data import Dataset

_MOST_ROWS = 1024  # of a block, by default
_LEAST_ROWS = 16

#: The results' columns whose type does not depend on the rows: a block may have nulls alone.
_TEXT = ("text", "finish_reason", "state", "error", "qkv_key")
_NUMBERS = ("prompt_tokens", "output_tokens")


def _ray() -> Any:
    try:
        import pyarrow  # noqa: F401, PLC0415 (extras)
        import ray.data  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"{error}; pip install 'qkv[ray]'") from error
    return ray


def answer(
    dataset: Dataset,
    model: str | os.PathLike[str],
    params: SamplingParams | None = None,
    *,
    rows: Rows,
    on_finish: Hook | None = None,
    workers: int | None = None,
    threads: int | None = None,
    batch_size: int | None = None,
    input_tokens: int = 512,
    **engine_options: Any,
) -> Dataset:
    """The data set with its rows answered; lazy, as all of Ray Data.

    dataset: rows with a column that names them (rows.id): the name keys the row's seed, so it must
        stay the same whichever worker takes it.
    model, engine_options: as Engine takes them. params, rows, on_finish: as run_dataset takes them.
    workers: engines. None: one for each machine; an engine uses all cores of its machine, and two
        would read the weights twice.
    threads: cores of an engine, which Ray reserves. None: those of the smallest machine, shared
        among the workers that must stand there.
    batch_size: rows of a block. None: twice what fits into the memory of one worker at once, by
        qkv.plan with `input_tokens` and params.max_tokens; 16 to 1,024.

    ValueError: no rows.id, no machine, no memory for the weights. What is wrong with a row is in
    its `state` and `error`; what is wrong with the model fails the job."""
    ray = _ray()
    if rows.id is None:
        raise ValueError(
            "rows.id: a column that names the rows is needed: a place in a block is no name"
        )
    params = SamplingParams() if params is None else params
    for name, value in (("workers", workers), ("threads", threads), ("batch_size", batch_size)):
        if value is not None:
            integer(name, value, 1)
    if not ray.is_initialized():
        ray.init()
    cores, memory_gib = _smallest_machine(ray)
    n_machines = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
    workers = n_machines if workers is None else workers
    here = math.ceil(workers / n_machines)
    threads = max(1, cores // here) if threads is None else threads
    if batch_size is None:
        batch_size = _planned_rows(model, memory_gib / here, input_tokens, params, engine_options)
    return dataset.map_batches(
        _Worker,
        fn_constructor_kwargs={
            "model": os.fspath(model),
            "params": params,
            "rows": rows,
            "on_finish": on_finish,
            "engine_options": {"threads": threads, **engine_options},
        },
        batch_size=batch_size,
        batch_format="pyarrow",
        num_cpus=threads,
        # Ray Data restarts an actor that dies, and gives its block out again.
        compute=ray.data.ActorPoolStrategy(size=workers),
    )


def _smallest_machine(ray: Any) -> tuple[int, float]:
    """(cores, GiB of memory) that every machine has at least."""
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    found = [resources for resources in found if resources.get("CPU")]
    if not found:
        raise ValueError("Ray knows no machine with a processor")
    return (
        min(int(resources["CPU"]) for resources in found),
        min(float(resources.get("memory", 0.0)) for resources in found) / GIB,
    )


def _planned_rows(
    model: str | os.PathLike[str],
    memory_gib: float,
    input_tokens: int,
    params: SamplingParams,
    engine_options: Mapping[str, Any],
) -> int:
    given = engine_options.get("kv_cache_dtype", "bf16")
    lanes = given if isinstance(given, (list, tuple)) else [given]
    planned = plan(
        model,
        memory_gib=memory_gib,
        kv_cache_dtypes=["bf16" if lane == "auto" else lane for lane in lanes],
        input_tokens=input_tokens,
        output_tokens=max(params.max_tokens * params.n, 1),
    )
    most = min(planned.requests.values()) // len(lanes)
    return min(max(2 * most, _LEAST_ROWS), _MOST_ROWS)


class _Worker:
    """One engine; Ray keeps it between blocks."""

    def __init__(
        self,
        *,
        model: str,
        params: SamplingParams,
        rows: Rows,
        on_finish: Hook | None,
        engine_options: Mapping[str, Any],
    ) -> None:
        from ..engine import Engine  # noqa: PLC0415 (the driver needs none)

        self._engine = Engine(model, **engine_options)
        self._params = params
        self._rows = rows
        self._on_finish = on_finish

    def __call__(self, block: Any) -> Any:
        """A table in, a table with the answers out, in the same order."""
        done = answers(
            self._engine, block.to_pylist(), self._rows, self._params, on_finish=self._on_finish
        )
        return _table(_in_order(done, block, self._rows), block.schema)


def _in_order(done: Iterable[dict[str, Any]], block: Any, rows: Rows) -> list[dict[str, Any]]:
    assert rows.id is not None
    names = block.column(rows.id).to_pylist() if rows.id in block.column_names else []
    places = {name: place for place, name in reversed(list(enumerate(names)))}
    return sorted(done, key=lambda row: places.get(row["id"], len(names)))


def _table(found: list[dict[str, Any]], given: Any) -> Any:
    """Columns that came in keep their types, so that all blocks agree."""
    import pyarrow  # noqa: PLC0415

    columns = dict.fromkeys(name for row in found for name in row)
    known = {name: pyarrow.string() for name in _TEXT}
    known |= {name: pyarrow.int64() for name in _NUMBERS}
    known |= {
        name: given.field(name.removeprefix("input_")).type
        for name in columns
        if name not in known and name.removeprefix("input_") in given.names
    }
    arrays = {
        name: pyarrow.array([row.get(name) for row in found], known.get(name)) for name in columns
    }
    return pyarrow.table(arrays)
