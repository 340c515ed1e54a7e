"""Readers of qkv.quantization, family by family: tensors that are packed here from known codes give
those codes' values, and what a configuration and tensors contradict each other in is an error.

Packing follows the formats' descriptions and shares nothing with what reads it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qkv import _core
from qkv.quantization import Detected, detect
from qkv.quantization.wire import to_core
from ref import make_tiny, stored

Array = NDArray[Any]
Tensors = dict[str, stored.Tensor]
Config = dict[str, Any]

Q = "model.layers.0.self_attn.q_proj"
ATTN = "model.layers.0.self_attn"
rng = np.random.default_rng


@pytest.fixture
def find(tmp_path: Path) -> Callable[..., Detected]:
    """find(section, tensors): what is detected in a folder with both."""

    def make(
        section: Any,
        tensors: Mapping[str, stored.Tensor],
        quantization: str | None = None,
        files: Mapping[str, Any] | None = None,
        key: str = "quantization_config",
    ) -> Detected:
        config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 128}
        if section is not None:
            config[key] = section
        for name, content in {"config.json": config, **(files or {})}.items():
            (tmp_path / name).write_text(json.dumps(content))
        stored.write(tmp_path / "model.safetensors", tensors)
        return detect(_core.Checkpoint(str(tmp_path)), quantization)

    return make


def values(found: Detected, tensors: Tensors, n: int, k: int, module: str = Q) -> stored.F32:
    """By the formula in NumPy and by the engine's own code, which must agree."""
    weight = f"{module}.weight"
    expected = stored.evaluate(found.matrices[weight], stored.as_stored(tensors), n, k)
    with tempfile.TemporaryDirectory() as folder:
        stored.write(Path(folder) / "model.safetensors", tensors)
        matrices, arrays = to_core(found.matrices)
        core = _core.Checkpoint(folder).matrix(weight, (n, k), matrices, arrays)
    assert np.array_equal(core, expected)
    return expected


def words(rows: Array, bits: int) -> Array:
    """[r, c] codes -> [r, words]: a stream of bits in each row, padded to whole words."""
    each = (rows[..., None].astype(np.int64) >> np.arange(bits)) & 1
    flat = each.reshape(rows.shape[0], -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    packed = np.packbits(flat.astype(np.uint8), axis=1, bitorder="little")
    found: Array = np.ascontiguousarray(packed).view("<i4")
    return found


def awq_words(rows: Array) -> Array:
    """[k, n] codes -> [k, n / 8]: nibble i of a word is column {0, 2, 4, 6, 1, 3, 5, 7}[i]."""
    eight = rows.reshape(rows.shape[0], -1, 8).astype(np.int64)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    packed = (eight[:, :, order] << (4 * np.arange(8))).sum(axis=2)
    found: Array = packed.astype(np.uint32).view(np.int32)
    return found


def halves(rows: Array) -> Array:
    """[r, c] codes of 4 bits -> [r, c / 2] bytes, the even one low."""
    found: Array = (rows[:, 0::2] | rows[:, 1::2] << 4).astype(np.uint8)
    return found


def f16(shape: tuple[int, ...], seed: int = 1) -> Array:
    return rng(seed).uniform(0.01, 0.1, shape).astype(np.float16)


def plain(*modules: str, n: int = 32, k: int = 64) -> Tensors:
    return {f"{m}.weight": ("BF16", np.full((n, k), 0x3F80)) for m in modules}


def fp8_module(module: str, n: int = 32, k: int = 64, **scales: Any) -> Tensors:
    found: Tensors = {f"{module}.weight": ("F8_E4M3", rng(3).integers(0, 0x70, (n, k)))}
    for part, value in (scales or {"weight_scale": np.float32(0.5)}).items():
        found[f"{module}.{part}"] = ("F32", np.asarray(value, np.float32))
    return found


# GPTQ.


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    n: int = 64,
    k: int = 96,
    add: int = 1,
    zeros: Array | None = None,
    module: str = Q,
) -> tuple[Tensors, stored.F32]:
    n_groups = 1 if group == -1 else -(-k // group)
    codes = rng(bits).integers(0, 1 << bits, (n, k))
    zeros = rng(7).integers(0, 1 << bits, (n, n_groups)) if zeros is None else zeros
    scales = f16((n_groups, n))
    of_k = np.arange(k) // (k if group == -1 else group)
    w = scales.astype(np.float32).T[:, of_k] * (codes - zeros[:, of_k]).astype(np.float32)
    tensors: Tensors = {
        f"{module}.qweight": ("I32", words(codes, bits).T),
        f"{module}.qzeros": ("I32", words(((zeros - add) % (1 << bits)).T, bits)),
        f"{module}.scales": ("F16", scales),
    }
    return tensors, w


def gptq_config(**changes: Any) -> Config:
    base = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    return {**base, **changes}


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
@pytest.mark.parametrize("group", (-1, 32, 96, 128))
@pytest.mark.parametrize("version", ("gptq", "gptq_v2"))
def test_gptq(find: Callable[..., Detected], bits: int, group: int, version: str) -> None:
    tensors, w = gptq(bits, group, add=1 if version == "gptq" else 0)
    section = gptq_config(bits=bits, group_size=group, checkpoint_format=version)
    found = find(section, tensors)
    assert found.method == "gptq" and found.notes == []
    assert np.array_equal(values(found, tensors, 64, 96), w)


@pytest.mark.parametrize("version, add", (("gptq", 1), ("gptq_v2", 0), (None, 1)))
def test_symmetric_gptq_needs_no_zero_points(
    find: Callable[..., Detected], version: str | None, add: int
) -> None:
    tensors, w = gptq(zeros=np.full((64, 3), 8), add=add)
    found = find(gptq_config(sym=True, checkpoint_format=version), tensors)
    description = found.matrices[f"{Q}.weight"]
    assert "zero" not in description and description["also"] == [f"{Q}.qzeros"]
    assert np.array_equal(values(found, tensors, 64, 96), w)


@pytest.mark.parametrize("version, add", (("gptq", 0), ("gptq_v2", 1)))
def test_symmetric_gptq_of_the_other_version(
    find: Callable[..., Detected], version: str, add: int
) -> None:
    tensors, _ = gptq(zeros=np.full((64, 3), 8), add=add)
    with pytest.raises(_core.CheckpointError, match="checkpoint_format.*set checkpoint_format"):
        find(gptq_config(sym=True, checkpoint_format=version), tensors)


def test_symmetric_gptq_without_a_version(find: Callable[..., Detected]) -> None:
    """Stored 8s are gptq_v2's; nothing says otherwise, and the note says so."""
    tensors, w = gptq(zeros=np.full((64, 3), 8), add=0)
    found = find(gptq_config(sym=True), tensors)
    assert "gptq_v2" in found.notes[0]
    assert np.array_equal(values(found, tensors, 64, 96), w)


def test_gptq_says_symmetric_and_is_not(find: Callable[..., Detected]) -> None:
    tensors, _ = gptq()
    with pytest.raises(_core.CheckpointError, match="sym is true.*qzeros"):
        find(gptq_config(sym=True), tensors)


def test_gptq_desc_act(find: Callable[..., Detected]) -> None:
    tensors, _ = gptq()
    index = rng(2).permutation(np.arange(96) // 32).astype(np.int32)
    tensors[f"{Q}.g_idx"] = ("I32", index)
    found = find(gptq_config(desc_act=True), tensors)
    assert found.matrices[f"{Q}.weight"]["k_group"] == f"{Q}.g_idx"
    codes = np.unpackbits(
        tensors[f"{Q}.qweight"][1].T.copy().view(np.uint8), axis=1, bitorder="little"
    )
    codes = (codes.reshape(64, 96, 4) << np.arange(4)).sum(axis=2)
    zeros = rng(7).integers(0, 16, (64, 3))
    scales = tensors[f"{Q}.scales"][1].astype(np.float32).T
    w = scales[:, index] * (codes - zeros[:, index]).astype(np.float32)
    assert np.array_equal(values(found, tensors, 64, 96), w)


@pytest.mark.parametrize("index", (np.zeros(96), np.arange(96) // 32))
def test_gptq_index_that_says_nothing(find: Callable[..., Detected], index: Array) -> None:
    tensors, w = gptq()
    tensors[f"{Q}.g_idx"] = ("I32", index)
    tensors[f"{Q}.bias"] = ("F16", np.zeros(64))
    found = find(gptq_config(), tensors)
    description = found.matrices[f"{Q}.weight"]
    assert description["also"] == [f"{Q}.g_idx", f"{Q}.bias"] and "k_group" not in description
    assert np.array_equal(values(found, tensors, 64, 96), w)


@pytest.mark.parametrize(
    "index, message",
    (
        (np.full(96, 3), "g_idx: element 0 is group 3"),
        (np.full(96, -2), "g_idx: element 0 is group -2"),
        (np.zeros(95), r"g_idx is I32 \[95\]"),
        (None, "g_idx is missing: desc_act"),
    ),
)
def test_gptq_index_that_is_wrong(
    find: Callable[..., Detected], index: Array | None, message: str
) -> None:
    tensors, _ = gptq()
    if index is not None:
        tensors[f"{Q}.g_idx"] = ("I32", index)
    with pytest.raises(_core.CheckpointError, match=message):
        find(gptq_config(desc_act=True), tensors)


def test_gptq_dynamic(find: Callable[..., Detected]) -> None:
    """By expressions at the start of a name, the first that fits: overrides, or left as it is."""
    k_proj, v_proj = f"{ATTN}.k_proj", f"{ATTN}.v_proj"
    tensors, w = gptq()
    eight, w_eight = gptq(8, -1, module=k_proj)
    tensors |= eight | plain(v_proj)
    dynamic = {
        r"+:.*\.k_proj": {"bits": 8, "group_size": -1},
        r"-:.*v_proj": {},
        r".*k_proj": {"bits": 2},
    }
    found = find(gptq_config(dynamic=dynamic), tensors)
    assert np.array_equal(values(found, tensors, 64, 96), w)
    assert np.array_equal(values(found, tensors, 64, 96, k_proj), w_eight)
    assert found.ignored == {v_proj: r"dynamic -:.*v_proj"} and found.notes == []


@pytest.mark.parametrize(
    "pattern, hangs",
    (
        (r"(a+)+$", True),
        (r"(?:a|aa)*b", True),
        (r"(?P<name>(?:\w+)\.)+x", True),
        (r"(a?){50}", True),
        ("a?" * 20, True),
        ("(a|a)" * 20, True),
        (".*" * 7 + "x", True),
        ("()" * 5000, True),
        (r".*layers\.\d+\.mlp\.(gate|up|down)_proj$", False),
        (r"^(?!.*(lm_head|router)).*$", False),
        (r"model\.layers\.(?:[0-9]|1[0-9])\.[(+*|]*.*", False),
    ),
)
def test_patterns_that_could_take_for_ever(
    find: Callable[..., Detected], pattern: str, hangs: bool
) -> None:
    tensors, _ = gptq()
    config = gptq_config(dynamic={f"-:{pattern}": {}})
    if not hangs:
        find(config, tensors)
        return
    with pytest.raises(_core.UnsupportedError, match="take for ever"):
        find(config, tensors)


@pytest.mark.parametrize(
    "changes, message",
    (
        ({"bits": 5}, "bits is 5"),
        ({"bits": None}, "bits is None"),
        ({"bits": "4"}, "bits is '4'"),
        ({"bits": True}, "bits is True"),
        ({"bits": 8}, r"scales is F16 \[3, 64\]"),
        ({"group_size": 7}, r"scales is F16 \[3, 64\].*\[14, 64\].*group_size 7"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": None}, "group_size is None"),
        ({"dynamic": {"(": {}}}, "no regular expression"),
        ({"dynamic": {".*": 4}}, "dynamic"),
        ({"dynamic": [3]}, "a list of names"),
    ),
)
def test_gptq_config_that_is_wrong(
    find: Callable[..., Detected], changes: Config, message: str
) -> None:
    tensors, _ = gptq()
    with pytest.raises(_core.CheckpointError, match=message):
        find(gptq_config(**changes), tensors)


@pytest.mark.parametrize(
    "changes", ({"checkpoint_format": "marlin"}, {"is_marlin_format": True}, {"format": "bitblas"})
)
def test_other_layouts_of_gptq_are_refused(find: Callable[..., Detected], changes: Config) -> None:
    tensors, _ = gptq()
    with pytest.raises(_core.UnsupportedError, match="(marlin|bitblas).*Save the checkpoint again"):
        find(gptq_config(**changes), tensors)


# AWQ.


def awq(group: int = 32, *, n: int = 64, k: int = 96) -> tuple[Tensors, stored.F32]:
    n_groups = 1 if group == -1 else -(-k // group)
    codes = rng(5).integers(0, 16, (k, n))
    zeros = rng(6).integers(0, 16, (n_groups, n))
    scales = f16((n_groups, n))
    of_k = np.arange(k) // (k if group == -1 else group)
    w = scales.astype(np.float32)[of_k] * (codes - zeros[of_k]).astype(np.float32)
    tensors: Tensors = {
        f"{Q}.qweight": ("I32", awq_words(codes)),
        f"{Q}.qzeros": ("I32", awq_words(zeros)),
        f"{Q}.scales": ("F16", scales),
    }
    return tensors, np.ascontiguousarray(w.T)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def test_awq_words() -> None:
    """Columns that contain their own index make this word."""
    assert awq_words(np.arange(8)[None, :])[0, 0] == 0x75316420


@pytest.mark.parametrize("group", (-1, 32, 96))
def test_awq(find: Callable[..., Detected], group: int) -> None:
    tensors, w = awq(group)
    found = find({**AWQ, "group_size": group}, tensors)
    assert np.array_equal(values(found, tensors, 64, 96), w)


def test_awq_in_its_old_file(find: Callable[..., Detected]) -> None:
    tensors, w = awq()
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    found = find(None, tensors, files={"quant_config.json": old})
    assert (found.method, found.source) == ("awq", "quant_config.json")
    assert np.array_equal(values(found, tensors, 64, 96), w)


@pytest.mark.parametrize("version", ("gemv", "gemv_fast", "marlin", "exllama"))
def test_other_layouts_of_awq_are_refused(find: Callable[..., Detected], version: str) -> None:
    tensors, _ = awq()
    with pytest.raises(_core.UnsupportedError, match=f"{version}.*version gemm"):
        find({**AWQ, "version": version}, tensors)


def test_awq_says_no_zero_points_and_has_some(find: Callable[..., Detected]) -> None:
    tensors, _ = awq()
    with pytest.raises(_core.CheckpointError, match="zero_point is false.*qzeros"):
        find({**AWQ, "zero_point": False}, tensors)
    del tensors[f"{Q}.qzeros"]
    assert find({**AWQ, "zero_point": False}, tensors).matrices
    with pytest.raises(_core.CheckpointError, match="q_proj.qzeros is missing"):
        find(AWQ, tensors)


def test_awq_and_gptq_are_told_apart(find: Callable[..., Detected]) -> None:
    with pytest.raises(_core.CheckpointError, match="qweight is I32.*AWQ packs so"):
        find(gptq_config(), awq()[0])
    with pytest.raises(_core.CheckpointError, match="qweight is I32.*GPTQ packs so"):
        find(AWQ, gptq()[0])


# AutoRound.


def autoround_config(**changes: Any) -> Config:
    base = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
    return {**base, "data_type": "int", **changes}


@pytest.mark.parametrize(
    "packing, add",
    (("auto_round:auto_gptq", 1), ("auto_round", 0), ("auto_round:gptqmodel", 0), (None, 1)),
)
def test_autoround_as_gptq(find: Callable[..., Detected], packing: str | None, add: int) -> None:
    tensors, w = gptq(add=add)
    found = find(autoround_config(packing_format=packing), tensors)
    assert found.method == "auto-round"
    assert np.array_equal(values(found, tensors, 64, 96), w)


def test_autoround_as_awq(find: Callable[..., Detected]) -> None:
    tensors, w = awq()
    found = find(autoround_config(packing_format="auto_round:auto_awq"), tensors)
    assert np.array_equal(values(found, tensors, 64, 96), w)


def test_autoround_settings_by_layer(find: Callable[..., Detected]) -> None:
    k_proj, v_proj = f"{ATTN}.k_proj", f"{ATTN}.v_proj"
    tensors, _ = gptq()
    eight, w = gptq(8, -1, module=k_proj)
    tensors |= eight | plain(v_proj)
    extra = {k_proj: {"bits": 8, "group_size": -1}, r".*\.v_proj": {"bits": 16}}
    found = find(autoround_config(extra_config=extra), tensors)
    assert np.array_equal(values(found, tensors, 64, 96, k_proj), w)
    assert list(found.ignored) == [v_proj]


def test_autoround_in_other_packings(find: Callable[..., Detected]) -> None:
    with pytest.raises(_core.UnsupportedError, match="auto_round:fake.*export the model again"):
        find(autoround_config(packing_format="auto_round:fake"), gptq()[0])
    tensors, w = ct_mxfp4()
    section = autoround_config(
        packing_format="auto_round:llm_compressor", data_type="mx_fp", group_size=32, act_bits=4
    )
    found = find(section, tensors)
    assert np.array_equal(values(found, tensors, 32, 64), w)
    assert found.matrices[f"{Q}.weight"]["input"] == {"quant": "mxfp4"}


# compressed-tensors.


def ct_config(
    weights: Config | None, inputs: Config | None = None, fmt: str = "pack-quantized", **more: Any
) -> Config:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    base: Config = {"quant_method": "compressed-tensors", "format": fmt, "ignore": ["lm_head"]}
    return {**base, "config_groups": {"group_0": group}, **more}


def int_args(bits: int = 4, group: int | None = 32, **changes: Any) -> Config:
    strategy = "channel" if group is None else "group"
    base = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy}
    return {**base, "group_size": group, "dynamic": False, **changes}


def ct_packed(
    bits: int, group: int | None, *, zeros: bool = False, n: int = 40, k: int = 96, module: str = Q
) -> tuple[Tensors, stored.F32]:
    n_groups = 1 if group is None else -(-k // group)
    codes = rng(bits).integers(0, 1 << bits, (n, k))
    zero = rng(8).integers(0, 1 << bits, (n, n_groups))
    scales = rng(9).integers(0x3C00, 0x3E00, (n, n_groups))
    of_k = np.arange(k) // (group or k)
    middle = zero if zeros else np.full((n, n_groups), 1 << (bits - 1))
    w = stored.floats("BF16", scales)[:, of_k] * (codes - middle[:, of_k]).astype(np.float32)
    tensors: Tensors = {
        f"{module}.weight_packed": ("I32", words(codes, bits)),
        f"{module}.weight_scale": ("BF16", scales),
        f"{module}.weight_shape": ("I64", np.array([n, k])),
    }
    if zeros:
        tensors[f"{module}.weight_zero_point"] = ("I32", words(zero.T, bits).T)
    return tensors, w


@pytest.mark.parametrize("bits", (2, 3, 4, 5, 6, 7, 8))
@pytest.mark.parametrize("group", (None, 32, 64))
@pytest.mark.parametrize("zeros", (False, True))
def test_pack_quantized(
    find: Callable[..., Detected], bits: int, group: int | None, zeros: bool
) -> None:
    tensors, w = ct_packed(bits, group, zeros=zeros)
    found = find(ct_config(int_args(bits, group, symmetric=not zeros)), tensors)
    assert np.array_equal(values(found, tensors, 40, 96), w)


def test_pack_quantized_with_an_index(find: Callable[..., Detected]) -> None:
    tensors, _ = ct_packed(4, 32)
    tensors[f"{Q}.weight_g_idx"] = ("I32", rng(2).permutation(np.arange(96) // 32))
    found = find(ct_config(int_args(actorder="group")), tensors)
    assert found.matrices[f"{Q}.weight"]["k_group"] == f"{Q}.weight_g_idx"


def test_pack_quantized_of_an_old_release(find: Callable[..., Detected]) -> None:
    tensors, _ = ct_packed(3, 32)
    tensors[f"{Q}.weight_packed"] = ("I32", np.zeros((40, 10)))
    with pytest.raises(_core.CheckpointError, match="9 words.*old releases"):
        find(ct_config(int_args(3)), tensors)


@pytest.mark.parametrize("bits", (8,))
@pytest.mark.parametrize("group", (None, 32))
def test_int_quantized(find: Callable[..., Detected], bits: int, group: int | None) -> None:
    n_groups = 1 if group is None else 2
    codes = rng(1).integers(-128, 128, (32, 64))
    zeros = rng(2).integers(-128, 128, (32, n_groups))
    scales = rng(3).uniform(0.01, 0.1, (32, n_groups)).astype(np.float32)
    of_k = np.arange(64) // (group or 64)
    tensors: Tensors = {
        f"{Q}.weight": ("I8", codes),
        f"{Q}.weight_scale": ("F32", scales),
        f"{Q}.weight_zero_point": ("I8", zeros),
    }
    section = ct_config(int_args(bits, group, symmetric=False), fmt="int-quantized")
    w = scales[:, of_k] * (codes - zeros[:, of_k]).astype(np.float32)
    assert np.array_equal(values(find(section, tensors), tensors, 32, 64), w)
    section = ct_config(int_args(bits, group), fmt="int-quantized")
    with pytest.raises(_core.CheckpointError, match="symmetric is true.*weight_zero_point"):
        find(section, tensors)
    tensors[f"{Q}.weight_zero_point"] = ("I8", zeros * 0)
    w = scales[:, of_k] * codes.astype(np.float32)
    assert np.array_equal(values(find(section, tensors), tensors, 32, 64), w)


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    "inputs, expected",
    (
        (None, None),
        (TOKEN, {"quant": "int8", "steps": 127.5}),
        ({**TOKEN, "type": "float"}, {"quant": "fp8"}),
        ({**TOKEN, "type": "float", "strategy": "tensor"}, {"quant": "fp8"}),
        ({**TOKEN, "type": "float", "strategy": "group", "group_size": 128}, "fp8_group"),
        (STATIC, {"quant": "fp8", "scale": 0.25}),
        ({**STATIC, "type": "int"}, {"quant": "int8", "scale": 0.25}),
    ),
)
def test_inputs(find: Callable[..., Detected], inputs: Config | None, expected: Any) -> None:
    tensors, _ = ct_packed(4, 32)
    if inputs is not None and not inputs["dynamic"]:
        tensors[f"{Q}.input_scale"] = ("F32", np.array([0.25]))
    found = find(ct_config(int_args(), inputs), tensors)
    if expected == "fp8_group":
        expected = {"quant": "fp8_group", "group": 128}
    assert found.matrices[f"{Q}.weight"].get("input") == expected


def test_inputs_that_are_asymmetric_stay(find: Callable[..., Detected]) -> None:
    tensors, _ = ct_packed(4, 32)
    found = find(ct_config(int_args(), {**TOKEN, "symmetric": False}), tensors)
    assert "input" not in found.matrices[f"{Q}.weight"] and "asymmetric" in found.notes[0]


def test_static_input_without_its_scale(find: Callable[..., Detected]) -> None:
    tensors, _ = ct_packed(4, 32)
    with pytest.raises(_core.CheckpointError, match="q_proj.input_scale is missing"):
        find(ct_config(int_args(), STATIC), tensors)
    tensors[f"{Q}.input_scale"] = ("F32", np.array([0.0]))
    with pytest.raises(_core.CheckpointError, match="q_proj.input_scale: 0, a scale is positive"):
        find(ct_config(int_args(), STATIC), tensors)


@pytest.mark.parametrize("block", ([128, 128], "128x128", [32, 16]))
def test_float_blocks(find: Callable[..., Detected], block: Any) -> None:
    rows, columns = (128, 128) if isinstance(block, str) else block
    n, k = 160, 144
    scales = rng(4).uniform(0.1, 1, (-(-n // rows), -(-k // columns))).astype(np.float32)
    codes = rng(3).integers(0, 0x70, (n, k))
    tensors: Tensors = {
        f"{Q}.weight": ("F8_E4M3", codes),
        f"{Q}.weight_scale": ("F32", scales),
    }
    args = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}
    found = find(ct_config(args, fmt="float-quantized"), tensors)
    each = np.repeat(np.repeat(scales, rows, 0)[:n], columns, 1)[:, :k]
    assert np.array_equal(values(found, tensors, n, k), each * stored.floats("F8_E4M3", codes))


def ct_mxfp4(module: str = Q) -> tuple[Tensors, stored.F32]:
    codes = rng(1).integers(0, 16, (32, 64))
    exponents = rng(2).integers(115, 130, (32, 2))
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    value = np.where(codes & 8, -grid[codes & 7], grid[codes & 7])
    w = np.ldexp(value, np.repeat(exponents, 32, 1) - 127).astype(np.float32)
    return {
        f"{module}.weight_packed": ("U8", halves(codes)),
        f"{module}.weight_scale": ("U8", exponents),
    }, w


def test_mxfp4_and_mxfp8(find: Callable[..., Detected]) -> None:
    args = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    tensors, w = ct_mxfp4()
    found = find(ct_config(args, args, "mxfp4-pack-quantized"), tensors)
    assert np.array_equal(values(found, tensors, 32, 64), w)
    tensors[f"{Q}.weight"] = ("F8_E4M3", rng(5).integers(0, 0x70, (32, 64)))
    del tensors[f"{Q}.weight_packed"]
    eight = {**args, "num_bits": 8, "dynamic": True}
    found = find(ct_config(eight, eight, "mxfp8-quantized"), tensors)
    assert found.matrices[f"{Q}.weight"]["input"] == {"quant": "mxfp8"}
    scale = stored.floats("F8_E8M0", tensors[f"{Q}.weight_scale"][1])
    w = np.repeat(scale, 32, 1) * stored.floats("F8_E4M3", tensors[f"{Q}.weight"][1])
    assert np.array_equal(values(found, tensors, 32, 64), w)


def test_a_group_has_its_own_format(find: Callable[..., Detected]) -> None:
    """mixed-precision: by exact name, else by expression at the start, else by class."""
    k_proj, v_proj = f"{ATTN}.k_proj", f"{ATTN}.v_proj"
    tensors, w_q = ct_packed(4, 32)
    eight, w_k = ct_packed(8, None, module=k_proj)
    floats, w_v = ct_mxfp4(v_proj)
    tensors |= eight | floats
    fp4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    groups = {
        "a": {"targets": ["Linear"], "format": "pack-quantized", "weights": int_args()},
        "b": {
            "targets": [r"re:.*k_proj"],
            "format": "pack-quantized",
            "weights": int_args(8, None),
        },
        "c": {"targets": [v_proj], "format": "mxfp4-pack-quantized", "weights": fp4},
        "d": {"targets": ["re:proj"], "format": "pack-quantized", "weights": int_args(2)},
    }
    section = {**ct_config(None, fmt="mixed-precision"), "config_groups": groups}
    found = find(section, tensors)
    assert np.array_equal(values(found, tensors, 40, 96), w_q)
    assert np.array_equal(values(found, tensors, 40, 96, k_proj), w_k)
    assert np.array_equal(values(found, tensors, 32, 64, v_proj), w_v)


@pytest.mark.parametrize(
    "ignore, ignored",
    (
        (["lm_head"], False),
        (["re:.*self_attn.*"], True),
        (["re:self_attn"], False),  # at the start only
        (["q_proj"], True),  # the end of a path
        (["self_attn.q_proj"], True),
        (["model.layers.0"], False),  # never a parent
        (["proj"], False),
        ([f"{ATTN}.qkv_proj"], True),  # the projection that the shard is fused into
    ),
)
def test_ignore_lists(find: Callable[..., Detected], ignore: list[str], ignored: bool) -> None:
    tensors, _ = ct_packed(4, 32, module="model.layers.0.mlp.up_proj")
    found = find(ct_config(int_args(), ignore=ignore), tensors | plain(Q))
    assert (Q in found.ignored) == ignored
    assert bool(found.notes) != ignored  # a plain projection is told unless the list has it


def test_tensors_beat_the_ignore_list(find: Callable[..., Detected]) -> None:
    tensors, w = ct_packed(4, 32, module="lm_head")
    found = find(ct_config(int_args()), tensors)
    assert np.array_equal(values(found, tensors, 40, 96, "lm_head"), w)
    assert found.notes == ["1 modules are quantized although excluded, and read so: lm_head"]


def test_a_fused_projection_is_ignored_whole(find: Callable[..., Detected]) -> None:
    fused = f"{ATTN}.qkv_proj"
    tensors, _ = ct_packed(4, 32, module=f"{ATTN}.o_proj")
    shards = [f"{ATTN}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    found = find(ct_config(int_args(), ignore=shards), tensors | plain(fused))
    assert list(found.ignored) == [fused]
    with pytest.raises(_core.CheckpointError, match=r"qkv_proj: .* excludes .*q_proj.*and not .*k"):
        find(ct_config(int_args(), ignore=shards[:1]), tensors | plain(fused))
    gate_up = "model.layers.0.mlp.gate_up_proj"
    with pytest.raises(_core.CheckpointError, match=r"gate_up_proj: .* excludes .*up_proj"):
        find(ct_config(int_args(), ignore=["re:.*mlp.up_proj"]), tensors | plain(gate_up))


@pytest.mark.parametrize(
    "more, message",
    (
        ({"format": "marlin-24"}, "2:4 sparsity"),
        ({"format": "mxfp6-pack-quantized"}, "6-bit"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        (
            {"transform_config": {"config_groups": {"R": {"apply": [{"location": "input"}]}}}},
            "transform",
        ),
    ),
)
def test_what_compressed_tensors_has_and_qkv_has_not(
    find: Callable[..., Detected], more: Config, message: str
) -> None:
    tensors, _ = ct_packed(4, 32)
    with pytest.raises(_core.UnsupportedError, match=message):
        find(ct_config(int_args(), **more), tensors)


def test_no_group_means_a_quantized_module(find: Callable[..., Detected]) -> None:
    tensors, _ = ct_packed(4, 32)
    section = ct_config(int_args())
    section["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    with pytest.raises(_core.CheckpointError, match="weight_packed is I32.*no group"):
        find(section, tensors)


# FP8.


@pytest.mark.parametrize("scale", (np.float32(0.5), np.full(32, 0.5), np.full((32, 1), 0.5)))
def test_fp8_by_tensor_and_row(find: Callable[..., Detected], scale: Array) -> None:
    tensors = fp8_module(Q, weight_scale=scale)
    found = find({"quant_method": "fp8", "activation_scheme": "dynamic"}, tensors)
    assert found.matrices[f"{Q}.weight"]["input"] == {"quant": "fp8"}
    w = np.float32(0.5) * stored.floats("F8_E4M3", tensors[f"{Q}.weight"][1])
    assert np.array_equal(values(found, tensors, 32, 64), w)


@pytest.mark.parametrize("name", ("input_scale", "activation_scale"))
def test_fp8_static(find: Callable[..., Detected], name: str) -> None:
    section = {"quant_method": "fp8", "activation_scheme": "static"}
    tensors = fp8_module(Q, weight_scale=0.5)
    with pytest.raises(_core.CheckpointError, match="q_proj.input_scale is missing.*static"):
        find(section, tensors)
    tensors[f"{Q}.{name}"] = ("F32", np.float32(0.125))
    description = find(section, tensors).matrices[f"{Q}.weight"]
    assert description["input"] == {"quant": "fp8", "scale": 0.125}
    assert description["also"] == [f"{Q}.{name}"]
    section["activation_scheme"] = "dynamic"
    with pytest.raises(_core.CheckpointError, match=f"{name} is F32.* is left over"):
        find(section, tensors)


@pytest.mark.parametrize("dtype", ("F32", "BF16", "U8", "F8_E8M0"))
def test_fp8_blocks(find: Callable[..., Detected], dtype: str) -> None:
    """With ragged edges; exponents as scales make those of inputs powers of two, too."""
    n, k = 192, 160
    bits: Array = rng(1).uniform(0.1, 1, (2, 2)).astype(np.float32)
    if dtype == "BF16":
        bits = make_tiny.bf16_bits(bits)
    elif dtype != "F32":
        bits = rng(1).integers(110, 130, (2, 2))
    tensors: Tensors = {
        f"{Q}.weight": ("F8_E4M3", rng(3).integers(0, 0x70, (n, k))),
        f"{Q}.weight_scale_inv": (dtype, bits),
    }
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    section |= {"weight_block_size": [128, 128]}  # type: ignore[dict-item]
    found = find(section, tensors)
    scales = stored.floats("F8_E8M0" if dtype == "U8" else dtype, bits)
    each = np.repeat(np.repeat(scales, 128, 0)[:n], 128, 1)[:, :k]
    w = each * stored.floats("F8_E4M3", tensors[f"{Q}.weight"][1])
    assert np.array_equal(values(found, tensors, n, k), w)
    inp = found.matrices[f"{Q}.weight"]["input"]
    assert inp.get("power_of_two", False) == (dtype in ("U8", "F8_E8M0"))
    del section["weight_block_size"]
    with pytest.raises(_core.CheckpointError, match="weight_scale_inv.*no weight_block_size"):
        find(section, tensors)


@pytest.mark.parametrize(
    "ignored, hit",
    (
        (["q_proj"], True),
        ([Q], True),
        (["layers.0.self_attn.q_proj"], True),
        (["model.layers.0.self_attn"], True),
        (["layers.0.self_attn.qkv_proj"], True),
        (["layers.0.self_attn.q"], False),
        (["ayers.0.self_attn.q_proj"], False),
        (["layers.1.self_attn.q_proj"], False),
    ),
)
def test_fp8_ignore_lists(find: Callable[..., Detected], ignored: list[str], hit: bool) -> None:
    tensors = fp8_module("model.layers.0.mlp.gate_proj") | plain(Q)
    for key in ("ignored_layers", "modules_to_not_convert"):
        found = find({"quant_method": "fp8", key: ignored}, tensors)
        assert (Q in found.ignored) == hit


def test_fp8_ignores_a_gate_and_no_gate_up(find: Callable[..., Detected]) -> None:
    gate, fused = "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_up_proj"
    tensors = fp8_module(fused) | plain(gate)
    found = find({"quant_method": "fp8", "ignored_layers": ["mlp.gate"]}, tensors)
    assert list(found.ignored) == [gate] and found.notes == []


def test_fp8_names_what_its_projections_are_made_of(find: Callable[..., Detected]) -> None:
    fused = "model.layers.0.linear_attn.in_proj_ba"
    tensors = fp8_module(Q) | plain(fused)
    section = {
        "quant_method": "fp8",
        "packed_modules_mapping": {"in_proj_ba": ["in_proj_b", "in_proj_a"]},
        "modules_to_not_convert": ["in_proj_b", "in_proj_a"],
    }
    assert list(find(section, tensors).ignored) == [fused]
    section["modules_to_not_convert"] = ["in_proj_b"]
    with pytest.raises(
        _core.CheckpointError, match="in_proj_ba: .*in_proj_b from .* and not .*in_proj_a"
    ):
        find(section, tensors)


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_scales_are_numbers(find: Callable[..., Detected], bad: float) -> None:
    scale = np.full(32, 0.5)
    scale[3] = bad
    with pytest.raises(_core.CheckpointError, match="q_proj.weight_scale: element 3"):
        find({"quant_method": "fp8"}, fp8_module(Q, weight_scale=scale))
    assert find({"quant_method": "fp8"}, fp8_module(Q, weight_scale=np.zeros(32))).matrices


def test_fp8_without_a_scale(find: Callable[..., Detected]) -> None:
    tensors = fp8_module(Q) | fp8_module(f"{ATTN}.k_proj")
    del tensors[f"{Q}.weight_scale"]
    with pytest.raises(_core.CheckpointError, match="q_proj.weight_scale is missing"):
        find({"quant_method": "fp8"}, tensors)
    with pytest.raises(_core.CheckpointError, match="weight is F8_E4M3.*nothing says how"):
        find(None, {f"{Q}.weight": tensors[f"{Q}.weight"]})


def test_w8a8(find: Callable[..., Detected]) -> None:
    codes, scale = rng(1).integers(-127, 128, (32, 64)), rng(2).uniform(0.1, 1, (32, 1))
    tensors: Tensors = {
        f"{Q}.weight": ("I8", codes),
        f"{Q}.weight_scale": ("F32", scale),
    }
    found = find({"quant_method": "w8a8_int8"}, tensors)
    assert found.matrices[f"{Q}.weight"]["input"] == {"quant": "int8"}
    w = scale.astype(np.float32) * codes.astype(np.float32)
    assert np.array_equal(values(found, tensors, 32, 64), w)
    with pytest.raises(_core.CheckpointError, match="weight is I8.*F8_E4M3 or F8_E5M2"):
        find({"quant_method": "w8a8_fp8"}, tensors)
    found = find({"quant_method": "w8a8_fp8"}, fp8_module(Q, weight_scale=scale))
    assert found.matrices[f"{Q}.weight"]["input"] == {"quant": "fp8"}


def test_blockwise_int8(find: Callable[..., Detected]) -> None:
    codes, scale = rng(1).integers(-127, 128, (40, 64)), rng(2).uniform(0.1, 1, (2, 2))
    tensors: Tensors = {
        f"{Q}.weight": ("I8", codes),
        f"{Q}.weight_scale_inv": ("F32", scale),
    }
    found = find({"quant_method": "blockwise_int8", "weight_block_size": [32, 32]}, tensors)
    each = np.repeat(np.repeat(scale.astype(np.float32), 32, 0)[:40], 32, 1)
    assert np.array_equal(values(found, tensors, 40, 64), each * codes.astype(np.float32))


def test_w4afp8(find: Callable[..., Detected]) -> None:
    expert = "model.layers.0.mlp.experts.0.up_proj"
    codes = rng(1).integers(-8, 8, (32, 256))
    scale = rng(2).uniform(0.1, 1, (32, 2)).astype(np.float32)
    tensors: Tensors = {
        f"{expert}.weight": ("I8", halves(codes & 15).view(np.int8)),
        f"{expert}.weight_scale_inv": ("F32", scale),
        f"{expert}.input_scale": ("F32", np.float32(0.5)),
    } | fp8_module(Q, 64, 128, weight_scale_inv=np.ones((1, 1)))
    found = find({"quant_method": "w4afp8", "activation_scheme": "dynamic"}, tensors)
    w = np.repeat(scale, 128, 1) * codes.astype(np.float32)
    assert np.array_equal(values(found, tensors, 32, 256, expert), w)
    assert found.matrices[f"{expert}.weight"]["input"] == {"quant": "fp8", "scale": 0.5}
    assert found.matrices[f"{Q}.weight"]["input"] == {"quant": "fp8_group", "group": 128}


def test_mxfp8(find: Callable[..., Detected]) -> None:
    tensors: Tensors = {
        f"{Q}.weight": ("F8_E4M3", rng(5).integers(0, 0x70, (32, 64))),
        f"{Q}.weight_scale_inv": ("U8", rng(2).integers(115, 130, (32, 2))),
    }
    found = find({"quant_method": "mxfp8"}, tensors)
    assert found.matrices[f"{Q}.weight"]["scale"]["format"] == "F8_E8M0"
    tensors[f"{Q}.weight_scale_inv"][1][3, 1] = 255
    with pytest.raises(_core.CheckpointError, match="weight_scale_inv: element 7"):
        find({"quant_method": "mxfp8"}, tensors)


# ModelOpt.


def modelopt(algo: str, **more: Any) -> Config:
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"], **more}


def nvfp4_module(module: str = Q, n: int = 32, k: int = 64) -> tuple[Tensors, Array]:
    codes = rng(1).integers(0, 16, (n, k))
    return {
        f"{module}.weight": ("U8", halves(codes)),
        f"{module}.weight_scale": ("F8_E4M3", rng(2).integers(1, 0x70, (n, k // 16))),
        f"{module}.weight_scale_2": ("F32", np.float32(0.25)),
        f"{module}.input_scale": ("F32", np.float32(0.5)),
    }, codes


def test_modelopt_nvfp4(find: Callable[..., Detected]) -> None:
    tensors, codes = nvfp4_module()
    found = find(modelopt("NVFP4", group_size=16), tensors)
    assert found.method == "modelopt_fp4"
    assert found.matrices[f"{Q}.weight"]["input"] == {"quant": "nvfp4", "group": 16, "scale": 0.5}
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    value = np.where(codes & 8, -grid[codes & 7], grid[codes & 7])
    scale = np.repeat(stored.floats("F8_E4M3", tensors[f"{Q}.weight_scale"][1]), 16, 1)
    assert np.array_equal(values(found, tensors, 32, 64), np.float32(0.25) * (scale * value))
    tensors[f"{Q}.weight_scale"][1][5, 2] = 0x7F
    with pytest.raises(_core.CheckpointError, match="q_proj.weight_scale: element 22 is not"):
        find(modelopt("NVFP4"), tensors)


def test_modelopt_nvfp4_without_quantized_inputs(find: Callable[..., Detected]) -> None:
    tensors, _ = nvfp4_module()
    found = find(modelopt("W4A16_NVFP4"), tensors)
    assert "input" not in found.matrices[f"{Q}.weight"]
    del tensors[f"{Q}.input_scale"]
    with pytest.raises(_core.CheckpointError, match="q_proj.input_scale is missing"):
        find(modelopt("NVFP4"), tensors)
    del tensors[f"{Q}.weight_scale_2"]
    with pytest.raises(_core.CheckpointError, match="q_proj.weight_scale_2 is missing"):
        find(modelopt("W4A16_NVFP4"), tensors)


def test_modelopt_awq_scales_the_input(find: Callable[..., Detected]) -> None:
    tensors, _ = nvfp4_module()
    tensors[f"{Q}.pre_quant_scale"] = ("BF16", np.full(64, 0x3F80))
    found = find(modelopt("NVFP4_AWQ"), tensors)
    assert found.matrices[f"{Q}.weight"]["k_scale"] == {"tensor": f"{Q}.pre_quant_scale"}
    tensors[f"{Q}.pre_quant_scale"] = ("BF16", np.full(32, 0x3F80))
    with pytest.raises(_core.CheckpointError, match=r"pre_quant_scale is BF16 \[32\]"):
        find(modelopt("NVFP4_AWQ"), tensors)


def test_modelopt_int4_pairs_rows(find: Callable[..., Detected]) -> None:
    codes = rng(1).integers(-8, 8, (32, 256))
    scale = rng(2).uniform(0.1, 1, (32, 2)).astype(np.float32)
    tensors: Tensors = {
        f"{Q}.weight": ("U8", ((codes[0::2] & 15) | (codes[1::2] & 15) << 4)),
        f"{Q}.weight_scale": ("F32", scale),
        f"{Q}.pre_quant_scale": ("BF16", np.full(256, 0x3F80)),
    }
    found = find(modelopt("W4A16_AWQ", group_size=128), tensors)
    w = np.repeat(scale, 128, 1) * codes.astype(np.float32)
    assert np.array_equal(values(found, tensors, 32, 256), w)


@pytest.mark.parametrize(
    "algo, scale",
    (
        ("FP8", np.float32(0.5)),
        ("FP8_PER_CHANNEL_PER_TOKEN", np.full(32, 0.5)),
        ("FP8_PB_WO", np.full((1, 1, 1, 1), 0.5)),
    ),
)
def test_modelopt_fp8(find: Callable[..., Detected], algo: str, scale: Array) -> None:
    tensors = fp8_module(Q, weight_scale=scale)
    if algo == "FP8":
        tensors[f"{Q}.input_scale"] = ("F32", np.float32(1))
    found = find(modelopt(algo), tensors)
    assert found.method == "modelopt_fp8"
    w = np.float32(0.5) * stored.floats("F8_E4M3", tensors[f"{Q}.weight"][1])
    assert np.array_equal(values(found, tensors, 32, 64), w)


def test_modelopt_in_its_own_file(find: Callable[..., Detected]) -> None:
    tensors, _ = nvfp4_module()
    own = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["*k_proj*"]},
    }
    tensors |= plain(f"{ATTN}.k_proj")
    found = find(None, tensors, files={"hf_quant_config.json": own})
    assert (found.method, found.source) == ("modelopt_fp4", "hf_quant_config.json")
    assert found.ignored == {f"{ATTN}.k_proj": "*k_proj*"} and found.notes == []


def test_modelopt_mixed(find: Callable[..., Detected]) -> None:
    """By the layer's name, or that of the projection that it is fused into."""
    k_proj, up = f"{ATTN}.k_proj", "model.layers.0.mlp.up_proj"
    tensors, _ = nvfp4_module(up)
    tensors |= fp8_module(k_proj, weight_scale=0.5, input_scale=0.25) | plain(Q)
    layers = {
        up: {"quant_algo": "NVFP4", "group_size": 16},
        f"{ATTN}.qkv_proj": {"quant_algo": "FP8"},
    }
    section = modelopt("MIXED_PRECISION", quantized_layers=layers)
    found = find(section, tensors)
    assert found.method == "modelopt_mixed"
    assert found.matrices[f"{k_proj}.weight"]["input"] == {"quant": "fp8", "scale": 0.25}
    assert found.matrices[f"{up}.weight"]["input"]["quant"] == "nvfp4"
    del layers[up]
    with pytest.raises(_core.CheckpointError, match="up_proj.weight is U8.*no quant_algo"):
        find(section, tensors)
    with pytest.raises(_core.CheckpointError, match="quantized_layers, which is missing"):
        find(modelopt("MIXED_PRECISION"), tensors)


def test_modelopt_says_what_it_cannot(find: Callable[..., Detected]) -> None:
    with pytest.raises(_core.UnsupportedError, match="quant_algo 'NVFP4_SVD'.*NVFP4_AWQ"):
        find(modelopt("NVFP4_SVD"), nvfp4_module()[0])


@pytest.mark.parametrize(
    "pattern, hit",
    (
        ("*self_attn*", True),
        ("model.layers.0.*", True),
        ("q_proj", True),
        ("model.layers.*.self_attn", True),
        ("q_pro", False),
        ("layers.0.self_attn.q_proj", False),
    ),
)
def test_globs(find: Callable[..., Detected], pattern: str, hit: bool) -> None:
    tensors = fp8_module("model.layers.1.mlp.up_proj", weight_scale=1, input_scale=1) | plain(Q)
    for key in ("exclude_modules", "ignore"):
        found = find({**modelopt("FP8"), "ignore": [], key: [pattern]}, tensors)
        assert (Q in found.ignored) == hit


# Quark.


def quark(weight: Any, inputs: Any = None, **more: Any) -> Config:
    scheme = {"weight": weight, "input_tensors": inputs}
    base = {"quant_method": "quark", "global_quant_config": scheme, "exclude": ["lm_head"]}
    return {**base, "export": {"pack_method": "reorder"}, **more}


def spec(dtype: str, by: str = "per_tensor", **more: Any) -> Config:
    return {"dtype": dtype, "qscheme": by, "symmetric": True, "is_dynamic": False, **more}


@pytest.mark.parametrize("dtype", ("int4", "uint4"))
@pytest.mark.parametrize("method", ("reorder", "order"))
def test_quark_int4(find: Callable[..., Detected], dtype: str, method: str) -> None:
    low = -8 if dtype == "int4" else 0
    codes = rng(1).integers(low, low + 16, (64, 32))  # [k, n]
    zeros = rng(2).integers(low, low + 16, (2, 32))
    scale = rng(3).uniform(0.1, 1, (2, 32)).astype(np.float32)

    def pack(values: Array) -> Array:
        return awq_words(values & 15) if method == "reorder" else words(values & 15, 4)

    tensors: Tensors = {
        f"{Q}.weight": ("I32", pack(codes)),
        f"{Q}.weight_scale": ("F32", scale),
        f"{Q}.weight_zero_point": ("I32", pack(zeros)),
    }
    weight = spec(dtype, "per_group", group_size=32, symmetric=False)
    section = quark(weight, export={"pack_method": method})
    found = find(section, tensors)
    w = np.repeat(scale, 32, 0) * (codes - np.repeat(zeros, 32, 0)).astype(np.float32)
    assert np.array_equal(values(found, tensors, 32, 64), w.T)


def test_quark_layers_count_most(find: Callable[..., Detected]) -> None:
    """The pattern of a layer, else the kind of layer, else the model's."""
    k_proj, v_proj = f"{ATTN}.k_proj", f"{ATTN}.v_proj"
    tensors = fp8_module(Q, weight_scale=0.5) | fp8_module(k_proj, weight_scale=np.full(32, 0.5))
    mxfp4 = {"weight": spec("fp4", "per_group", group_size=32, scale_format="e8m0")}
    tensors[f"{v_proj}.weight"] = ("U8", rng(1).integers(0, 256, (32, 32)))
    tensors[f"{v_proj}.weight_scale"] = ("U8", rng(2).integers(115, 130, (32, 2)))
    dynamic = spec("fp8_e4m3", "per_channel", is_dynamic=True)
    section = quark(
        spec("int8"),
        layer_quant_config={
            "*k_proj": {"weight": spec("fp8_e4m3", "per_channel"), "input_tensors": dynamic},
            "*v_proj": mxfp4,
        },
        layer_type_quant_config={"Linear": {"weight": spec("fp8_e4m3")}},
    )
    found = find(section, tensors)
    assert "input" not in found.matrices[f"{Q}.weight"]
    assert found.matrices[f"{k_proj}.weight"]["input"] == {"quant": "fp8"}
    assert found.matrices[f"{v_proj}.weight"]["scale"]["format"] == "F8_E8M0"
    del section["layer_type_quant_config"]
    with pytest.raises(_core.CheckpointError, match="q_proj.weight is F8_E4M3.*I8 is wanted"):
        find(section, tensors)


def test_quark_nvfp4_has_two_specs(find: Callable[..., Detected]) -> None:
    tensors, _ = nvfp4_module()
    tensors[f"{Q}.input_scale_2"] = tensors.pop(f"{Q}.input_scale")
    two = [spec("fp4", "per_group", group_size=16), spec("fp8_e4m3", is_scale_quant=True)]
    found = find(quark(two, two), tensors)
    assert found.matrices[f"{Q}.weight"]["input"] == {"quant": "nvfp4", "group": 16, "scale": 0.5}


def test_quark_without_export(find: Callable[..., Detected]) -> None:
    section = quark(spec("fp8_e4m3"))
    del section["export"]
    with pytest.raises(_core.CheckpointError, match="export is missing"):
        find(section, fp8_module(Q))
    with pytest.raises(_core.UnsupportedError, match="weight_format 'fake_quantized'"):
        find(quark(spec("fp8_e4m3"), export={"weight_format": "fake_quantized"}), fp8_module(Q))
    with pytest.raises(_core.UnsupportedError, match="quark mx6 per_group is not supported"):
        find(quark(spec("mx6", "per_group")), fp8_module(Q))


# MLX.


def mlx(bits: int, group: int, module: str = Q, k: int = 128) -> tuple[Tensors, stored.F32]:
    codes = rng(bits).integers(0, 1 << bits, (32, k))
    scales = rng(1).integers(0x3C00, 0x3E00, (32, k // group))
    biases = rng(2).integers(0xBC00, 0xBE00, (32, k // group))
    each = [np.repeat(stored.floats("BF16", a), group, 1) for a in (scales, biases)]
    return {
        f"{module}.weight": ("U32", words(codes, bits).view(np.uint32)),
        f"{module}.scales": ("BF16", scales),
        f"{module}.biases": ("BF16", biases),
    }, (each[0] * codes.astype(np.float32) + each[1])


@pytest.mark.parametrize("bits", (1, 2, 3, 4, 5, 6, 8))
@pytest.mark.parametrize("group", (32, 64, 128))
def test_mlx_affine(find: Callable[..., Detected], bits: int, group: int) -> None:
    tensors, w = mlx(bits, group)
    found = find({"bits": bits, "group_size": group}, tensors, key="quantization")
    assert found.method == "mlx"
    assert np.array_equal(values(found, tensors, 32, 128), w)


def test_mlx_by_path(find: Callable[..., Detected]) -> None:
    embed, v_proj = "model.embed_tokens", f"{ATTN}.v_proj"
    tensors, _ = mlx(4, 64)
    eight, w = mlx(8, 32, embed)
    tensors |= eight | plain(v_proj)
    section = {"bits": 4, "group_size": 64, embed: {"bits": 8, "group_size": 32}, v_proj: False}
    found = find(section, tensors)
    assert np.array_equal(values(found, tensors, 32, 128, embed), w)
    assert found.ignored == {v_proj: v_proj} and found.notes == []


def test_mlx_community_says_nothing(find: Callable[..., Detected]) -> None:
    """Only the shapes tell, of a matrix whose width the config gives."""
    for bits, group in ((4, 64), (8, 64), (4, 32), (8, 32), (2, 64), (3, 128)):
        tensors, w = mlx(bits, group)
        found = find(None, tensors)
        assert found.source == f"the tensors ({Q}.weight)"
        assert np.array_equal(values(found, tensors, 32, 128), w)


@pytest.mark.parametrize("mode, group", (("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)))
def test_mlx_floats(find: Callable[..., Detected], mode: str, group: int) -> None:
    bits = 8 if mode == "mxfp8" else 4
    codes = rng(1).integers(0, 0x70 if bits == 8 else 16, (32, 128))
    scales = rng(2).integers(0x30, 0x70, (32, 128 // group))
    tensors: Tensors = {
        f"{Q}.weight": ("U32", words(codes, bits).view(np.uint32)),
        f"{Q}.scales": ("U8", scales),
    }
    found = find({"bits": bits, "group_size": group, "mode": mode}, tensors)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    value = np.where(codes & 8, -grid[codes & 7], grid[codes & 7])
    if bits == 8:
        value = stored.floats("F8_E4M3", codes)
    scale = stored.floats("F8_E4M3" if mode == "nvfp4" else "F8_E8M0", scales)
    assert np.array_equal(
        values(found, tensors, 32, 128), (np.repeat(scale, group, 1) * value).astype(np.float32)
    )
    assert np.array_equal(
        values(find(None, tensors), tensors, 32, 128), values(found, tensors, 32, 128)
    )


def test_mlx_that_contradicts_itself(find: Callable[..., Detected]) -> None:
    tensors, _ = mlx(4, 64, f"{ATTN}.o_proj")
    with pytest.raises(_core.CheckpointError, match="bits and group_size stand nowhere"):
        find(None, tensors)
    tensors, _ = mlx(4, 64)
    with pytest.raises(_core.CheckpointError, match=r"weight is U32 \[32, 16\] beside.*32 words"):
        find({"bits": 8, "group_size": 64}, tensors)
    with pytest.raises(_core.UnsupportedError, match="mode 'ternary'"):
        find({"bits": 8, "group_size": 64, "mode": "ternary"}, tensors)
    del tensors[f"{Q}.biases"]
    with pytest.raises(_core.CheckpointError, match="q_proj.biases is missing"):
        find({"bits": 4, "group_size": 64}, tensors)


# bitsandbytes.


def bnb(
    kind: str = "nf4", *, n: int = 32, k: int = 64, nested: bool = False, dtype: str = "float32"
) -> tuple[Tensors, stored.F32]:
    codes = rng(1).integers(0, 16, n * k)
    table = np.sort(rng(2).uniform(-1, 1, 16)).astype(np.float32)
    n_blocks = -(-n * k // 64)
    state: Config = {"quant_type": kind, "blocksize": 64, "dtype": dtype, "shape": [n, k]}
    absmax = rng(3).uniform(0.1, 1, n_blocks).astype(np.float32)
    tensors: Tensors = {
        f"{Q}.weight": ("U8", (codes[0::2] << 4 | codes[1::2])[:, None]),
        f"{Q}.weight.absmax": ("F32", absmax),
        f"{Q}.weight.quant_map": ("F32", table),
    }
    if nested:
        small = rng(4).integers(0, 256, n_blocks)
        inner = rng(5).uniform(-1, 1, 256).astype(np.float32)
        outer = rng(6).uniform(0.1, 1, -(-n_blocks // 256)).astype(np.float32)
        absmax = inner[small] * outer[np.arange(n_blocks) // 256] + np.float32(0.3)
        state |= {"nested_blocksize": 256, "nested_offset": 0.3, "nested_dtype": "float32"}
        tensors[f"{Q}.weight.absmax"] = ("U8", small)
        tensors[f"{Q}.weight.nested_absmax"] = ("F32", outer)
        tensors[f"{Q}.weight.nested_quant_map"] = ("F32", inner)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"{Q}.weight.quant_state.bitsandbytes__{kind}"] = ("U8", text)
    w = table[codes] * absmax[np.arange(n * k) // 64]
    return tensors, w.reshape(n, k)


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("kind", ("nf4", "fp4"))
@pytest.mark.parametrize("nested", (False, True))
@pytest.mark.parametrize("k", (64, 128, 96, 40))  # rows of 96 and 40 are no whole blocks
def test_bitsandbytes(find: Callable[..., Detected], kind: str, nested: bool, k: int) -> None:
    tensors, w = bnb(kind, nested=nested, k=k)
    found = find(BNB, tensors)
    assert np.array_equal(values(found, tensors, 32, k), w)
    used = {f"{Q}.weight", *found.matrices[f"{Q}.weight"]["also"]}
    scale = found.matrices[f"{Q}.weight"]["scale"]
    assert used | {scale.get("tensor", f"{Q}.weight")} == set(tensors)


@pytest.mark.parametrize("dtype, short", (("float16", "F16"), ("bfloat16", "BF16")))
def test_bitsandbytes_rounds(find: Callable[..., Detected], dtype: str, short: str) -> None:
    """To the dtype that its state has, as bitsandbytes itself does."""
    tensors, w = bnb(dtype=dtype)
    found = find(BNB, tensors)
    assert np.array_equal(values(found, tensors, 32, 64), stored.rounded(w, short))


def test_bitsandbytes_int8(find: Callable[..., Detected]) -> None:
    codes, scb = rng(1).integers(-127, 128, (32, 64)), rng(2).uniform(0.1, 1, 32)
    tensors: Tensors = {
        f"{Q}.weight": ("I8", codes),
        f"{Q}.SCB": ("F32", scb),
        f"{Q}.weight_format": ("U8", np.zeros(())),
    }
    found = find({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors)
    w = (scb.astype(np.float32) / np.float32(127))[:, None] * codes.astype(np.float32)
    assert np.array_equal(values(found, tensors, 32, 64), w)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit is true, but .*U8.*4 bits"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is fp4, but there is .*__nf4"),
    ],
)
def test_bitsandbytes_that_contradicts_itself(
    find: Callable[..., Detected], change: dict[str, Any], message: str
) -> None:
    """Both loaded as what the tensors are, without a word."""
    with pytest.raises(_core.CheckpointError, match=message):
        find({**BNB, **change}, bnb()[0])


@pytest.mark.parametrize("fmt", ["pack-quantized", "int-quantized"])
def test_a_format_of_another_type(find: Callable[..., Detected], fmt: str) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    section = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"format": fmt, "targets": ["Linear"], "weights": weights}},
    }
    with pytest.raises(_core.CheckpointError, match=f"format {fmt} holds weights of type int, not"):
        find(section, {})


@pytest.mark.parametrize("k", (64, 96))  # rows of 96 are no whole blocks: scales are copied
def test_bitsandbytes_scale_that_is_no_number(find: Callable[..., Detected], k: int) -> None:
    tensors, _ = bnb(k=k)
    tensors[f"{Q}.weight.absmax"][1][3] = np.nan
    with pytest.raises(_core.CheckpointError, match="not a finite number"):
        find(BNB, tensors)


@pytest.mark.parametrize(
    "state, message",
    (
        ("{", "not JSON"),
        ("[]", "must hold an object"),
        ('{"shape": [32, 65], "blocksize": 64}', r"4096 codes|2048 codes"),
        ('{"shape": [32], "blocksize": 64}', "shape is"),
        ('{"shape": [32, 64]}', "blocksize is None"),
        ('{"shape": [32, 64], "blocksize": 0}', "blocksize is 0"),
        ('{"shape": [32, 64], "blocksize": 128}', r"absmax is F32 \[32\]"),
    ),
)
def test_bitsandbytes_state_that_is_wrong(
    find: Callable[..., Detected], state: str, message: str
) -> None:
    tensors, _ = bnb()
    name = f"{Q}.weight.quant_state.bitsandbytes__nf4"
    tensors[name] = ("U8", np.frombuffer(state.encode(), np.uint8))
    with pytest.raises(_core.CheckpointError, match=message):
        find(BNB, tensors)
    del tensors[name]
    with pytest.raises(_core.CheckpointError, match="quant_state.* is missing"):
        find(BNB, tensors)


# MXFP4 of gpt-oss.


def test_mxfp4_blocks(find: Callable[..., Detected]) -> None:
    experts = "model.layers.0.mlp.experts.down_proj"
    tensors: Tensors = {
        f"{experts}_blocks": ("U8", rng(1).integers(0, 256, (2, 8, 3, 16))),
        f"{experts}_scales": ("U8", rng(2).integers(115, 130, (2, 8, 3))),
        f"{experts}_bias": ("BF16", np.zeros((2, 8))),
    }
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    found = find(section, tensors | plain(Q))
    assert list(found.matrices) == [experts] and list(found.ignored) == [Q]
    assert stored.evaluate(found.matrices[experts], stored.as_stored(tensors), 16, 96).shape == (
        16,
        96,
    )
    tensors[f"{experts}_scales"] = ("U8", np.zeros((2, 8, 2)))
    with pytest.raises(_core.CheckpointError, match=r"_scales is U8 \[2, 8, 2\].*\[2, 8, 3\]"):
        find(section, tensors)
    del tensors[f"{experts}_scales"]
    with pytest.raises(_core.CheckpointError, match="down_proj_scales is missing"):
        find(section, tensors)
