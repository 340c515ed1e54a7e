"""Records what lm-evaluation-harness's `hf` model makes of MMLU items, for
tests/test_lm_eval_agreement.py: tests/data/lm_eval_hf_NAME.json.

    record_lm_eval.py NAME MODEL.gguf N_ITEMS [--folder FOLDER]

Needs lm-eval (0.4.13 was used), torch, transformers, accelerate and gguf; the tests do not. The
GGUF file is dequantized by transformers and rounded to bf16 (into FOLDER, which may stay for the
next time). The items are, of the subjects with the shortest prompts, each one's shortest; prompts
are those of qkv.tasks. Each item has the log-likelihoods of its four choices with the model in
float32 and, as the harness runs it by default, in bfloat16; both with batch size 1 and one thread.
The difference of the two is the noise that a bf16 engine is allowed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from qkv import tasks

ROOT = Path(__file__).resolve().parents[2]


def ids_digest(ids: Sequence[int]) -> str:
    """The start of the SHA-256 of the ids as little-endian int32."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:16]


def dequantize(source: Path, folder: Path) -> None:
    """The model and its tokenizer as transformers saves them, in bf16."""
    where: dict[str, Any] = {"gguf_file": source.name}
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(source.parent, **where, dtype=torch.float32).to(torch.bfloat16)
    # It is no quantized model any more, but says so and then cannot be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(folder)


def shortest(tokenizer: Any, n: int) -> list[tasks.Item]:
    best: dict[str | None, tuple[int, tasks.Item]] = {}
    for item in tasks.task("mmlu").items():
        length = len(str(item.prompt))
        if item.stratum not in best or length < best[item.stratum][0]:
            best[item.stratum] = (length, item)
    found = [item for _, item in best.values()]
    return sorted(found, key=lambda item: len(tokenizer.encode(item.prompt)))[:n]


def loglikelihoods(folder: Path, items: Sequence[tasks.Item], dtype: str) -> list[list[float]]:
    """[item][choice]"""
    model = HFLM(pretrained=str(folder), dtype=dtype, batch_size=1, device="cpu")
    found = []
    for item in items:
        pairs = [(item.prompt, choice) for choice in item.choices]
        requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        answers = model.loglikelihood(requests, disable_tqdm=True)
        found.append([round(float(value), 5) for value, _ in answers])
        print(dtype, item.key, found[-1], flush=True)
    del model
    gc.collect()
    return found


def record(name: str, source: Path, n: int, folder: Path) -> None:
    if not (folder / "config.json").exists():
        dequantize(source, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    items = shortest(tokenizer, n)
    kinds = ("float32", "bfloat16")
    found = {kind: loglikelihoods(folder, items, kind) for kind in kinds}
    off = np.abs(np.array(found["float32"]) - np.array(found["bfloat16"]))
    rows = [
        {
            "key": item.key,
            "n_tokens": len(tokenizer.encode(item.prompt)),
            "ids": ids_digest(tokenizer.encode(item.prompt)),
            **{kind: found[kind][place] for kind in kinds},
        }
        for place, item in enumerate(items)
    ]
    out = {
        "made_by": "tests/tools/record_lm_eval.py",
        "with": f"lm-eval {lm_eval.__version__} hf, transformers {transformers.__version__}, "
        f"torch {torch.__version__}, one thread",
        "model": source.name,
        "task": "mmlu",
        "noise": {"max": round(float(off.max()), 5), "mean": round(float(off.mean()), 5)},
        "rows": rows,
    }
    lines = json.dumps({**out, "rows": []}, indent=1).removesuffix("[]\n}")
    lines += "[\n  " + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]\n}\n"
    (ROOT / f"tests/data/lm_eval_hf_{name}.json").write_text(lines)
    print(out["noise"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("model", type=Path)
    parser.add_argument("items", type=int)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        record(args.name, args.model, args.items, args.folder or Path(made))


if __name__ == "__main__":
    main()
