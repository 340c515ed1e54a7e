"""Records what transformers computes for a real GGUF model: tests/data/real_<name>.json.

  record_real.py NAME MODEL.gguf        needs torch, transformers, gguf; not needed by the tests

transformers dequantizes the file to float32 itself (gguf_file=). Per prompt: the log-probability of
every token after the first, 32 greedy tokens with the gap between the best two logits at each, all
in float32; and the largest and the mean difference of the log-probabilities in bfloat16, which is
the noise that a bf16 engine is allowed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
PLAIN = [
    "The capital of France is Paris, and the capital of Italy is",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    " How many clips did Natalia sell altogether in April and May? Natalia sold 48 / 2 =",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 北京是中国的首都。 🙂",
]
CHAT = [
    "What is the capital of France?",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total"
    " does it take?",
]
GREEDY = 32


def logprobs(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    every = torch.log_softmax(logits.float(), dim=-1)
    return every[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


@torch.no_grad()
def record(model: Any, rounded: Any, ids: list[int]) -> dict[str, Any]:
    exact = logprobs(model(torch.tensor([ids])).logits[0], ids)
    noisy = logprobs(rounded(torch.tensor([ids])).logits[0], ids)
    tokens, margins = list(ids), []
    for _ in range(GREEDY):
        best = torch.topk(model(torch.tensor([tokens])).logits[0, -1], 2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 4))
    difference = (exact - noisy).abs()
    return {
        "ids": ids,
        "logprobs": [round(float(x), 5) for x in exact],
        "bf16_noise_max": round(float(difference.max()), 5),
        "bf16_noise_mean": round(float(difference.mean()), 5),
        "greedy": tokens[len(ids) :],
        "greedy_margin": margins,
    }


def main() -> None:
    name, path = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    where: dict[str, Any] = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    load = AutoModelForCausalLM.from_pretrained
    model = load(path.parent, **where, dtype=torch.float32, attn_implementation="eager").eval()
    rounded = load(path.parent, **where, dtype=torch.bfloat16, attn_implementation="eager").eval()
    prompts = [(text, tokenizer(text)["input_ids"]) for text in PLAIN]
    if tokenizer.chat_template:
        for text in CHAT:
            messages = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            prompts.append((text, list(ids["input_ids"] if hasattr(ids, "keys") else ids)))
    out = [{"text": text, **record(model, rounded, ids)} for text, ids in prompts]
    for row in out:
        print(repr(tokenizer.decode(row["greedy"])), row["bf16_noise_max"], row["bf16_noise_mean"])
    folder = Path(os.environ.get("OUT", ROOT / "tests/data"))
    (folder / f"real_{name}.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
