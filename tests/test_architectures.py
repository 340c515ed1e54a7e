"""What is special in some architectures: the text part of multimodal checkpoints, longrope's
switch, and refusals that say what is missing before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from core_runs import Request, open_engine, run, scored
from qkv import _core
from qkv.quantization import convert
from qkv.quantization.names import by_glob, with_fused
from ref import forward, make_tiny, stored, tiny_cases

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def multimodal(folder: Path, tiny: make_tiny.Tiny, rename: dict[str, str], **outer: Any) -> None:
    """The text model inside of a multimodal checkpoint; `rename`: beginnings of names, the first
    that fits."""
    folder.mkdir()
    text = {k: v for k, v in tiny.config.items() if k not in ("architectures", "torch_dtype")}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "torch_dtype": "bfloat16",
        **outer,
    }
    (folder / "config.json").write_text(json.dumps(config))
    others = ["vision_tower.embeddings.weight", "multi_modal_projector.norm.weight"]
    named = {name: np.ones((2, 8), np.float32) for name in others}
    for name, values in tiny.tensors.items():
        old, new = next((a, b) for a, b in rename.items() if name.startswith(a))
        named[new + name.removeprefix(old)] = values
    make_tiny.write_safetensors(folder / "model.safetensors", named)


@pytest.mark.parametrize(
    "rename",
    [{"": "language_model."}, {"model.": "model.language_model.", "": ""}],
    ids=["transformers 4", "transformers 5"],
)
def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path, rename: dict[str, str]) -> None:
    tiny = make_tiny.write(tmp_path / "text", "gemma3", tie_word_embeddings=False)
    multimodal(tmp_path / "both", tiny, rename)
    a, b = scored(tmp_path / "text"), scored(tmp_path / "both")
    assert list(a.token_ids) == list(b.token_ids)
    assert a.prompt_logprobs.tobytes() == b.prompt_logprobs.tobytes()
    found = qkv.inspect(tmp_path / "both")
    assert found.problem is None and found.config["arch"] == "Gemma3ForCausalLM"
    assert found.left_out == (2, "vision_tower.embeddings.weight")
    assert "2 of other parts than text" in str(found)
    with pytest.raises(_core.UnsupportedError, match="only the text part is read"):
        convert.convert(tmp_path / "both", tmp_path / "out", "int8")


# As the authors of Kimi K2.5 save it, and transformers 5.
KIMI = {
    "KimiK25ForConditionalGeneration": (
        {"model_type": "kimi_k2"}, {"": "language_model."}, "kimi_k25",
    ),
    "Kimi_K25ForConditionalGeneration": (
        {"model_type": "deepseek_v3"}, {"model.": "model.language_model.", "": ""}, "kimi_k25",
    ),
    "KimiVLForConditionalGeneration": (
        {"model_type": "deepseek_v3"}, {"": "language_model."}, "kimi_vl",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KIMI)
def test_the_text_part_of_kimi(tmp_path: Path, name: str) -> None:
    """DeepSeek-V3's class with its experts in int4, which both parts of the config say."""
    text, rename, model_type = KIMI[name]
    sizes: dict[str, Any] = {"moe_intermediate_size": 64, "first_k_dense_replace": 1}
    tiny = make_tiny.write(tmp_path / "text", "deepseek_v3", **sizes)
    tiny.config.update(text)
    outer = {"architectures": [name], "model_type": model_type}
    multimodal(tmp_path / "both", tiny, rename, **outer)
    a, b = scored(tmp_path / "text"), scored(tmp_path / "both")
    assert list(a.token_ids) == list(b.token_ids)
    assert a.prompt_logprobs.tobytes() == b.prompt_logprobs.tobytes()
    found = qkv.inspect(tmp_path / "both")
    assert found.problem is None and found.config["arch"] == "DeepseekV3ForCausalLM"
    config = json.loads((tmp_path / "both" / "config.json").read_text())
    planned = qkv.plan(config, memory_gib=1).bytes_per_token
    assert planned == qkv.plan(tiny.config, memory_gib=1).bytes_per_token


def test_kimi_s_experts_in_int4(tmp_path: Path) -> None:
    """The section stands in the text part, too, and names modules as the whole model has them; the
    same bits as of a model of text alone."""
    sizes: dict[str, Any] = {"moe_intermediate_size": 64, "first_k_dense_replace": 1}
    tiny = make_tiny.write(tmp_path / "plain", "deepseek_v3", **sizes)
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "ignore": [
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    }  # fmt: skip
    results = []
    for prefix in ("", "language_model."):
        tensors: dict[str, stored.Tensor] = {}
        for tensor, values in tiny.tensors.items():
            name = prefix + tensor
            if ".mlp.experts." in tensor:
                tensors |= packed(name.removesuffix(".weight"), values)
            else:
                tensors[name] = ("BF16", make_tiny.bf16_bits(values))
        text = {**tiny.config, "quantization_config": section}
        outer = {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "text_config": {**text, "model_type": "kimi_k2"},
        }
        folder = tmp_path / (prefix or "text")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(outer if prefix else text))
        stored.write(folder / "model.safetensors", tensors)
        with qkv.Engine(folder, kv_tokens=64, threads=1) as engine:
            assert engine.info["quantization"]["method"] == "compressed-tensors"
            (score,) = engine.score([list(range(7, 47))], progress=False)
        results.append(score.token_logprobs.tobytes())
    assert results[0] == results[1]


def packed(module: str, values: Any) -> dict[str, stored.Tensor]:
    """int4 in groups of 32 as compressed-tensors packs them, [out, in]."""
    groups = values.reshape(values.shape[0], -1, 32)
    scale = np.maximum(np.abs(groups).max(axis=-1) / 7, 1e-6).astype(np.float32)
    codes = np.clip(np.rint(groups / scale[..., None]), -8, 7).astype(np.int64) + 8
    words = codes.reshape(values.shape[0], -1, 8).astype(np.uint32)
    words = (words << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    return {
        f"{module}.weight_packed": ("I32", words.view(np.int32)),
        f"{module}.weight_scale": ("F32", scale),
        f"{module}.weight_shape": ("I64", np.array(values.shape, np.int64)),
    }


def test_an_excluded_module_of_the_text_part(tmp_path: Path) -> None:
    """Lists name modules as the whole model has them."""
    match = with_fused(by_glob(["language_model.model.layers.0.*", "vision_tower*"]))
    assert match("model.layers.0.mlp.up_proj") == "language_model.model.layers.0.*"
    assert match("model.layers.1.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        (
            {"architectures": ["MllamaForConditionalGeneration"]},
            "MllamaForConditionalGeneration.*not known to stand alone: it has cross-attention",
        ),
        ({"text_config": {"model_type": "moonshine"}}, '"moonshine", which is not supported'),
    ],
)
def test_text_parts_that_do_not_stand_alone(
    tmp_path: Path, outer: dict[str, Any], message: str
) -> None:
    tiny = make_tiny.write(tmp_path / "text", "gemma3")
    multimodal(tmp_path / "both", tiny, {"": "language_model."}, **outer)
    with pytest.raises(_core.UnsupportedError, match=message):
        scored(tmp_path / "both")


DELTA, STATE, CONV, KEYS = (
    "gated delta-net layers", "state-space layers", "short convolutions", "keys that an indexer",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("Qwen3NextForCausalLM", DELTA),
        ("Qwen3_5ForCausalLM", DELTA),
        ("Qwen3_5MoeForCausalLM", DELTA),
        ("Qwen4ExpForCausalLM", DELTA),
        ("OlmoHybridForCausalLM", DELTA),
        ("LaraMiniForCausalLM", DELTA),
        ("KimiLinearForCausalLM", "delta-attention layers"),
        ("BailingHybridForCausalLM", "delta-attention layers"),
        ("MiniMaxForCausalLM", "lightning attention"),
        ("MiniMaxText01ForCausalLM", "lightning attention"),
        ("MiniMaxM2ForCausalLM", "norms of q and k over all heads"),
        ("MambaForCausalLM", STATE),
        ("Mamba2ForCausalLM", STATE),
        ("FalconMambaForCausalLM", STATE),
        ("FalconH1ForCausalLM", STATE),
        ("JambaForCausalLM", STATE),
        ("BambaForCausalLM", STATE),
        ("ZambaForCausalLM", STATE),
        ("Zamba2ForCausalLM", STATE),
        ("NemotronHForCausalLM", STATE),
        ("GraniteMoeHybridForCausalLM", STATE),
        ("Plamo2ForCausalLM", STATE),
        ("HymbaForCausalLM", STATE),
        ("RecurrentGemmaForCausalLM", "recurrent layers"),
        ("RwkvForCausalLM", "recurrent layers"),
        ("xLSTMForCausalLM", "recurrent layers"),
        ("Lfm2ForCausalLM", CONV),
        ("Lfm2MoeForCausalLM", CONV),
        ("Lfm3ForCausalLM", CONV),
        ("InklingForCausalLM", CONV),
        ("DeepseekV32ForCausalLM", KEYS),
        ("GlmMoeDsaForCausalLM", KEYS),
        ("DeepseekV4ForCausalLM", "compressed keys"),
        ("LongcatFlashForCausalLM", "two blocks of attention in a layer"),
        ("SomethingForCausalLM", "known: .*LlamaForCausalLM.*Glm4MoeLiteForCausalLM"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, name: str, lacks: str) -> None:
    """From the config alone: there is no file of weights that could be read."""
    make_tiny.write(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    with pytest.raises(_core.UnsupportedError, match=f"{name}.*{lacks}"):
        scored(tmp_path)
    assert name in str(qkv.inspect(tmp_path).problem)


@pytest.mark.parametrize(
    ("arch", "lie", "message"),
    [
        (
            "llama",
            {"num_key_value_heads": 4},
            r"k_proj\.weight: shape \[32, 64\], the config says \[64, 64\] "
            r"\(4 heads, 4 for K and V, of 16 channels\)",
        ),
        (
            "phi3",
            {"num_attention_heads": 8},
            r"qkv_proj\.weight: shape \[128, 64\], the config says \[96, 64\] "
            r"\(8 heads, 2 for K and V, of 8 channels\)",
        ),
    ],
)
def test_a_lie_about_heads(tmp_path: Path, arch: str, lie: dict[str, Any], message: str) -> None:
    tiny = make_tiny.write(tmp_path, arch)
    (tmp_path / "config.json").write_text(json.dumps({**tiny.config, **lie}))
    with pytest.raises(_core.CheckpointError, match=message):
        scored(tmp_path)


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_layers_for_later_tokens_are_left_out(
    tmp_path: Path, container: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same bits as without them, and one line that says so."""
    plain, more = tmp_path / "plain", tmp_path / "more"
    tiny = make_tiny.write(plain, "glm4_moe")
    further = {
        "eh_proj.weight": np.ones((64, 128), np.float32),
        "enorm.weight": np.ones(64, np.float32),
        "mlp.experts.0.up_proj.weight": np.ones((40, 64), np.float32),
    }
    if container == "safetensors":
        more.mkdir()
        config = {**tiny.config, "num_nextn_predict_layers": 1}
        (more / "config.json").write_text(json.dumps(config))
        named = {f"model.layers.2.{name}": values for name, values in further.items()}
        make_tiny.write_safetensors(more / "model.safetensors", {**tiny.tensors, **named})
    else:
        plain, more = tmp_path / "plain.gguf", tmp_path / "more.gguf"
        make_tiny.write_gguf(plain, "glm4_moe")
        make_tiny.write_gguf(more, "glm4_moe", num_nextn_predict_layers=1)
    a, b = scored(plain), scored(more)
    assert list(a.token_ids) == list(b.token_ids)
    assert a.prompt_logprobs.tobytes() == b.prompt_logprobs.tobytes()
    assert qkv.inspect(more).further[0] == len(further)
    assert "layers for tokens after the next" in str(qkv.inspect(more))
    with qkv.Engine(more, kv_tokens=64):
        pass
    assert len([r for r in caplog.records if "after the next one" in r.getMessage()]) == 1


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_heads_by_layer_are_refused_by_name(
    tmp_path: Path, container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if container == "safetensors":
        tiny = make_tiny.write(tmp_path, "llama")
        lie = {"num_key_value_heads": [2, 1]}
        (tmp_path / "config.json").write_text(json.dumps({**tiny.config, **lie}))
        with pytest.raises(_core.Error, match="num_key_value_heads.*array"):
            scored(tmp_path)
        return
    metadata = make_tiny.gguf_metadata
    lie = {"llama.attention.head_count_kv": [2, 1]}
    monkeypatch.setattr(make_tiny, "gguf_metadata", lambda *args: metadata(*args) | lie)
    make_tiny.write_gguf(tmp_path / "m.gguf", "llama")
    with pytest.raises(_core.Error, match="head_count_kv.*layers of different sizes"):
        scored(tmp_path / "m.gguf")


def test_longrope_switches_with_the_sequence(tmp_path: Path) -> None:
    """Each token is the best by the reference for a sequence of that length: from 41 tokens on, all
    positions turn by the long factors, those of the prompt, too."""
    config: dict[str, Any] = {**tiny_cases.LONGROPE, "original_max_position_embeddings": 40}
    tiny = make_tiny.write(tmp_path, "phi3", seed=3, **config)
    prompt = np.arange(100, 133, dtype=np.int32)
    engine = open_engine(tmp_path, kv_tokens=128, threads=1, compute_dtype="float32")
    (result,) = run(engine, [Request(prompt, {**GREEDY, "max_tokens": 14})]).values()
    counts = engine.counts()
    engine.close()
    ids = [*prompt]
    for token, logprob in zip(result.token_ids, result.logprobs, strict=True):
        table = forward.log_probs(tiny.config, tiny.tensors, ids)[-1]
        assert token == table.argmax(), len(ids)
        assert abs(logprob - table[token]) < 1e-4, len(ids)
        ids.append(token)
    assert counts["n_retractions"] == 1
