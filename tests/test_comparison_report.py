"""How a comparison's findings are shown: text, page, data frames. They are made by hand."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

from qkv import stats
from qkv.comparison import blocks, plots, provenance, report
from qkv.comparison.results import (
    Answers,
    Bucket,
    Divergence,
    Findings,
    Kl,
    Lane,
    LaneResult,
    LaneVerdict,
    LayerSensitivity,
    Mix,
    Pair,
    Rerun,
    Sensitivity,
    TaskResult,
    TwoByTwo,
)
from qkv.stats import Interval

LANES = ("bf16", "fp8_e4m3", "nvfp4", "control")
BYTES = {"bf16": 28672, "fp8_e4m3": 14336, "nvfp4": 8064, "control": 28672}
# mean KL of each lane, and its flips on the tasks: (lost, gained, other wrong)
MEAN_KL = {"fp8_e4m3": 0.00154, "nvfp4": 0.0383, "control": 0.00041}
FLIPS = {
    "gsm8k": {"fp8_e4m3": (9, 8, 4), "nvfp4": (38, 7, 21), "control": (6, 7, 3)},
    "mmlu": {"fp8_e4m3": (11, 12, 6), "nvfp4": (141, 44, 60), "control": (7, 6, 2)},
}
SIZES = {"gsm8k": (400, 1319, 251), "mmlu": (4000, 14042, 2446)}


def lane(kv: str, **more: Any) -> Lane:
    name = kv
    fields: dict[str, Any] = {
        "name": name,
        "model": "Qwen2.5-Coder-1.5B-Instruct",
        "kv_cache_dtype": name,
        "kv_name": name,
        "control": name == "control",
        "bytes_per_token": BYTES[name],
        "pool_tokens": 11_000_000_000 // BYTES[name] // 16 * 16,
        "scales": "none needed" if name in ("bf16", "control") else "1.0",
        "clipped": 3e-8 if name == "fp8_e4m3" else 0.0,
        "flushed": {"nvfp4": 0.0312, "fp8_e4m3": 0.00041}.get(name, 0.0),
        "decode_speed": {"bf16": 1.0, "fp8_e4m3": 1.08, "nvfp4": 1.13}.get(name, 0.0),
        "prefill_speed": {"bf16": 1.0, "fp8_e4m3": 0.97, "nvfp4": 0.94}.get(name, 0.0),
    }
    return Lane(**{**fields, **more})


def kl_of(name: str) -> Kl:
    mean = MEAN_KL[name]
    edges = ((0, 64), (64, 128), (128, 256), (256, 512), (512, 1024))
    return Kl(
        n_tokens=16384,
        mean=mean,
        interval=Interval(mean * 0.9, mean * 1.12),
        median=mean / 4,
        p99=mean * 9,
        p999=mean * 40,
        max=mean * 210,
        mean_reverse=mean * 1.02,
        top1=1 - 4 * mean,
        nll_change=mean / 6,
        nll_interval=Interval(-mean / 9, mean / 3),
        rms_p_change=mean**0.5 / 3,
        buckets=tuple(
            Bucket(
                low=low,
                high=high,
                n_tokens=(high - low) * 16,
                mean=mean * (0.6 + 0.2 * i),
                interval=None
                if i == 4
                else Interval(mean * (0.5 + 0.2 * i), mean * (0.8 + 0.2 * i)),
                top1=1 - 4 * mean,
            )
            for i, (low, high) in enumerate(edges)
        ),
        alarm=name == "nvfp4",
    )


def answers(n: int, correct: int, **more: Any) -> Answers:
    fields: dict[str, Any] = {
        "truncated": 2, "unanswered": 3, "errors": 0, "mean_tokens": 143.2,
        "interval": stats.clopper_pearson(correct, n),
    }  # fmt: skip
    return Answers(n=n, correct=correct, **{**fields, **more})


def lane_result(task: str, name: str) -> LaneResult:
    n, _, correct = SIZES[task]
    if name == "bf16":
        strata = {"algebra": answers(100, 40), "law": answers(200, 99)} if task == "mmlu" else {}
        return LaneResult(lane=name, answers=answers(n, correct), strata=strata)
    lost, gained, other = FLIPS[task][name]
    pair = Pair(
        lost=lost,
        gained=gained,
        other_wrong=other,
        loss=(lost - gained) / n,
        interval=stats.tango_interval(lost, gained, n),
        clustered=Interval(-0.002, 0.031) if task == "mmlu" else None,
        p_exact=stats.mcnemar_exact(lost, gained),
        p_mid=stats.mcnemar_midp(lost, gained),
        p_holm=min(1.0, 2 * stats.mcnemar_exact(lost, gained)),
        detectable=stats.detectable(n, (lost + gained) / n),
        verdict=None
        if name == "control"
        else stats.verdict(lost, gained, n, correct, kl_alarm=name == "nvfp4"),
    )
    return LaneResult(
        lane=name,
        answers=answers(n, correct - lost + gained),
        pair=pair,
        kl=kl_of(name),
        divergence=Divergence(
            n=n, identical=n // 3, median_first=61.5, hazard=0.0123,
            excess=None if name == "control" else 0.0037,
        ) if task == "gsm8k" else None,
        strata={"algebra": answers(100, 38), "law": answers(200, 99)} if task == "mmlu" else {},
    )  # fmt: skip


def task_result(name: str) -> TaskResult:
    n, size, _ = SIZES[name]
    return TaskResult(
        task=name,
        kind="generate" if name == "gsm8k" else "choice",
        n=n,
        asked=n,
        size=size,
        chance=0.0 if name == "gsm8k" else 0.25,
        note="short generation only" if name == "gsm8k" else "",
        lanes={lane: lane_result(name, lane) for lane in LANES},
    )


def text_task() -> TaskResult:
    lanes = {
        name: LaneResult(lane=name, kl=kl_of(name), perplexity=9.8 + MEAN_KL[name])
        for name in LANES[1:]
    }
    first = LaneResult(lane="bf16", perplexity=9.8)
    return TaskResult(
        task="wikitext2", kind="text", n=32, asked=32, size=141, chance=0.0, note="",
        lanes={"bf16": first, **lanes},
    )  # fmt: skip


def sensitivity() -> Sensitivity:
    layers = tuple(
        LayerSensitivity(
            layer=i,
            part=part,
            kl=(kl := 0.0021 / (1 + (i * 7) % 28) * (1.6 if part == "k" else 1.0)),
            interval=Interval(0.85 * kl, 1.2 * kl),
            top1=0.985,
        )
        for i in range(28)
        for part in ("k", "v")
    )  # fmt: skip
    mix = Mix(
        kv_cache_dtype={"default": "nvfp4", "layers": {"0": "bf16", "4": {"k": "bf16"}}},
        bytes_per_token=9200,
        kl=0.0192,
        interval=Interval(0.0171, 0.0215),
        bound=0.02,
        met=True,
        tried=((1, 0.027, 8700), (2, 0.0192, 9200)),
    )
    return Sensitivity(
        lane="nvfp4", text="wikitext2, 4 x 512 tokens", n_tokens=2048, computed=31000,
        skipped=26000, layers=layers, full=0.0383, control=0.00041, mix=mix,
    )  # fmt: skip


def findings(**more: Any) -> Findings:
    """Everything that a report can have."""
    tasks = {"gsm8k": task_result("gsm8k"), "mmlu": task_result("mmlu"), "wikitext2": text_task()}
    settings = {
        "models": ["/models/Qwen2.5-Coder-1.5B-Instruct"],
        "tasks": [
            {"task": "gsm8k", "kind": "generate", "limit": 400, "size": 1319, "asked": 400,
             "chance": 0.0, "max_tokens": 256, "chat": False},
            {"task": "mmlu", "kind": "choice", "limit": 4000, "size": 14042, "asked": 4000,
             "chance": 0.25, "max_tokens": 0, "chat": False},
            {"task": "wikitext2", "kind": "text", "limit": 32, "size": 141, "asked": 32,
             "chance": 0.0, "max_tokens": 0, "chat": False},
        ],
        "margin": 0.01,
        "rerun_items": 32,
        "compute_dtype": "bf16",
    }  # fmt: skip
    fields: dict[str, Any] = {
        "settings": settings,
        "environment": {
            "build": "5c1ab2d0c3b1f1f6b8f2a1aa", "isa": "avx512bf16",
            "models": {"Qwen2.5-Coder-1.5B-Instruct": "0f9c2d88e57a4c0d92a1b3c4"},
        },
        "lanes": tuple(map(lane, LANES)),
        "margin": 0.01,
        "tasks": tasks,
        "verdicts": {
            "fp8_e4m3": LaneVerdict(
                lane="fp8_e4m3", kind="NOT ENOUGH DATA", differs=("KV cache",),
                reason="gsm8k: the loss is -1.887 to 2.394 points (95 %): it may exceed the margin "
                "of 1; items still needed: 2936 (if the change loses nothing)",
            ),
            "nvfp4": LaneVerdict(
                lane="nvfp4", kind="NOT SAFE", differs=("KV cache",),
                reason="gsm8k, mmlu, wikitext2: KL alarm: the predictions moved further than "
                "rounding explains; gsm8k: a loss of 4.621 to 11.180 points (95 %) is proven",
            ),
        },
        "rerun": Rerun(items=32, lanes=4, identical=True),
        "sensitivity": {"nvfp4": sensitivity()},
        "two_by_two": (
            TwoByTwo(
                task="gsm8k", models=("Qwen3-8B", "Qwen3-8B-FP8"), kv=("bf16", "fp8_e4m3"),
                accuracy=((0.62, 0.615), (0.61, 0.6)), weights_loss=0.01, kv_loss=0.005,
                both_loss=0.02, interaction=0.005,
            ),
        ),
        "warnings": ("nvfp4: no scales in the checkpoint, 1.0 is used for every layer",),
    }  # fmt: skip
    return Findings(**{**fields, **more})


def bare(**more: Any) -> Findings:
    """The least that a comparison can have."""
    fields: dict[str, Any] = {
        "settings": {}, "environment": {}, "lanes": (lane("bf16"), lane("fp8_e4m3")),
        "margin": 0.01, "tasks": {}, "verdicts": {}, "rerun": None,
    }  # fmt: skip
    return Findings(**{**fields, **more})


def without(task: TaskResult, *parts: str) -> TaskResult:
    empty: dict[str, Any] = {part: {} if part == "strata" else None for part in parts}
    return replace(task, lanes={name: replace(r, **empty) for name, r in task.lanes.items()})


class Checked(HTMLParser):
    """Fails on what is opened and not closed, on scripts, and on anything to be fetched."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.counts: dict[str, int] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.look(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.look(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def look(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert tag not in ("script", "img", "link", "iframe", "object", "base", "form"), tag
        for name, value in attrs:
            assert name not in ("src", "srcset", "data", "action") and not name.startswith("on")
            if name == "href":
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    @property
    def text(self) -> str:
        return "".join(self.words)


# ---- text ------------------------------------------------------------------------------------


def test_text_opens_with_the_verdicts() -> None:
    lines = report.text(findings()).splitlines()
    assert lines[0].startswith("fp8_e4m3  NOT ENOUGH DATA  gsm8k: the loss is -1.887 to 2.394")
    assert lines[2].startswith("nvfp4     NOT SAFE         gsm8k, mmlu, wikitext2: KL alarm")
    assert lines[5] == (
        "Model Qwen2.5-Coder-1.5B-Instruct; baseline bf16; margin 1 point of accuracy; control "
        "lane: control."
    )
    assert lines[6].startswith("Tasks: gsm8k (n = 400 of 1,319), mmlu (n = 4,000 of 14,042), ")
    assert re.search(r"wikitext2 \(n = \d+ windows\)", lines[6])  # of how many: not known
    assert "32 items x 4 lanes in another order and batch size, bit-identical." in " ".join(lines)


@pytest.mark.parametrize(
    "row",
    [
        "fp8_e4m3  250/400  62.50 [57.55, 67.26]  2  3  0  143",
        "nvfp4  NOT SAFE  38/7/21  +7.75 [+4.70, +11.24]  <0.0001  <0.0001  4.68",
        "control  (control)  7/6/2  +0.03 [-0.17, +0.23]  1.0000  1.0000  0.25",
        "mmlu  fp8_e4m3  16,384  0.00154 [0.0014, 0.0017]  3.76  99.38  +0.000257  0.000385"
        "  0.0139",
        "mmlu  nvfp4  16,384  0.0383 [0.034, 0.043]  93.4 ALARM  84.68  +0.00638  0.00958  0.345",
        "mmlu  nvfp4  1.53  8.04  0.0391  6.52",
        "fp8_e4m3  14,336  767,296 (2.00 x)  1.08 x  0.97 x  1.0  <0.0001  0.0410",
        "gsm8k  fp8_e4m3  133/400 (33.2 %)  61.5  1.230  +0.370",
        "algebra  40/100  38/100  38/100  38/100",
        "0  K  ####################  0.00336 [0.0029, 0.0040]  98.50",
        "Qwen3-8B-FP8  61.00  60.00",
    ],
)
def test_rows_of_the_text(row: str) -> None:
    """Worked out by hand from the findings above; columns apart by two spaces or more."""
    shown = [re.sub(r" {2,}", "  ", line) for line in report.text(findings()).splitlines()]
    assert row in shown


def test_text_has_every_part() -> None:
    shown = " ".join(report.text(findings()).split())
    assert "Perplexity on wikitext2: bf16 9.8000, fp8_e4m3 9.8015" in shown
    assert "task's strata as clusters (not used for the verdict): fp8_e4m3 -0.03" in shown
    assert (
        'kv_cache_dtype={"default": "nvfp4", "layers": {"0": "bf16", "4": {"k": "bf16"}}}' in shown
    )
    assert "it stays under the bound of 0.0200" in shown
    assert "... and 32 rows more" in shown
    assert "weights alone +1.00, KV cache alone +0.50, both +2.00; beyond their sum +0.50" in shown
    assert "- nvfp4: no scales in the checkpoint" in shown


def test_text_fits_a_terminal() -> None:
    """Also with long names, which are cut but stay apart."""
    long = [f"{'Qwen3-30B-A3B-Instruct-2507-' * 3}{i} / k=fp8_e4m3,v=nvfp4,mixed" for i in (1, 2)]
    task = task_result("gsm8k")
    lanes = {"bf16": task.lanes["bf16"], **dict.fromkeys(long, task.lanes["nvfp4"])}
    task = replace(task, task="a task with a name that is much longer than it need be", lanes=lanes)
    other = findings(
        lanes=(lane("bf16"), *(lane("nvfp4", name=name, control=False) for name in long)),
        tasks={task.task: task},
        verdicts={name: LaneVerdict(lane=name, kind="SAFE", reason="r " * 99, differs=())
                  for name in long},
    )  # fmt: skip
    for found in (findings(), other):
        shown = report.text(found)
        assert max(map(len, shown.splitlines())) <= report.WIDTH
    lines = shown[: shown.index("\n\n")].splitlines()
    short = [line.split("  ")[0] for line in lines if "  SAFE  " in line]
    assert len(short) == 2 and len(set(short)) == 2
    whole = " ".join(shown.split())
    assert all(f"{a} is {b}" in whole for a, b in zip(short, long, strict=True))


def test_failed_rerun_and_missing_mix_are_said() -> None:
    rerun = Rerun(items=32, lanes=2, identical=False, first_difference="gsm8k 17, nvfp4")
    mix = sensitivity().mix
    assert mix is not None
    missed = replace(sensitivity(), mix=replace(mix, met=False))
    shown = report.text(findings(rerun=rerun, sensitivity={"nvfp4": missed}))
    assert "Rerun check: FAILED" in shown and "gsm8k 17, nvfp4" in shown
    assert "does NOT stay under" in shown
    assert "Rerun check: not run." in report.text(bare())


def test_tokens_without_a_number_are_said() -> None:
    task = task_result("gsm8k")
    nan = math.nan
    broken = replace(
        kl_of("fp8_e4m3"), mean=nan, interval=None, median=nan, p99=nan, p999=nan, max=nan,
        mean_reverse=nan, nll_change=nan, nll_interval=None, rms_p_change=nan, buckets=(),
        alarm=True, not_finite=16384,
    )  # fmt: skip
    result = replace(task.lanes["fp8_e4m3"], kl=broken)
    found = findings(tasks={"gsm8k": replace(task, lanes={**task.lanes, "fp8_e4m3": result})})
    shown = report.text(found)
    assert "NOT FINITE: fp8_e4m3 on gsm8k gave NaN or infinity on 16,384 tokens of 16,384" in shown
    assert re.search(r"fp8_e4m3 +16,384 +nan \[-\] +nan ALARM", shown)
    Checked(report.page(found))


def test_lanes_of_other_weights() -> None:
    """Their KL is against the first lane of the same weights."""
    other = [replace(lane("fp8_e4m3"), name=f"B / {kv}", model="B") for kv in ("bf16", "fp8")]
    task = task_result("gsm8k")
    result = replace(
        task.lanes["fp8_e4m3"], lane="B / fp8", kl=replace(kl_of("fp8_e4m3"), against="B / bf16")
    )
    lanes = {"bf16": task.lanes["bf16"], "B / bf16": replace(result, kl=None), "B / fp8": result}
    shown = report.text(
        bare(lanes=(lane("bf16"), *other), tasks={"gsm8k": replace(task, lanes=lanes)})
    )
    assert "Models Qwen2.5-Coder-1.5B-Instruct, B; baseline bf16" in shown
    assert "B / fp8: KL is against B / bf16, which has the same weights." in shown


def test_no_verdict_without_a_second_lane() -> None:
    assert report.text(bare()).startswith("No verdict")


def test_what_cannot_be_detected_is_no_number() -> None:
    task = task_result("gsm8k")
    result = task.lanes["fp8_e4m3"]
    assert result.pair is not None
    pair = replace(result.pair, detectable=math.inf)
    task = replace(task, lanes={**task.lanes, "fp8_e4m3": replace(result, pair=pair)})
    shown = report.text(findings(tasks={"gsm8k": task}))
    row = next(line for line in shown.splitlines() if "9/8/4" in line)
    assert row.endswith("none")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"), (0.00094123, "0.000941"), (12.345, "12.3"), (1234.5, "1234"),
        (2.5e-7, "2.50e-07"),
        (math.nan, "nan"), (-math.inf, "-inf"), (0.9999, "1.000"),
    ],
)  # fmt: skip
def test_numbers(value: float, shown: str) -> None:
    assert blocks.number(value) == shown


def test_shares_and_points() -> None:
    assert [blocks.percent(x) for x in (0, 1e-9, 0.5, 1)] == ["0", "<0.01", "50.00", "100.00"]
    assert [blocks.points(x) for x in (0.015, -0.015, 0, -1e-9)] == [
        "+1.50",
        "-1.50",
        "0.00",
        "0.00",
    ]
    assert [blocks.p_value(x) for x in (0.00001, 0.0123, 1)] == ["<0.0001", "0.0123", "1.0000"]


# ---- the page --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> str:
    return report.page(findings())


def test_page_is_sound_and_complete(whole: str) -> None:
    found = Checked(whole)
    assert whole.startswith("<!DOCTYPE html>")
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert found.counts["svg"] == 4
    for words in (
        "KV-cache comparison: Qwen2.5-Coder-1.5B-Instruct", "NOT ENOUGH DATA",
        "1 warning, see below",
        "Task mmlu", "KL: how far the predictions moved", "What was gained", "Mixes tried",
        "Where generated texts part", "Which layers matter: nvfp4", "Weights and KV cache apart",
        "Warnings", "How to read this", "What was run", "5c1ab2d0c3b1f1f6b8f2a1aa",
        "0f9c2d88e57a4c0d92a1b3c4", "rerun_items", "in a higher format in the mix", "margin 1",
    ):  # fmt: skip
        assert words in found.text, words


def test_page_needs_no_network_and_suits_both_schemes(whole: str) -> None:
    assert "http" not in whole and "url(" not in re.sub(r"url\(#", "", whole)
    assert "@import" not in whole
    assert "@media(prefers-color-scheme:dark)" in whole and "@media print" in whole
    svgs = "".join(re.findall(r"<svg.*?</svg>", whole, re.S))
    # Every colour is the page's own, and text is text.
    assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r"(?:href=\"|url\()#[\w.-]+", "", svgs))
    assert "currentColor" in svgs and "var(--qkv-c0)" in svgs
    for name in set(re.findall(r"var\((--qkv-\w+)\)", whole)) - {"--qkv-tone"}:
        assert f"{name}:" in whole
    assert ">fp8_e4m3</text>" in svgs


def test_no_p_value_is_taken_for_safety(whole: str) -> None:
    assert "significant" not in whole.lower() + report.text(findings()).lower()
    assert "A large p value clears nothing" in whole


def test_verdict_words_stand_beside_colours(whole: str) -> None:
    badges = re.findall(r'<b class="badge (\w+)">([^<]+)</b>', whole)
    assert ("unsafe", "NOT SAFE") in badges and ("safe", "SAFE") in badges
    assert ("open", "NOT ENOUGH DATA") in badges


def test_same_findings_same_bytes(whole: str) -> None:
    """Whatever a user has set in matplotlib, which stays as it was."""
    import matplotlib  # noqa: PLC0415

    with matplotlib.rc_context({"font.size": 31, "svg.fonttype": "path", "axes.grid": True}):
        assert report.page(findings()) == whole
        assert matplotlib.rcParams["font.size"] == 31


def test_run_again(whole: str) -> None:
    code = Checked(whole).text
    call = code[code.index("import qkv\n") :]
    call = call[: call.index("\n)") + 2]
    asked: dict[str, Any] = {}
    fake = SimpleNamespace(compare=lambda *args, **more: asked.update(args=args, **more))
    exec(call.removeprefix("import qkv"), {"qkv": fake})
    assert asked == {
        "args": (
            "/models/Qwen2.5-Coder-1.5B-Instruct",
            ["bf16", "fp8_e4m3", "nvfp4"],
            ["gsm8k", "mmlu", "wikitext2"],
        ),
        "limit": {"gsm8k": 400, "mmlu": 4000, "wikitext2": 32},
        "margin": 0.01,
        "control": True,
        "rerun_items": 32,
        "by_layer": True,
        "compute_dtype": "bf16",
    }


def test_run_again_model_by_model() -> None:
    lanes = (lane("bf16", model="A"), lane("fp8_e4m3", model="B"))
    again = provenance.repeat(bare(lanes=lanes, tasks={"mine": text_task()}))
    assert '["A", "B"],\n    ["bf16", "fp8_e4m3"],\n    ["mine"],' in again
    assert "grid=False" in again and "# mine is a task of your own" in again


def test_run_again_with_shorter_answers() -> None:
    given = findings()
    settings = {**given.settings, "tasks": [{**given.settings["tasks"][0], "max_tokens": 64}]}
    again = provenance.repeat(replace(given, settings=settings))
    assert '    [qkv.tasks.task("gsm8k", max_tokens=64)],\n' in again


def test_fragment_stands_alone() -> None:
    shown = report.html(findings())
    found = Checked(shown)
    assert shown.startswith('<div class="qkv">') and "<html" not in shown and "<body" not in shown
    assert found.counts["svg"] == 4 and "NOT SAFE" in found.text


HOSTILE = (
    "<script>alert(1)</script>", "\"><img src=x onerror='alert(1)'>", "</svg><b>", "$\\frac{x$",
    "\x1b[31mred\r\n\x00", "‮evil", "'DejaVu Sans'", "--><!--", "###", "#010203 id=\"x",
    "]]>", "&lt;", "\ud800", "漢字", "{margin}", "https://example.org/x.png",
)  # fmt: skip


def hostile(name: str) -> Findings:
    """The name in every place where a name or a note can be."""
    task = task_result("mmlu")
    lanes = {
        "bf16": task.lanes["bf16"],
        name: replace(task.lanes["nvfp4"], strata={name: answers(9, 4)}),
    }
    two = replace(findings().two_by_two[0], task=name, models=(name, name), kv=(name, name))
    settings = {name: name, "models": [name], "tasks": [{"task": name, "limit": 3}]}
    return findings(
        settings={**settings, "k": [{name: 1}]},
        environment={name: {name: name}},
        lanes=(
            lane("bf16", model=name),
            lane("nvfp4", name=name, scales=name, kv_cache_dtype=name),
        ),
        tasks={name: replace(task, task=name, note=name, lanes=lanes)},
        verdicts={name: LaneVerdict(lane=name, kind="SAFE", reason=name, differs=(name, name))},
        rerun=Rerun(items=1, lanes=1, identical=False, first_difference=name),
        sensitivity={name: replace(sensitivity(), lane=name, text=name)},
        two_by_two=(two,),
        warnings=(name,),
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda found: {})
    clean = blocks.clean(name)
    found = hostile(name)
    for whole in (report.page(found), report.html(found)):
        whole.encode("utf-8")
        parsed = Checked(whole)
        # A lane's name stands in the verdict, the tables and what was run.
        assert parsed.text.count(clean) > 20
    shown = report.text(found)
    assert clean in shown and all(line.isprintable() for line in shown.splitlines())


def test_hostile_names_in_plots() -> None:
    """All of them as lanes and as tasks of one drawing."""
    task = task_result("gsm8k")
    lanes = {"bf16": task.lanes["bf16"], **dict.fromkeys(HOSTILE, task.lanes["nvfp4"])}
    found = hostile(HOSTILE[0])
    found = replace(
        found,
        lanes=(lane("bf16"), *(lane("nvfp4", name=name) for name in HOSTILE)),
        tasks={name: replace(task, task=name, lanes=lanes) for name in HOSTILE[3:5]},
    )
    drawn = plots.draw(found)
    assert set(drawn) == {"losses", "positions", "memory", "layers0"}
    names = blocks.shortened(HOSTILE, 26)
    for name, svg in drawn.items():
        words = Checked(svg).words
        if name != "layers0":
            assert set(names.values()) <= {word.strip() for word in words}, name


def test_page_without_matplotlib(monkeypatch: pytest.MonkeyPatch, whole: str) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for shown in (report.page(findings()), report.html(findings())):
        found = Checked(shown)
        assert "svg" not in found.counts and found.counts["table"] == Checked(whole).counts["table"]
        assert "no plots here" in found.text and "pip install 'qkv[report]'" in found.text
        # What a plot would have shown stands open.
        assert "<details open><summary>Mean KL by position, gsm8k" in shown
    with pytest.raises(ImportError, match=r"qkv\[report\]"):
        plots.draw(findings())


def test_optional_packages_are_not_imported_before_they_are_needed() -> None:
    code = (
        "import sys; from qkv.comparison import report; "
        "sys.exit(bool({'matplotlib', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


PARTS = ("answers", "pair", "kl", "divergence", "strata")


@pytest.mark.parametrize(
    "found",
    [
        bare(),
        bare(lanes=()),
        bare(lanes=(lane("bf16"),)),
        findings(sensitivity={}, two_by_two=(), warnings=()),
        bare(sensitivity={"nvfp4": replace(sensitivity(), mix=None, control=None)}),
        bare(sensitivity={"gone": replace(sensitivity(), lane="gone", layers=())}),
        bare(tasks={"wikitext2": text_task()}),
        bare(lanes=tuple(lane(n, decode_speed=0.0, pool_tokens=0) for n in LANES[:3])),
        *(bare(tasks={"mmlu": without(task_result("mmlu"), part)}) for part in PARTS),
        bare(tasks={"mmlu": without(task_result("mmlu"), *PARTS)}),
    ],
)
def test_absent_parts(found: Findings) -> None:
    Checked(report.page(found))
    assert report.text(found)
    assert all(lane.name in report.text(found) for lane in found.lanes)


def test_identical_lanes_have_no_logarithm() -> None:
    """BF16 against BF16: KL is exactly 0, which no log scale can show."""
    zero = replace(
        kl_of("control"), mean=0.0, interval=Interval(0.0, 0.0), max=0.0, alarm=False,
        buckets=(Bucket(low=0, high=64, n_tokens=9, mean=0.0, interval=None, top1=1.0),),
    )  # fmt: skip
    task = task_result("gsm8k")
    lanes = {name: replace(r, kl=r.kl and zero) for name, r in task.lanes.items()}
    found = findings(tasks={"gsm8k": replace(task, lanes=lanes)}, sensitivity={})
    assert Checked(report.page(found)).counts["svg"] == 1  # the losses
    assert re.search(r"fp8_e4m3 +16,384 +0 \[0, 0\] +- ", report.text(found))


# ---- data frames -----------------------------------------------------------------------------


def test_frames() -> None:
    pytest.importorskip("pandas")
    frames = report.to_pandas(findings())
    assert set(frames) == {"results", "lanes", "buckets", "strata", "layers"}
    results = frames["results"].set_index(["task", "lane"])
    row = results.loc[("gsm8k", "nvfp4")]
    assert (row["pair_lost"], row["pair_gained"], row["pair_verdict"]) == (38, 7, "NOT SAFE")
    assert row["pair_interval_upper"] == stats.tango_interval(38, 7, 400).upper
    assert row["kl_mean"] == MEAN_KL["nvfp4"] and row["kl_interval_lower"] < row["kl_mean"]
    assert results.loc[("wikitext2", "bf16")]["perplexity"] == 9.8
    assert len(results) == 12
    assert len(frames["lanes"]) == 4 and len(frames["layers"]) == 56
    assert len(frames["buckets"]) == 5 * 9 and len(frames["strata"]) == 8
    assert set(report.to_pandas(bare())) == set(frames)


def test_frames_need_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        ImportError, match=r"to_pandas\(\) needs pandas: pip install 'qkv\[report\]'"
    ):
        report.to_pandas(findings())
