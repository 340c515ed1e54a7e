"""A row becomes a request, and with its output a row again.

An output row has, in this order:

    id                the row's own (a column), else its place in the input, from 0 on; -1 - place
                      where the first row's id is an integer: of none of the others, then
    its columns       as they came; one that has a name of those below gets "input_" before it
    text              of the first sample, null if there is none
    finish_reason     "stop" or "length"; stop_reason: the string or token id that ended it, or null
    state             "ok", "truncated" (cut at max_tokens or the end of the context), "too_long"
                      (it does not fit into the model or the KV pool), "error"
    error             the reason of the last two, else null
    prompt_tokens     and output_tokens (of all samples): how many
    prompt_token_ids  and token_ids, if asked for
    logprobs          and top_ids, top_logprobs, prompt_logprobs as the sampling parameters ask
    samples           all samples, where there are several: text, finish_reason and so on of each
    lanes             with several KV formats: the samples of each by its name
    score_NAME        what the hook gave under NAME
    qkv_key           a hash of the row and of all that its answer depends on (keys.py)

Nothing of it depends on the place in the batch, the time, or what was cached."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..chat_template import row_template
from ..incoming import is_ids
from ..outputs import Completion, RequestOutput, json_ready
from ..params import SamplingParams
from . import keys
from .source import Bad, Row

if TYPE_CHECKING:
    from ..engine import Engine

_ID_COLUMNS = ("id", "key", "custom_id")
_PROMPT_COLUMNS = ("prompt", "prompt_token_ids", "messages")
_LISTS = ("prompt_token_ids", "messages")
#: Rows that are looked at for one that can be read, before the first is named.
_HEAD = 1000
_RESULTS = frozenset(
    ("id", "text", "finish_reason", "stop_reason", "state", "error", "prompt_tokens",
     "output_tokens", "prompt_token_ids", "token_ids", "logprobs", "top_ids", "top_logprobs",
     "prompt_logprobs", "samples", "lanes", "qkv_key")
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How prompts are made of rows, and what of a row is kept.

    prompt: the column with the prompt: text, token ids, or messages. None: the first of prompt,
        prompt_token_ids, messages that a row has. Text in the last two is JSON, as CSV has it.
    template: instead, a Jinja template over the row's columns: "{{ question }}\\nAnswer:".
    system: a system message before the prompt, which then goes through the chat template.
    chat: whether a prompt that is text goes through the model's chat template (None: if there is a
        system message). Messages always do.
    id: the column with the row's name, text or an integer, unlike any other's. None: the first of
        id, key, custom_id that a row has, else its place (among integers: -1 - place). The seed
        comes from the prompt and the row's own id.
    params: a column with sampling parameters of the row's own (an object or its JSON text), which
        go before the common ones. None: "params", where it is an object.
    columns: the input columns that are kept; None: all.
    token_ids: whether the output has the ids of prompt and output tokens.
    """

    prompt: str | None = None
    template: str | None = None
    system: str | None = None
    chat: bool | None = None
    id: str | None = None
    params: str | None = None
    columns: Sequence[str] | None = None
    token_ids: bool = False

    def __post_init__(self) -> None:
        if self.prompt is not None and self.template is not None:
            raise ValueError("a prompt column and a template: one of them makes the prompt")
        if isinstance(self.columns, str):
            raise TypeError(f"columns={self.columns!r}: a list of names is needed")

    def described(self) -> dict[str, Any]:
        """For the header of an output: what its rows depend on."""
        found = dict(vars(self))
        found["columns"] = None if self.columns is None else list(self.columns)
        return found


@dataclass
class Request:
    """A row on its way: what is known before it has an output."""

    place: int  # in the input, from 0 on
    id: Any
    columns: dict[str, Any]
    prompt: Any  # what Engine.stream takes: a mapping, or a ValueError in its place
    id_key: bytes
    row_key: str


class Prompts:
    """Requests of rows, and rows of outputs. `run` goes into the rows' keys: of the settings."""

    def __init__(self, rows: Rows, params: SamplingParams, run: bytes = b"") -> None:
        self._rows = rows
        self._params = params
        self._run = run
        self._fill = None if rows.template is None else row_template(rows.template)
        self._chat = rows.chat if rows.chat is not None else rows.system is not None
        self._own: tuple[str, SamplingParams] = ("", params)  # the last that a row had
        self._integers = False  # whether ids are integers

    def check(self, engine: Engine) -> None:
        """Error if all prompts would need a chat template and the model has none."""
        if self._chat:
            engine.tokenizer.apply_chat_template([{"role": "user", "content": "?"}])

    def begin(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The same rows. The first that can be read shows whether ids are integers: then a line
        that is no row must not have its place for a name, which another row may have."""
        head: list[Row] = []
        for row in rows:
            head.append(row)
            if not isinstance(row, Bad):
                with suppress(Exception):  # its own error later
                    self._integers = isinstance(self._own_id(row)[0], int)
                break
            if len(head) == _HEAD:
                break
        return chain(head, rows)

    def _name(self, place: int) -> int:
        """Of a row without an id."""
        return -1 - place if self._integers else place

    def identify(self, row: Row, place: int) -> Request:
        """The row with its id and keys, without a prompt yet: enough to know whether it is done."""
        name = self._name(place)
        if isinstance(row, Bad):
            return self._request(place, name, {}, ValueError(row.reason), row.reason)
        columns: dict[str, Any] = {}
        own = None
        try:
            columns = {str(name): value for name, value in row.items()}
            own, problem = self._own_id(columns)
            keys.check(columns)
        except Exception as error:  # of values that came from outside
            reason = str(error) or type(error).__name__
            used = name if own is None else own
            return self._request(place, used, {}, ValueError(reason), reason)
        used = name if own is None else own
        return self._request(place, used, columns, problem, columns, own)

    def _request(
        self, place: int, used: Any, columns: dict[str, Any], problem: ValueError | None, row: Any,
        own: Any = None,
    ) -> Request:  # fmt: skip
        request = Request(
            place=place,
            id=used,
            columns=columns,
            prompt=problem,
            id_key=keys.of_id(used),
            row_key=keys.of_row(self._run, row),
        )
        if problem is None:
            request.prompt = {"key": own}
        return request

    def duplicate(self, request: Request) -> Request:
        """Of a row whose id was used before: an error under a name of its own."""
        reason = f"the id {request.id!r:.80} was used before, by another row"
        name = f"{request.id} (row {request.place})"
        columns = request.columns
        return self._request(request.place, name, columns, ValueError(reason), columns)

    def complete(self, request: Request) -> None:
        """Makes the prompt. Whatever is wrong with it becomes the row's error."""
        if isinstance(request.prompt, ValueError):
            return
        try:
            request.prompt |= self._prompt(request.columns)
            params = self._row_params(request.columns)
            if params is not None:
                request.prompt["params"] = params
        except Exception as error:  # of the template and of values that came from outside
            request.prompt = ValueError(str(error) or type(error).__name__)

    def _own_id(self, columns: Mapping[str, Any]) -> tuple[Any, ValueError | None]:
        name = self._rows.id
        if name is None:
            name = next((known for known in _ID_COLUMNS if columns.get(known) is not None), None)
            if name is None:
                return None, None
        value = columns.get(name)
        if isinstance(value, np.integer):
            value = int(value)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            keys.check(value)  # an integer of thousands of digits has no text
            return value, None
        if value is None:
            return None, ValueError(f"there is no id in the column {name!r}")
        return None, ValueError(f"{name}={value!r:.80}: an id is text or an integer")

    def _prompt(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        if self._fill is not None:
            return self._spoken(self._fill(columns), "the template's text")
        name = self._rows.prompt
        if name is None:
            found = (known for known in _PROMPT_COLUMNS if columns.get(known) is not None)
            name = next(found, None)
        if name is None or name not in columns:
            wanted = " or ".join(map(repr, _PROMPT_COLUMNS)) if name is None else repr(name)
            there = ", ".join(map(repr, columns)) or "none"
            raise ValueError(f"there is no column {wanted}; the row's columns: {there:.300}")
        value = columns[name]
        if name in _LISTS and isinstance(value, str) and value:  # CSV has only text
            value = _list(name, value)
        return self._spoken(value, f"the column {name!r}")

    def _spoken(self, value: Any, where: str) -> dict[str, Any]:
        """A prompt as the engine takes it."""
        if isinstance(value, str):
            if not value:
                raise ValueError(f"{where} is empty")
            if not self._chat:
                return {"prompt": value}
            value = [{"role": "user", "content": value}]
        if isinstance(value, np.ndarray) and value.dtype == object:
            value = value.tolist()
        if isinstance(value, (list, tuple, np.ndarray)) and len(value) == 0:
            raise ValueError(f"{where} is empty")
        if is_ids(value):
            return {"prompt_token_ids": value}
        if not (isinstance(value, (list, tuple)) and isinstance(value[0], Mapping)):
            raise ValueError(
                f"{where} is {type(value).__name__} {value!r:.60}: text, token ids or messages are "
                "needed"
            )
        messages = list(value)
        if self._rows.system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self._rows.system}, *messages]
        return {"messages": messages}

    def _row_params(self, columns: Mapping[str, Any]) -> SamplingParams | None:
        value = columns.get(self._rows.params or "params")
        if value is None or (self._rows.params is None and not isinstance(value, Mapping)):
            return None
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        if not text:
            return None
        if text == self._own[0]:
            return self._own[1]
        given = json.loads(text)
        if not isinstance(given, Mapping):
            raise ValueError(f"sampling parameters {value!r:.80}: an object is needed")
        # Parquet has every member of an object in every row.
        params = self._params.merged({k: v for k, v in given.items() if v is not None})
        self._own = (text, params)
        return params

    def answer(self, request: Request, output: RequestOutput) -> dict[str, Any]:
        """The output row, ready for JSON."""
        kept = self._rows.columns
        row: dict[str, Any] = {"id": request.id}
        for name, value in request.columns.items():
            if kept is not None and name not in kept:
                continue
            if name == "id" and type(value) is type(request.id) and value == request.id:
                continue
            row[output_name(name, row)] = value
        good = output.error is None
        row["text"] = output.text if good else None
        row["finish_reason"] = output.finish_reason if good else None
        row["stop_reason"] = output.outputs[0].stop_reason if good and output.outputs else None
        row["state"] = output.state
        row["error"] = output.error
        row["prompt_tokens"] = len(output.prompt_token_ids)
        row["output_tokens"] = output.metrics.output_tokens if good else 0
        if self._rows.token_ids:
            row["prompt_token_ids"] = output.prompt_token_ids
        if good:
            row |= self._details(request, output)
        row |= {f"score_{name}": value for name, value in _sound(output.scores).items()}
        row["qkv_key"] = request.row_key
        ready: dict[str, Any] = json_ready(row)
        return ready

    def _details(self, request: Request, output: RequestOutput) -> dict[str, Any]:
        params = request.prompt.get("params", self._params)
        row: dict[str, Any] = {}
        if output.outputs:
            row |= self._arrays(output.outputs[0], params)
        if params.prompt_logprobs is not None:
            row["prompt_logprobs"] = output.prompt_logprobs
        if len(output.outputs) > 1:
            row["samples"] = [self._sample(sample, params) for sample in output.outputs]
        if output.lanes:
            row["lanes"] = {
                name: [self._sample(sample, params) for sample in lane.outputs]
                for name, lane in output.lanes.items()
            }
        return row

    def _sample(self, sample: Completion, params: SamplingParams) -> dict[str, Any]:
        return {
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "output_tokens": len(sample.token_ids),
            **self._arrays(sample, params),
        }

    def _arrays(self, sample: Completion, params: SamplingParams) -> dict[str, Any]:
        row: dict[str, Any] = {}
        if self._rows.token_ids:
            row["token_ids"] = sample.token_ids
        if params.logprobs is not None:
            row["logprobs"] = sample.logprobs
            if params.logprobs > 0:
                row |= {"top_ids": sample.top_ids, "top_logprobs": sample.top_logprobs}
        return row


def _list(column: str, text: str) -> list[Any]:
    """Of JSON text; or words would be what the model is asked, and no error."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the column {column!r} is not valid JSON: {error}") from None
    if not isinstance(value, list):
        raise ValueError(f"the column {column!r} is {text!r:.60}: a list is needed")
    return value


def output_name(name: str, taken: Container[str]) -> str:
    """Of a column that came in, in an output that has the columns `taken` already."""
    while name in _RESULTS or name.startswith("score_") or name in taken:
        name = f"input_{name}"
    return name


def _sound(scores: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a hook gave; its error if it cannot be written."""
    try:
        keys.check(scores)
    except ValueError as error:
        return {"error": f"what the hook gave: {error}"}
    return scores
