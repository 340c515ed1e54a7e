"""qkv.quantization: what is found in a checkpoint, and that its descriptions give the values that
the formats' own tools give."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkv import _core
from qkv.quantization import METHODS, Detected, detect, table
from ref import stored

QUANTIZED = {
    "autoround-int4-g128-sym-qwen3-s": "auto-round",
    "awq-gemm-g128-llama-tiny": "awq",
    "bnb-nf4-llama-g": "bitsandbytes",
    "ct-fp8-dynamic-qwen3-s": "compressed-tensors",
    "ct-fp8-static-kv-llama-g": "compressed-tensors",
    "ct-mxfp4-llama-g": "compressed-tensors",
    "ct-nvfp4-qwen3-s": "compressed-tensors",
    "ct-w4a16-qwen3moe": "compressed-tensors",
    "ct-w8a8-int8-qwen3-s": "compressed-tensors",
    "fp8-block-deepseekv3": "fp8",
    "fp8-static-autofp8-llama-g": "fp8",
    "gptoss-mxfp4": "mxfp4",
    "gptq-int4-g32-descact-asym-qwen3-s": "gptq",
    "gptq-v2-int4-g64-asym-llama-g": "gptq",
    "mlx-4bit-g64-llama-tiny": "mlx",
    "modelopt-fp8-llama-g": "modelopt_fp8",
    "modelopt-nvfp4-qwen3-s": "modelopt_fp4",
    "quark-fp8-kv8-llama-g": "quark",
}


def found_in(folder: Path, quantization: str | None = None) -> Detected:
    return detect(_core.Checkpoint(str(folder)), quantization)


def all_tensors(folder: Path) -> dict[str, stored.Tensor]:
    found: dict[str, stored.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= stored.read(path)
    return found


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_of_every_tool(fixtures_dir: Path, name: str) -> None:
    """Bit for bit what the tool's own code gives."""
    folder = fixtures_dir / name
    found = found_in(folder)
    assert found.method == QUANTIZED[name]
    assert found.notes == [] and found.online is None
    tensors = all_tensors(folder)
    expected = np.load(folder / "dequant.npz")
    weights = [key.removesuffix("|shape") for key in expected.files if key.endswith("|shape")]
    assert len(weights) >= 2
    for weight in weights:
        shape = tuple(int(n) for n in expected[f"{weight}|shape"])
        values = evaluated(found, tensors, weight, shape)
        check_values(name, expected, weight, values)


def evaluated(
    found: Detected, tensors: dict[str, stored.Tensor], weight: str, shape: tuple[int, ...]
) -> stored.F32:
    """The hub's [experts, in, out] of gpt-oss is the transpose of what is stored."""
    if len(shape) == 3:
        n_experts, k_in, n_out = shape
        values = stored.evaluate(found.matrices[weight], tensors, n_experts * n_out, k_in)
        return np.ascontiguousarray(values.reshape(n_experts, n_out, k_in).transpose(0, 2, 1))
    return stored.evaluate(found.matrices[weight], tensors, *shape)


# The reference's order of operations is another: code * (scale * factor), which rounds twice; the
# formula here, factor * (scale * code), rounds once.
ULPS = {"ct-nvfp4-qwen3-s": 1, "modelopt-nvfp4-qwen3-s": 1}


def same(name: str, values: stored.F32, wanted: stored.F32) -> bool:
    if name in ULPS:
        steps = np.abs(values - wanted) / np.spacing(np.abs(wanted))
        return bool(steps.max() <= ULPS[name])
    return np.array_equal(values, wanted)


def check_values(name: str, expected: Any, weight: str, values: stored.F32) -> None:
    rows = values.reshape(-1, values.shape[-1])
    for key, part in ((weight, rows), ("rows_first64", rows[:64]), ("rows_last16", rows[-16:])):
        key = key if key == weight else f"{weight}|{key}"
        if key in expected.files:
            assert same(name, part, expected[key].reshape(part.shape)), key
    if name in ULPS:
        sums = rows.astype(np.float64).sum(axis=1)
        assert np.abs(sums - expected[f"{weight}|rowsum_f64"]).max() <= 1e-5
        return
    digest = hashlib.sha256(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()
    assert digest == str(expected[f"{weight}|sha256"]), weight


BAD = {
    "quant-gptq-but-bf16": "says gptq, but no tensor is quantized: .*weight is BF16",
    "fp8-nan-scale": "q_proj.weight_scale: element 3 is not a finite number",
    "fp8-scale-missing": "weight_scale is missing",
    "gptq-gidx-out-of-range": "g_idx: element .* is group 1048576",
    "gptq-qweight-short": r"g_idx is I32 \[32\], I32 \[24\] is wanted",
    "gptq-group-7": "scales is F16 .*group_size 7",
}


@pytest.mark.parametrize("name", BAD)
def test_bad(fixtures_dir: Path, name: str) -> None:
    with pytest.raises(_core.CheckpointError, match=BAD[name]):
        found_in(fixtures_dir / "bad" / name)


def test_zero_scales_are_legal(fixtures_dir: Path) -> None:
    found = found_in(fixtures_dir / "bad" / "fp8-zero-scale")
    assert len(found.matrices) == 7 and found.notes == []


def test_plain_and_gguf(fixtures_dir: Path) -> None:
    for folder in sorted(fixtures_dir.glob("base-*")):
        found = found_in(folder)
        assert (found.method, found.matrices, found.notes) == ("", {}, [])
    for folder in sorted(fixtures_dir.glob("gguf-*")):
        assert found_in(folder).method == "gguf"


def test_every_tensor_is_taken_once(fixtures_dir: Path) -> None:
    """Of what belongs to quantized weights, all is named by a description, and by one alone; the
    engine counts the rest, and the KV cache's scales are found elsewhere."""
    kv = ("k_scale", "v_scale", "output_scale")
    for name in QUANTIZED:
        found = found_in(fixtures_dir / name)
        named: list[str] = []
        for matrix in found.matrices.values():
            parts = [matrix[p] for p in ("codes", "zero", "scale", "min", "factor") if p in matrix]
            named += [part["tensor"] for part in parts if "tensor" in part]
            named += [
                *matrix.get("also", ()),
                *([matrix["k_group"]] if "k_group" in matrix else []),
            ]
        assert len(named) == len(set(named))
        for tensor, (dtype, _) in all_tensors(fixtures_dir / name).items():
            is_plain = dtype in ("BF16", "F16", "F32") and tensor.endswith(("weight", "bias"))
            is_other = tensor.endswith((*kv, "_bias", "sinks", "e_score_correction_bias"))
            assert is_plain or is_other or tensor in named, tensor


# What the user says.


@pytest.mark.parametrize(
    "fixture, given",
    (
        ("awq-gemm-g128-llama-tiny", ("awq", "awq_marlin", "moe_wna16", "humming")),
        ("gptq-v2-int4-g64-asym-llama-g", ("gptq", "gptq_marlin", "moe_wna16", "humming")),
        ("autoround-int4-g128-sym-qwen3-s", ("auto-round",)),
        ("bnb-nf4-llama-g", ("bitsandbytes",)),
        ("ct-w8a8-int8-qwen3-s", ("compressed-tensors", "w8a8_int8", "auto-round-int8")),
        ("ct-fp8-dynamic-qwen3-s", ("compressed-tensors", "w8a8_fp8", "humming")),
        ("modelopt-fp8-llama-g", ("modelopt", "modelopt_fp8")),
        ("modelopt-nvfp4-qwen3-s", ("modelopt", "modelopt_fp4", "petit_nvfp4")),
        ("fp8-block-deepseekv3", ("fp8",)),
        ("gptoss-mxfp4", ("mxfp4",)),
        ("mlx-4bit-g64-llama-tiny", ("mlx_q4",)),
        ("quark-fp8-kv8-llama-g", ("quark",)),
        ("gguf-q4_k_m-llama-g", ("gguf",)),
    ),
)
def test_every_other_name_is_refused(
    fixtures_dir: Path, fixture: str, given: tuple[str, ...]
) -> None:
    """Names that fit give what None gives; requantizing is told; all others name both."""
    plain = found_in(fixtures_dir / fixture)
    for name in METHODS:
        requantizes = name in {
            "fp8": ("nvfp4_online", "nvfp4", "int4", "modelopt_fp4", "quark_mxfp4"),
            "modelopt_fp8": ("nvfp4_online", "nvfp4", "int4", "quark_mxfp4"),
            "modelopt_fp4": ("quark_mxfp4",),
        }.get(plain.method, ())
        if name in given or name == "unquant" or requantizes:
            found = found_in(fixtures_dir / fixture, name)
            assert (found.online == name) == requantizes
            assert not requantizes or "validated again" in found.notes[-1]
            if name != "petit_nvfp4":
                assert str(found.matrices) == str(plain.matrices)
            continue
        if name == "humming" and plain.method not in ("gguf", "mxfp4"):
            continue
        with pytest.raises(_core.UnsupportedError) as error:
            found_in(fixtures_dir / fixture, name)
        if METHODS[name].kind != "refused":
            assert repr(name) in str(error.value) and plain.method in str(error.value)
            assert "leave" in str(error.value)


def test_inputs_of_petit_stay(fixtures_dir: Path) -> None:
    found = found_in(fixtures_dir / "modelopt-nvfp4-qwen3-s", "petit_nvfp4")
    assert all("input" not in matrix for matrix in found.matrices.values())


def test_online_methods_ask_for_it(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "base-qwen3-s-tiny"
    for name, method in METHODS.items():
        if method.makes:
            assert found_in(folder, name).online == name
        elif name == "unquant":
            assert found_in(folder, name).online is None
        elif method.kind != "refused":
            with pytest.raises(_core.UnsupportedError, match="only read, not made.*fp8"):
                found_in(folder, name)
    with pytest.raises(ValueError, match="quantization='int3': must be one of awq"):
        found_in(folder, "int3")


def test_all_names_are_known() -> None:
    assert len(METHODS) == 31 + 5  # SGLang's, and our own
    text = table()
    assert all(f"\n{name} " in text for name in METHODS)
    assert all(method.does for method in METHODS.values())


# Where it stands, in folders made here.


WEIGHT = "model.layers.0.self_attn.q_proj.weight"
FP8: dict[str, stored.Tensor] = {
    WEIGHT: ("F8_E4M3", np.full((32, 64), 0x38)),
    f"{WEIGHT}_scale": ("F32", np.float32(0.5)),
}
PLAIN: dict[str, stored.Tensor] = {WEIGHT: ("BF16", np.full((32, 64), 0x3F80))}


def made(
    folder: Path,
    config: dict[str, Any] | str,
    tensors: dict[str, stored.Tensor],
    quantization: str | None = None,
    **files: Any,
) -> Detected:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    stored.write(folder / "model.safetensors", tensors)
    return found_in(folder, quantization)


@pytest.mark.parametrize("method", ("hqq", "torchao", "aqlm", "exl2", "bitnet", "novel"))
def test_methods_that_are_not_read(tmp_path: Path, method: str) -> None:
    with pytest.raises(_core.UnsupportedError) as error:
        made(tmp_path, {"quantization_config": {"quant_method": method}}, PLAIN)
    assert f"quant_method '{method}' is not supported" in str(error.value)
    assert "take " in str(error.value) or "GGUF" in str(error.value) or method == "novel"


def test_modelslim_wins_over_all(tmp_path: Path) -> None:
    section = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(_core.UnsupportedError, match="quant_model_description.json.*Ascend"):
        made(tmp_path, section, FP8, quant_model_description={})


def test_order_of_sources(tmp_path: Path) -> None:
    """config.json first, in its text_config too; then the files beside it."""
    fp8, modelopt = {"quant_method": "fp8"}, {"quantization": {"quant_algo": "NVFP4"}}
    found = made(tmp_path, {"quantization_config": fp8}, FP8, hf_quant_config=modelopt)
    assert (found.method, found.source) == ("fp8", "config.json: quantization_config")
    found = made(tmp_path, {"text_config": {"quantization_config": fp8}}, FP8)
    assert found.method == "fp8"
    channel = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    old = {"config_groups": {"g": {"targets": ["Linear"], "weights": channel}}}
    found = made(tmp_path, {"compression_config": old}, FP8)
    assert found.method == "compressed-tensors"
    with pytest.raises(_core.CheckpointError, match="quant_algo NVFP4"):
        made(tmp_path, {}, FP8)  # hf_quant_config.json still lies there
    found = made(tmp_path, {}, FP8, hf_quant_config={"quantization": {"quant_algo": "FP8_PB_WO"}})
    assert (found.method, found.source) == ("modelopt_fp8", "hf_quant_config.json")


def test_without_a_word(tmp_path: Path) -> None:
    """The user's name counts if the tensors are quantized; else they are left over."""
    with pytest.raises(_core.CheckpointError, match="config.json says nothing of quantization"):
        made(tmp_path, {}, FP8)
    found = made(tmp_path, {}, FP8, "fp8")
    assert (found.method, found.online, len(found.matrices)) == ("fp8", None, 1)
    with pytest.raises(_core.CheckpointError, match="quant_method is missing"):
        made(tmp_path, {"quantization_config": {"bits": 4}}, PLAIN)


@pytest.mark.parametrize(
    "section",
    (
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float"}},
    ),
)
def test_only_the_cache_is_quantized(tmp_path: Path, section: dict[str, Any]) -> None:
    tensors = PLAIN | {"model.layers.0.self_attn.k_scale": ("F32", np.float32(1))}
    config = {"quantization_config": section}
    assert made(tmp_path, config, tensors).method == ""
    assert made(tmp_path, config, tensors, "fp8").online == "fp8"
    with pytest.raises(_core.UnsupportedError, match="awq is only read"):
        made(tmp_path, config, tensors, "awq")


@pytest.mark.parametrize(
    "part", ("weight_scale_inv", "weight_scale_2", "input_scale", "qzeros", "biases", "g_idx")
)
def test_leftovers_are_named(tmp_path: Path, part: str) -> None:
    extra = FP8 | {WEIGHT.replace("weight", part): ("F32", np.float32(1))}
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    with pytest.raises(_core.CheckpointError, match=f"q_proj.{part} is F32.*is left over"):
        made(tmp_path, config, extra)
    alone = PLAIN | {f"model.layers.0.mlp.up_proj.{part}": ("F32", np.float32(1))}
    with pytest.raises(_core.CheckpointError, match=f"up_proj.{part} is F32.*no weight at all"):
        made(tmp_path, {}, alone)


@pytest.mark.parametrize(
    "text",
    ("", "[]", "{", '{"quantization_config": []}', '{"quantization_config": 3}', "[" * 100000),
)
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(_core.CheckpointError):
        made(tmp_path, text, FP8)


# Whatever a configuration says, the answer is a description or one of qkv's own errors.


KEYS = st.sampled_from(
    "quant_method bits group_size sym desc_act dynamic quant_algo config_groups weights targets "
    "num_bits type strategy format ignore weight_block_size activation_scheme export exclude "
    "global_quant_config layer_quant_config weight dtype qscheme block_size packing_format "
    "extra_config mode quantized_layers version zero_point scale_fmt modules_to_not_convert "
    "input_activations input_tensors block_structure transform_config sparsity_config quantization "
    "packed_modules_mapping checkpoint_format model.layers.0.self_attn.q_proj".split()
)
WORDS = st.sampled_from(
    "awq gptq fp8 mxfp8 compressed-tensors modelopt quark mxfp4 bitsandbytes mlx auto-round FP8 "
    "w8a8_int8 w8a8_fp8 w4afp8 blockwise_int8 NVFP4 MIXED_PRECISION INT4_AWQ int float group "
    "Linear channel tensor block per_group per_tensor int4 fp4 re:( re:.* * q_proj [ gptq_v2 "
    "static".split()
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10), st.integers(), st.floats(), WORDS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def checkpoints(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each fixture with its tensors alone."""
    folders = {}
    for name in QUANTIZED:
        folders[name] = tmp_path_factory.mktemp(name)
        for path in (fixtures_dir / name).glob("model*.safetensors*"):
            (folders[name] / path.name).symlink_to(path)
    return folders


def mutated(section: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """The tool's own section with one to four values changed, at any depth."""
    section = json.loads(json.dumps(section))
    for _ in range(data.draw(st.integers(1, 4))):
        place: Any = section
        while data.draw(st.booleans()):
            inner = [v for v in place.values() if isinstance(v, dict) and v]
            if not inner:
                break
            place = data.draw(st.sampled_from(inner))
        known = st.sampled_from(sorted(place)) if place else KEYS
        place[data.draw(st.one_of(known, known, KEYS))] = data.draw(VALUES)
    return section


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_config(fixtures_dir: Path, checkpoints: dict[str, Path], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(QUANTIZED)))
    other = data.draw(st.one_of(st.just(name), st.sampled_from(sorted(QUANTIZED))))
    config = json.loads((fixtures_dir / other / "config.json").read_text())
    config["quantization_config"] = mutated(config["quantization_config"], data)
    (checkpoints[name] / "config.json").write_text(json.dumps(config))
    quantization = data.draw(st.one_of(st.none(), st.none(), st.sampled_from(sorted(METHODS))))
    try:
        found = found_in(checkpoints[name], quantization)
    except (_core.CheckpointError, _core.UnsupportedError) as error:
        assert str(error)
    else:
        json.dumps({key: sorted(matrix) for key, matrix in found.matrices.items()})
