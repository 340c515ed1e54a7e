"""The same runs on a loaded engine, by its own clocks."""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .. import options
from .._core import Error
from ..engine import Engine
from ..outputs import RequestOutput
from ..params import SamplingParams
from .figures import Run
from .workload import Workload, prompts


def warm_up(engine: Engine) -> None:
    """Pages of memory that were never touched, threads that sleep: not of the first run."""
    engine.generate([np.zeros(64, np.int32)], _params([8]), progress=False)


def _params(output_tokens: Sequence[int]) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0) for n in output_tokens]


def _added(latest: NDArray[np.float64]) -> NDArray[np.float64]:
    """When each request was added. A stamp may come late, by other rows' or other processes' work,
    never early; and requests are added in order."""
    return np.minimum.accumulate(latest[::-1])[::-1]


def measure(engine: Engine, table: NDArray[np.int32], workload: Workload, seed: int) -> Run:
    """The run of Workload.draw()'s table, from an empty prefix cache. All prompts are known to the
    engine at the start (of very many as far as it reads ahead), and as many as there are users may
    run at a time. Error: a row's."""
    core = engine._core
    with engine._exclusive():
        core.flush()
        core.limit(workload.users)
    before = core.counts()
    ends = np.zeros(len(table))

    def stamp(output: RequestOutput) -> None:
        ends[output.index] = time.perf_counter()

    start = time.perf_counter()
    try:
        outputs = engine.generate(
            prompts(table, engine._vocab, seed),
            _params(table[:, 3].tolist()),
            on_finish=stamp,
            progress=False,
        )
    finally:
        with engine._exclusive():
            core.limit(engine._max_running)
    for output in outputs:
        if output.error is not None:
            raise Error(f"request {output.index}: {output.error}")
    after = core.counts()
    metrics = [output.metrics for output in outputs]
    total = np.array([m.total_time for m in metrics])
    added = _added(ends - start - total)
    return Run(
        admitted=added + np.array([m.queue_time for m in metrics]),
        first_token=added + np.array([m.time_to_first_token for m in metrics]),
        finished=added + total,
        prompt_tokens=np.array([m.prompt_tokens for m in metrics], np.int32),
        cached_tokens=np.array([m.cached_tokens for m in metrics], np.int32),
        output_tokens=np.array([m.output_tokens for m in metrics], np.int32),
        retractions=sum(m.retractions for m in metrics),
        prefilled=after["n_prefill_rows"] - before["n_prefill_rows"],
        most_running=after["most_running"],
        most_waiting=after["most_short"],
        most_used_tokens=after["most_used_pages"] * options.PAGE_TOKENS,
        pool_tokens=after["n_pages"] * options.PAGE_TOKENS,
    )
