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

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..dataset.loop import requests, through
from ..dataset.parquet import plain
from ..dataset.prompt import Prompts, Rows, output_name
from ..params import SamplingParams, integer
from ..planner import GIB, plan
from ..run import Hook

if TYPE_CHECKING:
    from ray.data import Dataset

_MOST_ROWS = 1024  # of a block, by default
_LEAST_ROWS = 16

#: The results' columns whose type does not depend on the rows: a block may have nulls alone.
_TYPED = {
    "text": "string",
    "finish_reason": "string",
    "stop_reason": "string",
    "state": "string",
    "error": "string",
    "prompt_tokens": "int64",
    "output_tokens": "int64",
    "qkv_key": "string",
}


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
    threads: cores of an engine. None: those of the smallest machine, shared among the workers that
        must stand there. Ray reserves as many, but one of a machine's, for what reads and writes.
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
        num_cpus=_reserved(cores, here, threads),
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


def _reserved(cores: int, here: int, threads: int) -> float:
    """Of a machine's cores, for each of the `here` workers on it. One is left: a task that reads
    rows would wait for it for ever, and the workers for rows. Parts only below 1, as Ray has it."""
    share = (cores - 1) / here
    return min(threads, math.floor(share) if share >= 1 else share)


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
        """A table in, a table with the answers out, in the same order. Columns that came in do
        not go through Python: they keep their types, and values that it has not."""
        prompts = Prompts(replace(self._rows, columns=()), self._params)
        prompts.check(self._engine)
        found: list[dict[str, Any]] = [{} for _ in range(block.num_rows)]
        for request, output in through(
            self._engine,
            requests(prompts, plain(block)),
            self._params,
            on_finish=self._on_finish,
        ):
            found[request.place] = prompts.answer(request, output)
        return _table(found, block, self._rows)


def _table(found: list[dict[str, Any]], block: Any, rows: Rows) -> Any:
    """The names as they came (a row without one, or with another's, has its error), the columns
    that are kept, the results."""
    import pyarrow  # noqa: PLC0415

    there = rows.id in block.column_names
    columns = {
        "id": block.column(rows.id) if there else pyarrow.nulls(len(found), pyarrow.string())
    }
    for name in block.column_names:
        if name == rows.id == "id" or (rows.columns is not None and name not in rows.columns):
            continue
        columns[output_name(name, columns)] = block.column(name)
    for name in dict.fromkeys([*_TYPED, *(name for row in found for name in row)]):
        if name != "id":
            columns[name] = _results(pyarrow, name, [row.get(name) for row in found])
    return pyarrow.table(columns)


def _results(pyarrow: Any, name: str, values: list[Any]) -> Any:
    kind = _TYPED.get(name)
    if name == "stop_reason":  # a text or a token id
        values = [None if value is None else str(value) for value in values]
    if kind is not None:
        return pyarrow.array(values, getattr(pyarrow, kind)())
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, UnicodeError):  # a hook's, of several types
        return pyarrow.array(
            [None if value is None else json.dumps(value, default=str) for value in values]
        )
