"""Data sets through a model: rows in, rows with answers out, and nothing lost.

A row takes this way, and each part knows only the one before it:

    source.py    rows come in: JSONL, CSV, Parquet, text lines, any iterable; one at a time
    prompt.py    a row becomes a request (prompt, sampling, id), and with its output a row again
    loop.py      requests go through Engine.stream, a bounded number of them at a time
    sink.py      rows are written, whole or not at all, and found again by the next run
    summary.py   what is seen of it while it runs, and at its end

Another front end that has its own way to hold rows (blocks of a distributed data set, a queue)
uses the middle alone, without files:

    rows = qkv.dataset.Rows(template="{{ question }}", id="uid")
    for row in qkv.dataset.answers(engine, block, rows, qkv.SamplingParams(max_tokens=64)):
        ...   # a dict: id, the input columns, text, state, ... as prompt.py lists them

`answers` takes an iterable of mappings, gives each row once, as they finish, and never fails for
a row: its state says so. What a row becomes depends on the row (and its own id, if it has one),
never on the others or on its place; only the id of a row that has none is its place, which
`first=` moves. `digests.of_engine(engine)` has what else results depend on.
"""

from .jobs import run_dataset
from .loop import answers
from .merging import merge
from .prompt import Rows
from .summary import Summary

__all__ = ["Rows", "Summary", "answers", "merge", "run_dataset"]
