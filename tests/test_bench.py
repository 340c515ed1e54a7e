"""qkv.bench: published pools on the simulated scheduler, figures by hand, the engine's own runs,
what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import _core, cli
from qkv.benchmark import figures, measure, report, simulate, sweeps, workload
from qkv.benchmark.workload import Workload
from test_planner import QWEN3_8B

# An L4: its data sheet's bandwidth, half of its bf16 operations.
L4 = qkv.Machine(gb_per_s=300, tflops=60)
# Of SGLang on it, as published: tokens of the pool at two memory fractions, and the prompt rows per
# step that it takes for a GPU of this size.
POOLS = {"bf16": 24094, "fp8_e4m3": 142369}
SMALL_POOLS = {"bf16": 6559, "fp8_e4m3": 107299}
CHUNK = 2048
COST = simulate.CostModel(
    step_seconds=1.0, prefill_row_seconds=0.0, decode_row_seconds=0.0, kv_byte_seconds=0.0
)


def bench(*args: Any, **options: Any) -> qkv.Bench:
    return qkv.bench(*args, **{"machine": L4, "progress": False, **options})


# The published figures.


@pytest.mark.parametrize("schedule", ["offline", "fcfs"])
def test_who_waits_at_64_users(schedule: str) -> None:
    """Published: 38 of 64 requests of 512 + 128 tokens ran at usage 0.99 and 26 waited; with the
    FP8 pool all ran at 0.29."""
    found = bench(QWEN3_8B, users=64, pool_tokens=POOLS, schedule=schedule, chunk_tokens=CHUNK)
    bf16, fp8 = found.cells
    assert 64 - bf16.mean("most_waiting") == 37 and 37 <= bf16.mean("most_running") <= 40
    assert bf16.mean("token_usage") == pytest.approx(0.99, abs=0.01)
    assert bf16.fit_fully == 37
    assert fp8.mean("most_running") == 64 and fp8.mean("most_waiting") == 0
    assert round(fp8.mean("token_usage"), 2) == 0.29
    assert "37 to 40 run" in str(found) and "64 run, none waits" in str(found)
    assert fp8.mean("output_tokens_per_s") > bf16.mean("output_tokens_per_s")


@pytest.mark.parametrize("chunk", [512, CHUNK])
def test_who_waits_is_the_chunks_least_concern(chunk: int) -> None:
    found = bench(QWEN3_8B, pool_tokens=POOLS, chunk_tokens=chunk)
    for cell in found.cells:
        waits = cell.kv_cache_dtype == "bf16" and cell.users == 64
        assert (cell.mean("most_waiting") > 0) == waits
        assert cell.mean("most_running") == (pytest.approx(38.5, abs=1.5) if waits else cell.users)


def shared_prefix(schedule: str, **options: Any) -> dict[str, list[report.Cell]]:
    """64 prompts in 4 groups from 8 users, 0 to 4,096 shared tokens, by KV format."""
    found = bench(QWEN3_8B, "shared-prefix", pool_tokens=SMALL_POOLS, schedule=schedule, **options)
    cells: dict[str, list[report.Cell]] = {}
    for cell in found.cells:
        assert (cell.requests, cell.groups, cell.users) == (64, 4, 8)
        cells.setdefault(cell.kv_cache_dtype, []).append(cell)
    assert [cell.shared_tokens for cell in cells["bf16"]] == [0, 512, 1024, 2048, 4096]
    return cells


@pytest.mark.parametrize("schedule", ["offline", "fcfs"])
def test_large_pool_has_no_cliff(schedule: str) -> None:
    """Published: with the FP8 pool the first token took at most 0.4 s."""
    cells = shared_prefix(schedule)["fp8_e4m3"]
    assert report.cliff(cells) is None
    rates = [cell.mean("hit_rate") for cell in cells]
    assert rates == sorted(rates)
    speeds = [cell.mean("output_tokens_per_s") for cell in cells]
    assert all(after > 0.85 * before for before, after in zip(speeds, speeds[1:], strict=False))
    assert all(cell.mean("most_waiting") == 0 for cell in cells)


def test_first_come_first_served_has_a_cliff_at_2048() -> None:
    """Published: the first token after 0.47 s before, after 12.6 s at 2,048."""
    cells = shared_prefix("fcfs")
    assert report.cliff(cells["bf16"]) == 2048
    by_shared = {cell.shared_tokens: cell for cell in cells["bf16"]}
    assert by_shared[1024].mean("ttft_mean") < 0.5
    assert by_shared[2048].mean("ttft_mean") > 10 * by_shared[1024].mean("ttft_mean")
    assert by_shared[2048].mean("hit_rate") < by_shared[1024].mean("hit_rate")
    large = next(cell for cell in cells["fp8_e4m3"] if cell.shared_tokens == 2048)
    ratio = large.mean("output_tokens_per_s") / by_shared[2048].mean("output_tokens_per_s")
    assert ratio > 2


def test_fp8_weights_and_pool_at_2048_shared_tokens() -> None:
    """Published, with Qwen3-8B-FP8 in the larger pool: the first token within 0.4 s, and 6.0 times
    the output. Of the prompts' own lengths nothing is published; with 128 + 128 it is 3.7 times,
    2.4 of them by the pool alone (that of 32 to 512 each is between 3.1 and 4.2)."""
    found = bench(
        QWEN3_8B,
        "shared-prefix",
        machine=replace(L4, memory_gib=22.0, weights_gib={"none": 15.28, "fp8": 8.81}),
        quantizations=[None, "fp8"],
        pool_tokens=SMALL_POOLS,
        schedule="fcfs",
        shared_tokens=2048,
    )
    by_arm = {cell.arm: cell for cell in found.cells}
    before = by_arm["as stored + bf16"].mean("output_tokens_per_s")
    both, pool = by_arm["fp8 + fp8_e4m3"], by_arm["as stored + fp8_e4m3"]
    assert both.mean("output_tokens_per_s") / before == pytest.approx(3.7, abs=0.05)
    assert pool.mean("output_tokens_per_s") / before == pytest.approx(2.4, abs=0.05)
    assert both.mean("ttft_mean") < 0.4


def test_offline_computes_each_prefix_once() -> None:
    cells = shared_prefix("offline")["bf16"]
    assert report.cliff(cells) is None
    for cell in cells:
        once = 4 * cell.shared_tokens + 64 * 128
        assert [run.prefilled_tokens for run in cell.figures] == [once] * 3
        assert [run.prefill_ratio for run in cell.figures] == [1.0] * 3


def test_a_device_that_is_planned() -> None:
    """Pools from free memory, weights and KV format; the same answer as qkv.plan."""
    machine = replace(L4, memory_gib=22.0, weights_gib={"none": 15.28, "fp8": 8.81})
    found = bench(QWEN3_8B, machine=machine, quantizations=[None, "fp8"], users=[1, 64], seeds=1)
    assert [cell.arm for cell in found.cells[::2]] == [
        "as stored + bf16", "as stored + fp8_e4m3", "fp8 + bf16", "fp8 + fp8_e4m3",
    ]  # fmt: skip
    for cell in found.cells:
        planned = qkv.plan(
            QWEN3_8B,
            memory_gib=22.0,
            weights_gib=15.28 if cell.quantization is None else 8.81,
            kv_cache_dtypes=[cell.kv_cache_dtype],
            page_tokens=16,
        )
        assert cell.pool_tokens // 16 * 16 == planned.tokens[cell.kv_cache_dtype]
        assert cell.fit_fully == planned.requests[cell.kv_cache_dtype]
        assert cell.bytes_per_token == planned.bytes_per_token[cell.kv_cache_dtype]
    slow, fast = (found.cells[i].mean("tpot_mean") for i in (0, 4))
    assert fast < slow  # fewer bytes of weights in each step


def test_a_request_that_can_never_fit_has_its_reason() -> None:
    found = bench(QWEN3_8B, "shared-prefix", pool_tokens=1024, shared_tokens=[0, 2048], seeds=1)
    assert found.cells[0].error is None
    assert found.cells[1].error is not None and "2304 tokens needed" in found.cells[1].error
    assert found.cells[1].to_dict()["error"] == found.cells[1].error
    assert "2304 tokens needed" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_spread_over_seeds() -> None:
    one = bench(QWEN3_8B, users=8, pool_tokens=POOLS, spread=0.5, seeds=4)
    cell = one.cells[0]
    values = [run.output_tokens_per_s for run in cell.figures]
    assert len(set(values)) == 4
    assert cell.mean("output_tokens_per_s") == pytest.approx(np.mean(values))
    assert cell.sd("output_tokens_per_s") == pytest.approx(np.std(values, ddof=1))
    again = bench(QWEN3_8B, users=8, pool_tokens=POOLS, spread=0.5, seeds=4)
    assert again.to_dict() == one.to_dict()


# Parts.


def test_workload() -> None:
    load = Workload(
        users=2, requests=64, input_tokens=100, output_tokens=20, groups=4, shared_tokens=50,
        spread=0.25,
    )  # fmt: skip
    table = load.draw(7)
    assert (table == load.draw(7)).all() and (table != load.draw(8)).any()
    assert np.bincount(table[:, 0]).tolist() == [16] * 4
    assert (table[:, 1] == 50).all()
    assert table[:, 2].min() >= 75 and table[:, 2].max() <= 125
    assert table[:, 3].min() >= 15 and table[:, 3].max() <= 25 and load.longest == 50 + 125 + 25
    ids = workload.prompts(table, 1000, 7)
    assert [len(row) for row in ids] == (table[:, 1] + table[:, 2]).tolist()
    assert len({row[:50].tobytes() for row in ids}) == 4
    by_group = sorted(range(64), key=lambda i: (table[i, 0], i))
    assert sorted(range(64), key=lambda i: ids[i].tolist()) == by_group
    assert len({row[50:60].tobytes() for row in ids}) == 64
    # 48 of the 50 shared tokens fill pages, which are computed once in each group.
    assert workload.least_prefill(table) == table[:, 1:3].sum() - 60 * 48


def test_figures_by_hand() -> None:
    """Three requests of two users; the third is sent when the first is answered."""
    run = figures.Run(
        admitted=np.array([0.0, 0.0, 3.0]),
        first_token=np.array([1.0, 2.0, 4.5]),
        finished=np.array([3.0, 8.0, 4.5]),
        prompt_tokens=np.array([10, 10, 20], np.int32),
        cached_tokens=np.array([0, 0, 16], np.int32),
        output_tokens=np.array([3, 4, 1], np.int32),
        retractions=1,
        prefilled=48,
        most_running=2,
        most_waiting=1,
        most_used_tokens=48,
        pool_tokens=96,
    )
    assert figures.sent(run, 2).tolist() == [0.0, 0.0, 3.0]
    assert figures.sent(run, 5).tolist() == [0.0, 0.0, 0.0]
    targets = qkv.Targets(ttft=1.5, tpot=1.0)
    found = figures.figures(run, users=2, targets=targets, least_prefill=24)
    assert found.ttft_mean == pytest.approx((1.0 + 2.0 + 1.5) / 3) and found.ttft_p50 == 1.5
    assert found.tpot_mean == pytest.approx((1.0 + 2.0) / 2)  # the third has one token
    assert found.output_tokens_per_s == 1.0 and found.total_tokens_per_s == 6.0
    assert found.goodput == pytest.approx(2 / 8) and found.goodput_share == pytest.approx(2 / 3)
    assert found.hit_rate == 0.4 and found.token_usage == 0.5 and found.prefill_ratio == 2.0


def test_fit_finds_the_parts() -> None:
    parts = np.array([0.03, 2e-4, 5e-5, 3e-12])
    random = np.random.default_rng(0)
    works = []
    for _ in range(12):
        counts = random.integers(1, 1000, 4) * np.array([1, 500, 60, 10**9])
        n_steps, n_prefill, n_decode, kv_bytes = counts.tolist()
        works.append(
            simulate.Work(
                seconds=float(counts @ parts), n_steps=n_steps, n_prefill=n_prefill,
                n_decode=n_decode, kv_bytes=kv_bytes,
            )
        )  # fmt: skip
    cost, error = simulate.fit(works)
    assert list(cost.to_dict().values()) == pytest.approx(parts)
    assert error < 1e-9
    assert simulate.CostModel.from_mapping(cost.to_dict()) == cost
    with pytest.raises(ValueError, match="3 runs, a cost model of 4 parts"):
        simulate.fit(works[:3])


def test_roofline() -> None:
    cost = simulate.CostModel.roofline(weight_bytes=3e11, row_weights=5e9, gb_per_s=300, tflops=50)
    assert cost.step_seconds == 1.0 and cost.kv_byte_seconds == pytest.approx(1 / 3e11)
    assert cost.prefill_row_seconds == cost.decode_row_seconds == pytest.approx(2e-4)


def test_simulation_of_a_million_steps() -> None:
    """One user, 1,000 answers of 1,000 tokens: an answer's last token is in no step."""
    table = Workload(users=1, requests=1000, input_tokens=16, output_tokens=1000).draw(0)
    found = simulate.counted(
        table, Workload(users=1, requests=1000, input_tokens=16, output_tokens=1000),
        pool_tokens=2048, kv_bytes=1, cost=COST,
    )  # fmt: skip
    assert found.n_steps == 1_000_000 and found.seconds == 1e6
    assert found.n_prefill == 16_000 and found.n_decode == 999_000


# The engine's own runs.


@pytest.mark.parametrize("schedule", ["offline", "fcfs"])
@pytest.mark.parametrize("pool", [256, 4096])
def test_the_engine_takes_the_steps_that_are_simulated(
    tiny: Callable[..., Path], schedule: str, pool: int
) -> None:
    point = Workload(
        users=4, requests=12, input_tokens=24, output_tokens=30, groups=2, shared_tokens=64,
        spread=0.5,
    )  # fmt: skip
    table = point.draw(3)
    with qkv.Engine(
        tiny("llama"), kv_tokens=pool, max_running=8, chunk_tokens=32, schedule=schedule
    ) as engine:
        measured = measure.measure(engine, table, point, 3)
        assert engine._core.counts()["most_running"] <= 4
    simulated = simulate.simulate(
        table, point, pool_tokens=pool, kv_bytes=1, cost=COST, chunk_tokens=32, schedule=schedule
    )
    for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
        assert (getattr(measured, name) == getattr(simulated, name)).all()
    for name in (
        "prefilled", "retractions", "most_running", "most_waiting", "most_used_tokens",
        "pool_tokens",
    ):  # fmt: skip
        assert getattr(measured, name) == getattr(simulated, name), name
    assert (measured.most_waiting > 0) == (pool == 256)
    assert (measured.admitted <= measured.first_token).all()
    assert (measured.first_token <= measured.finished).all()


def test_late_stamps() -> None:
    """Added at 1, 2, 3, 4; the first and the third stamp came late."""
    assert measure._added(np.array([7.0, 2.0, 9.0, 4.0])).tolist() == [2.0, 2.0, 4.0, 4.0]


def test_bench_on_this_machine(tiny: Callable[..., Path]) -> None:
    found = qkv.bench(
        tiny("llama"), users=[1, 2, 4], input_tokens=32, output_tokens=8, seeds=2, progress=False,
        pool_tokens=[1024, 2048], requests=6,
    )  # fmt: skip
    assert not found.simulated and len(found.cells) == 12
    assert {cell.pool_tokens for cell in found.cells} == {1024, 2048}
    for cell in found.cells:
        assert cell.error is None and cell.mean("most_running") == cell.users
        assert cell.mean("output_tokens_per_s") > 0 and cell.mean("ttft_mean") > 0
        assert cell.mean("prefilled_tokens") == 6 * 32
    assert set(found.fitted) == {"bf16", "fp8_e4m3"}
    assert found.fitted["bf16"].runs == 12
    said = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert simulate.CostModel.from_mapping(
        {k: v for k, v in said["cost_models"]["bf16"].items() if k.endswith("_seconds")}
    )


def test_weights_that_cannot_be_made(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was known after all runs with the weights before them."""
    monkeypatch.setattr(sweeps, "Engine", None)
    with pytest.raises(qkv.Error, match="quantization='awq', but the weights are"):
        qkv.bench(tiny("llama"), quantizations=[None, "awq"], users=1, progress=False)


def test_points_that_the_model_cannot_take(tiny: Callable[..., Path]) -> None:
    found = qkv.bench(
        tiny("llama"), "shared-prefix", shared_tokens=[0, 64, 2**20], groups=1, requests=2, users=2,
        input_tokens=8, output_tokens=4, seeds=1, pool_tokens=64, kv_cache_dtypes="bf16",
        progress=False,
    )  # fmt: skip
    errors = [cell.error for cell in found.cells]
    assert errors[0] is None
    assert errors[1] == "requests of 76 tokens, the pool holds 64"
    assert errors[2] is not None and "the model takes" in errors[2]


def test_limit_and_peaks(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama"), kv_tokens=1024, max_running=4) as engine:
        for wrong in (0, -1, 5, 2**40):
            with pytest.raises(ValueError, match="max_running"):
                engine._core.limit(wrong)
        with pytest.raises(TypeError):
            engine._core.limit("2")  # type: ignore[arg-type]
        engine._core.limit(2)
        prompts = [[i + 1] * 20 for i in range(6)]
        engine.generate(prompts, qkv.SamplingParams(max_tokens=4), progress=False)
        counts = engine._core.counts()
        assert counts["most_running"] == 2 and counts["most_short"] == 0
        assert 2 <= counts["most_used_pages"] <= 4
        engine._core.flush()
        assert engine._core.counts()["most_running"] == 0


# Shown.


def test_table_html_plot(tmp_path: Path) -> None:
    found = bench(QWEN3_8B, "shared-prefix", pool_tokens=SMALL_POOLS, seeds=2, schedule="fcfs")
    text = str(found)
    assert "cliff at 2,048 shared tokens" in text and "no cliff" in text
    assert "<table>" in found._repr_html_() and "cliff at 2,048" in found._repr_html_()
    pytest.importorskip("matplotlib")
    figure = found.plot()
    assert len(figure.axes) == 8
    line = figure.axes[0].get_lines()[0].get_xdata()
    assert list(line) == [0, 512, 1024, 2048, 4096]
    figure.savefig(tmp_path / "plot.svg")
    assert len(bench(QWEN3_8B, pool_tokens=POOLS, seeds=1).plot().axes) == 6


def config_file(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    return str(path)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_file(tmp_path)
    pools = ["--pool", "bf16=24094,fp8_e4m3=142369", "--chunked-prefill-size", "2048"]
    device = ["--simulate", "--bandwidth", "300", "--tflops", "60", "--no-progress"]
    assert cli.main(["bench", config, *device, *pools, "--users", "64", "--seeds", "1"]) == 0
    text = capsys.readouterr().out
    assert "37 to 40 run, up to 27 wait for pages" in text and "usage 0.29" in text
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COST.to_dict()))
    more = ["--simulate", "--cost", str(cost), "--no-progress", "--json", "--memory-gib", "22"]
    assert cli.main(["bench", config, *more, "--users", "1", "--kv-cache-dtype", "bf16"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cells"][0]["tpot_mean"]["mean"] == 1.0
    cost.write_text(json.dumps({"cost_models": {"bf16": {**COST.to_dict(), "runs": 5}}}))
    assert cli.main(["bench", config, *more, "--users", "1", "--kv-cache-dtype", "bf16"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["tpot_mean"]["mean"] == 1.0
    assert cli.main(["bench", config, *more, "--users", "1"]) == 2
    said = capsys.readouterr().err
    assert (
        "cost: nothing for fp8_e4m3, only for bf16; a bench fits one where a format ran 4 " in said
    )
    cost.write_text(json.dumps({"cost_models": {}}))  # of a bench that was too short
    assert cli.main(["bench", config, *more, "--users", "1"]) == 2
    assert "cost: nothing for bf16, nor for anything else; a bench fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--users", "1,x", "--simulate", "--cost", "none.json"], "--users 1,x"),
        (["--simulate", "--memory-gib", "22"], "gb_per_s and tflops"),
        (["--memory-gib", "22"], "add --simulate"),
        (["--simulate", "--cost", "none.json"], "none.json"),
        (["--pool", "bf16=x"], "--pool bf16=x"),
        (["--pool", "16", "--max-total-tokens", "16"], "one of them"),
        (["--max-running-requests", "3"], "--users"),
        (["--simulate", "--bandwidth", "300", "--tflops", "60"], "memory_gib or pool_tokens"),
        (["--ttft-target", "0"], "ttft target 0"),
        (["--simulate", "--bandwidth", "nan", "--tflops", "60", "--pool", "99"], "gb_per_s"),
        (["--simulate", "--bandwidth", "1", "--tflops", "1", "--pool", "9999", "--threads", "2"],
         "loads no engine: threads"),
    ],
)  # fmt: skip
def test_command_line_refuses(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", config_file(tmp_path), *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"sweep": "both"}, ValueError, "sweep='both'"),
        ({"schedule": "best"}, ValueError, "schedule='best'"),
        ({"users": 0}, ValueError, "users=0"),
        ({"users": []}, ValueError, "users is empty"),
        ({"users": [1, True]}, TypeError, "users=True"),
        ({"users": 2**40}, ValueError, "users="),
        ({"groups": 2}, ValueError, "of the sweep 'shared-prefix'"),
        ({"requests": 0}, ValueError, "requests=0"),
        ({"input_tokens": 0}, ValueError, "input_tokens=0"),
        ({"output_tokens": 0}, ValueError, "output_tokens=0"),
        ({"input_tokens": 2**31 - 1}, ValueError, "at most 1073741824"),
        ({"spread": 1.5}, ValueError, "spread=1.5"),
        ({"spread": float("nan")}, ValueError, "spread"),
        ({"seeds": 0}, ValueError, "seeds=0"),
        ({"seeds": []}, ValueError, "seeds is empty"),
        ({"seeds": "abc"}, TypeError, "seeds='abc'"),
        ({"pool_tokens": 15}, ValueError, "pool_tokens=15"),
        ({"pool_tokens": []}, ValueError, "pool_tokens is empty"),
        ({"pool_tokens": {"nvfp4": 99}}, ValueError, "nothing for bf16"),
        ({"pool_tokens": None}, ValueError, "memory_gib or pool_tokens"),
        ({"kv_cache_dtypes": "int3"}, ValueError, "int3"),
        ({"kv_cache_dtypes": "auto"}, ValueError, "auto"),
        ({"kv_cache_dtypes": []}, ValueError, "empty"),
        ({"quantizations": [3]}, TypeError, "quantizations"),
        ({"quantizations": "psychic"}, ValueError, "psychic"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens=0"),
        ({"prefix_cache": 1}, TypeError, "prefix_cache"),
        ({"threads": 2}, TypeError, "loads no engine"),
        ({"machine": None}, TypeError, "a config alone"),
    ],
)
def test_bench_refuses(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        bench(QWEN3_8B, **{"pool_tokens": POOLS, **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "how long a step takes"),
        ({"gb_per_s": 300}, "how long a step takes"),
    ],
)
def test_machine_refuses(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        qkv.Machine(**options)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_cost_refuses(value: float) -> None:
    with pytest.raises(ValueError, match="step_seconds"):
        replace(COST, step_seconds=value)
    with pytest.raises(ValueError, match="gb_per_s"):
        simulate.CostModel.roofline(weight_bytes=1, row_weights=1, gb_per_s=value, tflops=1)


def test_cost_of_nothing() -> None:
    with pytest.raises(ValueError, match="all 0"):
        replace(COST, step_seconds=0.0)
    with pytest.raises(ValueError, match="a cost model has just"):
        simulate.CostModel.from_mapping({"step_seconds": 1})


GOOD = np.array([[-1, 0, 16, 4]], np.int32)


@pytest.mark.parametrize(
    ("requests", "options", "error", "says"),
    [
        (GOOD.tolist(), {}, TypeError, "requests"),
        (GOOD.astype(np.int64), {}, TypeError, "requests: dtype"),
        (GOOD[:, :3], {}, ValueError, "requests"),
        (GOOD[:0], {}, ValueError, r"requests: \[0, 4\]"),
        (GOOD[0], {}, ValueError, "dimensions"),
        (np.array([[-1, 0, 0, 4]], np.int32), {}, ValueError, "request 0"),
        (np.array([[0, -5, 8, 4]], np.int32), {}, ValueError, "request 0"),
        (np.array([[-1, 5, 8, 4]], np.int32), {}, ValueError, "request 0"),
        (np.array([[0, 2**31 - 1, 2**31 - 1, 4]], np.int32), {}, ValueError, "request 0"),
        (GOOD, {"kv_tokens": 15}, ValueError, "kv_tokens: 15"),
        (GOOD, {"kv_tokens": 2**50}, ValueError, "kv_tokens"),
        (GOOD, {"kv_tokens": 16}, qkv.OutOfPages, "request 0: 20 tokens needed"),
        (GOOD, {"max_running": 0}, ValueError, "max_running"),
        (GOOD, {"chunk_tokens": 0}, ValueError, "chunk_tokens"),
        (GOOD, {"step_seconds": -1.0}, ValueError, "step_seconds"),
        (GOOD, {"kv_token_seconds": float("nan")}, ValueError, "kv_token_seconds"),
    ],
)
def test_core_simulate_refuses(
    requests: Any, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        _core.simulate(requests, **{"kv_tokens": 1024, "max_running": 2, **options})


def test_core_simulate_needs_its_pool() -> None:
    with pytest.raises(TypeError, match="kv_tokens and max_running"):
        _core.simulate(GOOD, max_running=1)  # type: ignore[call-arg]


def test_a_plot_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured is said first."""
    pytest.importorskip("matplotlib")
    command = ["bench", config_file(tmp_path), "--simulate", "--pool", "4096", "--bandwidth", "300",
        "--tflops", "60", "--users", "1", "--seeds", "1", "--no-progress", "--json"]  # fmt: skip
    for name in ("none/x.png", "x.bogus"):
        assert cli.main([*command, "--plot", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert json.loads(said.out)["sweep"] == "concurrency"
        assert said.err.startswith(f"qkv: --plot {tmp_path / name}: ")


@pytest.mark.parametrize("name", ["kv_cache_dtypes", "quantizations"])
def test_a_format_twice(name: str) -> None:
    given: Any = {"kv_cache_dtypes": ["bf16", "bf16"], "quantizations": [None, None]}[name]
    with pytest.raises(ValueError, match=f"{name}=.*: one is there twice"):
        bench(QWEN3_8B, pool_tokens=[4096], seeds=1, **{name: given})
