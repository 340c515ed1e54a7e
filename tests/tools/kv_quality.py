"""What each KV format costs on real text: mean KL and top-1 agreement against bf16, as Markdown.

    python tests/tools/kv_quality.py MODEL TEXT [--windows 16] [--length 512]

TEXT is a text file (.gz is fine), WikiText-2's raw test set for the tables in the README. Windows
of `length` tokens are scored, all formats as lanes of one engine over the same tokens; scales are
calibrated on as many tokens of the text's end, which are not scored.
"""

import argparse
import gzip
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import qkv

FORMATS = ("fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp4_mx_block16")
SCALED = ("fp8_e4m3", "fp8_e5m2", "nvfp4")


def read_text(path: str) -> str:
    data = Path(path).read_bytes()
    return (gzip.decompress(data) if path.endswith(".gz") else data).decode("utf-8")


def windows(ids: list[int], n: int, length: int, start: list[int]) -> list[list[int]]:
    """Each begins with `start`, the tokens that every text of the model begins with (BOS)."""
    step = length - len(start)
    return [start + ids[i * step : (i + 1) * step] for i in range(n)]


def measure(
    model: str, text: list[list[int]], formats: tuple[str, ...], **options: Any
) -> dict[str, tuple[float, float, float]]:
    """Per format: mean KL in nats, the 99th percentile of it, top-1 agreement."""
    with qkv.Engine(model, kv_cache_dtype=["bf16", *formats], **options) as engine:
        scores = engine.score(text)
    found = {}
    for name in formats:
        lanes = [score.lanes[name] for score in scores]
        kl = np.concatenate([lane.kl for lane in lanes if lane.kl is not None])
        top1 = np.concatenate([lane.top1 for lane in lanes if lane.top1 is not None])
        if len(kl) != sum(len(ids) - 1 for ids in text):
            raise SystemExit(f"{name}: {len(kl)} positions were compared: {scores[0].error}")
        found[name] = (float(kl.mean()), float(np.quantile(kl, 0.99)), float(top1.mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    with qkv.Engine(args.model, kv_tokens=1024) as engine:
        start = list(engine.tokenizer.encode(""))
        ids = list(engine.tokenizer.encode(read_text(args.text)))[len(start) :]
    n_tokens = args.windows * args.length
    if len(ids) < 2 * n_tokens:
        raise SystemExit(f"{args.text}: {len(ids)} tokens, {2 * n_tokens} are needed")
    text = windows(ids, args.windows, args.length, start)
    held_out = windows(ids[-n_tokens:], args.windows, args.length, start)

    rows = {(name, "1.0"): values for name, values in measure(args.model, text, FORMATS).items()}
    with tempfile.TemporaryDirectory() as folder:
        for name in SCALED:
            path = str(Path(folder) / f"{name}.json")
            qkv.calibrate(args.model, held_out, name, out=path)
            values = measure(args.model, text, (name,), quantization_param_path=path)
            rows[(name, "calibrated")] = values[name]
    print(f"\n{Path(args.model).name}, {args.windows} windows of {args.length} tokens\n")
    print("| KV cache | scales | mean KL (nats) | 99 % KL | top-1 agreement |")
    print("|---|---|---|---|---|")
    for name in FORMATS:
        for scales in ("1.0", "calibrated"):
            if (name, scales) in rows:
                mean, high, top1 = rows[(name, scales)]
                shown = scales if name in SCALED else "none"
                print(f"| {name} | {shown} | {mean:.5f} | {high:.4f} | {100 * top1:.2f} % |")


if __name__ == "__main__":
    main()
