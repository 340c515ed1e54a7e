"""Teacher-forced predictions of given tokens: KL, the change of their probabilities, perplexity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import stats
from .journal import Record
from .results import Bucket, Kl

#: Tokens of a long text that are drawn together: what is further apart is hardly related.
BLOCK_TOKENS = 512
#: The first bucket of positions; each further one ends at twice the position.
FIRST_BUCKET = 128


@dataclass(frozen=True)
class Tokens:
    """The scored tokens of all rows in the order of the rows, [n] each; in float64, in nats."""

    kl: NDArray[np.float64]
    reverse: NDArray[np.float64]
    top1: NDArray[np.bool_]
    reference: NDArray[np.float64]  # log-probability of the given token under the reference lane
    logprobs: NDArray[np.float64]  # the same under this lane
    positions: NDArray[np.int64]  # in the sequence
    blocks: NDArray[np.int64]  # the same number: drawn together by the bootstrap

    @property
    def good(self) -> NDArray[np.bool_]:
        """Where every number is finite."""
        numbers = (self.kl, self.reverse, self.reference, self.logprobs)
        return np.asarray(np.isfinite(np.stack(numbers)).all(axis=0), np.bool_)

    def at(self, mask: NDArray[np.bool_]) -> Tokens:
        return Tokens(**{name: values[mask] for name, values in vars(self).items()})


def rows(records: Iterable[Record]) -> list[Record]:
    """Those with scores, in an order that does not depend on when they were computed."""
    return sorted((record for record in records if record["lanes"]), key=_order)


def _order(record: Record) -> tuple[int, str]:
    """ "wikitext2-512-10" comes after "wikitext2-512-9"."""
    key = str(record["key"])
    return len(key), key


def tokens(found: Sequence[Record], lane: str, reference: str, *, by_row: bool) -> Tokens | None:
    """The lane's tokens; None where it was not compared. by_row: a row is a block however long it
    is (a document); else blocks of 512 tokens within the rows of a text."""
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in Tokens.__dataclass_fields__}
    n_blocks = 0
    for record in found:
        scores = record["lanes"].get(lane, {})
        if "kl" not in scores:
            continue
        kl = np.asarray(scores["kl"], np.float64)
        offsets = np.arange(kl.size)
        own = np.zeros(kl.size, np.int64) if by_row else offsets // BLOCK_TOKENS
        parts["kl"].append(kl)
        parts["reverse"].append(np.asarray(scores["kl_reverse"], np.float64))
        parts["top1"].append(np.asarray(scores["top1"], np.bool_))
        parts["reference"].append(np.asarray(record["lanes"][reference]["logprobs"], np.float64))
        parts["logprobs"].append(np.asarray(scores["logprobs"], np.float64))
        parts["positions"].append(offsets + int(record["start"]))
        parts["blocks"].append(own + n_blocks)
        n_blocks += int(own[-1]) + 1 if kl.size else 0
    if n_blocks == 0:
        return None
    return Tokens(**{name: np.concatenate(values) for name, values in parts.items()})


def measure(found: Tokens, *, control: float | None, against: str, step: float = 1.0) -> Kl:
    """control: the control lane's mean KL on the same task, None without one. step: the lane's
    relative rounding step in steps of bf16 (stats.kl_allowance). Tokens with a number
    that is not finite are counted and left out of every figure; one is enough for an alarm."""
    good = found.good
    used = found.at(good)
    n_bad = int(good.size - np.count_nonzero(good))
    interval = _interval(used.kl, used.blocks)
    beyond = (
        interval is not None
        and control is not None
        and stats.kl_beyond_control(interval.lower, control, step)
    )
    nll = used.reference - used.logprobs
    p_change = np.exp(used.logprobs) - np.exp(used.reference)
    median, p99, p999, most = _percentiles(used.kl)
    return Kl(
        n_tokens=int(good.size),
        mean=_mean(used.kl),
        interval=interval,
        median=median,
        p99=p99,
        p999=p999,
        max=most,
        mean_reverse=_mean(used.reverse),
        top1=_mean(used.top1),
        nll_change=_mean(nll),
        nll_interval=_interval(nll, used.blocks),
        rms_p_change=float(np.sqrt(_mean(p_change**2))),
        buckets=tuple(_buckets(used)),
        alarm=beyond or n_bad > 0,
        not_finite=n_bad,
        against=against,
    )


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean(dtype=np.float64)) if values.size else float("nan")


def _percentiles(values: NDArray[np.float64]) -> list[float]:
    levels = [50, 99, 99.9, 100]
    if not values.size:
        return [float("nan")] * len(levels)
    return [float(value) for value in np.percentile(values, levels)]


def _interval(values: NDArray[np.float64], blocks: NDArray[np.int64]) -> stats.Interval | None:
    """By drawing blocks, with one seed for all; None if there are fewer than two."""
    labels = blocks.tolist()
    return stats.block_bootstrap(values, labels) if len(set(labels)) > 1 else None


def _buckets(used: Tokens) -> Iterator[Bucket]:
    low, high = 0, FIRST_BUCKET
    last = int(used.positions.max()) if used.positions.size else -1
    while low <= last:
        part = used.at((used.positions >= low) & (used.positions < high))
        if part.kl.size:
            yield Bucket(
                low=low,
                high=high,
                n_tokens=part.kl.size,
                mean=_mean(part.kl),
                interval=_interval(part.kl, part.blocks),
                top1=_mean(part.top1),
            )
        low, high = high, 2 * high


def perplexity(found: Sequence[Record], lane: str) -> float | None:
    """exp of the mean negative log-likelihood; NaN if a token's is not a number."""
    parts = [
        np.asarray(record["lanes"][lane]["logprobs"], np.float64)
        for record in found
        if lane in record["lanes"]
    ]
    if not sum(part.size for part in parts):
        return None
    with np.errstate(over="ignore"):
        return float(np.exp(-np.concatenate(parts).mean()))


def not_finite(found: Sequence[Record], lane: str) -> int:
    """How many of the lane's log-probabilities are no finite number."""
    scores: Iterator[Mapping[str, Any]] = (record["lanes"].get(lane, {}) for record in found)
    return sum(
        int(np.count_nonzero(~np.isfinite(np.asarray(own.get("logprobs", []), np.float64))))
        for own in scores
    )
