"""One run over many prompts: rows in, outputs out, a bounded number of them under way."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._core import Error, OutOfPages, Result
from .incoming import Item, token_array
from .outputs import Comparison, Completion, Key, Metrics, RequestOutput
from .params import SamplingParams
from .progress import Progress
from .structured import Grammar, Guide
from .tokenizer import Decoder, Tokenizer, check_text

if TYPE_CHECKING:
    from .engine import Engine

Hook = Callable[[RequestOutput], Mapping[str, Any] | None]


class StopWatch:
    """Looks for stop strings in the output as it grows."""

    def __init__(self, params: SamplingParams, decoder: Decoder) -> None:
        self._decoder = decoder
        self._stops = tuple(params.stop)
        self._reach = max(len(stop) for stop in self._stops) - 1
        self._min_tokens = params.min_tokens
        self._from = 0  # what was written before min_tokens is not looked at
        self._text = ""
        self.count = 0  # tokens seen
        self.hit: str | None = None
        self.error: str | None = None

    @property
    def text(self) -> str:
        """Up to the stop string."""
        return self._text

    def push(self, token: int) -> bool:
        """True if a stop string is complete now, or if the tokenizer cannot say."""
        self.count += 1
        try:
            piece = self._decoder.push(token)
        except Error as error:
            self.error = str(error)
            return True
        start = max(len(self._text) - self._reach, self._from, 0)
        self._text += piece
        if self.count <= self._min_tokens:
            self._from = len(self._text)
            return False
        found = [(self._text.find(stop, start), stop) for stop in self._stops]
        found = [(place, stop) for place, stop in found if place >= 0]
        if not found:
            return False
        place, self.hit = min(found, key=lambda entry: entry[0])
        self._text = self._text[:place]
        return True


class Row:
    """A row that is under way: one sequence per lane and sample."""

    def __init__(self, run: "Run", item: Item, n_lanes: int) -> None:
        assert item.ids is not None
        self.run = run
        self.item = item
        self.ids = item.ids
        n = item.params.n
        self.completions: list[list[Completion | None]] = [[None] * n for _ in range(n_lanes)]
        self.results: list[list[Result | None]] = [[None] * n for _ in range(n_lanes)]
        self.open: dict[int, Seq] = {}


@dataclass
class Seq:
    row: Row
    lane: int
    sample: int
    watch: StopWatch | None
    guide: Guide | None = None
    count: int = 0  # tokens seen of a watched one


def described(error: BaseException) -> str:
    """Its type and text, also where the text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def derive_seed(engine_seed: int, ids: NDArray[np.int32], key: Key) -> int:
    """64 bits from what the row is, never from where it stands."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(engine_seed.to_bytes(8, "little"))
    digest.update(ids.astype("<i4").tobytes())
    digest.update(repr(key).encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")


class Run:
    """Feeds items into the engine and collects outputs."""

    def __init__(
        self,
        engine: "Engine",
        items: Iterator[Item],
        *,
        window: int,
        on_finish: Hook | None,
        progress: Progress,
    ) -> None:
        self._engine = engine
        self._items = items
        self._window = window
        self._on_finish = on_finish
        self._progress = progress
        self._exhausted = False
        self._rows: set[Row] = set()
        self._compiling: list[tuple[Item, Grammar]] = []  # rows whose form is not ready yet
        self._done: deque[RequestOutput] = deque()

    def results(self) -> Iterator[RequestOutput]:
        """Outputs as they finish. Whatever ends this, nothing stays behind in the engine."""
        try:
            while True:
                # Before more is read: reading may take long, and what is done is to be kept.
                while self._done:
                    output = self._done[0]
                    self._hook(output)  # an interrupt in it does not lose the row
                    self._done.popleft()
                    self._progress.rows()
                    yield output
                with self._engine._exclusive():
                    self._fill()
                if self._done:  # rows that were not started
                    continue
                if self._rows:
                    with self._engine._exclusive():
                        self._progress.step(self._engine._pump())
                elif self._compiling:
                    wait([grammar.begin() for _, grammar in self._compiling], None, FIRST_COMPLETED)
                elif self._exhausted:
                    finish = getattr(self._on_finish, "finish", None)
                    if finish is not None:
                        finish(self._engine)
                    return
        finally:
            self._abort()
            self._progress.close()

    def finished(self) -> list[RequestOutput]:
        """Answered and not yet given out."""
        return list(self._done)

    def _hook(self, output: RequestOutput) -> None:
        if self._on_finish is None or output.error is not None:
            return
        try:
            scores = self._on_finish(output)
            output.scores = {} if scores is None else dict(scores)
        except Exception as error:  # the caller's code: it marks its row and nothing else
            output.scores = {"error": described(error)}

    def _fill(self) -> None:
        compiling, self._compiling = self._compiling, []
        for begun, grammar in compiling:
            if grammar.begin().done():
                self._start(begun, grammar)
            else:
                self._compiling.append((begun, grammar))
        room = self._window - len(self._rows) - len(self._compiling)
        if self._exhausted or room <= 0:
            return
        batch: list[Item] = []
        while len(batch) < room:
            item = next(self._items, None)
            if item is None:
                self._exhausted = True
                break
            batch.append(item)
        self._encode(batch)
        for item in batch:
            self._begin(item)

    def _begin(self, item: Item) -> None:
        """Starts it, now or when its form is compiled."""
        grammar = None
        if item.error is None and item.params.structured_outputs is not None:
            try:
                grammar = self._engine._guides.grammar(item.params.structured_outputs)
            except Error as error:
                item.error = str(error)
        if grammar is not None and not grammar.begin().done():
            self._compiling.append((item, grammar))
        else:
            self._start(item, grammar)

    def _start(self, item: Item, grammar: Grammar | None) -> None:
        if item.error is None:
            self._add(item, grammar)
        if item.error is not None:
            ids = np.zeros(0, np.int32) if item.ids is None else item.ids
            self._done.append(
                RequestOutput(
                    index=item.index,
                    key=item.key,
                    prompt=item.text,
                    prompt_token_ids=ids,
                    error=item.error,
                    too_long=item.too_long,
                    metrics=Metrics(prompt_tokens=len(ids)),
                )
            )

    def _encode(self, batch: Sequence[Item]) -> None:
        """Text to ids, many rows at once; a row that cannot be encoded gets its error."""
        for special in (True, False):
            rows: list[tuple[Item, str]] = []
            for item in batch:
                if item.text is None or item.ids is not None or item.error is not None:
                    continue
                if item.add_special_tokens == special:
                    try:
                        check_text(item.text)
                        rows.append((item, item.text))
                    except ValueError as error:
                        item.error = str(error)
            if rows:
                self._encode_texts(rows, special)

    def _encode_texts(self, rows: Sequence[tuple[Item, str]], special: bool) -> None:
        tokenizer = self._engine.tokenizer
        texts = [text for _, text in rows]
        try:
            encoded = tokenizer.encode_batch(texts, add_special_tokens=special)
        except Error:  # of some text: alone each of them has its own error
            for item, text in rows:
                try:
                    item.ids = np.asarray(tokenizer.encode(text, add_special_tokens=special))
                except Error as error:
                    item.error = str(error)
            return
        for (item, _), ids in zip(rows, encoded, strict=True):
            item.ids = np.asarray(ids)

    def _add(self, item: Item, grammar: Grammar | None) -> None:
        try:
            item.ids = token_array(item.ids, self._engine._vocab)
            options = self._options(item, item.ids)
            watches, guides = self._watches(item.params), _guides(grammar)
        except (ValueError, Error) as error:
            item.error = str(error)
            return
        row = Row(self, item, len(self._engine._lanes))
        self._rows.add(row)  # first, so that whatever interrupts this drops it
        core, params = self._engine._core, item.params
        n_lanes = len(self._engine._lanes)
        if item.compare and n_lanes > 1 and options["logprob_start"] > 0:
            options |= {"group": self._engine._next_group(), "group_size": n_lanes}
        for lane in range(n_lanes):
            for sample in range(params.n):
                if sample > 0:
                    options["logprob_start"] = -1
                try:
                    number = core.add(row.ids, lane=lane, sample=sample, **options)
                except (ValueError, OverflowError, OutOfPages) as error:
                    item.error = str(error)
                    room = core.info["max_model_len"] - (params.max_tokens > 0)
                    item.too_long = isinstance(error, OutOfPages) or len(row.ids) > room
                    self._drop(row)
                    return
                seq = Seq(row, lane, sample, next(watches), next(guides))
                row.open[number] = seq
                self._engine._seqs[number] = seq
                if seq.guide is not None and params.max_tokens > 0:
                    core.allow(number, seq.guide.mask())
                    if seq.guide.error is not None:
                        item.error = seq.guide.error
                        self._drop(row)
                        return
            options["logprob_start"] = self._logprob_start(item, row.ids)

    def _watches(self, params: SamplingParams) -> Iterator[StopWatch | None]:
        """One for each sequence."""
        if not params.stop:
            return repeat(None)
        tokenizer = self._engine.tokenizer
        skip = params.skip_special_tokens
        return (StopWatch(params, tokenizer.decoder(skip_special_tokens=skip)) for _ in count())

    def _logprob_start(self, item: Item, ids: NDArray[np.int32]) -> int:
        if item.params.prompt_logprobs is None or len(ids) <= item.logprob_start:
            return -1
        return item.logprob_start

    def _options(self, item: Item, ids: NDArray[np.int32]) -> dict[str, Any]:
        """The arguments of the core's add()."""
        params = item.params
        seed = params.seed
        if seed is None:
            seed = derive_seed(self._engine._seed, ids, item.key)
        options: dict[str, Any] = {
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": seed,
            "ignore_eos": params.ignore_eos,
            "n_top": params.logprobs or 0,
            "logprob_start": self._logprob_start(item, ids),
            "prompt_n_top": params.prompt_logprobs or 0,
            "decode_start": item.decode_start,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "watch": bool(params.stop) or params.structured_outputs is not None,
        }
        if params.stop_token_ids:
            options["stop_token_ids"] = np.asarray(params.stop_token_ids, np.int32)
        if params.logit_bias:
            options["bias_ids"] = np.asarray(list(params.logit_bias), np.int32)
            options["bias"] = np.asarray(list(params.logit_bias.values()), np.float32)
        if params.bad_words:
            options["bad_words"] = self._bad_words(params)
        self._check_choice(params, options.get("bad_words", ()))
        return options

    def _check_choice(self, params: SamplingParams, words: Sequence[NDArray[np.int32]]) -> None:
        """ValueError if logit_bias and bad_words forbid every token."""
        vocab = self._engine._vocab
        bias = params.logit_bias or {}
        if len(bias) + len(words) < vocab - len(self._engine._eos_ids):
            return
        banned = {token for token, amount in bias.items() if amount == -math.inf}
        banned |= {int(word[0]) for word in words if len(word) == 1}
        if params.min_tokens > 0:
            banned |= self._engine._eos_ids
        if params.max_tokens > 0 and len(banned) >= vocab:
            raise ValueError(
                f"logit_bias, bad_words and min_tokens={params.min_tokens} forbid all {vocab} "
                "tokens"
            )

    def _bad_words(self, params: SamplingParams) -> list[NDArray[np.int32]]:
        """A word is meant at the start of a text and after a space, which are different tokens."""
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            if not isinstance(word, str):
                found[tuple(word)] = None
                continue
            for text in (word, " " + word.lstrip(" ")):
                ids = self._engine.tokenizer.encode(text, add_special_tokens=False)
                if ids:
                    found[tuple(ids)] = None
        return [np.asarray(ids, np.int32) for ids in found]

    def _drop(self, row: Row) -> None:
        for number in row.open:
            # Not there any more if the engine was closed meanwhile.
            if self._engine._seqs.pop(number, None) is not None:
                self._engine._abort(number)
        row.open.clear()
        self._rows.discard(row)

    def _abort(self) -> None:
        self._compiling.clear()
        for row in list(self._rows):
            self._drop(row)

    def finish(self, number: int, seq: Seq, result: Result) -> None:
        """A sequence is through. The last one of a row completes it."""
        row = seq.row
        del row.open[number]
        row.results[seq.lane][seq.sample] = result
        try:
            row.completions[seq.lane][seq.sample] = self._completion(row, seq, result)
        except Error as error:  # the tokenizer's; the other rows are not touched
            row.item.error = str(error)
        if not row.open:
            self._rows.discard(row)
            self._done.append(self._output(row))

    def _completion(self, row: Row, seq: Seq, result: Result) -> Completion:
        stopped = result.finish_reason == "stop" and result.stop_token >= 0
        stop_reason: str | int | None = result.stop_token if stopped else None
        reason: str = result.finish_reason
        for follower in (seq.watch, seq.guide):
            if follower is not None and follower.error is not None:
                raise Error(follower.error)
        if seq.watch is not None and seq.watch.hit is not None:
            text, stop_reason, reason = seq.watch.text, seq.watch.hit, "stop"
        else:
            ids = result.token_ids[:-1] if stopped else result.token_ids
            # The tokenizer is not even read for a row that was only scored.
            text = _text(self._engine._text_tokenizer, ids, row.item.params) if len(ids) else ""
        return Completion(
            text=text,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            top_ids=result.top_ids,
            top_logprobs=result.top_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _output(self, row: Row) -> RequestOutput:
        lanes = [self._lane_output(row, lane) for lane in range(len(row.results))]
        broken = [lane.error for lane in lanes if lane.error is not None]
        output = lanes[0]
        if len(lanes) > 1:
            names = [lane.name for lane in self._engine._lanes]
            # The first lane's entry is a copy, so that the result does not contain itself.
            lanes[0] = self._lane_output(row, 0)
            output.lanes = dict(zip(names, lanes, strict=True))
        output.error = broken[0] if broken else None
        return output

    def _lane_output(self, row: Row, lane: int) -> RequestOutput:
        results = [result for result in row.results[lane] if result is not None]
        first = results[0]
        comparison = None
        if row.item.compare and first.comparison != "none" and lane > 0:
            comparison = Comparison(first.kl, first.kl_reverse, first.top1)
        error = row.item.error
        if first.comparison == "broken":
            error = "the comparison of the lanes was broken off"
        return RequestOutput(
            error=error,
            comparison=comparison,
            index=row.item.index,
            key=row.item.key,
            prompt=row.item.text,
            prompt_token_ids=row.ids,
            outputs=[item for item in row.completions[lane] if item is not None],
            prompt_logprobs=first.prompt_logprobs,
            prompt_ranks=first.prompt_ranks,
            prompt_top_ids=first.prompt_top_ids,
            prompt_top_logprobs=first.prompt_top_logprobs,
            metrics=_metrics(results, len(row.ids)),
        )


def _guides(grammar: Grammar | None) -> Iterator[Guide | None]:
    """One for each sequence; Error if the grammar does not compile."""
    if grammar is None:
        return repeat(None)
    first = grammar.guide()
    return chain((first,), (grammar.guide() for _ in count()))


def _text(tokenizer: Tokenizer | None, ids: NDArray[np.int32], params: SamplingParams) -> str:
    if tokenizer is None:
        return ""
    return tokenizer.decode_output(ids, skip_special_tokens=params.skip_special_tokens)


def _metrics(results: Sequence[Result], n_prompt: int) -> Metrics:
    rates = [
        (result.total_time - result.time_to_first_token) / (len(result.token_ids) - 1)
        for result in results
        if len(result.token_ids) > 1
    ]
    return Metrics(
        queue_time=min(result.queue_time for result in results),
        time_to_first_token=min(result.time_to_first_token for result in results),
        time_per_token=sum(rates) / len(rates) if rates else 0.0,
        total_time=max(result.total_time for result in results),
        prompt_tokens=n_prompt,
        cached_tokens=results[0].cached_tokens,
        output_tokens=sum(len(result.token_ids) for result in results),
        retractions=sum(result.retractions for result in results),
    )
