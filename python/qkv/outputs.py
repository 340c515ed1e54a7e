"""What a run gives back."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = str | int | None


def _empty_f32() -> NDArray[np.float32]:
    return np.zeros(0, np.float32)


def _empty_i32() -> NDArray[np.int32]:
    return np.zeros(0, np.int32)


def _empty_table_f32() -> NDArray[np.float32]:
    return np.zeros((0, 0), np.float32)


def _empty_table_i32() -> NDArray[np.int32]:
    return np.zeros((0, 0), np.int32)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def json_ready(value: Any) -> Any:
    """The same with arrays as lists and NumPy numbers as Python's, for json.dumps."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value


@dataclass(kw_only=True)
class Completion:
    """One sample. Arrays are per output token; the stopping token, if any, is the last of them."""

    text: str = ""
    token_ids: NDArray[np.int32] = field(default_factory=_empty_i32)  # [n]
    logprobs: NDArray[np.float32] = field(default_factory=_empty_f32)  # [n], of the chosen token
    top_ids: NDArray[np.int32] = field(default_factory=_empty_table_i32)  # [n, k]
    top_logprobs: NDArray[np.float32] = field(default_factory=_empty_table_f32)  # [n, k]
    finish_reason: str | None = None  # "stop", "length", "abort"
    stop_reason: str | int | None = None  # the string or token id that ended it

    def __repr__(self) -> str:
        return (
            f"Completion({_short(self.text, 60)!r}, {len(self.token_ids)} tokens, "
            f"{self.finish_reason})"
        )


@dataclass(kw_only=True)
class Metrics:
    """Times in seconds. Several samples: first start, last end, tokens summed."""

    queue_time: float = 0.0
    time_to_first_token: float = 0.0
    time_per_token: float = 0.0  # after the first
    total_time: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the prefix tree
    output_tokens: int = 0
    retractions: int = 0


@dataclass(frozen=True)
class Comparison:
    """A lane's predictions of given tokens beside the first lane's, [n] each, in nats."""

    kl: NDArray[np.float32]  # the first lane against this one
    kl_reverse: NDArray[np.float32]
    top1: NDArray[np.bool_]  # the same most likely token


@dataclass(kw_only=True)
class RequestOutput:
    """The answer to one prompt. `error` says why there is none; it does not touch other rows."""

    index: int  # place in the input
    key: Key = None  # the caller's name for the row
    prompt: str | None = None  # None if token ids were given
    prompt_token_ids: NDArray[np.int32] = field(default_factory=_empty_i32)
    outputs: list[Completion] = field(default_factory=list)  # one per sample
    error: str | None = None
    too_long: bool = False  # the error is that it does not fit into the model or the KV pool
    # Of the prompt's tokens from the second on, [len - 1]; empty if not asked for.
    prompt_logprobs: NDArray[np.float32] = field(default_factory=_empty_f32)
    prompt_ranks: NDArray[np.int32] = field(default_factory=_empty_i32)
    prompt_top_ids: NDArray[np.int32] = field(default_factory=_empty_table_i32)
    prompt_top_logprobs: NDArray[np.float32] = field(default_factory=_empty_table_f32)
    metrics: Metrics = field(default_factory=Metrics)
    scores: dict[str, Any] = field(default_factory=dict)  # what the on_finish hook returned
    comparison: Comparison | None = None  # of the prompt's tokens; score() asks for it
    # With several lanes: each lane's answer by name; this object itself is the first lane's.
    lanes: dict[str, "RequestOutput"] = field(default_factory=dict)

    def _first(self) -> Completion:
        return self.outputs[0] if self.outputs else Completion()

    @property
    def text(self) -> str:
        """The first sample's text; "" for a row with an error."""
        return self._first().text

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self._first().token_ids

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return self._first().logprobs

    @property
    def finish_reason(self) -> str | None:
        return self._first().finish_reason

    @property
    def state(self) -> str:
        """ "ok", "truncated" (a sample was cut at its last token), "too_long" or "error"."""
        if self.error is not None:
            return "too_long" if self.too_long else "error"
        cut = any(sample.finish_reason == "length" for sample in self.outputs)
        return "truncated" if cut else "ok"

    def to_dict(self, *, arrays: bool = True) -> dict[str, Any]:
        """For JSON. Without `arrays` only text, reasons, metrics and scores."""
        row: dict[str, Any] = {"index": self.index, "key": self.key, "prompt": self.prompt}
        if self.error is not None:
            row["error"] = self.error
        row["outputs"] = [_completion_dict(item, arrays) for item in self.outputs]
        row["metrics"] = vars(self.metrics)
        if self.scores:
            row["scores"] = self.scores
        if arrays:
            row["prompt_token_ids"] = self.prompt_token_ids
            if len(self.prompt_logprobs):
                row["prompt_logprobs"] = self.prompt_logprobs
        if self.lanes:
            row["lanes"] = {
                name: [_completion_dict(item, arrays) for item in lane.outputs]
                for name, lane in self.lanes.items()
            }
        ready: dict[str, Any] = json_ready(row)
        return ready

    def __repr__(self) -> str:
        name = f"RequestOutput({self.index}" + (f", key={self.key!r}" if self.key else "")
        if self.error is not None:
            return f"{name}, error={self.error!r})"
        more = f", {len(self.outputs)} samples" if len(self.outputs) > 1 else ""
        return (
            f"{name}, {_short(self.text, 60)!r}, {self.metrics.prompt_tokens} -> "
            f"{self.metrics.output_tokens} tokens, {self.finish_reason}{more})"
        )

    def _repr_html_(self) -> str:
        prompt = self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} tokens"
        cells = [("prompt", _short(prompt, 400))]
        if self.error is not None:
            cells.append(("error", self.error))
        cells += [(item.finish_reason or "", item.text) for item in self.outputs]
        rows = "".join(
            f"<tr><th style='text-align:left;vertical-align:top'>{html.escape(name)}</th>"
            f"<td style='text-align:left;white-space:pre-wrap'>{html.escape(text)}</td></tr>"
            for name, text in cells
        )
        return f"<table>{rows}</table>"


def _completion_dict(item: Completion, arrays: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "text": item.text,
        "finish_reason": item.finish_reason,
        "stop_reason": item.stop_reason,
    }
    if arrays:
        row["token_ids"] = item.token_ids
        row["logprobs"] = item.logprobs
        if item.top_ids.size:
            row["top_ids"] = item.top_ids
            row["top_logprobs"] = item.top_logprobs
    return row


@dataclass(kw_only=True)
class Score:
    """Teacher-forced log-probabilities of given tokens, in nats.

    Against the first lane there are, in the other lanes' scores, kl (first lane against this),
    kl_reverse and top1 (whether the best token is the same); None where there is one lane."""

    index: int
    error: str | None = None
    token_ids: NDArray[np.int32] = field(default_factory=_empty_i32)  # [n], the tokens scored
    token_logprobs: NDArray[np.float32] = field(default_factory=_empty_f32)  # [n]
    rank: NDArray[np.int32] = field(default_factory=_empty_i32)  # [n], 0 = the most likely
    top_ids: NDArray[np.int32] = field(default_factory=_empty_table_i32)  # [n, top]
    top_logprobs: NDArray[np.float32] = field(default_factory=_empty_table_f32)  # [n, top]
    kl: NDArray[np.float32] | None = None
    kl_reverse: NDArray[np.float32] | None = None
    top1: NDArray[np.bool_] | None = None
    lanes: dict[str, "Score"] = field(default_factory=dict)

    @classmethod
    def of(cls, output: RequestOutput, start: int) -> "Score":
        """Of the prompt's tokens from `start` on, in all lanes."""

        def one(answer: RequestOutput) -> "Score":
            compared = answer.comparison
            ids = answer.prompt_token_ids[start:] if answer.error is None else _empty_i32()
            return cls(
                index=answer.index,
                error=answer.error,
                token_ids=ids,
                token_logprobs=answer.prompt_logprobs,
                rank=answer.prompt_ranks,
                top_ids=answer.prompt_top_ids,
                top_logprobs=answer.prompt_top_logprobs,
                kl=None if compared is None else compared.kl,
                kl_reverse=None if compared is None else compared.kl_reverse,
                top1=None if compared is None else compared.top1,
            )

        score = one(output)
        score.lanes = {name: one(lane) for name, lane in output.lanes.items()}
        return score

    @property
    def total(self) -> float:
        """Log-probability of all the tokens together, summed in float64."""
        return float(self.token_logprobs.sum(dtype=np.float64))

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one: greedy decoding would write just this."""
        return self.error is None and bool((self.rank == 0).all())

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "index": self.index,
            "error": self.error,
            "total": self.total,
            "greedy": self.greedy,
            "token_ids": self.token_ids,
            "token_logprobs": self.token_logprobs,
            "rank": self.rank,
        }
        if self.top_ids.size:
            row |= {"top_ids": self.top_ids, "top_logprobs": self.top_logprobs}
        if self.kl is not None:
            row |= {"kl": self.kl, "kl_reverse": self.kl_reverse, "top1": self.top1}
        if self.lanes:
            row["lanes"] = {name: lane.to_dict() for name, lane in self.lanes.items()}
        ready: dict[str, Any] = json_ready(row)
        return ready

    def __repr__(self) -> str:
        if self.error is not None:
            return f"Score({self.index}, error={self.error!r})"
        more = ", greedy" if self.greedy else ""
        if self.kl is not None and self.top1 is not None and len(self.kl):
            more += f", mean KL {self.kl.mean():.3g}, top-1 {self.top1.mean():.1%}"
        if self.lanes:
            more += f", lanes {', '.join(self.lanes)}"
        return (
            f"Score({self.index}, total={self.total:.4f} over {len(self.token_logprobs)} tokens"
            f"{more})"
        )
