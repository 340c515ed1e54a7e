"""A model in the shape of Qwen3-30B-A3B with fewer layers, from end to end, as CSV.

    bench_experts.py [--layers 2 | --share 0.55] [--threads 2] [--tokens 32] [--folder DIR]
        [--check]

Random bf16 weights are written once, a shard for each layer; --share takes as many layers as fill
that share of this machine's memory. Each format is made of them while loading, in a process of its
own: seconds and file bytes per second of loading; the most anonymous memory that the process had
(RssAnon, sampled every 10 ms from outside) above what it had before, in `of_held` over the weights
and the KV pool of the engine, so that 1 is no second copy. `mapped_mib` is the most that it mapped
of files (RssFile): clean pages, which the kernel drops where memory is wanted. Then one sequence's
decoding, tokens per second and bytes of the weights that a token reads per second. --check fails
where `of_held` is above 1.15, no token came, or the progress bar did not say bytes per second."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import numpy as np

from qkv import Engine, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bench_load import status_kib  # noqa: E402

FORMATS = ("none", "fp8_block", "int4")
INDEX = "model.safetensors.index.json"
HELD_AT_MOST = 1.15
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


def model_bytes(n_layers: int) -> int:
    return 2 * sum(int(np.prod(shape)) for shape in shapes(n_layers).values())


def layers_for(share: float) -> int:
    """As many as fill this share of the machine's memory."""
    total = share * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    none, one = model_bytes(0), model_bytes(1)
    return max(1, int((total - none) / (one - none)))


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], bits: np.ndarray) -> None:
    header: dict[str, object] = {}
    at = 0
    for name, shape in tensors.items():
        n_bytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, (name, shape) in enumerate(tensors.items()):
            n = int(np.prod(shape))
            ones = np.full(n, 0x3F80, np.uint16)
            file.write((ones if name.endswith("norm.weight") else bits[i % 4096 :][:n]).tobytes())


def write(folder: Path, n_layers: int) -> None:
    """Random weights; each matrix of a shard is a window of the same random numbers."""
    (folder / "config.json").write_text(json.dumps(config(n_layers)))
    rng = np.random.default_rng(0)
    values = rng.standard_normal(VOCAB * HIDDEN + 4096, dtype=np.float32) * 0.02
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes(n_layers).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    for file, tensors in shards.items():
        write_shard(folder / file, tensors, bits)
    places = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def run(folder: Path, name: str, threads: int, n_tokens: int) -> None:
    """The other process: what it had before, then all that it found, each a line."""
    print(json.dumps({"anon_kib": status_kib("RssAnon:")}), flush=True)
    start = time.perf_counter()
    quantization = None if name == "none" else name
    with Engine(folder, quantization=quantization, threads=threads, kv_tokens=1024) as engine:
        loaded = time.perf_counter() - start
        memory = engine.memory()
        params = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True)
        prompt = [list(range(1, 9))]
        engine.generate(prompt, params, progress=False)
        rates = []
        for _ in range(3):
            (output,) = engine.generate(prompt, params, progress=False)
            rates.append(1 / output.metrics.time_per_token)
    n_made = len(output.outputs[0].token_ids)
    weights, kv = memory["weights"], memory["kv"]
    found = {"seconds": loaded, "weights": weights, "kv": kv, "rate": max(rates), "n": n_made}
    print(json.dumps(found), flush=True)


def watched(command: list[str]) -> tuple[list[dict[str, float]], str, int, int]:
    """What it prints, what it shows on its terminal, and the most that it held meanwhile, in KiB:
    anonymous memory, and pages of files."""
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    shown = b""
    anon = mapped = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=its_end, text=True) as process:
        os.close(its_end)
        while process.poll() is None:
            if select.select([terminal], [], [], 0.01)[0]:
                try:
                    shown += os.read(terminal, 4096)
                except OSError:  # it has closed its end
                    time.sleep(0.01)
            try:
                anon = max(anon, status_kib("RssAnon:", process.pid))
                mapped = max(mapped, status_kib("RssFile:", process.pid))
            except OSError:
                break
        assert process.stdout is not None
        lines = [json.loads(line) for line in process.stdout]
    os.close(terminal)
    if process.returncode:
        sys.exit(
            f"exit {process.returncode}: {' '.join(command)}\n{shown.decode(errors='replace')}"
        )
    return lines, shown.decode(errors="replace"), anon, mapped


def report(folder: Path, name: str, command: list[str], n_tokens: int) -> list[str]:
    """Prints the row; what does not hold."""
    (before, found), shown, anon_kib, mapped_kib = watched(command)
    n_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    size = sum(shard.stat().st_size for shard in folder.glob("*.safetensors"))
    all_experts = n_layers * EXPERTS * 3 * HIDDEN * FFN
    dense = size / 2 - all_experts
    share = (dense + all_experts * TOP_K / EXPERTS) / (dense + all_experts)
    anon = (anon_kib - before["anon_kib"]) * 1024
    of_held = anon / (found["weights"] + found["kv"])
    seconds, rate = found["seconds"], found["rate"]
    print(
        f"{name},{size / 2**20:.0f},{seconds:.2f},{size / seconds / 1e9:.2f},"
        f"{found['weights'] / 2**20:.0f},{anon / 2**20:.0f},{mapped_kib / 1024:.0f},{of_held:.2f},"
        f"{rate:.1f},{rate * found['weights'] * share / 1e9:.1f}",
        flush=True,
    )
    speeds = re.findall(r"loading: .*?([\d.]+[kMGT]?B/s)", shown)
    print(f"# the bar said {', '.join(speeds[-1:]) or 'nothing'}", flush=True)
    wrong = []
    if of_held > HELD_AT_MOST:
        wrong.append(f"{name}: {of_held:.3f} of what is held, at most {HELD_AT_MOST}")
    if found["n"] != n_tokens:
        wrong.append(f"{name}: {found['n']} tokens, must be {n_tokens}")
    if not speeds:
        wrong.append(f"{name}: no bytes per second on the terminal: {shown!r}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--layers", type=int, default=2)
    size.add_argument("--share", type=float)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        run(args.folder, args.once, args.threads, args.tokens)
        return
    wrong = []
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        n_layers = layers_for(args.share) if args.share else args.layers
        free = shutil.disk_usage(folder).free
        if model_bytes(n_layers) > free:
            parser.error(f"the model takes {model_bytes(n_layers):,} bytes, {free:,} are free")
        write(folder, n_layers)
        print(
            "format,file_mib,load_s,load_gbytes_per_s,weights_mib,anon_mib,mapped_mib,of_held,"
            "tokens_per_s,read_gb_s"
        )
        for name in FORMATS:
            command = [sys.executable, __file__, "--once", name, "--folder", made]
            command += ["--threads", str(args.threads), "--tokens", str(args.tokens)]
            wrong += report(folder, name, command, args.tokens)
    if args.check and wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
