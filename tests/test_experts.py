"""Checkpoints with experts: one tensor for each, for all of a layer, or for gate and up of all are
the same model; a config that lies about them is refused before a weight is packed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from core_runs import open_engine, scored
from qkv import Engine, _core
from ref import experts, make_tiny, stored

F32 = NDArray[np.float32]


def bits_of(path: Path) -> tuple[list[int], bytes]:
    result = scored(path)
    return list(result.token_ids), result.prompt_logprobs.tobytes()


def each_expert(tiny: make_tiny.Tiny, layer: int, part: str) -> list[str]:
    n = experts.n_experts(tiny.config)
    return [f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight" for e in range(n)]


def regrouped(tiny: make_tiny.Tiny, layout: str) -> dict[str, F32]:
    """The same weights as transformers 5 ("fused") or mlx-lm ("stacked") writes them."""
    out = {k: v for k, v in tiny.tensors.items() if ".mlp.experts." not in k}
    for layer in range(tiny.config["num_hidden_layers"]):
        block = f"model.layers.{layer}.mlp."
        if not experts.is_sparse(tiny.config, layer):
            continue
        gate, up, down = (
            np.stack([tiny.tensors[name] for name in each_expert(tiny, layer, part)])
            for part in ("gate", "up", "down")
        )
        if layout == "fused":
            out[block + "experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            out[block + "experts.down_proj"] = down
        else:
            for part, values in (("gate", gate), ("up", up), ("down", down)):
                out[f"{block}switch_mlp.{part}_proj.weight"] = values
    return out


@pytest.mark.parametrize("layout", ["fused", "stacked"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "glm4_moe"])
def test_layouts_of_plain_experts(tmp_path: Path, arch: str, layout: str) -> None:
    tiny = make_tiny.write(tmp_path / "each", arch)
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "config.json").write_text(json.dumps(tiny.config))
    make_tiny.write_safetensors(tmp_path / "all" / "model.safetensors", regrouped(tiny, layout))
    assert bits_of(tmp_path / "each") == bits_of(tmp_path / "all")


def test_layouts_of_gpt_oss(tmp_path: Path) -> None:
    """[in, out] with gate and up by turns, and apart as [out, in]: the same bits."""
    tiny = make_tiny.write(tmp_path / "columns", "gpt_oss")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "config.json").write_text(json.dumps(tiny.config))
    rows = experts.split(tiny.tensors)
    make_tiny.write_safetensors(tmp_path / "rows" / "model.safetensors", rows)
    assert bits_of(tmp_path / "columns") == bits_of(tmp_path / "rows")


def affine(values: F32) -> dict[str, tuple[str, NDArray[Any]]]:
    """4 bits in groups of 32 as mlx-lm packs them, whatever the dimensions in front."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    low = groups.min(axis=-1)
    scale = np.maximum((groups.max(axis=-1) - low) / 15, 1e-6).astype(np.float32)
    codes = np.clip(np.rint((groups - low[..., None]) / scale[..., None]), 0, 15).astype(np.uint32)
    words = codes.reshape(*values.shape[:-1], -1, 8)
    packed = (words << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    return {
        "weight": ("U32", packed),
        "scales": ("F32", scale),
        "biases": ("F32", low.astype(np.float32)),
    }


def test_mlx_experts_in_three_dimensions(tmp_path: Path) -> None:
    """The same bits as a tensor for each expert."""
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64}
    tiny = make_tiny.write(tmp_path / "plain", "qwen3_moe", **sizes)
    folders = []
    for layout in ("each", "stacked"):
        named = tiny.tensors if layout == "each" else regrouped(tiny, layout)
        tensors: dict[str, stored.Tensor] = {}
        for name, values in named.items():
            if ".experts." in name or "switch_mlp" in name:
                stem = name.removesuffix(".weight")
                tensors |= {f"{stem}.{part}": t for part, t in affine(values).items()}
            else:
                tensors[name] = ("BF16", make_tiny.bf16_bits(values))
        folder = tmp_path / layout
        folder.mkdir()
        config = {**tiny.config, "quantization": {"bits": 4, "group_size": 32}}
        (folder / "config.json").write_text(json.dumps(config))
        stored.write(folder / "model.safetensors", tensors)
        folders.append(folder)
    found = []
    for folder in folders:
        with Engine(folder, kv_tokens=256, threads=1) as engine:
            (score,) = engine.score([list(range(7, 47))], progress=False)
            found.append(score.token_logprobs.tobytes())
    assert found[0] == found[1]


LIES = [
    ("qwen3_moe", {"num_experts": 10}, r"mlp\.gate\.weight: shape \[9, 64\], .* \[10, 64\]"),
    ("qwen3_moe", {"num_experts": 8}, r"mlp\.gate\.weight: shape \[9, 64\], .* \[8, 64\]"),
    ("qwen3_moe", {"num_local_experts": 8}, "num_local_experts 8, but num_experts 9"),
    ("qwen3_moe", {"num_experts_per_tok": 10}, "num_experts_per_tok: 10"),
    ("qwen3_moe", {"moe_intermediate_size": 48}, r"experts\.0\.gate_proj.*\[40, 64\].*\[48, 64\]"),
    ("qwen3_moe", {"decoder_sparse_step": 1}, r"no tensor model\.layers\.0\.mlp\.gate\.weight"),
    ("glm4_moe", {"n_routed_experts": 7}, r"mlp\.gate\.weight: shape \[6, 64\]"),
    ("glm4_moe", {"n_shared_experts": 1}, r"shared_experts\.gate_proj.*\[80, 64\].*\[40, 64\]"),
    ("glm4_moe", {"first_k_dense_replace": 0}, r"no tensor model\.layers\.0\.mlp\.gate\.weight"),
    ("glm4_moe", {"n_group": 4}, "3 of 6 experts for each token, out of 1 of 4 groups"),
    ("glm4_moe", {"scoring_func": "softmax"}, '"softmax" is not supported'),
    ("glm4_moe", {"use_qk_norm": False}, "_norm.weight: no part of the architecture"),
    ("gpt_oss", {"num_local_experts": 5}, r"router\.weight: shape \[6, 64\]"),
    ("gpt_oss", {"intermediate_size": 40}, r"gate_up_proj: shape \[6, 64, 96\], .*\[6, 64, 80\]"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: 5 is not supported"),
    ("gpt_oss", {"rope_scaling": None}, "rope_scaling"),
    ("gpt_oss", {"num_key_value_heads": [2, 2]}, "num_key_value_heads"),
    ("mixtral", {"num_local_experts": 6}, r"gate\.weight: shape \[5, 64\]"),
]


@pytest.mark.parametrize(("arch", "lie", "message"), LIES, ids=str)
def test_a_lie_about_experts(tmp_path: Path, arch: str, lie: dict[str, Any], message: str) -> None:
    """Before any weight is packed: no progress was reported."""
    tiny = make_tiny.write(tmp_path, arch)
    (tmp_path / "config.json").write_text(json.dumps({**tiny.config, **lie}))
    seen: list[int] = []

    def progress(done: int, total: int) -> bool:
        seen.append(done)
        return True

    with pytest.raises(_core.Error, match=message):
        open_engine(tmp_path, kv_tokens=64, progress=progress)
    assert not seen


@pytest.mark.parametrize(
    ("arch", "name"),
    [("glm4_moe", "1.mlp.gate.e_score_correction_bias"), ("gpt_oss", "0.self_attn.sinks")],
)
def test_a_vector_with_no_number(tmp_path: Path, arch: str, name: str) -> None:
    """A bias of the choice that is NaN chose the first experts, which no output shows."""
    tiny = make_tiny.write(tmp_path, arch)
    full = "model.layers." + name
    tiny.tensors[full][-1] = np.nan
    make_tiny.write_safetensors(tmp_path / "model.safetensors", tiny.tensors, "F32")
    with pytest.raises(_core.CheckpointError, match=full + ": a value is not a number"):
        Engine(tmp_path, kv_tokens=16)


@pytest.mark.parametrize(
    ("arch", "missing"),
    [
        ("gpt_oss", "mlp.router.weight"),
        ("gpt_oss", "mlp.router.bias"),
        ("gpt_oss", "mlp.experts.gate_up_proj"),
        ("mixtral", "block_sparse_moe.gate.weight"),
        ("mixtral", "block_sparse_moe.experts.0.w1.weight"),
        ("qwen3_moe", "mlp.gate.weight"),
    ],
)
def test_what_is_missing_has_the_architecture_s_own_name(
    tmp_path: Path, arch: str, missing: str
) -> None:
    """gpt-oss without its router was said to lack mlp.gate.weight."""
    tiny = make_tiny.write(tmp_path, arch)
    name = f"model.layers.1.{missing}"
    del tiny.tensors[name]
    make_tiny.write_safetensors(tmp_path / "model.safetensors", tiny.tensors)
    with pytest.raises(_core.CheckpointError, match=f"has no tensor {re.escape(name)}$"):
        Engine(tmp_path, kv_tokens=16)


def test_biases_of_experts_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An element has no bytes of its own there: this was a ValueError in the midst of loading."""
    write = make_tiny.write_gguf_file

    def quantized(path: Path, meta: Any, tensors: list[Any]) -> None:
        changed = [
            (name, shape, "Q8_0", bytes(int(np.prod(shape)) // 32 * 34))
            if name == "blk.0.ffn_up_exps.bias"
            else (name, shape, kind, data)
            for name, shape, kind, data in tensors
        ]
        write(path, meta, changed)

    monkeypatch.setattr(make_tiny, "write_gguf_file", quantized)
    make_tiny.write_gguf(tmp_path / "m.gguf", "gpt_oss", intermediate_size=64)
    with pytest.raises(
        _core.CheckpointError, match=r"blk\.0\.ffn_up_exps\.bias: biases of experts in Q8_0 blocks"
    ):
        Engine(tmp_path / "m.gguf", kv_tokens=16)


def test_a_lie_about_experts_in_blocks(fixtures_dir: Path, tmp_path: Path) -> None:
    """gpt-oss' own: a tensor for all experts."""
    source = fixtures_dir / "gptoss-mxfp4"
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    for lie in ({"num_local_experts": 4}, {"intermediate_size": 96}, {"head_dim": 32}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **lie}))
        with pytest.raises(_core.CheckpointError, match="the config says"):
            Engine(tmp_path, kv_tokens=64)
