"""qkv.plan: published pools, shapes of the cache, sizes of weights, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkv import _core, cli, options, planner
from qkv.planner import kv_shape, plan, weight_bytes
from ref import make_tiny

QWEN3_8B = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
KIMI_K2 = {
    "model_type": "kimi_k2", "num_hidden_layers": 61, "hidden_size": 7168,
    "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "vocab_size": 163840,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

# What SGLang's logs said, as published: GPU, model, format, fraction, weights and what they left
# (GiB), tokens of the pool; the relative error that inputs of two decimals allow.
POOLS = [
    ("L4", QWEN3_8B, "bf16", 0.85, 15.28, 6.59, 24094, 0.002),
    ("L4", QWEN3_8B, "fp8_e4m3", 0.85, 8.81, 13.06, 142369, 0.002),
    ("L4", QWEN3_8B, "bf16", 0.74, 15.28, 6.59, 6559, 0.005),
    ("L4", QWEN3_8B, "fp8_e4m3", 0.74, 8.81, 13.06, 107299, 0.002),
    ("GB10", QWEN3_30B, "fp8_e4m3", 0.7, 29.75, 83.63, 1083008, 0.002),
    ("GB10", QWEN3_30B, "bf16", 0.7, 57.75, 112.22 - 57.75, 227243, 0.002),
]
# Memory before the weights loaded. The L4's follows from the pools of one format at two fractions;
# it is not what the card has, and not weights plus what they left (something else was loaded, too).
L4_FREE = (24094 - 6559) * 147456 / (0.85 - 0.74) / planner.GIB


@pytest.mark.parametrize(("gpu", "config", "kv", "f", "weights", "left", "n", "tolerance"), POOLS)
def test_published_pools(
    gpu: str,
    config: dict[str, Any],
    kv: str,
    f: float,
    weights: float,
    left: float,
    n: int,
    tolerance: float,
) -> None:
    free = L4_FREE if gpu == "L4" else left + weights
    found = plan(
        config, memory_gib=free, weights_gib=free - left, mem_fraction=f, kv_cache_dtypes=[kv]
    )
    assert found.tokens[kv] == pytest.approx(n, rel=tolerance)


def test_both_formats_saw_the_same_card() -> None:
    assert pytest.approx(21.8915, abs=0.0015) == L4_FREE
    fp8 = (142369 - 107299) * 73728 / (0.85 - 0.74) / planner.GIB
    assert fp8 == pytest.approx(L4_FREE, abs=0.0015)


def test_published_requests() -> None:
    """37 requests of 512 + 128 tokens fit into 24,094 tokens; the 38th waits."""
    pool = 24094 * 147456 / planner.GIB
    found = plan(QWEN3_8B, memory_gib=pool + 1e-9, weights_gib=0, mem_fraction=1)
    assert found.tokens["bf16"] == 24094
    assert found.requests["bf16"] == 37 and found.waits_from["bf16"] == 38
    assert found.requests["fp8_e4m3"] == 24094 * 2 // 640
    # K alone: half of the pool.
    assert found.pool_gib("bf16") / 2 == pytest.approx(1.654, abs=0.001)


@pytest.mark.parametrize(
    ("kv", "n_bytes"),
    [
        ("bf16", 147456),
        ("fp8_e4m3", 73728),
        ("fp8_e5m2", 73728),
        ("mxfp8", 73728 * 33 // 32),
        ("nvfp4", 147456 * 9 // 32),
        ("fp4_mx_block16", 147456 * 9 // 32),
    ],
)
def test_bytes_of_every_format(kv: str, n_bytes: int) -> None:
    assert kv_shape(QWEN3_8B).bytes_per_token(kv) == n_bytes


@pytest.mark.parametrize(
    ("kv", "n_bytes"),
    [
        ("bf16", 70272),
        ("fp8_e4m3", 35136),
        ("fp8_ds_mla", 61 * 656),
        ("nvfp4", 61 * 324),
    ],
)
def test_latent_rows(kv: str, n_bytes: int) -> None:
    shape = kv_shape(KIMI_K2)
    assert shape.latent and shape.bytes_per_token(kv) == n_bytes
    assert plan(KIMI_K2, memory_gib=1000, weights_gib=1).bytes_per_token[kv] == n_bytes


@pytest.mark.parametrize(("kv", "n_bytes"), [("bf16", 98304), ("fp8_e4m3", 49152)])
def test_experts_do_not_change_a_token_s_bytes(kv: str, n_bytes: int) -> None:
    assert plan(QWEN3_30B, memory_gib=100, weights_gib=57.75).bytes_per_token[kv] == n_bytes


def test_published_latent_pools() -> None:
    """One memory gave 686,000 tokens in bf16 and 1,370,000 in fp8."""
    pool = 686000 * 70272 / planner.GIB
    found = plan(KIMI_K2, memory_gib=pool + 1e-9, weights_gib=0, mem_fraction=1)
    assert found.tokens["bf16"] == 686000
    assert found.tokens["fp8_e4m3"] == pytest.approx(1370000, rel=0.002)


def test_flashmla_layout_is_for_latent_rows() -> None:
    with pytest.raises(ValueError, match="fp8_ds_mla.*MLA only"):
        plan(QWEN3_8B, memory_gib=100, kv_cache_dtypes=["fp8_ds_mla"])


@pytest.mark.parametrize(
    ("config", "gib"),
    [
        (QWEN3_8B, 15.28),
        ({**QWEN3_8B, "quantization_config": FP8}, 8.81),
        (QWEN3_30B, 2 * 30.53e9 / planner.GIB),  # the model card's number of parameters
    ],
)
def test_weights_from_the_config(config: dict[str, Any], gib: float) -> None:
    assert weight_bytes(config) / planner.GIB == pytest.approx(gib, rel=0.01)


@pytest.mark.parametrize(
    ("quantization", "n_bytes"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 0.5 + 2.5 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5625),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, 0.5625),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, 1.0),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{}, {}]}}, 0.5625),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "uint4", "group_size": 128}},
            },
            0.5 + 2.5 / 128,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {"weights": {"num_bits": 8, "type": "float", "group_size": 32}}
                },
            },
            1 + 1 / 32,
        ),
        ({"bits": 4, "group_size": 64}, 0.5625),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            0.5625,
        ),
    ],
)
def test_weight_formats(quantization: dict[str, Any], n_bytes: float) -> None:
    plain = weight_bytes(QWEN3_8B)
    tables = 2 * 2 * 151936 * 4096
    if "quant_method" not in quantization:  # MLX quantizes them, too
        tables = 0
    found = weight_bytes({**QWEN3_8B, "quantization_config": quantization})
    assert found - tables == pytest.approx((plain - tables) / 2 * n_bytes)


def test_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    """ModelOpt's, beside a config.json that says nothing of it."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    plain = plan(tmp_path, memory_gib=100).weights_gib
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    found = plan(tmp_path, memory_gib=100)
    assert found.weights_from == "config" and found.weights_gib < 0.6 * plain


def test_unknown_weight_format_is_not_guessed() -> None:
    config = {**QWEN3_8B, "quantization_config": {"quant_method": "exl9"}}
    with pytest.raises(ValueError, match="exl9.*weights_gib"):
        plan(config, memory_gib=100)
    assert plan(config, memory_gib=100, weights_gib=5).tokens["bf16"] > 0


# Shapes.


def test_multi_head_attention_and_lists_of_heads() -> None:
    base = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    assert kv_shape(base).layers == ((4, 16, 16),) * 3
    given = {**base, "num_key_value_heads": [2, 0, 1]}
    assert kv_shape(given).layers == ((2, 16, 16), (0, 0, 0), (1, 16, 16))
    assert kv_shape({"text_config": base, "model_type": "vl"}).layers == ((4, 16, 16),) * 3


@pytest.mark.parametrize(
    ("name", "n_kv_heads"),
    [("LlamaForCausalLM", 64), ("Qwen2ForCausalLM", 32), ("Qwen3ForCausalLM", 32),
     ("MistralForCausalLM", 8), ("SomethingElse", 64)],
)  # fmt: skip
def test_absent_kv_heads_are_the_class_default(name: str, n_kv_heads: int) -> None:
    """The plan took as many as heads, the engine the class's default (test_arch_defaults.c)."""
    config = {
        "architectures": [name], "num_hidden_layers": 2, "hidden_size": 4096, "vocab_size": 100,
        "num_attention_heads": 64, "intermediate_size": 96, "head_dim": 64,
    }  # fmt: skip
    assert kv_shape(config).layers == ((n_kv_heads, 64, 64),) * 2
    null = {**config, "num_key_value_heads": None}
    assert kv_shape(null).layers == ((64, 64, 64),) * 2


@pytest.mark.parametrize(
    ("config", "n_bytes"),
    [
        ({"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
          "head_dim": 128, "hidden_size": 4096, "model_type": "glm4"}, 40960),
        ({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
          "hidden_size": 3072, "sliding_window": 2047, "model_type": "phi3"}, 393216),
        ({"num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
          "head_dim": 256, "hidden_size": 3584, "model_type": "gemma2"}, 344064),
        ({"text_config": {"num_hidden_layers": 48, "num_attention_heads": 16,
                          "num_key_value_heads": 8, "head_dim": 256, "hidden_size": 3840,
                          "model_type": "gemma3_text"}, "vision_config": {}}, 393216),
    ],
    ids=["GLM-4-9B-0414", "Phi-3-mini-4k", "Gemma-2-9B", "Gemma-3-12B"],
)  # fmt: skip
def test_dense_architectures(config: dict[str, Any], n_bytes: int) -> None:
    assert kv_shape(config).bytes_per_token("bf16") == n_bytes
    assert kv_shape(config).bytes_per_token("fp8_e4m3") == n_bytes // 2


def test_layers_with_a_state_are_not_counted() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 9
    config = {**QWEN3_8B, "layer_types": kinds}
    assert kv_shape(config).bytes_per_token("bf16") == 147456 // 4
    found = plan(config, memory_gib=100)
    assert "27 layers keep a state" in str(found)


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({"sliding_window": 8}, [8] * 6),
        ({"sliding_window": None}, [0] * 6),
        ({"sliding_window": 8, "model_type": "gemma2"}, [8, 0] * 3),
        ({"sliding_window": 8, "model_type": "gemma3_text"}, [8] * 5 + [0]),
        ({"sliding_window": 8, "sliding_window_pattern": 3}, [8, 8, 0] * 2),
        ({"sliding_window": 8, "model_type": "qwen2"}, [0] * 6),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4},
            [0] * 4 + [8] * 2,
        ),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3},
            [8, 0] * 3,
        ),
    ],
)
def test_windows(more: dict[str, Any], windows: list[int]) -> None:
    base = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4}
    assert list(kv_shape({**base, **more}).windows) == windows


def test_windows_are_said() -> None:
    config = {**QWEN3_8B, "sliding_window": 64, "model_type": "mistral"}
    found = plan(config, memory_gib=100)
    assert "36 of 36 layers attend to a window of 64 tokens" in found.notes[0]
    assert "(12% of a request of 640)" in found.notes[0]
    assert found.bytes_per_token["bf16"] == 147456


def test_formats_by_layer() -> None:
    mixed = {"default": "fp8_e4m3", "layers": {"0-1": "bf16", "2": {"v": "nvfp4"}}}
    found = plan(QWEN3_8B, memory_gib=100, kv_cache_dtypes=["bf16", mixed])
    (name,) = set(found.tokens) - {"bf16"}
    row = 8 * 128
    assert found.bytes_per_token[name] == 34 * 2 * row + 2 * 4 * row - row + row * 9 // 16


# From files.


def test_folder_file_and_dictionary_agree(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny("llama")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    args: dict[str, Any] = {"memory_gib": 1, "page_tokens": options.PAGE_TOKENS}
    whole = plan(folder, **args)
    alone = plan(tmp_path / "config.json", **args)
    bare = plan(tmp_path, **args)
    given = plan(config, **args)
    assert (whole.weights_from, alone.weights_from) == ("files", "config")
    assert whole.bytes_per_token == alone.bytes_per_token == bare.bytes_per_token
    assert alone.tokens == bare.tokens == given.tokens
    # The estimate leaves norms out, the files have a header.
    assert whole.weights_gib == pytest.approx(alone.weights_gib, rel=0.1)


def test_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tiny = make_tiny.write_gguf(path, "llama")
    found, same = plan(path, memory_gib=1), plan(tiny.config, memory_gib=1)
    assert found.bytes_per_token == same.bytes_per_token
    assert found.weights_from == "files" and found.weights_gib > 0


def test_engine_counts_as_the_plan_does(tiny: Callable[..., Path]) -> None:
    for arch in ("llama", "gemma3"):
        checkpoint = _core.Checkpoint(str(tiny(arch)))
        config = checkpoint.model_config()
        checkpoint.close()
        found = plan(tiny(arch), memory_gib=1)
        for kv, n_bytes in found.bytes_per_token.items():
            lanes = options.lanes(kv, config["n_layers"], compute_dtype="bf16", declared="")
            assert options.token_bytes(config, lanes) == n_bytes


def test_the_control_lane_counts_as_bf16_when_asked_for() -> None:
    found = plan(QWEN3_8B, memory_gib=100, kv_cache_dtypes=["bf16", "bf16_stochastic"])
    assert found.bytes_per_token["bf16_stochastic"] == found.bytes_per_token["bf16"]
    assert "bf16_stochastic" not in plan(QWEN3_8B, memory_gib=100).bytes_per_token


# What it refuses, and how it looks.


@pytest.mark.parametrize(
    ("config", "options_", "words"),
    [
        ({}, {}, "num_hidden_layers is None"),
        ({**QWEN3_8B, "num_attention_heads": "32"}, {}, "num_attention_heads is '32'"),
        ({**QWEN3_8B, "head_dim": -1}, {}, "head_dim is -1"),
        ({**QWEN3_8B, "layer_types": ["full_attention"]}, {}, "layer_types.*36 layers"),
        ({**QWEN3_8B, "num_key_value_heads": [8]}, {}, r"num_key_value_heads \[8\]"),
        (QWEN3_8B, {"memory_gib": 17}, "mem_fraction must be above 0.89"),
        (QWEN3_8B, {"memory_gib": 10}, "larger than it"),
        (QWEN3_8B, {"memory_gib": float("nan")}, "memory_gib=nan"),
        (QWEN3_8B, {"mem_fraction": 0}, "mem_fraction=0"),
        (QWEN3_8B, {"mem_fraction": 1.5}, "mem_fraction=1.5"),
        (QWEN3_8B, {"input_tokens": 0}, "input_tokens=0"),
        (QWEN3_8B, {"page_tokens": 0}, "page_tokens=0"),
        (QWEN3_8B, {"kv_cache_dtypes": []}, "empty"),
        (QWEN3_8B, {"kv_cache_dtypes": ["auto"]}, "auto"),
        (QWEN3_8B, {"kv_cache_dtypes": ["fp7"]}, "fp7"),
        (QWEN3_8B, {"kv_cache_dtypes": [{"layers": {"0-": "nvfp4"}}]}, "layers '0-'"),
        (QWEN3_8B, {"kv_cache_dtypes": [{"layers": {"1-36": "nvfp4"}}]}, "layers 0 to 35"),
        ({**QWEN3_8B, "layer_types": ["linear_attention"] * 36}, {"weights_gib": 1}, "no layer"),
        (QWEN3_8B, {"memory_gib": 1e300}, "memory_gib=1e.300"),
        (QWEN3_8B, {"weights_gib": -5}, "weights_gib=-5"),
        (QWEN3_8B, {"weights_gib": float("nan")}, "weights_gib=nan"),
        (QWEN3_8B, {"mem_fraction": float("nan")}, "mem_fraction=nan"),
        ({**QWEN3_8B, "num_hidden_layers": 2**40}, {}, "num_hidden_layers is 1099.*at most"),
        ({**QWEN3_8B, "hidden_size": 10**400}, {}, "hidden_size is 1000"),
        ({**QWEN3_8B, "intermediate_size": None}, {}, "intermediate_size is None"),
        ({**QWEN3_8B, "num_key_value_heads": {}}, {}, r"num_key_value_heads is {}"),
        ({**QWEN3_8B, "num_key_value_heads": [True] * 36}, {}, r"num_key_value_heads \[True"),
        ({**QWEN3_8B, "layer_types": "x" * 36}, {}, "layer_types 'xxx"),
        ({**QWEN3_8B, "layer_types": [None] * 36}, {}, r"layer_types \[None"),
        ({**QWEN3_8B, "quantization_config": "fp8"}, {}, "quantization_config is 'fp8'"),
        (
            {
                **QWEN3_8B,
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"g": 5},
                },
            },
            {},
            "config: g is 5",
        ),
        ({**QWEN3_30B, "mlp_only_layers": 5}, {}, "mlp_only_layers is 5"),
        ({**QWEN3_30B, "first_k_dense_replace": 99}, {}, "99 layers without experts, of 48"),
        ({**KIMI_K2, "qk_rope_head_dim": None}, {}, "qk_rope_head_dim is None"),
        ({**KIMI_K2, "kv_lora_rank": None}, {}, "kv_lora_rank is None"),
        ({**KIMI_K2, "kv_lora_rank": 0}, {}, "kv_lora_rank is 0"),
        ({**KIMI_K2, "kv_lora_rank": 2**31 - 1}, {}, "kv_lora_rank is 2147483647.*at most"),
        ({**QWEN3_8B, "head_dim": 2**31 - 1}, {}, "heads of 2147483647 channels.*at most"),
        (
            KIMI_K2,
            {"weights_gib": 1, "kv_cache_dtypes": [{"k": "fp8_e4m3", "v": "bf16"}]},
            "with MLA K and V are one row",
        ),
    ],
)
def test_refuses(config: dict[str, Any], options_: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(config, **{"memory_gib": 100, **options_})


@pytest.mark.parametrize(
    "options_",
    [{"memory_gib": "5"}, {"weights_gib": True}, {"mem_fraction": None}, {"kv_cache_dtypes": 5}],
)
def test_refuses_types(options_: dict[str, Any]) -> None:
    (name,) = options_
    with pytest.raises(TypeError, match=f"{name}="):
        plan(QWEN3_8B, **{"memory_gib": 100, **options_})


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100000])
def test_refuses_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        plan(tmp_path, memory_gib=1)
    with pytest.raises(_core.CheckpointError, match="no such file"):
        plan(tmp_path / "other", memory_gib=1)


def test_pages_are_whole() -> None:
    found = plan(QWEN3_8B, memory_gib=22, page_tokens=64, input_tokens=65, output_tokens=0)
    assert found.tokens["bf16"] % 64 == 0
    assert found.requests["bf16"] == found.tokens["bf16"] // 128


def test_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(QWEN3_8B, memory_gib=22)
    lines = str(found).splitlines()
    assert len({len(line) for line in lines[1:]}) == 1  # a table
    assert "requests of 512+128" in lines[1] and lines[2].split()[:2] == ["bf16", "147,456"]
    assert "2.00 x" in lines[3]
    assert found._repr_html_().count("<tr>") == 1 + len(planner.KV_DTYPES)
    assert json.loads(json.dumps(found.to_dict()))["tokens"] == found.tokens


def test_plot() -> None:
    pytest.importorskip("matplotlib", reason="the report extra is not installed")
    figure = plan(QWEN3_8B, memory_gib=22).plot()
    assert len(figure.axes[0].patches) == len(planner.KV_DTYPES)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    args = ["plan", str(tmp_path), "--memory-gib", "22"]
    assert cli.main(args) == 0
    assert "147,456" in capsys.readouterr().out
    args += ["--kv-cache-dtype", "bf16,nvfp4", "--mem-fraction-static", "0.8", "--json"]
    assert cli.main([*args, "--input-tokens", "100", "--output-tokens", "28"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["tokens"]) == ["bf16", "nvfp4"]
    assert found["requests"]["bf16"] == found["tokens"]["bf16"] // 128
    assert cli.main(["plan", str(tmp_path), "--memory-gib", "3"]) == 2
    assert "no room" in capsys.readouterr().err
