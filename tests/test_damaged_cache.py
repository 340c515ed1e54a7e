"""What a comparison is for: a damaged KV cache raises the KL alarm on a small sample, a sound one
does not. The damages are those that engines had: scales that are wrong by a factor, that of K taken
for that of V, values that never arrive, keys at the wrong position."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import tasks

pytestmark = pytest.mark.slow

Scales = dict[str, float]


@pytest.fixture(scope="module")
def calibrated(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The side file for e4m3 that fits the text."""
    path = tmp_path_factory.mktemp("calibrated") / "scales.json"
    with qkv.Engine(demo_model, kv_cache_dtype="bf16", kv_tokens=1024) as engine:
        windows = tasks.task("wikitext2").windows(engine.tokenizer.encode, limit=2)
        prompts = [ids for _, ids in windows]
        qkv.calibrate(engine, prompts, "fp8_e4m3", out=path, progress=False)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def side_file(path: Path, content: dict[str, Any], change: Callable[[Scales], Scales]) -> Path:
    """The same with the scales of every layer changed."""
    changed = json.loads(json.dumps(content))
    factors = changed["kv_cache"]["scaling_factor"]["0"]
    for layer in factors:
        factors[layer] = change(factors[layer])
    path.write_text(json.dumps(changed))
    return path


def alarms(model: Path, lanes: dict[str, Path], **options: Any) -> dict[str, bool]:
    """By lane of fp8_e4m3 with its scales: whether KL raised the alarm, as the verdict says."""
    kv = [{"default": "fp8_e4m3", "scales": str(p), "name": name} for name, p in lanes.items()]
    found = qkv.compare(
        model, ["bf16", *kv], tasks.task("wikitext2"), limit=2, rerun_items=0, speed=False,
        kv_tokens=2048, progress=False, **options,
    )  # fmt: skip
    raised = {}
    for name in lanes:
        kl = found.tasks["wikitext2"].lanes[name].kl
        assert kl is not None
        raised[name] = kl.alarm
        assert kl.alarm == (found.verdicts[name].kind == "NOT SAFE")
    return raised


def test_scales(demo_model: Path, calibrated: dict[str, Any], tmp_path: Path) -> None:
    changes: dict[str, Callable[[Scales], Scales]] = {
        "sound": lambda own: own,
        "too small by 16": lambda own: {name: value / 16 for name, value in own.items()},
        "K and V swapped": lambda own: {"k": own["v"], "v": own["k"]},
    }
    lanes = {
        name: side_file(tmp_path / f"{place}.json", calibrated, change)
        for place, (name, change) in enumerate(changes.items())
    }
    assert alarms(demo_model, lanes) == {name: name != "sound" for name in changes}


@pytest.mark.parametrize("fault", ["layer=12,kind=v_zero", "layer=16,kind=k_rotate,head=0"])
def test_faults(demo_model: Path, calibrated: dict[str, Any], tmp_path: Path, fault: str) -> None:
    """In one layer of thirty. Not every head is hurt by keys at the wrong position; this one is."""
    scales = side_file(tmp_path / "scales.json", calibrated, lambda own: own)
    assert alarms(demo_model, {"fp8": scales}, device=f"fault:{fault}") == {"fp8": True}
