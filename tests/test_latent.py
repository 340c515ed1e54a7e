"""Multi-head latent attention: what is cached, planned and refused. Values are held to those of
transformers in test_models.py and test_quantized_checkpoints.py, bits in test_same_bits_kv.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from core_runs import Request, assert_same, open_engine, run
from qkv import _core
from ref import forward, latent, make_tiny

Tiny = Callable[..., Path]
DS_MLA = {"kv_lora_rank": 144, "qk_rope_head_dim": 64}
# Bytes of a row of 32 + 8 channels, padded to 48, and of fp8_ds_mla's 144 + 64.
ROWS = {"bf16": 96, "fp8_e4m3": 48, "mxfp8": 50, "nvfp4": 27, "fp4_mx_block16": 27}


def request(n: int = 40, **options: Any) -> Request:
    tokens = np.random.default_rng(n).integers(0, 512, n, dtype=np.int32)
    given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 6, "logprob_start": 1}
    return Request(tokens, given | options)


@pytest.mark.parametrize("kv_format", ROWS)
def test_what_is_planned_is_what_is_held(tiny: Tiny, kv_format: str) -> None:
    path = tiny("deepseek_v3")
    config = json.loads((path / "config.json").read_text())
    planned = qkv.plan(config, memory_gib=1, kv_cache_dtypes=[kv_format]).bytes_per_token
    with qkv.Engine(path, kv_cache_dtype=kv_format, kv_tokens=64) as engine:
        held = engine.memory()["kv"]
    assert planned == {kv_format: 2 * ROWS[kv_format]}
    assert held == 64 * planned[kv_format]


def test_flashmlas_row(tiny: Tiny) -> None:
    path = tiny("deepseek_v3", **DS_MLA)
    config = json.loads((path / "config.json").read_text())
    planned = qkv.plan(config, memory_gib=1).bytes_per_token["fp8_ds_mla"]
    with qkv.Engine(path, kv_cache_dtype="fp8_ds_mla", kv_tokens=64) as engine:
        held = engine.memory()["kv"]
    assert planned == 2 * (144 + 2 * 4 + 64 * 2)
    assert held == 64 * planned


@pytest.mark.parametrize(
    ("arch", "options", "kv", "message"),
    [
        ("llama", {}, "fp8_ds_mla", "fp8_ds_mla is for latent attention"),
        ("deepseek_v3", {}, "fp8_ds_mla", "64 rotated channels, here there are 8"),
        ("deepseek_v3", {}, {"k": "bf16", "v": "nvfp4"}, "K and V, which cannot be bf16 and nvfp4"),
    ],
)
def test_caches_that_do_not_fit(
    tiny: Tiny, arch: str, options: dict[str, Any], kv: Any, message: str
) -> None:
    with pytest.raises(_core.UnsupportedError, match=message):
        qkv.Engine(tiny(arch, **options), kv_cache_dtype=kv, kv_tokens=64)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"num_attention_heads": 8}, r"o_proj.*\(8 heads of 12 \+ 8 channels, 20 of values"),
        ({"kv_lora_rank": 48}, r"kv_a_proj_with_mqa.*shape \[40, 64\], the config says \[56, 64\]"),
        ({"q_lora_rank": 16}, r"q_a_proj.*shape \[24, 64\], the config says \[16, 64\]"),
        ({"q_lora_rank": None}, r"has no tensor .*q_proj\.weight"),
        ({"qk_nope_head_dim": 16}, r"q_b_proj.*shape \[80, 24\], the config says \[96, 24\]"),
        ({"v_head_dim": 24}, r"o_proj.*shape \[64, 80\], the config says \[64, 96\]"),
        ({"n_routed_experts": 12}, r"mlp\.gate\.weight: shape \[8, 64\], the config says \[12"),
        ({"moe_intermediate_size": 32}, r"experts\.0\.gate_proj.*shape \[40, 64\]"),
        ({"n_shared_experts": 2}, r"shared_experts\.gate_proj.*shape \[40, 64\]"),
    ],
)
def test_a_config_that_lies(tmp_path: Path, lie: dict[str, Any], message: str) -> None:
    made = make_tiny.write(tmp_path, "deepseek_v3")
    (tmp_path / "config.json").write_text(json.dumps({**made.config, **lie}))
    with pytest.raises(_core.CheckpointError, match=message):
        qkv.Engine(tmp_path, kv_tokens=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 24}, "kv_lora_rank 24.*a multiple of 16"),
        ({"attention_bias": True}, "latent attention with biases"),
        ({"topk_method": "other"}, 'topk_method: "other" is not supported here, only noaux_tc'),
        ({"scoring_func": "softmax"}, 'scoring_func: "softmax" is not supported here'),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_tiny.write(tmp_path, "deepseek_v3", **change)
    with pytest.raises(_core.UnsupportedError, match=message):
        qkv.Engine(tmp_path, kv_tokens=64)


def test_expanded_prompts_are_refused_by_name(tiny: Tiny) -> None:
    """They would give up the same bits for any chunk; another name is no option at all."""
    with pytest.raises(_core.UnsupportedError, match="mla_prefill='expanded'.*'absorbed' alone"):
        qkv.Engine(tiny("deepseek_v3"), kv_tokens=64, mla_prefill="expanded")
    with pytest.raises(ValueError, match="mla_prefill='both': must be one of absorbed"):
        qkv.Engine(tiny("deepseek_v3"), kv_tokens=64, mla_prefill="both")
    with qkv.Engine(tiny("deepseek_v3"), kv_tokens=64, mla_prefill="absorbed"):
        pass


@pytest.mark.parametrize(("arch", "default"), [("deepseek_v3", 2.5), ("glm4_moe_lite", 1.8)])
def test_the_class_s_own_factor(tmp_path: Path, arch: str, default: float) -> None:
    """Of the experts' outputs, where the config has none."""
    made = make_tiny.write(tmp_path, arch)
    found = []
    for given in ({}, {"routed_scaling_factor": default}, {"routed_scaling_factor": 1.0}):
        config = {k: v for k, v in made.config.items() if k != "routed_scaling_factor"} | given
        (tmp_path / "config.json").write_text(json.dumps(config))
        with qkv.Engine(tmp_path, kv_tokens=64, threads=1) as engine:
            found.append(engine.score([list(range(16))], progress=False)[0].token_logprobs[1:])
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


def test_the_class_s_own_groups(tmp_path: Path) -> None:
    """DeepseekV3Config has 8 groups, of which a token takes 4."""
    made = make_tiny.write(tmp_path, "deepseek_v3", n_routed_experts=16, n_group=8, topk_group=4)
    found = []
    for given in ({}, {"n_group": 8, "topk_group": 4}, {"n_group": 1, "topk_group": 1}):
        config = {k: v for k, v in made.config.items() if k not in ("n_group", "topk_group")}
        (tmp_path / "config.json").write_text(json.dumps(config | given))
        with qkv.Engine(tmp_path, kv_tokens=64, threads=1) as engine:
            found.append(engine.score([list(range(16))], progress=False)[0].token_logprobs[1:])
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != found[2]).any()


@pytest.mark.parametrize("shape", [(), (128,), (1, 128, 32), (0, 32)])
def test_keys_and_values_of_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    made = make_tiny.write(tmp_path, "deepseek_v3")
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    tensors = {**make_tiny.make_tensors(made.config, 0), name: np.zeros(shape, np.float32)}
    make_tiny.write_safetensors(tmp_path / "model.safetensors", tensors)
    qkv.plan(tmp_path, memory_gib=1)  # counts it, loading refuses
    with pytest.raises(_core.CheckpointError, match=r"kv_b_proj\.weight: shape \["):
        qkv.Engine(tmp_path, kv_tokens=64)


@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v3"])
def test_gguf(tmp_path: Path, arch: str) -> None:
    """One name for both, keys and values in tensors of their own, mscale as a factor of a log."""
    made = make_tiny.write_gguf(tmp_path / "model.gguf", arch, types="F32")
    asked = request(60)
    engine = open_engine(tmp_path / "model.gguf", kv_tokens=256, threads=1, compute_dtype="float32")
    (result,) = run(engine, [asked]).values()
    engine.close()
    want = forward.prompt_logprobs(made.config, made.tensors, asked.tokens)
    np.testing.assert_allclose(result.prompt_logprobs, want, atol=1e-3)


def test_gguf_with_one_matrix_for_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny.write_gguf(tmp_path / "two.gguf", "deepseek_v3", types="F32")
    monkeypatch.setattr(latent, "split", lambda config, tensors: dict(tensors))
    make_tiny.write_gguf(tmp_path / "one.gguf", "deepseek_v3", types="F32")
    found = []
    for name in ("two.gguf", "one.gguf"):
        engine = open_engine(tmp_path / name, kv_tokens=256, threads=1)
        found.append(run(engine, [request()]))
        engine.close()
    assert_same(found[0], found[1], "kv_b_proj in one tensor")


def test_the_scale_is_one_for_k_and_v(tmp_path: Path, tiny: Tiny) -> None:
    def side_file(value: Any) -> Path:
        layers = {str(i): value for i in range(2)}
        kv = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": layers}}
        (tmp_path / "s.json").write_text(json.dumps({"model_type": None, "kv_cache": kv}))
        return tmp_path / "s.json"

    path = tiny("deepseek_v3")
    options: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "kv_tokens": 64}
    with qkv.Engine(path, quantization_param_path=side_file(0.25), **options) as engine:
        rows = engine.kv_scales()
        assert {(row.kind, row.values) for row in rows} == {("k", (0.25,)), ("v", (0.25,))}
    different = side_file({"k": 0.25, "v": 0.5})
    with pytest.raises(_core.CheckpointError, match=r"K and V are one row.*0\.25.*0\.5"):
        qkv.Engine(path, quantization_param_path=different, **options)


def test_calibration_gives_one_scale(tiny: Tiny) -> None:
    scales = qkv.calibrate(
        tiny("deepseek_v3"), [[5, 6, 7, 8, 9]], kv_cache_dtype="fp8_e4m3", out=None
    )
    assert all(k[0] == v[0] > 0 for k, v in scales.layers)
    assert scales.calibration["tokens"] == 5


def test_the_guard_backend(tiny: Tiny) -> None:
    found = []
    for device in ("cpu", "guard"):
        engine = open_engine(tiny("deepseek_v2"), kv_tokens=256, threads=2, device=device)
        found.append(run(engine, [request(n) for n in (3, 40, 20)]))
        engine.close()
    assert_same(found[0], found[1], "the guard backend")
