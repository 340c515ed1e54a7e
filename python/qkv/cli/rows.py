"""Rows that come in, and where what is made of them goes."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from .. import tasks
from .._core import Error
from ..dataset.source import Bad, parsed, standard_input, text_line
from .arguments import Problem


def input_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", metavar="FILE", help=".jsonl, or text lines; -: standard input")
    datasets = tasks.names(questions=True)
    parser.add_argument("--dataset", choices=datasets, help="questions that come with qkv")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows")


def prompts(
    args: argparse.Namespace, output: str | None
) -> tuple[Iterable[Any], Sequence[tasks.Question], Sequence[str]]:
    """Rows; the items of a data set; what was asked, where that is known beforehand (else the
    prompt itself is shown, template and all)."""
    sources = [bool(args.prompts), args.input is not None, args.dataset is not None]
    if sum(sources) != 1:
        raise Problem("give prompts, or --input FILE, or --dataset NAME (one of them)")
    questions: Sequence[tasks.Question] = ()
    asked: Sequence[str] = ()
    rows: Iterable[Any]
    if args.dataset is not None:
        questions = tasks.load(args.dataset)[: args.limit]
        asked = [question.question for question in questions]
        rows = [{"prompt": question.question, "key": question.key} for question in questions]
    elif args.input is not None:
        _check_files(args.input, output)
        rows = _read_rows(args.input)
        if args.limit is not None:
            rows = (row for _, row in zip(range(args.limit), rows, strict=False))
    else:
        rows = asked = args.prompts[: args.limit]
    return rows, questions, asked


def _check_files(source: str, target: str | None) -> None:
    """Before a model is loaded. Rows are read while others are written."""
    if source == "-":
        return
    try:
        os.stat(source)
    except OSError as error:
        raise Problem(f"{source}: {error.strerror}") from error
    if os.path.isdir(source):
        raise Problem(f"{source}: a folder, not a file")
    if target is not None and os.path.isfile(target) and os.path.samefile(source, target):
        raise Problem(f"--output {target}: the same file as --input")


def _read_rows(path: str) -> Iterator[Any]:
    """JSONL where the name says so, else a prompt in each line that is not empty. A line that is no
    row is a ValueError in its place: that row's error."""
    parse = json.loads if path.endswith((".jsonl", ".json")) else text_line
    try:
        with nullcontext(standard_input()) if path == "-" else open(path, "rb") as file:
            for row in parsed(file, parse):
                if isinstance(row, Bad):
                    yield ValueError(f"{path}, {row.reason}")
                    continue
                key = next((row[name] for name in ("key", "id", "custom_id") if name in row), None)
                yield {**row, "key": key}
    except OSError as error:
        raise Problem(f"{path}: {error}") from error
    except Error as error:
        raise Problem(f"--input {path}: {error}") from error


def as_chat(rows: Iterable[Any]) -> Iterator[Any]:
    """Plain prompts become the user's first message."""
    for row in rows:
        if isinstance(row, str):
            yield [{"role": "user", "content": row}]
        elif isinstance(row, Mapping) and isinstance(row.get("prompt"), str):
            yield {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        else:
            yield row


def output_options(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what}")
    parser.add_argument(
        "--arrays", action="store_true", help="JSON with token ids and log-probabilities"
    )


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def show(args: argparse.Namespace, facts: Callable[[], Mapping[str, Any]], text: object) -> int:
    """What a verb found, once: as JSON, or as its text. The exit code."""
    if args.json:
        print_json(facts())
    else:
        print(text)
    return 0


@contextmanager
def sink(path: str | None) -> Iterator[TextIO]:
    if path is None or path == "-":
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        yield file


def print_json(row: Mapping[str, Any], file: TextIO | None = None) -> None:
    """One line. Escapes what the file's encoding lacks: also half a surrogate pair, which a prompt
    that is reported as no valid Unicode may hold."""
    out = sys.stdout if file is None else file
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode(getattr(out, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(row)
    print(text, file=out, flush=True)
