"""A model in the shape of Qwen3-30B-A3B with fewer layers, from end to end, as CSV.

    bench_experts.py [--layers 2] [--threads 2] [--tokens 32] [--folder DIR]

Random bf16 weights are written once; each format is made of them while loading, in a process of its
own: seconds and file bytes per second of loading, the process' peak (VmHWM, of mapped pages, too)
over what the engine says that it holds (weights, activations, KV, scratch), and one sequence's
decoding, tokens per second and bytes of the weights that a token reads per second. `of_held` is
near 1 where no second copy is made."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from qkv import Engine, SamplingParams

FORMATS = ("none", "fp8_block", "int4")
EXPERTS, TOP_K, HIDDEN, FFN, VOCAB = 128, 8, 2048, 768, 8192


def config(n_layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 6144,
        "moe_intermediate_size": FFN,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def shapes(n_layers: int) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(n_layers):
        p = f"model.layers.{i}."
        for part, n in (("q", 4096), ("k", 512), ("v", 512)):
            out[f"{p}self_attn.{part}_proj.weight"] = (n, HIDDEN)
        out[f"{p}self_attn.o_proj.weight"] = (HIDDEN, 4096)
        out[f"{p}self_attn.q_norm.weight"] = out[f"{p}self_attn.k_norm.weight"] = (128,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{p}{norm}.weight"] = (HIDDEN,)
        out[f"{p}mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            for part in ("gate", "up"):
                out[f"{p}mlp.experts.{e}.{part}_proj.weight"] = (FFN, HIDDEN)
            out[f"{p}mlp.experts.{e}.down_proj.weight"] = (HIDDEN, FFN)
    out["model.norm.weight"] = (HIDDEN,)
    return out


def write(folder: Path, n_layers: int) -> None:
    """One file of random weights; each matrix is a window of the same random numbers."""
    (folder / "config.json").write_text(json.dumps(config(n_layers)))
    rng = np.random.default_rng(0)
    values = rng.standard_normal(VOCAB * HIDDEN + 4096, dtype=np.float32) * 0.02
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    header: dict[str, object] = {}
    at = 0
    for name, shape in shapes(n_layers).items():
        n_bytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, (name, shape) in enumerate(shapes(n_layers).items()):
            n = int(np.prod(shape))
            ones = np.full(n, 0x3F80, np.uint16)
            file.write((ones if name.endswith("norm.weight") else bits[i % 4096 :][:n]).tobytes())


def peak() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def run(folder: Path, name: str, threads: int, n_tokens: int) -> None:
    size = (folder / "model.safetensors").stat().st_size
    before = peak()
    start = time.perf_counter()
    quantization = None if name == "none" else name
    with Engine(folder, quantization=quantization, threads=threads, kv_tokens=1024) as engine:
        loaded = time.perf_counter() - start
        most = peak() - before
        memory = engine.memory()
        held = sum(memory[key] for key in ("weights", "activations", "scratch"))
        params = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True)
        prompt = [list(range(1, 9))]
        engine.generate(prompt, params, progress=False)
        rates = []
        for _ in range(3):
            (output,) = engine.generate(prompt, params, progress=False)
            rates.append(1 / output.metrics.time_per_token)
    n_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    weights = memory["weights"]
    all_experts = n_layers * EXPERTS * 3 * HIDDEN * FFN
    dense = size / 2 - all_experts
    share = (dense + all_experts * TOP_K / EXPERTS) / (dense + all_experts)
    rate = max(rates)
    print(
        f"{name},{loaded:.2f},{size / loaded / 1e9:.2f},{weights / 2**20:.0f},{most / 2**20:.0f},"
        f"{most / held:.2f},{rate:.1f},{rate * weights * share / 1e9:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        run(args.folder, args.once, args.threads, args.tokens)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made)
        if not (folder / "model.safetensors").exists():
            write(folder, args.layers)
        print("format,load_s,load_gbytes_per_s,weights_mib,peak_mib,of_held,tokens_per_s,read_gb_s")
        for name in FORMATS:
            command = [sys.executable, __file__, "--once", name, "--folder", str(folder)]
            command += ["--threads", str(args.threads), "--tokens", str(args.tokens)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
