"""Scales of the KV cache: side files, precedence, and the list that says what is applied."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import kv_scales, options, planner
from qkv.kv_scales import KvScale, resolve
from qkv.kv_scales_file import SideFile, read_side_file

N_LAYERS, N_HEADS = 2, 2


def side_file(factors: Any, *, dtype: Any = "float8_e4m3fn", model_type: Any = "llama") -> Any:
    return {
        "model_type": model_type,
        "kv_cache": {"dtype": dtype, "scaling_factor": {"0": factors}},
    }


def read(path: Path, content: Any) -> SideFile:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_side_file(path, n_layers=N_LAYERS, n_kv_heads=N_HEADS, model_types=["llama"])


# The file.


def test_schema_of_sglang(tmp_path: Path) -> None:
    found = read(tmp_path / "s.json", side_file({"0": 1.5, "1": 2}))
    assert found.kv_dtype == "fp8_e4m3" and found.source == "file s.json"
    assert [(k.tolist(), v.tolist()) for k, v in found.layers] == [([1.5], [1.5]), ([2.0], [2.0])]


def test_k_and_v_apart_and_per_head(tmp_path: Path) -> None:
    content = side_file({"0": {"k": 1.5, "v": 2.5}, "1": {"k": [1, 2], "v": 3}}, model_type=None)
    found = read(tmp_path / "s.json", content)
    assert [(k.tolist(), v.tolist()) for k, v in found.layers] == [
        ([1.5], [2.5]),
        ([1.0, 2.0], [3.0]),
    ]
    assert found.to_json() == content


@pytest.mark.parametrize(
    ("dtype", "kv"),
    [("float8_e4m3fn", "fp8_e4m3"), ("float8_e5m2", "fp8_e5m2"), ("nvfp4", "nvfp4")],
)
def test_formats_of_a_file(tmp_path: Path, dtype: str, kv: str) -> None:
    assert read(tmp_path / "s.json", side_file({"0": 1, "1": 1}, dtype=dtype)).kv_dtype == kv


GOOD = {"0": 1.0, "1": 1.0}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not readable as JSON"),
        ("[" * 100000, "not readable as JSON"),
        (b"\xff\xfe".decode("latin-1"), "not readable as JSON"),
        ([], "the file is list"),
        ({}, "the file has no 'model_type'"),
        ({"model_type": None}, "the file has no 'kv_cache'"),
        (side_file(GOOD, model_type="qwen3"), "model_type is 'qwen3', the model's is 'llama'"),
        (side_file(GOOD, model_type=5), "model_type is 5"),
        (side_file(GOOD, dtype="float8"), "dtype is 'float8', known are float8_e4m3fn"),
        (side_file(GOOD, dtype=None), "dtype is None"),
        ({"model_type": None, "kv_cache": {"dtype": "nvfp4"}}, "no 'scaling_factor'"),
        ({"model_type": None, "kv_cache": []}, "kv_cache is list"),
        (side_file({"0": 1.0}), r"layer 1 is missing \(1 of 2"),
        (side_file({"0": 1.0, "1": 1.0, "2": 1.0}), "layer '2': the model has layers 0 to 1"),
        (side_file({"0": 1.0, "01": 1.0}), "layer '01'"),
        (side_file({"0": 1.0, "1": 0.0}), "layer 1 is 0.0, must be positive and finite"),
        (side_file({"0": 1.0, "1": -1.0}), "layer 1 is -1.0"),
        (side_file({"0": 1.0, "1": 1e-60}), "layer 1 is 1e-60"),
        (side_file({"0": 1.0, "1": 1e60}), "layer 1 is 1e"),
        (side_file({"0": 1.0, "1": 10**400}), "layer 1 is 1000"),
        (side_file({"0": 1.0, "1": float("nan")}), "layer 1 is nan"),
        (side_file({"0": 1.0, "1": float("inf")}), "layer 1 is inf"),
        (side_file({"0": 1.0, "1": "1.0"}), "layer 1 is '1.0', must be a number"),
        (side_file({"0": 1.0, "1": True}), "layer 1 is True"),
        (side_file({"0": 1.0, "1": None}), "layer 1 is None"),
        (side_file({"0": 1.0, "1": [1.0, 1.0]}), "layer 1 is a list"),
        (side_file({"0": 1.0, "1": {"k": 1.0}}), "layer 1 has no 'v'"),
        (side_file({"0": 1.0, "1": {"k": 1.0, "v": 1, "q": 1}}), "layer 1 has 'q'"),
        (side_file({"0": 1.0, "1": {"k": 1.0, "v": [1.0]}}), "layer 1, V has 1 values.*2 KV heads"),
        (side_file({"0": 1.0, "1": {"k": [1, 0], "v": 1}}), "layer 1, K, head 1 is 0"),
        (side_file([1.0, 1.0]), "rank 0 is list"),
        (
            {"model_type": None, "kv_cache": {"dtype": "nvfp4", "scaling_factor": {}}},
            "ranks of none",
        ),
        (
            {
                "model_type": None,
                "kv_cache": {"dtype": "nvfp4", "scaling_factor": {"0": GOOD, "1": GOOD}},
            },
            "ranks 0, 1",
        ),
        (
            {
                "model_type": None,
                "kv_cache": {"dtype": "nvfp4", "scaling_factor": {"0": GOOD}, "scale": 2},
            },
            "kv_cache has 'scale'",
        ),
        (
            '{"model_type": null, "kv_cache": {"dtype": "nvfp4", "scaling_factor": {"0": '
            '{"0": 1.0, "1": 1.0, "1": 2.0}}}}',
            "'1' stands there twice",
        ),
    ],
)
def test_bad_files(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(qkv.CheckpointError, match=words) as caught:
        read(tmp_path / "s.json", content)
    assert "s.json" in str(caught.value)


def test_file_that_is_too_large(tmp_path: Path) -> None:
    """A gigabyte was read, whatever stood in it."""
    path = tmp_path / "s.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(qkv.CheckpointError, match="s.json: 1099511627776 bytes"):
        read_side_file(path, n_layers=N_LAYERS, n_kv_heads=N_HEADS)


def test_model_whose_type_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(side_file(GOOD)))
    with pytest.raises(qkv.CheckpointError, match="not known"):
        read_side_file(tmp_path / "s.json", n_layers=2, n_kv_heads=2, model_types=[])


def test_every_format_is_known_here() -> None:
    scaled, unscaled = set(kv_scales.LIMITS), set(kv_scales._UNSCALED) - {"float32"}
    assert scaled | unscaled == set(options.kv_names())
    # The control of comparisons is nobody's choice for a cache: a plan counts it when asked to.
    # fp8_ds_mla is for latent attention alone, and is counted where that is.
    others = {"bf16_stochastic", planner.DS_MLA}
    assert set(options.kv_names()) == {*planner.KV_DTYPES, *others}
    assert not scaled & unscaled


# Precedence.


def lanes(*given: Any) -> list[options.Lane]:
    return options.lanes(list(given), N_LAYERS, compute_dtype="bf16", declared="")


def one(*values: float) -> Any:
    return np.array(values, np.float32)


CARRIED: kv_scales.Carried = [
    (layer, kind, f"model.layers.{layer}.self_attn.{kind}_scale", one(0.25 + layer))
    for layer in range(N_LAYERS)
    for kind in "kv"
]
FILE = SideFile(
    name="s.json",
    kv_dtype="fp8_e4m3",
    model_type=None,
    layers=((one(2.0), one(3.0)), (one(4.0, 5.0), one(6.0))),
)


def rows_of(found: kv_scales.Resolved, **wanted: Any) -> list[KvScale]:
    return [r for r in found.rows if all(getattr(r, k) == v for k, v in wanted.items())]


def test_file_comes_before_checkpoint_before_one() -> None:
    def values(file: SideFile | None, carried: kv_scales.Carried) -> Any:
        return resolve(lanes("fp8_e4m3"), n_kv_heads=N_HEADS, file=file, carried=carried).values

    expected = np.array([[[2, 2], [3, 3]], [[4, 5], [6, 6]]], np.float32)
    assert np.array_equal(values(FILE, CARRIED)[0], expected)
    assert values(None, CARRIED)[0, 1].tolist() == [[1.25, 1.25], [1.25, 1.25]]
    assert np.array_equal(values(None, []), np.ones((1, N_LAYERS, 2, N_HEADS), np.float32))


def test_overridden_scales_are_listed() -> None:
    found = resolve(lanes("fp8_e4m3"), n_kv_heads=N_HEADS, file=FILE, carried=CARRIED)
    used, unused = rows_of(found, layer=1, kind="k")
    assert (used.source, used.applied, used.values) == ("file s.json", True, (4.0, 5.0))
    assert (unused.source, unused.applied) == ("model.layers.1.self_attn.k_scale", False)
    assert unused.reason == "overridden by file s.json"


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        ("bf16", "bf16 cache"),
        ("bf16_stochastic", "bf16 cache"),
        ("mxfp8", "block exponents only"),
        ("fp4_mx_block16", "block exponents only"),
    ],
)
def test_formats_without_a_scale_apply_none(kv: str, reason: str) -> None:
    found = resolve(lanes(kv), n_kv_heads=N_HEADS, file=None, carried=CARRIED)
    assert (found.values == 1).all()
    assert [(row.applied, row.reason) for row in found.rows] == [(False, reason)] * 4
    assert found.rows[0].values == (0.25,) and found.rows[0].source.endswith("k_scale")


def test_nvfp4_takes_the_scale_as_its_global_one() -> None:
    found = resolve(lanes("nvfp4"), n_kv_heads=N_HEADS, file=None, carried=CARRIED)
    assert found.values[0, 0, 0].tolist() == [0.25, 0.25]


def test_lanes_have_their_own() -> None:
    found = resolve(
        lanes("bf16", "fp8_e4m3", "fp8_e5m2", {"default": "fp8_e4m3", "v": "bf16"}),
        n_kv_heads=N_HEADS,
        file=FILE,
        carried=[],
    )
    assert found.values[:, 0, :, 0].tolist() == [[1, 1], [2, 3], [1, 1], [2, 1]]
    other = rows_of(found, lane="fp8_e5m2", layer=0, kind="k")
    assert [(row.source, row.applied) for row in other] == [
        ("default 1.0", True),
        ("file s.json", False),
    ]
    assert other[1].reason == "the file is for fp8_e4m3"
    (plain,) = rows_of(found, lane="bf16", layer=0, kind="k")
    assert (plain.source, plain.reason) == ("file s.json", "bf16 cache")


def test_file_for_another_format_is_refused() -> None:
    with pytest.raises(qkv.CheckpointError, match="s.json.*fp8_e4m3.*is bf16, fp8_e5m2"):
        resolve(lanes("bf16", "fp8_e5m2"), n_kv_heads=N_HEADS, file=FILE, carried=CARRIED)


@pytest.mark.parametrize(
    ("kv", "reason"), [("bf16", "bf16 cache"), ("mxfp8", "block exponents only")]
)
def test_file_for_a_cache_without_scales_is_listed(
    caplog: pytest.LogCaptureFixture, kv: str, reason: str
) -> None:
    """So that one command line serves both sides of a comparison. It was an error."""
    found = resolve(lanes(kv), n_kv_heads=N_HEADS, file=FILE, carried=[])
    assert (found.values == 1).all() and len(found.rows) == 2 * N_LAYERS
    assert {(r.source, r.applied, r.reason) for r in found.rows} == {("file s.json", False, reason)}
    kv_scales.write_log(found)
    assert any(r.levelno == logging.WARNING and "s.json" in r.getMessage() for r in caplog.records)


def test_what_cannot_be_applied_is_listed() -> None:
    carried: kv_scales.Carried = [
        *CARRIED,
        (0, "q", "model.layers.0.self_attn.q_scale", one(0.5)),
        (0, "prob", "model.layers.0.self_attn.prob_scale", one(0.5)),
        (1, "k_zero_point", "model.layers.1.self_attn.k_zero_point", one(0.0)),
    ]
    found = resolve(lanes("fp8_e4m3"), n_kv_heads=N_HEADS, file=None, carried=carried)
    listed = {row.kind: row for row in found.rows if row.kind not in ("k", "v")}
    assert set(listed) == {"q", "prob", "k_zero_point"}
    assert not any(row.applied for row in listed.values())
    assert listed["q"].reason == "queries are kept in bf16"
    assert "zero" in listed["k_zero_point"].reason
    found = resolve(
        lanes("fp8_e4m3"), n_kv_heads=N_HEADS, file=None, carried=carried, query_dtype="fp8_e4m3"
    )
    assert "scale of their own" in rows_of(found, kind="q")[0].reason


def test_log_says_what_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qkv")

    def said(kv: str, file: SideFile | None, carried: kv_scales.Carried) -> list[tuple[int, str]]:
        caplog.clear()
        found = resolve(lanes(kv), n_kv_heads=N_HEADS, file=file, carried=carried)
        kv_scales.write_log(found)
        return [(record.levelno, record.getMessage()) for record in caplog.records]

    ((level, text),) = said("fp8_e4m3", None, [])
    assert level == logging.WARNING and "stored at scale 1.0" in text and "4 of 4" in text
    ((level, text),) = said("fp8_e4m3", None, CARRIED)
    assert level == logging.INFO and "4 applied" in text and "self_attn.k_scale" in text
    ((_, applied), (_, unused)) = said("fp8_e4m3", FILE, CARRIED)
    assert "4 applied, from file s.json" in applied and "overridden by file s.json" in unused
    ((level, text),) = said("bf16", None, CARRIED)
    assert level == logging.INFO and "4 not applied (bf16 cache)" in text
    assert said("bf16", None, []) == said("mxfp8", None, []) == []


def test_log_says_the_same_of_many_lanes_once(caplog: pytest.LogCaptureFixture) -> None:
    mixed = [{"default": "bf16", "layers": {"1": {part: "fp8_e4m3"}}} for part in "kv"]
    found = resolve(
        lanes("fp8_e4m3", *mixed, *mixed, *mixed), n_kv_heads=N_HEADS, file=None, carried=[]
    )
    kv_scales.write_log(found)
    one, many = (record.getMessage() for record in caplog.records)
    assert one.startswith("KV scales of lane fp8_e4m3: none in a file")
    assert many.startswith(
        "KV scales of lanes bf16,mixed, bf16,mixed#2, bf16,mixed#3, bf16,mixed#4 and 2 more: none"
    )
    assert "1 of 1" in many


# What a checkpoint declares.

STATIC = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor"}
QUARK = {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}


@pytest.mark.parametrize(
    ("config", "own", "kv", "key"),
    [
        ({}, None, "", ""),
        ({"kv_cache_scheme": None}, None, "", ""),
        ({"kv_cache_scheme": STATIC}, None, "fp8_e4m3", "kv_cache_scheme"),
        ({"kv_cache_scheme": {**STATIC, "num_bits": 4}}, None, "", "kv_cache_scheme"),
        ({"kv_cache_scheme": {**STATIC, "type": "int"}}, None, "", "kv_cache_scheme"),
        ({"kv_cache_quant_algo": "FP8"}, None, "fp8_e4m3", "quantization_config: kv_cache"),
        ({}, {"kv_cache_quant_algo": "FP8"}, "fp8_e4m3", "hf_quant_config.json: kv_cache"),
        ({}, {"kv_cache_quant_algo": "NVFP4"}, "", "kv_cache_quant_algo NVFP4"),
        ({}, {"kv_cache_quant_algo": None}, "", ""),
        ({"kv_cache_quant_config": QUARK}, None, "fp8_e4m3", "kv_cache_quant_config"),
    ],
)
def test_declared_formats(
    tmp_path: Path, config: dict[str, Any], own: dict[str, Any] | None, kv: str, key: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    if own is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    found, why = kv_scales.declared(str(tmp_path))
    assert found == kv and key in why and bool(key) == bool(why)


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("ct-fp8-static-kv-llama-g", "fp8_e4m3"),
        ("quark-fp8-kv8-llama-g", "fp8_e4m3"),
        ("fp8-static-autofp8-llama-g", ""),
        ("modelopt-fp8-llama-g", ""),
        ("ct-nvfp4-qwen3-s", ""),
    ],
)
def test_declared_formats_of_other_tools(fixtures_dir: Path, name: str, kv: str) -> None:
    assert kv_scales.declared(str(fixtures_dir / name))[0] == kv


# The table.


def counts_of(n_values: int, n_clipped: int = 0, n_flushed: int = 0, amax: float = 0.0) -> Any:
    shape = (N_LAYERS, 2, N_HEADS)
    return {
        "n_values": np.full(shape, n_values),
        "n_clipped": np.full(shape, n_clipped),
        "n_flushed": np.full(shape, n_flushed),
        "amax": np.full(shape, amax, np.float32),
    }


def test_table_with_counts() -> None:
    found = resolve(lanes("fp8_e4m3"), n_kv_heads=N_HEADS, file=FILE, carried=CARRIED)
    table = kv_scales.with_counts(found.rows, {"fp8_e4m3": counts_of(1000, 10, 5, 500.0)})
    assert len(table) == 8 and table[-1].kind == "v"
    used, unused = (row for row in table if row.layer == 1 and row.kind == "k")
    assert (used.clipped, used.flushed, used.amax) == (0.01, 0.005, 500.0)
    assert unused.clipped is None
    lines = str(table).splitlines()
    assert lines[0].split()[:3] == ["lane", "layer", "kind"]
    assert "4 .. 5 (2 heads)" in str(table) and "1 %" in str(table) and "no: overridden" in lines[2]
    assert table._repr_html_().count("<tr>") == 9
    assert json.loads(json.dumps(table.to_dict()))[4]["values"] == [4.0, 5.0]
    assert isinstance(table[:2], kv_scales.KvScaleTable) and str(table) == repr(table)


def test_table_before_anything_was_stored() -> None:
    found = resolve(lanes("fp8_e4m3"), n_kv_heads=N_HEADS, file=None, carried=[])
    table = kv_scales.with_counts(found.rows, {"fp8_e4m3": counts_of(0)})
    assert {row.amax for row in table} == {None}
    assert "default 1.0" in str(table)


def test_a_lane_may_have_its_own_scales() -> None:
    """A file for one lane, 1.0 for another, the checkpoint's for the rest."""
    kv = [
        {"default": "fp8_e4m3", "scales": "own.json", "name": "calibrated"},
        {"default": "fp8_e4m3", "scales": 1.0},
        "fp8_e4m3",
    ]
    made = [options.Lane("calibrated", [("fp8_e4m3", "fp8_e4m3")] * N_LAYERS, "own.json")]
    made += [options.Lane("unit", made[0].layers, 1.0), options.Lane("plain", made[0].layers)]
    found = resolve(made, n_kv_heads=N_HEADS, file=None, carried=CARRIED, own={"own.json": FILE})
    alone = resolve(lanes("fp8_e4m3"), n_kv_heads=N_HEADS, file=FILE, carried=CARRIED)
    plain = resolve(lanes("fp8_e4m3"), n_kv_heads=N_HEADS, file=None, carried=CARRIED)
    assert np.array_equal(found.values[0], alone.values[0])
    assert (found.values[1] == 1.0).all() and not (plain.values == 1.0).all()
    assert np.array_equal(found.values[2], plain.values[0])
    applied = [row for row in found.rows if row.lane == "unit" and row.applied]
    assert {row.source for row in applied} == {"asked for 1.0"}
    with pytest.raises(ValueError, match="own.json.*no such file"):
        options.lanes(kv, N_LAYERS, compute_dtype="bf16", declared="")
    with pytest.raises(ValueError, match="a side file, or 1.0"):
        options.lanes(
            [{"default": "fp8_e4m3", "scales": 2}], N_LAYERS, compute_dtype="bf16", declared=""
        )
