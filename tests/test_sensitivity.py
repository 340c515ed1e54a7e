"""Which layers need the higher format: the table, the mix and the journal behind them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import options
from qkv.comparison import compare, layers, sensitivity
from qkv.comparison.journal import Journal, Record
from qkv.comparison.results import Mix, Sensitivity
from qkv.comparison.settings import Plan, plan
from qkv.tasks import Task
from ref import make_tiny

# ---- from records to what they say: no model ------------------------------------------------

N_LAYERS, LENGTH, KEYS = 6, 65, ("t-0", "t-1", "t-2")
Cost = Callable[[options.Lane], float]


def lane(given: Any) -> options.Lane:
    (found,) = options.lanes(given, N_LAYERS, compute_dtype="bf16", declared="")
    return found


def sweep(low: Any = "fp8_e4m3", **more: Any) -> layers.Sweep:
    fields: dict[str, Any] = {
        "model": "m", "lane": "low", "base": lane("bf16"), "low": lane(low), "parts": ("k", "v"),
        "task": "t", "length": LENGTH, "keys": KEYS, "kl_bound": None, "n_kv_heads": 2,
        "head_dim": 64, "kv_rank": 0,
    }  # fmt: skip
    return layers.Sweep(**fields | more)


def additive(alone: dict[tuple[int, str], float], control: float = 0.001) -> Cost:
    """A lane costs what its K and V that are not bf16 cost alone; 0 where nothing is said."""

    def cost(own: options.Lane) -> float:
        if own.layers[0][0] == "bf16_stochastic":
            return control
        return sum(
            alone.get((layer, part), 0.0)
            for layer, pair in enumerate(own.layers)
            for part, name in zip("kv", pair, strict=True)
            if name != "bf16"
        )

    return cost


def record(asked: layers.Sweep, key: str, lanes: Sequence[options.Lane], cost: Cost) -> Record:
    """Tokens that scatter about the cost, by the same factors in every lane and window."""
    spread = 1 + 0.5 * np.cos(np.arange(LENGTH - 1) * math.tau / (LENGTH - 1))
    figures = {
        layers.name(own): {"kl": (cost(own) * spread).tolist(), "top1": [True] * (LENGTH - 1)}
        for own in lanes
    }
    return {"kind": "layers", "model": asked.model, "key": key, "lanes": figures}


def play(asked: layers.Sweep, cost: Cost) -> tuple[list[Record], list[int]]:
    """Everything that would be run, and how many mixes in each turn."""
    records = [asked.record()]
    records += [record(asked, key, asked.table(), cost) for key in asked.keys]
    turns = []
    while mixes := layers.trials(asked, layers.Measured(records, asked.model)):
        turns.append(len(mixes))
        records += [record(asked, key, mixes, cost) for key in asked.keys]
    return records, turns


def found(asked: layers.Sweep, cost: Cost) -> tuple[Sensitivity, Mix]:
    result = layers.findings(play(asked, cost)[0])["low"]
    assert result.mix is not None
    return result, result.mix


def test_mix_keeps_what_costs_most_and_no_more() -> None:
    alone = {(0, "k"): 0.5, (3, "v"): 0.2, (4, "k"): 0.009, (1, "k"): 0.004, (5, "v"): 0.003}
    result, mix = found(sweep(kl_bound=0.01), additive(alone))
    assert {(e.layer, e.part): e.kl for e in result.layers if e.kl > 0} == pytest.approx(alone)
    assert len(result.layers) == 2 * N_LAYERS and result.control == pytest.approx(0.001)
    assert result.full == pytest.approx(sum(alone.values()))
    # What is left of layers 1 and 5 takes 0.007.
    assert mix.bound == pytest.approx(0.01) and mix.met and mix.kl == pytest.approx(0.007)
    assert mix.kv_cache_dtype == {
        "default": "fp8_e4m3",
        "layers": {"0": {"k": "bf16"}, "3": {"v": "bf16"}, "4": {"k": "bf16"}},
    }
    by_kept = {kept: kl for kept, kl, _ in mix.tried}
    assert by_kept[3] == mix.kl and by_kept[2] > mix.bound
    both, three = options.token_bytes({"n_kv_heads": 2, "head_dim": 64}, [lane("fp8_e4m3")]), 3
    assert mix.bytes_per_token == both + three * 2 * 64


@pytest.mark.parametrize("seed", range(8))
def test_mix_is_the_least_that_meets_the_bound_in_few_turns(seed: int) -> None:
    """Also where costs do not add up: with noise that any change makes, and with a power."""
    rng = np.random.default_rng(seed)
    alone = {(i, part): float(rng.lognormal(-7, 2)) for i in range(N_LAYERS) for part in "kv"}
    plain, power, noise = additive(alone), rng.uniform(0.7, 1.4), rng.choice([0.0, 0.002])

    def cost(own: options.Lane) -> float:
        kl = plain(own)
        return kl**power + noise if kl > 0 else 0.0

    asked = sweep(kl_bound=float(rng.uniform(0.002, 0.05)))
    _, turns = play(asked, cost)
    result, mix = found(asked, cost)
    assert len(turns) <= 2
    by_kept = {kept: kl for kept, kl, _ in mix.tried}
    kept = next(n for n, kl in by_kept.items() if kl == mix.kl)
    if mix.met:
        assert mix.kl <= mix.bound and (kept == 0 or by_kept[kept - 1] > mix.bound)
    else:
        assert min(by_kept.values()) == mix.kl > mix.bound
        assert by_kept[2 * N_LAYERS - 1] > mix.bound
    sizes = [size for _, _, size in mix.tried]
    assert sizes == sorted(sizes) and list(by_kept) == sorted(by_kept)


def test_mix_is_the_lower_format_where_that_is_good_enough() -> None:
    _, mix = found(sweep(), additive({(2, "k"): 0.004}))
    assert mix.kv_cache_dtype == {"default": "fp8_e4m3"} and mix.met
    assert [kept for kept, _, _ in mix.tried] == [0]


def test_mix_that_misses_the_bound_is_the_best_there_is() -> None:
    alone = {(i, part): 0.1 + i + (part == "v") / 10 for i in range(N_LAYERS) for part in "kv"}
    _, mix = found(sweep(kl_bound=0.01), additive(alone))
    assert not mix.met and mix.kl == pytest.approx(0.1)
    assert mix.kv_cache_dtype == {"default": "bf16", "layers": {"0": {"k": "fp8_e4m3"}}}


def test_order_is_by_kl_per_byte_saved() -> None:
    """V in nvfp4 saves more than K in fp8_e4m3: with little more KL it stays low."""
    low = {"k": "fp8_e4m3", "v": "nvfp4"}
    alone = {(i, part): 0.010 if part == "k" else 0.011 for i in range(N_LAYERS) for part in "kv"}
    result, mix = found(sweep(low, kl_bound=0.0665), additive(alone))
    assert mix.kv_cache_dtype == {
        "default": "bf16",
        "layers": {f"0-{N_LAYERS - 1}": {"v": "nvfp4"}},
    }
    assert mix.kl == pytest.approx(0.066)
    # What saves nothing stays as it is, however little it costs.
    _, mix = found(sweep({"k": "bf16_stochastic", "v": "nvfp4"}, kl_bound=0.0665), additive(alone))
    assert mix.kv_cache_dtype["layers"] == {f"0-{N_LAYERS - 1}": {"v": "nvfp4"}}


def test_only_what_differs_is_run() -> None:
    low = {"default": "bf16", "layers": {"2-3": "fp8_e4m3", "4": {"v": "fp8_e4m3"}}}
    asked = sweep(low, parts=("k", "v", "kv"))
    units = [(unit.layer, unit.part) for unit in asked.units(asked.parts)]
    assert units == [
        (2, "k"), (2, "v"), (2, "kv"), (3, "k"), (3, "v"), (3, "kv"), (4, "v"), (4, "kv"),
    ]  # fmt: skip
    # Layer 4 has one half: alone it is one lane, whatever it is called. With full and control.
    assert len(asked.table()) == 7 + 2
    # All of it needs the baseline, of 6 layers; lanes that change from layer 2, 3 and 4 on.
    rows = len(KEYS) * (LENGTH - 1)
    assert asked.computed([asked.base, *asked.table()]) == rows * (6 + 4 + 6 + 3 * 4 + 3 * 3 + 2)
    assert asked.asked_for([asked.base, *asked.table()]) == rows * 10 * 6


def test_whole_layers() -> None:
    result, mix = found(sweep(parts=("kv",)), additive({(1, "k"): 0.2, (4, "v"): 0.3}))
    assert [(e.layer, e.part) for e in result.layers if e.kl > 0] == [(1, "kv"), (4, "kv")]
    assert mix.kv_cache_dtype["layers"] == {"1": "bf16", "4": "bf16"}
    only_k = sweep(parts=("k",))
    records, turns = play(only_k, additive({(1, "k"): 0.2}))
    assert turns == [] and layers.findings(records)["low"].mix is None


def test_one_token_without_a_finite_kl_is_the_worst_there_is() -> None:
    asked = sweep()
    records, _ = play(asked, additive({(1, "k"): 0.2, (2, "v"): 0.1}))
    damaged = layers.name(asked.lowered([layers.Unit(3, "v")]))
    records[1]["lanes"][damaged]["kl"][5] = math.nan
    result = layers.findings(records)["low"]
    worst = max(result.layers, key=lambda entry: entry.kl)
    assert (worst.layer, worst.part, worst.kl) == (3, "v", math.inf) and worst.interval is None
    assert layers.trials(asked, layers.Measured(records, "m"))  # the order is another now


@pytest.mark.parametrize("n_windows", [1, 2, 40])
def test_blocks_stay_within_a_window(n_windows: int) -> None:
    for size in (63, 511, 1023, 4095):
        blocks = layers._blocks([size] * n_windows)
        counts = np.bincount(blocks)
        assert counts.sum() == n_windows * size and counts.min() >= 63
        own = blocks.reshape(n_windows, size)
        assert (np.diff(own, axis=1) >= 0).all() and len(np.unique(own)) == len(counts)
        assert (own[1:, 0] > own[:-1, -1]).all()
        if size > 512 and n_windows == 40:
            assert 340 < counts.max() <= 512


def test_what_was_recorded_up_to_a_crash_counts(tmp_path: Path) -> None:
    """Whole windows alone are in the table. The search begins from its beginning each time, so it
    ends the same wherever it was broken off, and with whatever else there is."""
    alone = {(i, part): 0.5 ** (2 * i + (part == "v")) for i in range(N_LAYERS) for part in "kv"}
    asked, cost = sweep(kl_bound=0.03), additive(alone)
    records, _ = play(asked, cost)
    whole = layers.findings(records)["low"]
    assert layers.findings(records[:1]) == {}
    part = layers.findings(records[:3])["low"]
    assert (
        part.n_tokens == 2 * (LENGTH - 1) and part.mix is None and part.text == "t, 2 x 65 tokens"
    )
    assert part.computed * 3 == whole.computed * 2
    for n in range(1 + len(KEYS), len(records)):
        again = list(records[:n])
        measured = layers.Measured(again, "m")
        while mixes := layers.trials(asked, measured):
            for key in KEYS:
                missing = [own for own in mixes if not measured.has(own, key)]
                again.append(record(asked, key, missing, cost))
                measured.add(again[-1])
        assert layers.findings(again)["low"] == whole
    assert layers.findings([*records[::-1]])["low"] == whole


@pytest.mark.parametrize(
    ("by_layer", "kl_bound", "error", "match"),
    [
        (1, None, TypeError, "by_layer=1: True, False or a mapping"),
        ({"window": 3}, None, ValueError, "by_layer key='window': must be one of windows, length"),
        ({"windows": 0}, None, ValueError, "by_layer windows=0"),
        ({"length": 1}, None, ValueError, "by_layer length=1"),
        ({"parts": ("q",)}, None, ValueError, "by_layer parts='q'"),
        ({"parts": ()}, None, ValueError, "by_layer parts: at least one of k, v, kv"),
        (False, 0.1, ValueError, "kl_bound: .* needs by_layer"),
        (True, 0, ValueError, "kl_bound=0: must be above 0"),
        (True, math.inf, ValueError, "kl_bound=inf"),
        (True, True, TypeError, "kl_bound=True"),
    ],
)
def test_what_cannot_be_asked_for(
    by_layer: Any, kl_bound: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        sensitivity.wanted(by_layer, kl_bound)


def test_what_can_be_asked_for() -> None:
    assert sensitivity.wanted(False, None) is None
    assert sensitivity.wanted(True, None) == sensitivity.Wanted()
    asked = sensitivity.wanted({"windows": 8, "length": 1024, "parts": "kv"}, 0.5)
    assert asked == sensitivity.Wanted(windows=8, length=1024, parts=("kv",), kl_bound=0.5)
    asked = sensitivity.wanted({"parts": ["kv", "v", "k", "v"]}, None)
    assert asked is not None and asked.parts == ("k", "v", "kv")


# ---- tiny models ------------------------------------------------------------------------------

SHORT = {"windows": 2, "length": 64}
TEXT = Task(name="wikitext2", kind="text", text=lambda: 4 * make_tiny.TEXT)


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """To tokenize all of WikiText-2 takes longer than the rest."""
    monkeypatch.setattr(sensitivity, "named_task", {"wikitext2": TEXT}.__getitem__)


def planned(model: Path | str, kv: Sequence[Any] = ("bf16", "fp8_e4m3"), **more: Any) -> Plan:
    return plan(
        model, kv, TEXT, limit=1, margin=0.01, control=True, grid=True, chat=False, rerun_items=0,
        engine_options={"threads": 1, **more},
    )  # fmt: skip


def examine(
    own: Plan, by_layer: Any = SHORT, kl_bound: float | None = None, path: Path | None = None
) -> tuple[dict[str, Sensitivity], list[str]]:
    """What is found, and what was said on the way."""
    said: list[str] = []
    asked = sensitivity.wanted(by_layer, kl_bound)
    assert asked is not None
    sensitivity.check(own, asked)
    with Journal(path, own.header()) as journal:
        for entry in own.models:
            sensitivity.run(own, entry, journal, asked, said.append)
        return layers.findings(journal.records), said


def scales(path: Path, n_layers: int, k: float, v: float, **damaged: dict[str, float]) -> Path:
    """A side file with the same scales in all layers but the damaged ones ("layer1")."""
    factors = {str(i): {"k": k, "v": v} | damaged.get(f"layer{i}", {}) for i in range(n_layers)}
    kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}
    path.write_text(json.dumps({"model_type": None, "kv_cache": kv_cache}))
    return path


def test_table_points_at_a_layer_with_wrong_scales(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """K and V are at most about 6: a scale of 6 / 448 holds them, a sixteenth of it clips."""
    model, good = tiny("llama", num_hidden_layers=3), 6.5 / 448
    for layer in range(3):
        for part in ("k", "v"):
            file = scales(
                tmp_path / "s.json", 3, good, good, **{f"layer{layer}": {part: good / 16}}
            )
            result = examine(planned(model, quantization_param_path=file), kl_bound=1e9)[0]
            first, second, *_ = sorted(
                result["fp8_e4m3"].layers, key=lambda entry: entry.kl, reverse=True
            )
            assert (first.layer, first.part) == (layer, part)
            assert first.kl > 5 * second.kl
            assert first.interval is not None and first.interval.lower > second.kl
            assert first.kl == pytest.approx(result["fp8_e4m3"].full, rel=0.5)


def test_table_points_at_a_faulty_layer(tiny: Callable[..., Path]) -> None:
    """One layer's V is zero where K or V has 8 bits: in the control lane it is not."""
    model = tiny("llama", num_hidden_layers=3)
    for layer in range(3):
        own = planned(model, device=f"fault:layer={layer},kind=v_zero")
        result = examine(own, {**SHORT, "parts": ("kv",)})[0]["fp8_e4m3"]
        first, second, _ = sorted(result.layers, key=lambda entry: entry.kl, reverse=True)
        assert first.layer == layer and first.kl > 2 * second.kl
        assert result.control is not None and first.kl > 20 * result.control


def test_mix_runs_as_it_is_and_has_its_kl(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, path = tiny("llama", num_hidden_layers=4), tmp_path / "rows.jsonl"
    by_default = examine(planned(model, ["bf16", "nvfp4"]))[0]["nvfp4"]
    assert by_default.mix is not None  # its bound is half of the alarm's
    assert by_default.mix.bound == pytest.approx(64**2 / 3 / 2 * (by_default.control or 0))
    bound = by_default.full / 3
    found, said = examine(planned(model, ["bf16", "nvfp4"]), kl_bound=bound, path=path)
    result = found["nvfp4"]
    mix = result.mix
    assert mix is not None and mix.met and 0 < mix.kl <= mix.bound < result.full
    assert json.loads(json.dumps(mix.kv_cache_dtype)) == mix.kv_cache_dtype
    with qkv.Engine(model, threads=1, kv_cache_dtype=["bf16", mix.kv_cache_dtype]) as engine:
        windows = TEXT.windows(engine.tokenizer.encode, length=64, limit=2)
        scores = engine.score([ids for _, ids in windows], progress=False)
        kl = np.concatenate([list(score.lanes.values())[1].kl for score in scores])
    assert kl.astype(np.float64).mean() == mix.kl and kl.size == result.n_tokens
    low, high = 36, 128  # bytes of K and V of a layer
    kept = next(n for n, kl, _ in mix.tried if kl == mix.kl)
    assert mix.bytes_per_token == 4 * low + kept * (high - low) // 2
    # What it costs is said before anything is run.
    assert "11 lanes over 2 x 64 tokens, 5,544 rows x layers; 4,032 with" in said[0]
    assert (result.computed, result.computed + result.skipped) == (4032, 5544)
    assert "0 of 2 windows done, about" in said[1]
    again = examine(planned(model, ["bf16", "nvfp4"]), kl_bound=bound, path=path)
    assert again == (found, [])


def test_killed_at_any_record_it_ends_the_same(tiny: Callable[..., Path], tmp_path: Path) -> None:
    own, path = planned(tiny("llama")), tmp_path / "rows.jsonl"
    whole, _ = examine(own, path=path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 5
    for n in range(1, len(lines)):
        path.write_bytes(b"".join(lines[:n]) + lines[n][: len(lines[n]) // 2])
        again, said = examine(own, path=path)
        assert again == whole and said
        assert path.read_bytes().splitlines(keepends=True) == lines
    # More windows later: those that are there are not computed again, and the last wish counts.
    more, _ = examine(own, {"windows": 3, "length": 64}, path=path)
    assert more["fp8_e4m3"].text == "wikitext2, 3 x 64 tokens"
    fresh, _ = examine(own, {"windows": 3, "length": 64})
    assert more == fresh
    keys = [json.loads(line).get("key") for line in path.read_bytes().splitlines()[len(lines) :]]
    assert keys[:2] == [None, "wikitext2-64-2"]


def test_cost_is_what_the_engine_computes(tiny: Callable[..., Path]) -> None:
    model = tiny("llama", num_hidden_layers=N_LAYERS)
    asked = sweep(parts=("k", "v", "kv"), keys=("t-0",))
    lanes = [asked.base, *asked.table()]
    spelled = [options.spelled(own) for own in lanes]
    with qkv.Engine(model, threads=1, kv_tokens=80, kv_cache_dtype=spelled) as engine:
        scores = engine._core.score_lanes(np.arange(LENGTH, dtype=np.int32))
    assert scores.computed == asked.computed(lanes)
    assert scores.computed + scores.skipped == asked.asked_for(lanes)


def test_lanes_in_several_engines(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same figures, however many lanes fit in one."""
    own = planned(tiny("llama"))
    whole, _ = examine(own)
    monkeypatch.setattr(sensitivity, "_MOST_LANES", 3)
    assert examine(own)[0] == whole


def test_every_lower_format_has_a_table(tiny: Callable[..., Path]) -> None:
    """In a comparison: the findings have them, and the report shows them."""
    comparison = compare(
        tiny("llama"), ["bf16", "fp8_e4m3", "nvfp4"], TEXT, limit=1, rerun_items=1,
        by_layer={**SHORT, "parts": "kv"}, progress=False, threads=1,
    )  # fmt: skip
    table = comparison.findings.sensitivity
    assert list(table) == ["fp8_e4m3", "nvfp4"]
    assert table["fp8_e4m3"].full < table["nvfp4"].full
    assert table["fp8_e4m3"].control == table["nvfp4"].control
    assert all(entry.part == "kv" for own in table.values() for entry in own.layers)
    text = str(comparison)
    for own in table.values():
        assert own.mix is not None and "wikitext2, 2 x 64 tokens" in text
    assert comparison.to_dict()["sensitivity"]["nvfp4"]["mix"]["met"] in (True, False)


def test_nothing_to_examine(tiny: Callable[..., Path]) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="by_layer: no model has two lanes"):
        examine(planned(model, ["bf16", {"default": "bf16", "name": "again"}]))
    # One source of scales for a lane: a mix of these two could not be written down.
    with pytest.raises(ValueError, match="by_layer: no model has two lanes"):
        examine(planned(model, ["fp8_e4m3", {"default": "nvfp4", "scales": 1.0}]))
    with pytest.raises(ValueError, match="length=2048: .* takes at most 1024 tokens"):
        examine(planned(model), {"length": 2048})
    with pytest.raises(ValueError, match="length=64: .* takes at most 32 tokens"):
        examine(planned(model, max_model_len=32))


# ---- a real model -----------------------------------------------------------------------------


@pytest.mark.slow
def test_demo_model_points_at_what_is_damaged(demo_model: Path, tmp_path: Path) -> None:
    """K's scale of layer 12 a sixteenth of what it should be, K's and V's of layer 1 swapped: there
    K is six times as large as V. And the mix keeps just these two."""
    k, v = 20 / 448, 15 / 448
    file = scales(
        tmp_path / "s.json", 30, k, v, layer12={"k": k / 16}, layer1={"k": 2.7 / 448, "v": k}
    )
    result, _ = examine(
        planned(demo_model, quantization_param_path=file), {"windows": 1, "length": 48}
    )
    own = result["fp8_e4m3"]
    first, second, third, *_ = sorted(own.layers, key=lambda entry: entry.kl, reverse=True)
    assert [(first.layer, first.part), (second.layer, second.part)] == [(12, "k"), (1, "k")]
    assert second.kl > 10 * third.kl and own.control is not None and second.kl > 10 * own.control
    assert own.mix is not None and own.mix.met and own.mix.kl < own.mix.bound < own.full
    layers_kept = {"1": {"k": "bf16"}, "12": {"k": "bf16"}}
    assert own.mix.kv_cache_dtype == {"default": "fp8_e4m3", "layers": layers_kept}


@pytest.mark.slow
def test_demo_model_points_at_a_rotated_head(demo_model: Path, tmp_path: Path) -> None:
    """The keys of one head of three stand one position too far. Not every head is hurt by that."""
    file = scales(tmp_path / "s.json", 30, 20 / 448, 15 / 448)
    own = planned(
        demo_model, quantization_param_path=file, device="fault:layer=16,kind=k_rotate,head=0"
    )
    result, _ = examine(own, {"windows": 1, "length": 48, "parts": "kv"}, kl_bound=1e9)
    first, second, *_ = sorted(result["fp8_e4m3"].layers, key=lambda entry: entry.kl, reverse=True)
    assert first.layer == 16 and first.kl > 3 * second.kl
