"""Records what transformers computes for the tiny models: python tests/ref/record_transformers.py

Needs torch and transformers (recorded with 2.13 and 5.24); the tests need only the file that this
writes. Weights are what the checkpoint stores (bf16), computed in float32 with eager attention."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from ref import tiny_cases  # noqa: E402


def prompt_logprobs(folder: Path, ids: NDArray[np.int32], dtype: torch.dtype) -> NDArray[Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    tokens = torch.tensor(ids, dtype=torch.long)
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0].float()
    table = torch.log_softmax(logits, dim=-1)
    return np.asarray(table[torch.arange(len(ids) - 1), tokens[1:]].numpy())


def main() -> None:
    out: dict[str, Any] = {}
    for name in tiny_cases.CASES:
        with tempfile.TemporaryDirectory() as folder:
            made = tiny_cases.write(Path(folder), name)
            ids = tiny_cases.prompt(name)
            out[name] = prompt_logprobs(Path(folder), ids, torch.float32)
            out[f"{name}|bf16"] = prompt_logprobs(Path(folder), ids, torch.bfloat16)
        print(f"{name}: {out[name].mean():.3f}, {len(made.tensors)} tensors")
    np.savez_compressed(tiny_cases.RECORDED, **out)


if __name__ == "__main__":
    main()
