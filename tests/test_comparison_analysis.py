"""From the records of a comparison to its findings, by records made by hand: published pairs, real
paired answers, damage that must be seen and what must never be called safe."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import stats
from qkv.comparison import analysis, verdicts
from qkv.comparison.results import Findings, Kl, Lane, Pair

DATA = Path(__file__).resolve().parents[2] / "shared/data"
NAMES = ("bf16", "fp8", "control")
Rec = dict[str, Any]


# ---- records made by hand --------------------------------------------------------------------


def lane(name: str, model: str = "m", kv: str | None = None) -> Rec:
    kv = kv or name
    return {
        "name": name, "model": model, "kv_cache_dtype": kv, "kv_name": kv,
        "control": name == "control",
    }  # fmt: skip


def task(name: str, kind: str = "generate", asked: int = 0, size: int = 0, **more: Any) -> Rec:
    return {"task": name, "kind": kind, "asked": asked, "size": size, "chance": 0.0, **more}


def header(tasks: Sequence[Rec], names: Iterable[str] = NAMES, margin: float = 0.01) -> Rec:
    lanes = [lane(name) for name in names]
    settings = {"margin": margin, "tasks": list(tasks)}
    return {"kind": "header", "settings": settings, "environment": {"isa": "x"}, "lanes": lanes}


def answer(
    correct: bool, given: str | None = None, ids: Sequence[int] = (7, 8), **more: Any
) -> Rec:
    said = given or ("right" if correct else "wrong")
    return {
        "answer": said, "correct": correct, "answered": True, "truncated": False,
        "n_tokens": len(ids), "text": said, "token_ids": list(ids), **more,
    }  # fmt: skip


def row(name: str, place: int, lanes: Mapping[str, Rec], model: str = "m", **more: Any) -> Rec:
    return {
        "kind": "answer", "model": model, "task": name, "key": f"{name}-{place}", "place": place,
        "stratum": None, "lanes": dict(lanes), **more,
    }  # fmt: skip


def flips(name: str, n: int, correct: int, lost: int, gained: int, **more: Any) -> list[Rec]:
    """n items of which the baseline has `correct` right; the control lane does as the baseline.
    Rows share their answers: a test that changes one puts another in its place."""
    rows, said = [], {right: answer(right) for right in (False, True)}
    for place in range(n):
        before = place < correct
        after = place >= lost if before else place < correct + gained
        lanes = {"bf16": said[before], "fp8": said[after], "control": said[before]}
        rows.append(row(name, place, lanes, **more))
    return rows


def scores(n: int, kl: float | Sequence[float] | None = None, logprob: float = -1.0) -> Rec:
    found: Rec = {"logprobs": [logprob] * n}
    if kl is not None:
        values = [kl] * n if isinstance(kl, (int, float)) else list(kl)
        found |= {"kl": values, "kl_reverse": values, "top1": [True] * n}
    return found


def forced(name: str, key: Any, lanes: Mapping[str, Rec], start: int = 1, model: str = "m") -> Rec:
    return {
        "kind": "forced", "model": model, "task": name, "key": key, "start": start,
        "lanes": dict(lanes),
    }  # fmt: skip


def text_rows(fp8: Any, control: Any, n: int = 511, rows: int = 4) -> list[Rec]:
    return [
        forced(
            "wikitext2",
            f"wikitext2-512-{i}",
            {"bf16": scores(n), "fp8": scores(n, fp8), "control": scores(n, control)},
        )
        for i in range(rows)
    ]


GSM8K, WIKITEXT = task("gsm8k", asked=1319, size=1319), task("wikitext2", "text")


def pair_of(found: Findings, name: str, lane_name: str = "fp8") -> Pair:
    pair = found.tasks[name].lanes[lane_name].pair
    assert pair is not None
    return pair


def kl_of(found: Findings, name: str, lane_name: str = "fp8") -> Kl:
    kl = found.tasks[name].lanes[lane_name].kl
    assert kl is not None
    return kl


def kind_of(found: Findings, name: str) -> str:
    verdict = pair_of(found, name).verdict
    assert verdict is not None
    return verdict.kind


# ---- published pairs, and the real ones ------------------------------------------------------

# n, right under the baseline, lost, gained; p; at which margin in points; the verdict then.
PUBLISHED = [
    (1319, 1243, 8, 6, 0.79, 1.0, "SAFE"),
    (1319, 1243, 14, 12, 0.85, 1.0, "SAFE"),
    (1319, 1243, 34, 32, 0.90, 1.0, "NOT ENOUGH DATA"),
    (14042, 12513, 356, 346, 0.73, 0.5, "SAFE"),
    (14042, 12513, 946, 936, 0.84, 1.0, "SAFE"),
    (12032, 9660, 866, 746, 0.0030, 1.0, "NOT ENOUGH DATA"),
    (12032, 9660, 866, 746, 0.0030, 2.0, "SAFE"),
    (12032, 9660, 866, 746, 0.0030, 0.3, "NOT SAFE"),
]


@pytest.mark.parametrize(("n", "correct", "lost", "gained", "p", "margin", "kind"), PUBLISHED)
def test_published_pairs(
    n: int, correct: int, lost: int, gained: int, p: float, margin: float, kind: str
) -> None:
    """GSM8K 94.24 / 94.09, MMLU 89.11 / 89.04, MMLU-Pro 80.29 / 79.29 at plausible flips."""
    asked = header([task("x", asked=n, size=n)], margin=margin / 100)
    found = analysis.findings(asked, flips("x", n, correct, lost, gained))
    pair = pair_of(found, "x")
    answers = found.tasks["x"].lanes["fp8"].answers
    assert answers is not None and answers.correct == correct - lost + gained
    assert (pair.lost, pair.gained, pair.loss) == (lost, gained, (lost - gained) / n)
    assert pair.p_exact == pytest.approx(p, abs=0.005 if p > 0.01 else 0.00005)
    assert pair.p_mid < pair.p_exact == pair.p_holm
    assert pair.interval == stats.tango_interval(lost, gained, n)
    assert pair.detectable == stats.detectable(n, (lost + gained) / n)
    assert kind_of(found, "x") == found.verdicts["fp8"].kind == kind
    assert found.verdicts["fp8"].reason.startswith("x: ")
    # What the control lane did is shown, but it is not judged.
    assert pair_of(found, "x", "control").verdict is None and list(found.verdicts) == ["fp8"]


def real_rows(name: str) -> list[dict[str, str]]:
    """Read as plain text: a reader with notions of missing values would change answers."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no real data: ../shared/data/{name} is not there")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_mmlu_pro_of_two_models() -> None:
    names = ("Meta-Llama-3_1-8B", "Meta-Llama-3-8B")
    records = [
        row(
            "mmlu_pro",
            place,
            {
                name: answer(
                    given[name] == given["answer"], given[name], answered=given[name] != "-"
                )
                for name in names
            },
            stratum=given["category"],
        )
        for place, given in enumerate(real_rows("mmlu_pro_item_preds.csv.gz"))
    ]
    asked = header([task("mmlu_pro", asked=12032, size=12032, chance=0.1)], names)
    found = analysis.findings(asked, records)
    pair = pair_of(found, "mmlu_pro", names[1])
    assert (pair.lost, pair.gained, pair.other_wrong) == (1300, 1020, 3596)
    assert 100 * pair.loss == pytest.approx(2.3271, abs=5e-5)
    assert pair.p_exact == pytest.approx(6.66e-9, rel=1e-3)
    assert pair.clustered is not None
    half = 100 * (pair.clustered.upper - pair.clustered.lower) / 2
    assert half / 2.160369 == pytest.approx(0.6163, abs=5e-5)  # t with 13 degrees of freedom
    assert found.verdicts[names[1]].kind == "NOT SAFE"
    parts = found.tasks["mmlu_pro"].lanes[names[1]].strata
    assert len(parts) == 14 and sum(own.n for own in parts.values()) == 12032


def test_routellm_on_two_tasks() -> None:
    names = ("gpt4_1106", "mixtral_8x7b")
    records = [
        row(
            given["task"],
            place,
            {name: answer(given[name] == "1") for name in names},
            stratum=given["subject"] if given["task"] == "mmlu" else None,
        )
        for place, given in enumerate(real_rows("paired_correctness_routellm.csv.gz"))
    ]
    tasks = [task("mmlu", "choice", 14042, 14042, chance=0.25), GSM8K]
    found = analysis.findings(header(tasks, names), records)
    mmlu, gsm8k = (pair_of(found, name, names[1]) for name in ("mmlu", "gsm8k"))
    assert (mmlu.lost, mmlu.gained, gsm8k.lost, gsm8k.gained) == (2497, 742, 383, 95)
    assert 100 * mmlu.loss == pytest.approx(12.4982, abs=5e-5)
    assert mmlu.clustered is not None and gsm8k.clustered is None
    assert mmlu.clustered.upper - mmlu.clustered.lower > 5 * (mmlu.interval[1] - mmlu.interval[0])
    assert [mmlu.p_holm, gsm8k.p_holm] == stats.holm([mmlu.p_exact, gsm8k.p_exact])


# ---- what is safe and what is not ------------------------------------------------------------


@pytest.mark.parametrize(("n", "kind"), [(380, "NOT ENOUGH DATA"), (385, "SAFE")])
def test_no_flip_at_all(n: int, kind: str) -> None:
    found = analysis.findings(header([GSM8K]), flips("gsm8k", n, n // 2, 0, 0))
    assert found.verdicts["fp8"].kind == kind_of(found, "gsm8k") == kind
    pair = pair_of(found, "gsm8k")
    # The share of flips is not 0 but unknown; at most the upper limit of its interval.
    assert pair.detectable == stats.detectable(n, stats.clopper_pearson(0, n).upper)
    assert pair.p_exact == pair.p_mid == 1 and pair.other_wrong == 0


def test_identical_lanes() -> None:
    records = flips("gsm8k", 400, 200, 0, 0) + text_rows(0.0, 1e-4)
    records += [
        forced("gsm8k", f"gsm8k-{i}", {"bf16": scores(2), "fp8": scores(2, 0.0)}, start=600)
        for i in range(400)
    ]
    found = analysis.findings(header([GSM8K, WIKITEXT]), records)
    for name in ("gsm8k", "wikitext2"):
        kl = kl_of(found, name)
        assert kl.mean == kl.max == kl.mean_reverse == kl.nll_change == kl.rms_p_change == 0
        assert kl.interval == kl.nll_interval == (0, 0) and kl.top1 == 1 and not kl.alarm
    parted = found.tasks["gsm8k"].lanes["fp8"].divergence
    assert parted is not None and parted.identical == parted.n == 400
    assert parted.median_first is None and math.copysign(1, parted.hazard) == 1 > parted.hazard == 0
    assert found.verdicts["fp8"].kind == "SAFE"


@pytest.mark.parametrize("on_text", [False, True])
def test_a_kl_alarm_outweighs_equal_answers(on_text: bool) -> None:
    """No flip in 1000 items, but KL 20 times the control lane's."""
    records = flips("gsm8k", 1000, 500, 0, 0)
    if on_text:
        records += text_rows(2e-2, 1e-3)
    else:
        lanes = {"bf16": scores(3), "fp8": scores(3, 2e-2), "control": scores(3, 1e-3)}
        records += [forced("gsm8k", f"gsm8k-{i}", lanes) for i in range(1000)]
    found = analysis.findings(header([GSM8K, WIKITEXT] if on_text else [GSM8K]), records)
    name = "wikitext2" if on_text else "gsm8k"
    assert kl_of(found, name).alarm and not kl_of(found, name, "control").alarm
    assert kind_of(found, "gsm8k") == ("SAFE" if on_text else "NOT SAFE")
    verdict = found.verdicts["fp8"]
    assert verdict.kind == "NOT SAFE" and verdict.reason.startswith(f"{name}: KL alarm")
    # Nine times is not an alarm.
    calm = analysis.findings(header([GSM8K, WIKITEXT]), records[:1000] + text_rows(9e-3, 1e-3))
    assert not kl_of(calm, "wikitext2").alarm and calm.verdicts["fp8"].kind == "SAFE"


def test_a_baseline_at_chance_is_never_safe() -> None:
    asked = [task("mmlu", "choice", 4000, 4000, chance=0.25)]
    found = analysis.findings(header(asked), flips("mmlu", 4000, 1010, 0, 0))
    assert found.verdicts["fp8"].kind == kind_of(found, "mmlu") == "UNINFORMATIVE"
    # Beside a task that says something it still clears nothing.
    both = analysis.findings(
        header([*asked, GSM8K]), flips("mmlu", 4000, 1010, 0, 0) + flips("gsm8k", 500, 250, 0, 0)
    )
    assert kind_of(both, "gsm8k") == "SAFE" and both.verdicts["fp8"].kind == "NOT ENOUGH DATA"
    assert "mmlu is UNINFORMATIVE" in both.verdicts["fp8"].reason
    assert "SAFE on gsm8k" in both.verdicts["fp8"].reason
    # KL still speaks.
    alarm = analysis.findings(
        header([*asked, WIKITEXT]), flips("mmlu", 4000, 1010, 0, 0) + text_rows(1e-2, 1e-5)
    )
    assert alarm.verdicts["fp8"].kind == "NOT SAFE"


SAFE, SMALL = (500, 250, 0, 0), (100, 50, 0, 0)
LOSS, CHANCE = (500, 250, 60, 5), (500, 2, 0, 0)


@pytest.mark.parametrize(
    ("first", "second", "kind", "decides"),
    [
        (SAFE, SAFE, "SAFE", "a"), (SAFE, SMALL, "NOT ENOUGH DATA", "b"),
        (SAFE, None, "NOT ENOUGH DATA", "b"), (SMALL, LOSS, "NOT SAFE", "b"),
        (LOSS, SAFE, "NOT SAFE", "a"), (CHANCE, CHANCE, "UNINFORMATIVE", "a"),
        (CHANCE, LOSS, "NOT SAFE", "b"), (CHANCE, SMALL, "NOT ENOUGH DATA", "b"),
        (None, None, "NOT ENOUGH DATA", "a"),
    ],
)  # fmt: skip
def test_over_two_tasks(first: Any, second: Any, kind: str, decides: str) -> None:
    records: list[Rec] = []
    for name, given in (("a", first), ("b", second)):
        records += flips(name, *given) if given else []
    found = analysis.findings(header([task("a", asked=500), task("b", asked=500)]), records)
    verdict = found.verdicts["fp8"]
    assert verdict.kind == kind and f"{decides}: " in verdict.reason
    assert verdict.differs == ("KV cache",)


def test_a_text_alone_clears_nothing() -> None:
    found = analysis.findings(header([WIKITEXT]), text_rows(1e-6, 1e-6))
    assert found.verdicts["fp8"].kind == "NOT ENOUGH DATA"
    assert "no task with answers" in found.verdicts["fp8"].reason


def test_holm_over_the_tasks_of_a_lane() -> None:
    records = flips("a", 400, 200, 20, 6) + flips("b", 400, 200, 11, 2) + flips("c", 90, 40, 2, 2)
    names = ("a", "b", "c")
    found = analysis.findings(header([task(name, asked=400, size=400) for name in names]), records)
    p = [stats.mcnemar_exact(*flipped) for flipped in ((20, 6), (11, 2), (2, 2))]
    assert [pair_of(found, name).p_exact for name in names] == p
    assert [pair_of(found, name).p_holm for name in names] == stats.holm(p)
    assert [pair_of(found, name, "control").p_holm for name in names] == [1, 1, 1]
    assert "(p 0.028 by Holm over 3 tasks)" in found.verdicts["fp8"].reason


# ---- rows that fail, and runs that are not done ----------------------------------------------


def test_rows_with_an_error_count_for_no_lane() -> None:
    records = flips("gsm8k", 100, 60, 4, 2)
    records[0]["lanes"]["fp8"] = {"error": "prompt of 5000 tokens"}  # would have been lost
    records[99]["lanes"]["bf16"] = records[99]["lanes"]["fp8"] = {"error": "no"}
    records[70]["lanes"]["fp8"] = {
        **answer(False), "truncated": True, "answered": False, "answer": None
    }  # fmt: skip
    records[71]["lanes"]["bf16"] = answer(False, "another")
    found = analysis.findings(header([GSM8K]), records)
    result = found.tasks["gsm8k"]
    base, fp8 = (result.lanes[name].answers for name in ("bf16", "fp8"))
    assert base is not None and fp8 is not None
    assert (result.n, base.n, base.correct, base.errors) == (100, 98, 59, 1)
    assert (fp8.n, fp8.correct, fp8.errors, fp8.truncated, fp8.unanswered) == (98, 58, 2, 1, 1)
    assert (base.truncated, base.unanswered, base.mean_tokens) == (0, 0, 2)
    assert base.interval == stats.clopper_pearson(59, 98)
    assert (pair_of(found, "gsm8k").lost, pair_of(found, "gsm8k").other_wrong) == (3, 2)
    assert "gsm8k: 2 items that fp8 could not run count for no lane" in found.warnings
    # A lane that could run nothing at all has no figures and is not safe.
    for record in records:
        record["lanes"]["fp8"] = {"error": "no"}
    nothing = analysis.findings(header([GSM8K]), records)
    assert nothing.tasks["gsm8k"].lanes["bf16"].answers is None
    assert nothing.verdicts["fp8"].kind == "NOT ENOUGH DATA"


def test_a_comparison_that_still_runs() -> None:
    tasks = [task("mmlu", "choice", 500, 14042), GSM8K]
    found = analysis.findings(header(tasks), flips("mmlu", 400, 300, 0, 0))
    assert kind_of(found, "mmlu") == "SAFE" and found.verdicts["fp8"].kind == "NOT ENOUGH DATA"
    assert [(own.n, own.asked, own.size) for own in found.tasks.values()] == [
        (400, 500, 14042),
        (0, 1319, 1319),
    ]
    assert "mmlu: not finished, 400 of 500 items" in found.warnings
    empty = analysis.findings(header([*tasks, WIKITEXT]), [])
    assert empty.verdicts["fp8"].kind == "NOT ENOUGH DATA" and empty.rerun is None
    strict(empty)


def test_records_of_another_comparison() -> None:
    with pytest.raises(qkv.Error, match="'mgsm': no task of this comparison"):
        analysis.findings(header([GSM8K]), flips("mgsm", 1, 1, 0, 0))
    with pytest.raises(qkv.Error, match="'control': no lane of this comparison"):
        analysis.findings(header([GSM8K], ("bf16", "fp8")), flips("gsm8k", 1, 1, 0, 0))


def strict(found: Findings) -> str:
    """As JSON that any reader takes: no NaN, no infinity."""
    return json.dumps(analysis.to_json(found), allow_nan=False)


def test_the_order_of_the_records_does_not_matter() -> None:
    noise = random.Random(1)
    records = flips("gsm8k", 120, 80, 9, 3, stratum="x") + flips("mmlu", 90, 60, 4, 5)
    for place, record in enumerate(records):
        record["stratum"] = f"s{place % 7}"
        for own, said in record["lanes"].items():
            ids = [noise.randrange(3) for _ in range(4)]
            record["lanes"][own] = answer(said["correct"], ids=ids)
    values = [[noise.expovariate(500) for _ in range(600)] for _ in range(12)]
    records += [
        forced("wikitext2", f"w-{i}", {"bf16": scores(600), "fp8": scores(600, kl, -1 - kl[0])})
        for i, kl in enumerate(values)
    ]
    records += [
        {"kind": "rerun", "model": "m", "items": 4, "identical": True, "first_difference": ""},
        {"kind": "clips", "model": "m", "lanes": {"fp8": {"clipped": 0.1, "flushed": 0.2}}},
    ]
    asked = header([GSM8K, task("mmlu", "choice", 90, 90), WIKITEXT])
    first = strict(analysis.findings(asked, records))
    for _ in range(3):
        noise.shuffle(records)
        assert strict(analysis.findings(asked, records)) == first
    json.loads(first, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# ---- KL --------------------------------------------------------------------------------------


def test_kl_figures() -> None:
    """Every figure of two windows against NumPy on the same numbers."""
    rng = np.random.default_rng(5)
    n, rows = 1300, 2
    kl, reverse = rng.exponential(1e-3, (2, rows, n))
    base = rng.normal(-2, 1, (rows, n))
    own = base + rng.normal(0, 0.05, (rows, n))
    top1 = rng.random((rows, n)) < 0.9
    records = [
        forced(
            "wikitext2",
            f"w{i}",
            {
                "bf16": {"logprobs": base[i]},
                "fp8": {
                    "logprobs": own[i], "kl": kl[i], "kl_reverse": reverse[i], "top1": top1[i],
                },
            },
        )
        for i in range(rows)
    ]  # fmt: skip
    found = analysis.findings(header([WIKITEXT], ("bf16", "fp8")), records)
    result, whole = kl_of(found, "wikitext2"), kl.ravel()
    assert (result.n_tokens, result.not_finite, result.against) == (2600, 0, "bf16")
    assert result.mean == pytest.approx(whole.mean(), rel=1e-12)
    assert result.mean_reverse == pytest.approx(reverse.mean(), rel=1e-12)
    quantiles = [result.median, result.p99, result.p999, result.max]
    assert quantiles == pytest.approx(list(np.percentile(whole, [50, 99, 99.9, 100])))
    assert result.top1 == top1.mean()
    assert result.nll_change == pytest.approx((base - own).mean(), abs=1e-12)
    assert result.rms_p_change == pytest.approx(np.sqrt(((np.exp(own) - np.exp(base)) ** 2).mean()))
    blocks = [i * 3 + j // 512 for i in range(rows) for j in range(n)]
    assert result.interval == stats.block_bootstrap(whole, blocks)
    assert result.nll_interval == stats.block_bootstrap((base - own).ravel(), blocks)
    # The ratio of perplexities is the exponential of the change.
    lanes = found.tasks["wikitext2"].lanes
    before, after = lanes["bf16"].perplexity, lanes["fp8"].perplexity
    assert before is not None and after is not None
    assert math.log(after / before) == pytest.approx(result.nll_change, abs=1e-12)
    # Positions: the first scored token is the second of the sequence.
    edges = [(0, 128, 127), (128, 256, 128), (256, 512, 256), (512, 1024, 512), (1024, 2048, 277)]
    assert [(b.low, b.high, b.n_tokens / rows) for b in result.buckets] == edges
    for bucket in result.buckets:
        part = slice(max(bucket.low, 1) - 1, bucket.high - 1)
        assert bucket.mean == pytest.approx(kl[:, part].mean(), rel=1e-12)
        assert bucket.top1 == top1[:, part].mean() and bucket.interval is not None
    assert found.tasks["wikitext2"].n == found.tasks["wikitext2"].asked == 2


def test_a_row_of_a_task_is_one_block() -> None:
    """However long: its tokens follow from each other."""
    rng = np.random.default_rng(6)
    lengths = (700, 30, 1, 900)
    values = [rng.exponential(1e-3, length) for length in lengths]
    records = [
        forced("gsm8k", f"k{i}", {"bf16": scores(len(v)), "fp8": scores(len(v), list(v))}, start=90)
        for i, v in enumerate(values)
    ]
    found = analysis.findings(header([GSM8K]), records)
    labels = np.repeat(range(4), lengths).tolist()
    expected = stats.block_bootstrap(np.concatenate(values), labels)
    assert kl_of(found, "gsm8k").interval == expected
    assert [bucket.low for bucket in kl_of(found, "gsm8k").buckets] == [0, 128, 256, 512]
    # One row alone is one block: no interval, hence no alarm, and that is said.
    one = analysis.findings(header([GSM8K]), records[:1])
    assert kl_of(one, "gsm8k").interval is None and not kl_of(one, "gsm8k").alarm
    assert any("too few rows for an interval" in line for line in one.warnings)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("control", [True, False])
def test_kl_that_is_no_number_is_an_alarm(bad: float, control: bool) -> None:
    records = flips("gsm8k", 500, 250, 0, 0) + text_rows(1e-6, 1e-3)
    records[500]["lanes"]["fp8"]["kl"][17] = bad
    if not control:
        for record in records:
            del record["lanes"]["control"]
    names = NAMES if control else NAMES[:2]
    found = analysis.findings(header([GSM8K, WIKITEXT], names), records)
    kl = kl_of(found, "wikitext2")
    assert kl.alarm and kl.not_finite == 1 and kl.n_tokens == 4 * 511
    assert kl.mean == pytest.approx(1e-6) and kl.max == 1e-6
    assert found.verdicts["fp8"].kind == "NOT SAFE"
    assert "no finite KL at 1 of 2044 tokens" in found.verdicts["fp8"].reason
    assert any(line.startswith("wikitext2: fp8: KL alarm") for line in found.warnings)
    strict(found)


def test_a_lane_of_nothing_but_nan() -> None:
    """In its answers too: a task of choices has an error then, and the verdict comes from KL."""
    nan = math.nan
    lanes = {"bf16": scores(1), "fp8": scores(1, nan, nan), "control": scores(1, 1e-4)}
    records = flips("mmlu", 50, 40, 0, 0)
    for record in records:
        record["lanes"]["fp8"] = {"error": "a log-likelihood is not a number"}
    records += [forced("mmlu", f"mmlu-{i}", lanes, start=400) for i in range(50)]
    found = analysis.findings(header([task("mmlu", "choice", 50, 50, chance=0.25)]), records)
    kl = kl_of(found, "mmlu")
    assert kl.alarm and kl.not_finite == kl.n_tokens == 50
    assert math.isnan(kl.mean) and math.isnan(kl.top1) and kl.interval is None and not kl.buckets
    assert found.verdicts["fp8"].kind == "NOT SAFE"
    assert found.verdicts["fp8"].reason.startswith("mmlu: KL alarm: no finite KL at 50 of 50")
    assert '"mean": null' in strict(found)


def test_nan_under_the_baseline_or_the_control() -> None:
    records = text_rows(1e-3, 1e-3)
    records[0]["lanes"]["bf16"]["logprobs"][3] = math.nan
    found = analysis.findings(header([WIKITEXT]), records)
    assert "wikitext2: bf16: 1 log-probabilities are not finite" in found.warnings
    assert found.verdicts["fp8"].kind == "NOT SAFE" and kl_of(found, "wikitext2").not_finite == 1
    assert math.isnan(found.tasks["wikitext2"].lanes["bf16"].perplexity or 0)
    # A control lane of NaN cannot say what is normal: no alarm, but not silently.
    found = analysis.findings(header([WIKITEXT]), text_rows(1.0, math.nan))
    assert not kl_of(found, "wikitext2").alarm and kl_of(found, "wikitext2", "control").alarm
    assert "wikitext2: the control lane has no KL, so there is no KL alarm" in found.warnings


def test_without_a_control_lane_there_is_no_alarm() -> None:
    records = flips("gsm8k", 500, 250, 0, 0) + text_rows(5.0, 1e-3)
    for record in records:
        del record["lanes"]["control"]
    found = analysis.findings(header([GSM8K, WIKITEXT], NAMES[:2]), records)
    assert not kl_of(found, "wikitext2").alarm and found.verdicts["fp8"].kind == "SAFE"
    assert any(
        line.startswith("no control lane") and "no KL alarm" in line for line in found.warnings
    )


def test_a_control_lane_that_changes_nothing() -> None:
    """Ten times nothing is nothing: by the definition any KL is an alarm then. It is said why."""
    found = analysis.findings(header([WIKITEXT]), text_rows(1e-9, 0.0))
    assert kl_of(found, "wikitext2").alarm and found.verdicts["fp8"].kind == "NOT SAFE"
    assert any("the KL of control is 0" in line for line in found.warnings)
    assert not kl_of(analysis.findings(header([WIKITEXT]), text_rows(0.0, 0.0)), "wikitext2").alarm
    # Rounding may leave a sum of zeros a little below it.
    found = analysis.findings(header([WIKITEXT]), text_rows(1e-9, -1e-12))
    assert kl_of(found, "wikitext2").alarm


def test_rows_that_could_not_be_scored() -> None:
    records = text_rows(1e-3, 1e-3)
    records.append({**forced("wikitext2", "w9", {}), "error": "too long"})
    records.append(forced("gsm8k", "gsm8k-0", {}, start=0))  # an empty text: nothing to score
    found = analysis.findings(header([GSM8K, WIKITEXT]), records)
    assert found.tasks["wikitext2"].n == 4
    assert "wikitext2: 1 rows could not be scored and have no KL" in found.warnings
    assert found.tasks["gsm8k"].lanes["fp8"].kl is None


# ---- divergence, notes, strata ---------------------------------------------------------------


def test_divergence() -> None:
    """22.7 % and 14.5 % of outputs of 120 tokens on average identical: 1.23 and 1.60 % a token."""
    base = list(range(120))
    parted = [*base[:40], -1, *base[41:]]
    records = [
        row(
            "gsm8k",
            i,
            {
                "bf16": answer(True, ids=base),
                "fp8": answer(True, ids=base if i < 145 else parted if i < 900 else base[:60]),
                "control": answer(True, ids=base if i < 227 else [*base, 5]),
            },
        )
        for i in range(1000)
    ]
    found = analysis.findings(header([GSM8K]), records).tasks["gsm8k"].lanes
    fp8, control = found["fp8"].divergence, found["control"].divergence
    assert fp8 is not None and control is not None and found["bf16"].divergence is None
    assert (fp8.n, fp8.identical, fp8.median_first) == (1000, 145, 40)
    assert (control.identical, control.median_first) == (227, 120)
    assert fp8.hazard == pytest.approx(0.0160, abs=5e-5)
    assert control.hazard == pytest.approx(0.0123, abs=5e-5)
    assert fp8.excess == fp8.hazard - control.hazard and control.excess == 0
    for record in records:
        del record["lanes"]["control"]
    alone = analysis.findings(header([GSM8K], NAMES[:2]), records).tasks["gsm8k"].lanes
    own = alone["fp8"].divergence
    assert own is not None and own.excess is None


@pytest.mark.parametrize(
    ("given", "length", "note"),
    [
        (task("gsm8k"), 511, analysis.SHORT), (task("gsm8k"), 512, ""), (task("needle"), 9, ""),
        (task("mmlu", "choice"), 0, ""),
    ],
)  # fmt: skip
def test_short_outputs_are_named(given: Rec, length: int, note: str) -> None:
    name = given["task"]
    records = flips(name, 400, 300, 0, 0)
    for record in records:
        record["lanes"]["bf16"] = {**record["lanes"]["bf16"], "n_tokens": length}
    found = analysis.findings(header([given]), records)
    assert found.tasks[name].note == note
    short = note != "" or given["kind"] == "choice"
    assert ("shown for short outputs only" in found.verdicts["fp8"].reason) == short


def test_needle_by_length_and_depth() -> None:
    records = []
    for place, (length, depth) in enumerate(itertools.product(("1k", "4k"), ("0", "50", "100"))):
        for i in range(10):
            right = not (length == "4k" and depth == "50") or i < 3
            lanes = {"bf16": answer(True), "fp8": answer(right), "control": answer(True)}
            records.append(row("needle", place * 10 + i, lanes, stratum=f"{length}/{depth}"))
    records[0]["lanes"]["fp8"] = {"error": "no"}
    found = analysis.findings(header([task("needle", asked=60, size=60)]), records)
    parts = found.tasks["needle"].lanes["fp8"].strata
    cells = {name: (own.correct, own.n, own.errors) for name, own in parts.items()}
    assert cells == {
        "1k/0": (9, 9, 1), "1k/100": (10, 10, 0), "1k/50": (10, 10, 0),
        "4k/0": (10, 10, 0), "4k/100": (10, 10, 0), "4k/50": (3, 10, 0),
    }  # fmt: skip
    clustered = pair_of(found, "needle").clustered
    assert clustered is not None and clustered.lower < 0 < clustered.upper


# ---- several models --------------------------------------------------------------------------

GRID = {
    "A / bf16": ("A", "bf16"), "A / fp8": ("A", "fp8"), "control": ("A", "bf16_stochastic"),
    "B / bf16": ("B", "bf16"), "B / fp8": ("B", "fp8"),
}  # fmt: skip


def grid_header(names: Iterable[str] = tuple(GRID)) -> Rec:
    asked = header([GSM8K, WIKITEXT])
    asked["lanes"] = [lane(name, *GRID[name]) for name in names]
    return asked


def grid_records(right: Mapping[str, int], n: int = 1000) -> list[Rec]:
    """The first so many items are right under each lane; each model has its own records."""
    records = []
    for model in ("B", "A"):
        own = [name for name in right if GRID[name][0] == model]
        records += [
            row("gsm8k", i, {name: answer(i < right[name]) for name in own}, model)
            for i in range(n)
        ]
        for i in range(4 if own else 0):
            lanes = {name: scores(511, 1e-3 if "bf16" not in name else None) for name in own}
            records.append(forced("wikitext2", f"w{i}", lanes, model=model))
    return records


def test_two_models_and_the_2_x_2() -> None:
    right = {"A / bf16": 800, "A / fp8": 795, "control": 800, "B / bf16": 780, "B / fp8": 750}
    found = analysis.findings(grid_header(), grid_records(right))
    assert {name: own.differs for name, own in found.verdicts.items()} == {
        "A / fp8": ("KV cache",),
        "B / bf16": ("weights",),
        "B / fp8": ("weights", "KV cache"),
    }
    assert (pair_of(found, "gsm8k", "B / fp8").lost, found.tasks["gsm8k"].n) == (50, 1000)
    reason = found.verdicts["B / fp8"].reason
    assert reason.startswith("two choices differ from the baseline") and "the 2 x 2 tells" in reason
    (square,) = found.two_by_two  # the text has no accuracy
    assert (square.task, square.models, square.kv) == ("gsm8k", ("A", "B"), ("bf16", "fp8"))
    assert square.accuracy == ((0.8, 0.795), (0.78, 0.75))
    parts = (square.weights_loss, square.kv_loss, square.both_loss, square.interaction)
    assert parts == pytest.approx((0.02, 0.005, 0.05, 0.025))
    # KL is against the same weights' first lane, and judged by the only control lane there is.
    assert kl_of(found, "wikitext2", "B / fp8").against == "B / bf16"
    assert found.tasks["wikitext2"].lanes["B / bf16"].kl is None
    assert any("B: has no control lane; its KL is held against" in line for line in found.warnings)
    # While the second model is not done, only what both did counts.
    part = [
        own
        for own in grid_records(right)
        if own["model"] == "A" or own["key"] == "w0" or own.get("place", 1000) < 90
    ]
    running = analysis.findings(grid_header(), part).tasks
    assert (running["gsm8k"].n, running["wikitext2"].n) == (90, 1)


def test_the_2_x_2_is_offered() -> None:
    names = ("A / bf16", "B / fp8")
    found = analysis.findings(grid_header(names), grid_records(dict.fromkeys(names, 700)))
    assert not found.two_by_two and found.verdicts["B / fp8"].kind == "SAFE"
    assert "run the 2 x 2 to tell them apart (add A / fp8 and B / bf16)" in (
        found.verdicts["B / fp8"].reason
    )


@pytest.mark.parametrize(
    ("names", "dtypes", "differs"),
    [
        (("bf16", "bf16#2"), ("bf16", "bf16"), ()),
        (("bf16", "bf16"), ("auto", "bf16"), ()),
        (("bf16", "fp8_e4m3"), ("auto", "auto"), ("KV cache",)),
        (("x", "x"), ({"layers": {"0": "bf16"}},) * 2, ()),
        (("x", "x"), ({"layers": {"0": "bf16"}}, {"layers": {"1": "bf16"}}), ("KV cache",)),
    ],
)
def test_what_differs(names: Any, dtypes: Any, differs: tuple[str, ...]) -> None:
    asked = header([GSM8K], ("a", "b"))
    for own, name, dtype in zip(asked["lanes"], names, dtypes, strict=True):
        own |= {"kv_name": name, "kv_cache_dtype": dtype}
    assert analysis.findings(asked, []).verdicts["b"].differs == differs


# ---- what is said of the lanes and the run ---------------------------------------------------


def test_what_the_run_found_out_about_the_lanes() -> None:
    names = ("A / bf16", "A / fp8", "B / bf16")
    records: list[Rec] = [
        {"kind": "model", "model": "A", "lanes": {"A / fp8": {"scales": "file", "pool_tokens": 9}}},
        {"kind": "clips", "model": "A", "lanes": {"A / fp8": {"clipped": 0.25, "flushed": 0.5}}},
        {"kind": "speed", "model": "B", "lanes": {"B / bf16": {"decode": 30, "prefill": 50}}},
        {
            "kind": "speed",
            "model": "A",
            "lanes": {
                "A / bf16": {"decode": 20, "prefill": 100},
                "A / fp8": {"decode": 25, "prefill": 90},
            },
        },
        {"kind": "rerun", "model": "B", "items": 8, "identical": False, "first_difference": "x, 3"},
        {"kind": "rerun", "model": "A", "items": 8, "identical": True, "first_difference": ""},
    ]
    found = analysis.findings(grid_header(names), records)
    assert [(own.decode_speed, own.prefill_speed) for own in found.lanes] == [
        (1, 1), (1.25, 0.9), (1.5, 0.5),
    ]  # fmt: skip
    fp8 = found.lanes[1]
    assert (fp8.scales, fp8.pool_tokens, fp8.clipped, fp8.flushed) == ("file", 9, 0.25, 0.5)
    assert found.rerun is not None and (found.rerun.items, found.rerun.lanes) == (16, 3)
    assert not found.rerun.identical and found.rerun.first_difference == "x, 3"
    assert any("the rerun check failed" in line for line in found.warnings)
    again = analysis.findings(grid_header(names), [])
    assert {own.decode_speed for own in again.lanes} == {0} and again.environment == {"isa": "x"}


def test_three_items_show_no_loss() -> None:
    found = analysis.findings(header([GSM8K]), flips("gsm8k", 3, 3, 1, 0))
    assert pair_of(found, "gsm8k").detectable == math.inf
    assert json.loads(strict(found))["tasks"]["gsm8k"]["lanes"]["fp8"]["pair"]["detectable"] is None


def test_every_format_has_its_rounding_step() -> None:
    """The KL alarm allows for it: a format that is forgotten would be held to bf16's."""
    assert set(analysis.ROUNDING_STEPS) == {name for name, _ in qkv._core.kv_formats()}

    def lane(kv: Any, name: str) -> Lane:
        return Lane(name=name, model="m", kv_cache_dtype=kv, kv_name=name)

    assert analysis.rounding_step(lane("fp8_e5m2", "fp8_e5m2")) == 32
    mixed = {"default": "bf16", "layers": {"3": {"v": "nvfp4"}}}
    assert analysis.rounding_step(lane(mixed, "bf16,mixed")) == 64
    assert analysis.rounding_step(lane({"k": "fp8_e4m3", "name": "mine"}, "mine")) == 16
    # What a checkpoint declares has no other trace: its second lane, its lanes with exceptions.
    assert analysis.rounding_step(lane("auto", "fp8_e4m3#2")) == 16
    assert analysis.rounding_step(lane({"layers": {"0": "bf16"}}, "fp8_e4m3,mixed")) == 16
    assert analysis.rounding_step(lane({"v": "bf16"}, "k=fp8_e5m2,v=bf16")) == 32
    named = {"default": "fp8_e4m3", "name": "nvfp4", "scales": "nvfp4"}
    assert analysis.rounding_step(lane(named, "nvfp4")) == 16


def test_the_worst_task_stands_first() -> None:
    """A proven loss of 30 points is not to hide behind "the same on"."""
    kinds = [
        verdicts._OnTask("mmlu", "NOT SAFE", "an alarm", -0.02, 0.05),
        verdicts._OnTask("gsm8k", "NOT SAFE", "a loss is proven", 0.23, 0.38),
        verdicts._OnTask("mgsm", "SAFE", "small", -0.01, 0.005),
    ]
    assert verdicts._together(kinds) == (
        "NOT SAFE",
        "gsm8k: a loss is proven; NOT SAFE on mmlu, too; SAFE on mgsm",
    )
