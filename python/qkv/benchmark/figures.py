"""From the times of each request to what is reported of a run."""

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ..params import real


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a user puts up with, in seconds: until the first token, and between tokens after it."""

    ttft: float = 1.0
    tpot: float = 0.1

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = real(f"{name} target", getattr(self, name))
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} target {value:g}: seconds above 0 are needed")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, measured or simulated: n requests, seconds from its start."""

    admitted: NDArray[np.float64]  # [n], when its first step began
    first_token: NDArray[np.float64]  # [n]
    finished: NDArray[np.float64]  # [n]
    prompt_tokens: NDArray[np.int32]  # [n]
    cached_tokens: NDArray[np.int32]  # [n], of the prompt, found in the prefix cache
    output_tokens: NDArray[np.int32]  # [n]
    retractions: int
    prefilled: int  # prompt tokens computed, recomputation included
    most_running: int
    most_waiting: int
    most_used_tokens: int
    pool_tokens: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one run. Times in seconds.

    A request counts as sent when the user who sends it is free: the k-th that the schedule takes,
    of U users, when k - U are answered. ttft runs from there to the first token, tpot is the mean
    time between the tokens after it (requests with one token have none)."""

    output_tokens_per_s: float
    total_tokens_per_s: float  # prompts, cached or not, and output
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    tpot_p50: float
    tpot_p99: float
    goodput: float  # requests per second that met both targets
    goodput_share: float  # of all requests
    most_running: float  # requests at a time
    most_waiting: float  # sent, and kept from running by nothing but missing pages
    token_usage: float  # the largest share of the pool that running requests held
    hit_rate: float  # share of the prompts' tokens that the prefix cache had
    prefilled_tokens: float  # prompt tokens computed, recomputation included
    prefill_ratio: float  # of those, to what computing each prefix once takes
    retractions: float
    seconds: float


NAMES = tuple(field.name for field in fields(Figures))


def sent(run: Run, users: int) -> NDArray[np.float64]:
    """When each request was sent, as Figures says."""
    times = np.zeros(len(run.admitted))
    order = np.argsort(run.admitted, kind="stable")
    freed = np.sort(run.finished)
    times[order[users:]] = freed[: max(len(freed) - users, 0)]
    return times


def figures(run: Run, *, users: int, targets: Targets, least_prefill: int) -> Figures:
    """least_prefill: of workload.least_prefill()."""
    ttft = np.maximum(run.first_token - sent(run, users), 0.0)
    several = run.output_tokens > 1
    tpot = (run.finished - run.first_token)[several] / (run.output_tokens[several] - 1)
    met = ttft <= targets.ttft
    met[several] &= tpot <= targets.tpot
    seconds = float(run.finished.max())
    rate = 1.0 / seconds if seconds > 0 else math.inf
    n_output, n_prompt = int(run.output_tokens.sum()), int(run.prompt_tokens.sum())
    return Figures(
        output_tokens_per_s=n_output * rate,
        total_tokens_per_s=(n_output + n_prompt) * rate,
        ttft_mean=float(ttft.mean()),
        ttft_p50=float(np.median(ttft)),
        ttft_p99=float(np.quantile(ttft, 0.99)),
        tpot_mean=float(tpot.mean()) if len(tpot) else 0.0,
        tpot_p50=float(np.median(tpot)) if len(tpot) else 0.0,
        tpot_p99=float(np.quantile(tpot, 0.99)) if len(tpot) else 0.0,
        goodput=int(met.sum()) * rate,
        goodput_share=float(met.mean()),
        most_running=run.most_running,
        most_waiting=run.most_waiting,
        token_usage=run.most_used_tokens / run.pool_tokens,
        hit_rate=int(run.cached_tokens.sum()) / n_prompt,
        prefilled_tokens=run.prefilled,
        prefill_ratio=run.prefilled / least_prefill,
        retractions=run.retractions,
        seconds=seconds,
    )
