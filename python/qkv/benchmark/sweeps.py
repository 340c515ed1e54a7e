"""The sweeps: over the number of users, and over what their prompts share."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import planner
from .._core import OutOfPages
from ..engine import Engine
from ..options import PAGE_TOKENS, one_of, token_bytes, window_of
from ..params import flag, integer, real
from ..progress import Progress
from . import arms
from .figures import Figures, Run, Targets, figures
from .measure import measure, warm_up
from .report import Bench, Cell, Fitted
from .simulate import LEAST_RUNS, CostModel, Machine, Work, counted, fit, simulate
from .workload import Workload, least_prefill

SWEEPS = ("concurrency", "shared-prefix")
USERS = (1, 2, 4, 8, 16, 32, 64)
SHARED = (0, 512, 1024, 2048, 4096)
_LEAST_REQUESTS = 16
# Counting a run's steps needs no times; a model of 0 everywhere is refused.
_COUNTING = CostModel(
    step_seconds=1.0, prefill_row_seconds=0.0, decode_row_seconds=0.0, kv_byte_seconds=0.0
)


def bench(
    model: str | os.PathLike[str] | Mapping[str, Any],
    sweep: str = "concurrency",
    *,
    kv_cache_dtypes: Any = ("bf16", "fp8_e4m3"),
    quantizations: Any = (None,),
    users: int | Sequence[int] | None = None,
    groups: int | Sequence[int] | None = None,
    shared_tokens: int | Sequence[int] | None = None,
    pool_tokens: Any = None,
    requests: int | None = None,
    input_tokens: int | None = None,
    output_tokens: int = 128,
    spread: float = 0.0,
    seeds: int | Sequence[int] = 3,
    targets: Targets | None = None,
    machine: Machine | None = None,
    schedule: str = "offline",
    chunk_tokens: int = 512,
    prefix_cache: bool = True,
    progress: bool = True,
    **engine_options: Any,
) -> Bench:
    """Runs a load over weight formats times KV formats, and says how fast, how late, who waits.

    sweep: "concurrency": distinct prompts of `input_tokens` (512) from 1 to 64 `users`, four times
        as many requests as users (at least 16). "shared-prefix": 64 requests in 4 `groups` from 8
        `users`; a prompt is its group's `shared_tokens` (0 to 4,096) and `input_tokens` (128) of
        its own. users, groups, shared_tokens and pool_tokens may each be several: all are combined.
    quantizations: what Engine takes; None: the weights as they are stored.
    pool_tokens: of the KV cache; a number, several, or a mapping from KV formats (or the names of
        the arms) to these. Default: what the engine would take, or what fits into the machine.
    spread: lengths vary evenly by so much of the given ones, 0 to 1.
    seeds: runs of each point, which draw lengths, tokens and the order of the groups; figures are
        means, with the standard deviation over the seeds beside them.
    targets: for goodput: the requests per second whose time to the first token (from when their
        user was free) and mean time per token after it are both within them.
    machine: a device that is not here. Nothing is loaded: the engine's own scheduler runs against a
        cost model (CostModel), on a virtual clock. A config.json is enough.
    schedule: "offline": all prompts are known, those with a common prefix run together; "fcfs": as
        they were sent. In both as many run at a time as there are users.
    engine_options: as Engine takes them (threads, device, max_model_len, ...).

    A point at which a request can never fit has its reason in place of figures. ValueError,
    TypeError: an argument, with its bounds."""
    one_of("sweep", sweep, SWEEPS)
    one_of("schedule", schedule, ("offline", "fcfs"))
    flag("prefix_cache", prefix_cache)
    integer("chunk_tokens", chunk_tokens, 1)
    source = planner.read_model(model)
    setup = _Setup(
        choices=arms.choices(kv_cache_dtypes, quantizations, source),
        points=_points(
            sweep, users, groups, shared_tokens, requests, input_tokens, output_tokens, spread
        ),
        seeds=_seeds(seeds),
        targets=Targets() if targets is None else targets,
        pool_tokens=pool_tokens,
        scheduling={
            "schedule": schedule,
            "chunk_tokens": chunk_tokens,
            "prefix_cache": prefix_cache,
        },
    )
    fitted: dict[str, Fitted] = {}
    if machine is not None:
        if engine_options:
            raise TypeError(f"a simulation loads no engine: {', '.join(engine_options)}")
        cells = list(_simulated(setup, machine, source, progress))
    elif isinstance(model, Mapping):
        raise TypeError("a config alone cannot be loaded: give machine=, or a checkpoint")
    else:
        cells = list(_measured(setup, model, engine_options, progress, fitted))
    return Bench(
        sweep=sweep,
        model=source.name,
        simulated=machine is not None,
        settings={
            **setup.scheduling,
            "input_tokens": setup.points[0].input_tokens,
            "output_tokens": output_tokens,
            "spread": spread,
            "seeds": list(setup.seeds),
            "ttft_target": setup.targets.ttft,
            "tpot_target": setup.targets.tpot,
        },
        cells=tuple(cells),
        fitted=fitted,
    )


@dataclass(frozen=True, kw_only=True)
class _Setup:
    choices: list[arms.Choice]
    points: list[Workload]
    seeds: Sequence[int]
    targets: Targets
    pool_tokens: Any
    scheduling: dict[str, Any]

    def figures(self, run: Run, point: Workload, table: Any) -> Figures:
        return figures(
            run, users=point.users, targets=self.targets, least_prefill=least_prefill(table)
        )


def _numbers(name: str, given: Any, default: Sequence[int], low: int) -> list[int]:
    """Of an axis, each once, in order."""
    if given is None:
        given = default
    several = given if isinstance(given, (list, tuple, range, np.ndarray)) else [given]
    found = sorted({integer(name, entry, low, 2**20) for entry in several})
    if not found:
        raise ValueError(f"{name} is empty: at least one is needed")
    return found


def _points(
    sweep: str,
    users: Any,
    groups: Any,
    shared_tokens: Any,
    requests: int | None,
    input_tokens: int | None,
    output_tokens: int,
    spread: float,
) -> list[Workload]:
    alone = sweep == "concurrency"
    if alone and (groups is not None or shared_tokens is not None):
        raise ValueError("groups and shared_tokens are of the sweep 'shared-prefix'")
    if not 0.0 <= real("spread", spread) <= 1.0:
        raise ValueError(f"spread={spread:g}: must be within 0 and 1")
    n_input = 512 if alone else 128
    base = Workload(
        users=1,
        requests=64 if requests is None else integer("requests", requests, 1, 2**20),
        input_tokens=integer("input_tokens", n_input if input_tokens is None else input_tokens, 1),
        output_tokens=integer("output_tokens", output_tokens, 1),
        spread=float(spread),
    )
    found = []
    for n_groups in [0] if alone else _numbers("groups", groups, (4,), 1):
        for n_users in _numbers("users", users, USERS if alone else (8,), 1):
            for n_shared in [0] if alone else _numbers("shared_tokens", shared_tokens, SHARED, 0):
                point = replace(base, groups=n_groups, users=n_users, shared_tokens=n_shared)
                if alone and requests is None:
                    point = replace(point, requests=max(4 * n_users, _LEAST_REQUESTS))
                if point.longest > 2**30:
                    raise ValueError(f"a request of {point.longest} tokens, at most {2**30}")
                found.append(point)
    return found


def _seeds(given: Any) -> Sequence[int]:
    if isinstance(given, (list, tuple, range)):
        found = [integer("seeds", entry, 0) for entry in given]
        if not found:
            raise ValueError("seeds is empty: at least one is needed")
        return found
    return range(integer("seeds", given, 1, 10_000))


def _cell(
    choice: arms.Choice, pool_tokens: int, kv_bytes: int, point: Workload, **found: Any
) -> Cell:
    fits = planner.requests_that_fit(pool_tokens, point.longest, PAGE_TOKENS)
    return Cell(
        arm=choice.name,
        quantization=choice.quantization,
        kv_cache_dtype=choice.kv,
        pool_tokens=pool_tokens,
        bytes_per_token=kv_bytes,
        users=point.users,
        requests=point.requests,
        groups=point.groups,
        shared_tokens=point.shared_tokens,
        fit_fully=fits,
        **found,
    )


def _simulated(
    setup: _Setup, machine: Machine, source: planner.Source, show: bool
) -> Iterator[Cell]:
    most_users = max(point.users for point in setup.points)
    found = [
        arm
        for choice in setup.choices
        for arm in arms.arms(choice, setup.pool_tokens, machine, source, most_users)
    ]
    with closing(Progress(show, len(found) * len(setup.points), "points")) as bar:
        for arm in found:
            for point in setup.points:
                try:
                    runs = [_simulate_one(setup, arm, point, seed, bar) for seed in setup.seeds]
                    outcome: dict[str, Any] = {"figures": tuple(runs)}
                except OutOfPages as error:
                    outcome = {"error": str(error)}
                bar.rows()
                yield _cell(arm.choice, arm.pool_tokens, arm.kv_bytes, point, **outcome)


def _simulate_one(
    setup: _Setup, arm: arms.Arm, point: Workload, seed: int, bar: Progress
) -> Figures:
    table = point.draw(seed)
    run = simulate(
        table,
        point,
        pool_tokens=arm.pool_tokens,
        kv_bytes=arm.kv_bytes,
        cost=arm.cost,
        window=arm.window,
        **setup.scheduling,
    )
    bar.step(int(table[:, 1:].sum()))
    return setup.figures(run, point, table)


def _measured(
    setup: _Setup,
    model: str | os.PathLike[str],
    options: Mapping[str, Any],
    show: bool,
    fitted: dict[str, Fitted],
) -> Iterator[Cell]:
    """`fitted` gets a cost model for each choice that ran often enough."""
    for kind in dict.fromkeys(choice.quantization for choice in setup.choices):
        planner.check_weights(model, kind)  # before the first runs and not after
    sizes: list[tuple[arms.Choice, int | None]] = []
    for choice in setup.choices:
        given = arms.pools(setup.pool_tokens, choice)
        sizes += [(choice, size) for size in (given if given is not None else [None])]
    most_users = max(point.users for point in setup.points)
    works: dict[str, list[Work]] = {}
    with closing(Progress(show, len(sizes) * len(setup.points), "points")) as bar:
        for choice, size in sizes:
            with Engine(
                model,
                quantization=choice.quantization,
                kv_cache_dtype=choice.kv_cache_dtype,
                kv_tokens=size,
                max_running=most_users,
                **setup.scheduling,
                **options,
            ) as engine:
                works.setdefault(choice.name, [])
                yield from _of_engine(setup, choice, engine, works[choice.name], bar)
    for name, runs in works.items():
        if len(runs) >= LEAST_RUNS:
            cost, error = fit(runs)
            fitted[name] = Fitted(cost=cost, largest_error=error, runs=len(runs))


def _of_engine(
    setup: _Setup, choice: arms.Choice, engine: Engine, works: list[Work], bar: Progress
) -> Iterator[Cell]:
    facts = engine.info
    pool, kv_bytes = facts["kv_tokens"], token_bytes(facts["config"], engine._lanes)
    window = window_of(facts["config"])
    warm_up(engine)
    for point in setup.points:
        outcome: dict[str, Any] = {}
        if point.longest > facts["max_model_len"]:
            outcome["error"] = (
                f"requests of {point.longest} tokens, the model takes {facts['max_model_len']}"
            )
        elif point.longest > pool:
            outcome["error"] = f"requests of {point.longest} tokens, the pool holds {pool}"
        else:
            runs = []
            for seed in setup.seeds:
                table = point.draw(seed)
                run = measure(engine, table, point, seed)
                bar.step(int(table[:, 1:].sum()))
                runs.append(setup.figures(run, point, table))
                works += _work(setup, run, table, point, pool, kv_bytes, window)
            outcome["figures"] = tuple(runs)
        bar.rows()
        yield _cell(choice, pool, kv_bytes, point, **outcome)


def _work(
    setup: _Setup, run: Run, table: Any, point: Workload, pool: int, kv_bytes: int, window: int
) -> list[Work]:
    """What the run computed, by simulating it: nothing if its steps were others."""
    steps = counted(
        table,
        point,
        pool_tokens=pool,
        kv_bytes=kv_bytes,
        cost=_COUNTING,
        window=window,
        **setup.scheduling,
    )
    if steps.n_prefill != run.prefilled:
        return []
    return [
        Work(
            seconds=float(run.finished.max()),
            n_steps=steps.n_steps,
            n_prefill=steps.n_prefill,
            n_decode=steps.n_decode,
            kv_bytes=steps.n_attended * kv_bytes,
        )
    ]
