"""run_dataset: a file of rows through a model into a file of answers, as often as it takes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import islice
from typing import Any

from .. import digests
from .._core import Error
from ..engine import Engine
from ..params import SamplingParams, integer
from ..run import Hook
from . import keys, loop
from .prompt import Prompts, Request, Rows
from .sink import Sink
from .source import Bad, Source, open_source
from .summary import Counts, RowsProgress, Summary

_ON_BAD = ("error", "skip", "stop")


def run_dataset(
    model: str | os.PathLike[str] | Engine,
    rows: Any,
    out: str | os.PathLike[str],
    params: SamplingParams | None = None,
    *,
    options: Rows | None = None,
    on_finish: Hook | None = None,
    on_bad_row: str = "error",
    retry_errors: bool = False,
    restart: bool = False,
    shard: tuple[int, int] | None = None,
    limit: int | None = None,
    progress: bool = True,
    log_json: bool = False,
    **engine_options: Any,
) -> Summary:
    """Answers the rows of a data set into a file. Called again after whatever ended it, the same
    call goes on where it was, and the file becomes the same, but for the order of its rows.

    model: as Engine takes it, with engine_options; or an Engine, which stays open.
    rows: a .jsonl, .csv, .parquet or .txt file, or an iterable of mappings or prompts, also an
        endless one. Read as they are needed. What is kept of each row is an entry in an index of
        ids: 45 bytes in a temporary file, where there are more than 100,000 rows.
    out: a .jsonl or .parquet file (extra `parquet`). prompt.py lists the columns. out.qkv beside it
        holds the settings; a table is written at the end, from out.jsonl, which is kept.
    params: how prompts are continued; a row may have its own (options.params).
    options: Rows: where prompts, ids and sampling parameters stand, what is kept.
    on_finish: as Engine.generate's; its scores become columns score_NAME. It is no part of the
        settings that are compared.
    on_bad_row: what becomes of input that is no row: "error" an error in the output, "skip"
        nothing (it is counted), "stop" an Error that names the first, before anything is computed
        (the input is read twice then).
    retry_errors: do again the rows that are in the output with an error or as too long.
    restart: if the output was begun with other settings, or anyhow, begin a new one; what is there
        is kept as out.1, out.2, ...
    shard: (i, n), i from 0 to n - 1: only this part of the rows, by their ids; merge() joins the
        outputs.
    limit: only the first rows of the input (of all shards).
    progress, log_json: a bar with rows, tokens/s, time left and states; or JSON lines of what
        happens. Both on standard error.

    Error, OSError: settings that differ from the output's, another process at work on it, a file
    that cannot be read or written, a row that changed since it was answered."""
    if on_bad_row not in _ON_BAD:
        raise ValueError(f"on_bad_row={on_bad_row!r}: must be one of {', '.join(_ON_BAD)}")
    if limit is not None:
        integer("limit", limit, 1)
    if on_finish is not None and not callable(on_finish):
        raise TypeError(f"on_finish={on_finish!r:.100}: a function is needed")
    if isinstance(model, Engine) and engine_options:
        raise TypeError(f"an Engine has its options already: {', '.join(engine_options)}")
    job = _Job(
        source=open_source(rows),
        options=Rows() if options is None else options,
        params=SamplingParams() if params is None else params,
        on_finish=on_finish,
        shard=_checked_shard(shard),
        limit=limit,
        skip_bad=on_bad_row == "skip",
    )
    job.check_paths(out)
    Prompts(job.options, job.params)  # a template that is none, before a model is loaded
    if on_bad_row == "stop":
        job.check_rows()
    with ExitStack() as stack:
        sink = Sink(out)
        stack.callback(sink.close)
        if isinstance(model, Engine):
            engine = model
        else:
            engine = stack.enter_context(Engine(model, **engine_options))
        return job.run(engine, sink, restart, retry_errors, progress, log_json)


def _checked_shard(shard: Any) -> tuple[int, int]:
    if shard is None:
        return 0, 1
    if not isinstance(shard, Sequence) or isinstance(shard, str) or len(shard) != 2:
        raise TypeError(f"shard={shard!r:.60}: (i, n) is needed")
    n = integer("shard's n", shard[1], 1)
    return integer("shard's i", shard[0], 0, n - 1), n


class _Job:
    def __init__(
        self,
        *,
        source: Source,
        options: Rows,
        params: SamplingParams,
        on_finish: Hook | None,
        shard: tuple[int, int],
        limit: int | None,
        skip_bad: bool,
    ) -> None:
        self._source = source
        self.options = options
        self.params = params
        self._on_finish = on_finish
        self._shard = shard
        self._limit = limit
        self._skip_bad = skip_bad
        self._read = 0  # rows of the input, those of other shards too
        self._own = 0  # rows of this shard
        self._sum = 0  # of all rows' keys: the same for the same rows in any order

    def check_paths(self, out: str | os.PathLike[str]) -> None:
        if os.path.isfile(self._source.name) and os.path.exists(out):
            if os.path.samefile(self._source.name, out):
                raise Error(f"{os.fspath(out)}: the input cannot be the output, too")

    def check_rows(self) -> None:
        """Error that names the first bad row of the input."""
        if not self._source.again:
            raise ValueError("on_bad_row='stop': these rows can be read only once")
        for place, row in enumerate(islice(self._source.rows(), self._limit)):
            if isinstance(row, Bad):
                raise Error(f"{self._source.name}: row {place}: {row.reason}; nothing was done")

    def _header(self, engine: Engine) -> dict[str, Any]:
        found = digests.of_engine(engine)
        sampling = {k: v for k, v in asdict(self.params).items()
                    if v != getattr(SamplingParams(), k)}  # fmt: skip
        found["settings"] |= {"rows": self.options.described(), "sampling": sampling}
        # Not of the rows' keys: a part's rows are those of the whole.
        run = keys.of_row(b"", found)
        found["settings"]["shard"] = list(self._shard)
        return {**found, "run": run, "model": engine.info["model"]}

    def run(
        self, engine: Engine, sink: Sink, restart: bool, retry: bool, show: bool, as_json: bool
    ) -> Summary:
        header = self._header(engine)
        index = sink.begin(header, restart=restart, retry_errors=retry)
        summary = Summary(path=str(sink.path), before=len(index), damaged=sink.damaged)
        prompts = Prompts(self.options, self.params, bytes.fromhex(header["run"]))
        prompts.check(engine)
        bar = RowsProgress(show, self._total() if show or as_json else None, as_json)
        bar.event("start", **header, before=len(index))
        bar.before(len(index))
        counts, start = Counts(engine), time.monotonic()
        requests = self._requests(prompts, index, sink, summary)
        done = loop.through(engine, requests, self.params, on_finish=self._on_finish, progress=bar)
        with closing(done):
            for request, output in done:
                row = prompts.answer(request, output)
                sink.write(row)
                summary.count(output)
                bar.output(row)
        summary.seconds = time.monotonic() - start
        counts.fill(summary)
        sink.finish(
            {"rows": self._own, "input_rows": self._read, "input": f"{self._sum:032x}",
             "summary": summary.to_dict()}
        )  # fmt: skip
        bar.event("summary", **summary.to_dict())
        return summary

    def _total(self) -> int | None:
        total = self._source.count()
        if total is not None and self._limit is not None:
            total = min(total, self._limit)
        return total if total is None or self._shard[1] == 1 else round(total / self._shard[1])

    def _requests(
        self, prompts: Prompts, index: keys.Index, sink: Sink, summary: Summary
    ) -> Iterator[Request]:
        """What is still to be done."""
        place, n_shards = self._shard
        rows = prompts.begin(islice(self._source.rows(), self._limit))
        for number, row in enumerate(rows):
            self._read += 1
            if self._skip_bad and isinstance(row, Bad):
                summary.skipped += 1
                continue
            request = prompts.identify(row, number)
            self._sum = (self._sum + int(request.row_key, 16)) % 2**128
            if keys.shard_of(request.id_key, n_shards) != place:
                continue
            self._own += 1
            found = index.get(request.id_key)
            while found is not None and found[0] == keys.SEEN:
                request = prompts.duplicate(request)
                found = index.get(request.id_key)
            bits = keys.row_bits(request.row_key)
            if found is not None and found[1] != bits:
                raise _changed(request, found[0], sink)
            index.put(request.id_key, keys.SEEN, bits)
            if found is None:
                prompts.complete(request)
                yield request


def _changed(request: Request, state: int, sink: Sink) -> Error:
    way_out = "retry_errors=True (--retry-errors) does rows with an error again"
    if state != keys.FAILED:
        way_out = "take another output, or restart=True (--restart)"
    return Error(
        f"{sink.rows_path}: the row with the id {request.id!r:.80} is answered there with other "
        f"columns: the input has changed; {way_out}"
    )
