"""qkv calibrate and qkv plan: the KV cache, before it is used."""

import argparse
from typing import Any

from .. import options
from ..calibration import calibrate
from ..planner import GIB, KV_DTYPES, plan
from .arguments import FORMATTER, Problem, engine_options, kv_cache_dtype, open_engine
from .rows import as_chat, input_options, json_option, prompts, show


def add_calibrate(verbs: Any) -> None:
    parser = verbs.add_parser(
        "calibrate",
        help="find the scales of an FP8 or NVFP4 KV cache on your own prompts",
        description="Runs prompts with a bf16 KV cache, finds the scale of K and V in each layer\n"
        "and writes them as a file for --quantization-param-path, and as safetensors with\n"
        "the names that SGLang and vLLM read. --kv-cache-dtype is what is calibrated.",
        epilog="examples:\n"
        "  qkv calibrate --model ./Qwen3-8B --dataset gsm8k --chat --out scales.json\n"
        "  qkv calibrate --model demo --input prompts.txt --per head --method mse --out s.json",
        formatter_class=FORMATTER,
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text")
    input_options(parser)
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
    json_option(parser)
    engine_options(parser)
    parser.set_defaults(run=_calibrate, kv_cache_dtype="fp8_e4m3")


def _calibrate(args: argparse.Namespace) -> int:
    rows, _, _ = prompts(args, args.out)
    if args.kv_cache_dtype == "auto":
        raise Problem("--kv-cache-dtype auto: name the format to calibrate")
    target, args.kv_cache_dtype = args.kv_cache_dtype, "bf16"
    with open_engine(args) as engine:
        scales = calibrate(
            engine,
            list(as_chat(rows)) if args.chat else rows,
            target,
            out=args.out,
            per=args.per,
            method=args.method,
            plain=args.sglang_schema,
            max_tokens=args.max_tokens,
            progress=not args.no_progress,
        )
    return show(args, scales.to_dict, scales)


def add_plan(verbs: Any) -> None:
    parser = verbs.add_parser(
        "plan",
        help="how much fits into the KV cache, before anything is loaded",
        description="Bytes per token, tokens in the pool and requests that fit, for each format\n"
        "of the KV cache. A config.json is enough.",
        epilog="examples:\n"
        "  qkv plan ./Qwen3-8B --memory-gib 22 --mem-fraction-static 0.85\n"
        "  qkv plan config.json --memory-gib 80 --kv-cache-dtype bf16,nvfp4 --json",
        formatter_class=FORMATTER,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, a config.json, a .gguf file, or 'demo'")
    add("--memory-gib", type=float, metavar="GIB",
        help="free before the weights load (default: what is free here now)")  # fmt: skip
    add("--weights-gib", type=float, metavar="GIB", help="default: from the files or the config")
    add("--quantization", metavar="NAME", help="what the weights are quantized to while loading")
    add("--prefill-quantization", metavar="NAME",
        help="other weights for prompts: such a name, or another checkpoint")  # fmt: skip
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
    json_option(parser)
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    memory = options.free_memory() / GIB if args.memory_gib is None else args.memory_gib
    kinds = KV_DTYPES if args.kv_cache_dtype is None else kv_cache_dtype(args.kv_cache_dtype)
    found = plan(
        args.model,
        memory_gib=memory,
        weights_gib=args.weights_gib,
        quantization=args.quantization,
        prefill_quantization=args.prefill_quantization,
        mem_fraction=args.mem_fraction_static,
        kv_cache_dtypes=kinds,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        page_tokens=args.page_size,
    )
    if args.plot is not None:
        found.plot().savefig(args.plot)
    return show(args, found.to_dict, found)
