"""The engine's scheduler with a cost model in place of the kernels: the runs of a GPU in seconds.

The cost model gives the seconds of a step:

    step + prefill_row * rows of prompts + decode_row * rows of output
         + kv_byte * bytes of KV cache that the step's requests attend to

(each request's cache counts once per step, however many rows it has). CostModel.roofline() takes
the four from what a device can do; fit() from measured runs, whose steps simulate() counts: a
measured run and its simulation have the same steps, so four unknowns remain for any number of
runs. A fit to the device itself is worth more than a roofline: kernels do not reach it, and
weights are read once per step only by an engine that computes prompts and output together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core, options
from ..params import real
from .figures import Run
from .workload import Workload

_PARTS = ("step_seconds", "prefill_row_seconds", "decode_row_seconds", "kv_byte_seconds")
#: Runs that a fit takes.
LEAST_RUNS = len(_PARTS)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of a step, of each row in it, and of each byte of KV cache that it reads."""

    step_seconds: float
    prefill_row_seconds: float
    decode_row_seconds: float
    kv_byte_seconds: float

    def __post_init__(self) -> None:
        for name in _PARTS:
            value = real(name, getattr(self, name))
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name}={value:g}: must be finite and not negative")
        if not any(getattr(self, name) for name in _PARTS):
            raise ValueError("a cost model whose parts are all 0 gives no times")

    @classmethod
    def roofline(
        cls, *, weight_bytes: float, row_weights: float, gb_per_s: float, tflops: float
    ) -> "CostModel":
        """weight_bytes: read in each step. row_weights: parameters that one token is multiplied
        with. gb_per_s: 10**9 bytes of memory per second; tflops: 10**12 operations per second that
        the GEMMs reach (half of the data sheet's figure is usual)."""
        for name, value in (("gb_per_s", gb_per_s), ("tflops", tflops)):
            if not 0.0 < real(name, value) < math.inf:
                raise ValueError(f"{name}={value:g}: must be above 0")
        row = 2.0 * row_weights / (tflops * 1e12)
        return cls(
            step_seconds=weight_bytes / (gb_per_s * 1e9),
            prefill_row_seconds=row,
            decode_row_seconds=row,
            kv_byte_seconds=1e-9 / gb_per_s,
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "CostModel":
        """From to_dict(), as JSON has it."""
        if not isinstance(values, Mapping) or set(values) != set(_PARTS):
            raise ValueError(f"a cost model has just {', '.join(_PARTS)}, not {values!r:.100}")
        return cls(**values)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device that is not here. memory_gib: free before the weights load; gb_per_s and tflops as
    CostModel.roofline() has them; or `cost`, measured on it (of one arm, or by the arms' names)."""

    memory_gib: float | None = None  # None where pool_tokens says how large the pools are
    mem_fraction: float = 0.85
    weights_gib: float | Mapping[str, float] | None = None  # by quantization; None: counted
    gb_per_s: float | None = None
    tflops: float | None = None
    cost: CostModel | Mapping[str, CostModel] | None = None

    def __post_init__(self) -> None:
        if self.cost is None and (self.gb_per_s is None or self.tflops is None):
            raise ValueError(
                "a simulation needs to know how long a step takes: gb_per_s and tflops of the "
                "device, or cost, fitted to it"
            )


def counted(
    table: NDArray[np.int32],
    workload: Workload,
    *,
    pool_tokens: int,
    kv_bytes: int,
    cost: CostModel,
    window: int = 0,
    chunk_tokens: int = 512,
    prefix_cache: bool = True,
    schedule: str = "offline",
) -> _core.Simulation:
    """The run of Workload.draw()'s table. kv_bytes: of a token in the cache. window: the largest
    of a layer, 0 if none has one. OutOfPages names the request that can never fit."""
    # A pool that holds every request at a time is as good as any larger one.
    n_tokens = table[:, 1:].sum(axis=1, dtype=np.int64)
    most = int((n_tokens + 2 * options.PAGE_TOKENS).sum())
    return _core.simulate(
        table,
        kv_tokens=min(pool_tokens, most),
        max_running=workload.users,
        chunk_tokens=chunk_tokens,
        prefix_cache=prefix_cache,
        offline=schedule == "offline",
        window=window,
        step_seconds=cost.step_seconds,
        prefill_row_seconds=cost.prefill_row_seconds,
        decode_row_seconds=cost.decode_row_seconds,
        kv_token_seconds=cost.kv_byte_seconds * kv_bytes,
    )


def simulate(
    table: NDArray[np.int32], workload: Workload, *, pool_tokens: int, **settings: Any
) -> Run:
    """As counted(), which also says what `settings` are."""
    found = counted(table, workload, pool_tokens=pool_tokens, **settings)
    return Run(
        admitted=found.admitted,
        first_token=found.first_token,
        finished=found.finished,
        prompt_tokens=table[:, 1] + table[:, 2],
        cached_tokens=found.cached_tokens,
        output_tokens=table[:, 3],
        retractions=int(found.retractions.sum()),
        prefilled=found.n_prefill,
        most_running=found.most_running,
        most_waiting=found.most_short,
        most_used_tokens=found.most_used_pages * options.PAGE_TOKENS,
        pool_tokens=pool_tokens // options.PAGE_TOKENS * options.PAGE_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a measured run computed, and how long it took."""

    seconds: float
    n_steps: int
    n_prefill: int
    n_decode: int
    kv_bytes: int  # read: tokens attended to times bytes of a token


def fit(runs: Sequence[Work]) -> tuple[CostModel, float]:
    """The parts that explain the runs best, none negative, by least squares of the relative errors;
    and the largest relative error. ValueError for fewer than four runs."""
    from scipy.optimize import nnls  # noqa: PLC0415 (slow to import)

    if len(runs) < LEAST_RUNS:
        raise ValueError(f"{len(runs)} runs, a cost model of {len(_PARTS)} parts needs as many")
    counts = np.array([[w.n_steps, w.n_prefill, w.n_decode, w.kv_bytes] for w in runs], float)
    seconds = np.array([w.seconds for w in runs])
    if not (seconds > 0).all():
        raise ValueError("a run that took no time: nothing can be fitted to it")
    scale = np.maximum(counts.max(axis=0), 1.0)  # bytes and steps differ by many orders
    parts = nnls(counts / scale / seconds[:, None], np.ones(len(runs)))[0] / scale
    error = float(np.abs(counts @ parts / seconds - 1.0).max())
    return CostModel(**dict(zip(_PARTS, map(float, parts), strict=True))), error
