"""One task's answers: rows paired over the lanes, how each lane did, and how it differs from the
baseline."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import stats
from .journal import Record
from .results import Answers, Divergence, Pair


@dataclass(frozen=True)
class Row:
    """One item under every lane."""

    place: int
    key: Hashable
    stratum: str | None
    lanes: Mapping[str, Mapping[str, Any]]  # the answers by lane

    @property
    def counts(self) -> bool:
        """Whether every lane could run it."""
        return not any("error" in answer for answer in self.lanes.values())


def rows(records: Iterable[Record], lanes: Sequence[str]) -> list[Row]:
    """The items that all lanes are done with, in the order of the data set. records: the task's
    answers, of all models, in any order."""
    found: dict[Hashable, dict[str, Any]] = {}
    first: dict[Hashable, Record] = {}
    for record in records:
        found.setdefault(record["key"], {}).update(record["lanes"])
        first.setdefault(record["key"], record)
    done = [
        Row(int(first[key]["place"]), key, first[key]["stratum"], answers)
        for key, answers in found.items()
        if all(name in answers for name in lanes)
    ]
    return sorted(done, key=lambda row: (row.place, str(row.key)))


def answers(done: Sequence[Row], lane: str) -> Answers | None:
    """None where no row counts: there is nothing to take a share of."""
    counted = [row.lanes[lane] for row in done if row.counts]
    if not counted:
        return None
    n, correct = len(counted), sum(bool(answer["correct"]) for answer in counted)
    return Answers(
        n=n,
        correct=correct,
        truncated=sum(bool(answer["truncated"]) for answer in counted),
        unanswered=sum(not answer["answered"] for answer in counted),
        errors=sum("error" in row.lanes[lane] for row in done),
        mean_tokens=sum(int(answer["n_tokens"]) for answer in counted) / n,
        interval=stats.clopper_pearson(correct, n),
    )


def strata(done: Sequence[Row], lane: str) -> dict[str, Answers]:
    """The same by stratum, in the order of their names; empty for a task without strata."""
    groups: dict[str, list[Row]] = {}
    for row in done:
        if row.stratum is not None:
            groups.setdefault(row.stratum, []).append(row)
    found = {name: answers(groups[name], lane) for name in sorted(groups)}
    return {name: own for name, own in found.items() if own is not None}


def pair(done: Sequence[Row], base: str, lane: str) -> Pair | None:
    """Everything but the verdict and Holm's adjustment, which need more than this task's answers;
    None where no row counts."""
    both = [(row, row.lanes[base], row.lanes[lane]) for row in done if row.counts]
    if not both:
        return None
    n = len(both)
    change = [bool(a["correct"]) - bool(b["correct"]) for _, a, b in both]
    lost, gained = change.count(1), change.count(-1)
    other_wrong = sum(
        not a["correct"] and not b["correct"] and a["answer"] != b["answer"] for _, a, b in both
    )
    groups = [row.stratum for row, _, _ in both]
    # Without a flip the share of flips is not known to be 0: the most that it may be.
    share = (lost + gained) / n or stats.clopper_pearson(0, n).upper
    p_exact = stats.mcnemar_exact(lost, gained)
    return Pair(
        lost=lost,
        gained=gained,
        other_wrong=other_wrong,
        loss=(lost - gained) / n,
        interval=stats.tango_interval(lost, gained, n),
        clustered=stats.clustered_interval(change, groups) if len(set(groups)) > 1 else None,
        p_exact=p_exact,
        p_mid=stats.mcnemar_midp(lost, gained),
        p_holm=p_exact,
        detectable=stats.detectable(n, share),
        verdict=None,
    )


def divergence(done: Sequence[Row], base: str, lane: str) -> Divergence | None:
    """Of the generated tokens; None where no row counts. `excess` is not filled in."""
    both = [
        (row.lanes[base]["token_ids"], row.lanes[lane]["token_ids"]) for row in done if row.counts
    ]
    if not both:
        return None
    first = sorted(place for a, b in both if (place := first_difference(a, b)) is not None)
    n, middle = len(both), len(first) // 2
    # An empty output parts, if it does, where its first token would be.
    length = max(sum(len(a) for a, _ in both) / n, 1.0)
    return Divergence(
        n=n,
        identical=n - len(first),
        median_first=(first[middle] + first[~middle]) / 2 if first else None,
        hazard=stats.hazard((n - len(first)) / n, length),
        excess=None,
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The place of the first token that is not the same; where one text only goes on, its end."""
    for place, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))
