"""qkv generate and qkv chat."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from .. import _core
from ..engine import Engine
from ..outputs import RequestOutput
from ..params import SamplingParams
from . import dataset
from .arguments import FORMATTER, Problem, engine_options, open_engine, sampling, sampling_options
from .rows import as_chat, input_options, output_options, print_json, prompts, sink


def add_generate(verbs: Any) -> None:
    parser = verbs.add_parser(
        "generate",
        help="continue prompts, or answer questions, in one batch",
        description="Answers the rows of a file into a file: qkv generate IN OUT. What was done\n"
        "is never lost or done twice: see below. Or continues prompts from the command\n"
        "line, a text file (one in each line), a JSONL file, or a data set that comes with\n"
        'qkv, in one batch. A JSONL row has "prompt", "prompt_token_ids" or "messages", and\n'
        'may have "key" and "params". Into --output FILE rows are written as they finish.',
        epilog="examples:\n"
        '  qkv generate --model demo --max-tokens 20 "The sky is" "Two and two make"\n'
        "  qkv generate --model demo --dataset gsm8k --limit 8 --temperature 0\n"
        "  qkv generate --model ./Qwen3-8B --input rows.jsonl --output answers.jsonl --chat"
        + dataset.EPILOG,
        formatter_class=FORMATTER,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT",
        help="text to continue; or IN and OUT: IN a .jsonl, .csv, .parquet or .txt file, OUT a "
        ".jsonl or .parquet file (IN -: JSON lines of standard input)")  # fmt: skip
    input_options(parser)
    parser.add_argument("--output", metavar="FILE", help="write here; .jsonl: as JSON")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, default=None,
        help="put prompts through the chat template (default for a data set)")  # fmt: skip
    output_options(parser, "a JSON object for each row")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    dataset.options(parser)
    engine_options(parser)
    sampling_options(parser)
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise Problem(f"--limit {args.limit}: must be at least 1")
    if dataset.is_asked(args):
        return dataset.run(args)
    dataset.check_unused(args)
    params = sampling(args)
    rows, questions, asked = prompts(args, args.output)
    to_file = args.output not in (None, "-")
    failed = 0
    with open_engine(args) as engine, sink(args.output) as file:
        chat = args.chat
        if chat is None:
            chat = args.dataset is not None and engine.tokenizer.has_chat_template
        if chat:
            # Kept as a list where it is one: the progress bar then knows how many there are.
            rows = list(as_chat(rows)) if isinstance(rows, list) else as_chat(rows)
        outputs: Iterable[RequestOutput] = engine.stream(
            rows, params, progress=not args.no_progress
        )
        # Into a file rows go as they finish, so that an end of any kind loses none of them.
        for output in outputs if to_file else _in_order(outputs):
            failed += output.error is not None
            place = output.index
            gold = questions[place].gold if questions else None
            _write_output(args, file, output, gold, asked[place] if asked else None)
    if failed:
        print(f"qkv: {failed} rows have an error (in their output)", file=sys.stderr)
    return 1 if failed else 0


def _print_output(file: TextIO, output: RequestOutput, gold: str | None, asked: str | None) -> None:
    prompt: Any = asked if asked is not None else output.prompt
    if prompt is None:
        prompt = output.prompt_token_ids.tolist()
    print(f"--- {output.index}" + (f" ({output.key})" if output.key else ""), file=file)
    print(f"{prompt}", file=file)
    if output.error is not None:
        print(f"[error] {output.error}", file=file)
    for sample in output.outputs:
        print(f">>> {sample.text.strip()}", file=file)
        if sample.finish_reason == "length":
            print(f"[cut after {len(sample.token_ids)} tokens]", file=file)
    if gold is not None:
        print(f"[right answer: {gold}]", file=file)
    file.flush()


def _write_output(
    args: argparse.Namespace,
    file: TextIO,
    output: RequestOutput,
    gold: str | None,
    asked: str | None,
) -> None:
    if not _writes_json(args):
        _print_output(file, output, gold, asked)
        return
    row = output.to_dict(arrays=args.arrays)
    if gold is not None:
        row["gold"] = gold
    print_json(row, file)


def _writes_json(args: argparse.Namespace) -> bool:
    if args.json:
        return True
    return args.output is not None and args.output.endswith((".jsonl", ".json"))


def _in_order(outputs: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    waiting: dict[int, RequestOutput] = {}
    place = 0
    for output in outputs:
        waiting[output.index] = output
        while place in waiting:
            yield waiting.pop(place)
            place += 1


def add_chat(verbs: Any) -> None:
    parser = verbs.add_parser(
        "chat",
        help="talk with a model",
        description="Answers one message, or, without one, each line that is typed.",
        epilog='examples:\n  qkv chat --model demo "What is a prime number?"\n'
        '  qkv chat --model demo --system "Answer in one sentence."',
        formatter_class=FORMATTER,
    )
    parser.add_argument("message", nargs="*", metavar="MESSAGE", help="one message")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    output_options(parser, "a JSON object for each answer")
    engine_options(parser)
    sampling_options(parser)
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    params = sampling(args, **{"max_tokens": 512, "temperature": 0.0})
    first = [{"role": "system", "content": args.system}] if args.system else []
    with open_engine(args) as engine:
        if args.message:
            messages = [*first, {"role": "user", "content": " ".join(args.message)}]
            output = _chat_turn(engine, messages, params)
            _print_answer(args, output)
            return 0
        return _converse(args, engine, first, params)


def _chat_turn(
    engine: Engine, messages: list[dict[str, str]], params: SamplingParams
) -> RequestOutput:
    output = engine.chat(messages, params, progress=False)[0]
    if output.error is not None:
        raise _core.Error(output.error)
    messages.append({"role": "assistant", "content": output.text})
    return output


def _print_answer(args: argparse.Namespace, output: RequestOutput) -> None:
    if args.json:
        print_json(output.to_dict(arrays=args.arrays))
    else:
        print(output.text.strip(), flush=True)


def _converse(
    args: argparse.Namespace,
    engine: Engine,
    first: list[dict[str, str]],
    params: SamplingParams,
) -> int:
    """Reads lines until the input ends. A message without an answer is forgotten; the exit code."""
    if sys.stdin is None:
        raise Problem("standard input is closed: give a MESSAGE")
    code = 0
    interactive = sys.stdin.isatty()
    if interactive:
        print("Type a message; /new starts over, /quit or Ctrl-D ends.", file=sys.stderr)
    messages = list(first)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return code
        if line in ("/quit", "/exit"):
            return code
        if line == "/new":
            messages = list(first)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                output = _chat_turn(engine, messages, params)
            except KeyboardInterrupt:
                messages.pop()
                print("[interrupted]", file=sys.stderr)
                continue
            except _core.Error as error:
                messages.pop()
                print(f"qkv: {error}", file=sys.stderr)
                if args.json:
                    print_json({"error": str(error)})
                code = 1
                continue
            _print_answer(args, output)
