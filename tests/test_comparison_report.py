"""How a comparison's findings are shown: text, page, data frames. They are made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from qkv import stats
from qkv.comparison import report
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


def lane(name: str, **more: Any) -> Lane:
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
            "version": "0.1.0", "build": "5c1ab2d0c3b1f1f6b8f2a1aa", "isa": "avx512bf16",
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
                reason="gsm8k, mmlu, wikitext2: KL alarm: the outputs differ far more than the "
                "control lane's; gsm8k: a loss of 4.621 to 11.180 points (95 %) is proven",
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


def test_text_opens_with_the_verdicts() -> None:
    lines = report.text(findings()).splitlines()
    assert lines[0].startswith("fp8_e4m3  NOT ENOUGH DATA  gsm8k: the loss is -1.887 to 2.394")
    assert any(line.startswith("nvfp4     NOT SAFE         gsm8k, mmlu") for line in lines[:5])


def test_text_fits_a_terminal() -> None:
    assert max(map(len, report.text(findings()).splitlines())) <= report.WIDTH


def test_nothing_but_a_baseline() -> None:
    bare = Findings(
        settings={}, environment={}, lanes=(lane("bf16"),), margin=0.01, tasks={}, verdicts={},
        rerun=None,
    )  # fmt: skip
    assert report.text(bare).startswith("No verdict")


def test_what_cannot_be_shown_is_not_a_number() -> None:
    task = task_result("gsm8k")
    result = task.lanes["fp8_e4m3"]
    assert result.pair is not None
    pair = replace(result.pair, detectable=math.inf)
    task = replace(task, lanes={**task.lanes, "fp8_e4m3": replace(result, pair=pair)})
    shown = report.text(findings(tasks={"gsm8k": task}))
    row = next(
        line for line in shown.splitlines() if line.startswith("fp8_e4m3") and "9/8/4" in line
    )
    assert row.endswith("none")
