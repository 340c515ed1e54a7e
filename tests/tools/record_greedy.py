"""Records tests/data/demo_greedy.json: the demo model's greedy answers, with the lead of each token
over the second best. Run it after a change that is meant to change the answers, and say why.

  record_greedy.py MODEL.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import qkv

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    " How many clips did Natalia sell altogether in April and May?",
    "Zähle drei Farben auf. 🙂",
]
MAX_TOKENS = 48
# Twice the largest difference between two instruction sets in a log-probability of the prompts of
# real_smollm2.json (scalar and avx512: 0.084), once for each of the two tokens compared.
NOISE = 0.17


def main() -> None:
    params = qkv.SamplingParams(max_tokens=MAX_TOKENS, temperature=0, logprobs=2)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with qkv.Engine(sys.argv[1], kv_tokens=8192) as engine:
        outputs = engine.chat(chats, params, progress=False)
    rows = []
    for question, output in zip(QUESTIONS, outputs, strict=True):
        best = output.outputs[0]
        margins = best.top_logprobs[:, 0] - best.top_logprobs[:, 1]
        rows.append(
            {
                "question": question,
                "prompt_token_ids": [int(t) for t in output.prompt_token_ids],
                "token_ids": [int(t) for t in best.token_ids],
                "margins": [round(float(m), 4) for m in margins],
                "text": best.text,
                "finish_reason": best.finish_reason,
            }
        )
    record = {"max_tokens": MAX_TOKENS, "noise": NOISE, "rows": rows}
    path = Path(__file__).resolve().parents[1] / "data/demo_greedy.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
