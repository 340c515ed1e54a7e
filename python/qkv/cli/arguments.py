"""Options that several verbs have: the engine's, and those of sampling."""

import argparse
import json
import logging
from collections.abc import Callable
from typing import Any

from .. import options
from ..engine import Engine
from ..params import SamplingParams

FORMATTER = argparse.RawDescriptionHelpFormatter


class Problem(Exception):
    """Wrong use: one line for the user, exit code 2."""


MODEL_HELP = "a folder with safetensors, a .gguf file, a hub name, or 'demo'"


def engine_options(
    parser: argparse.ArgumentParser, *, one_model: bool = True, kv_cache_dtypes: str = "auto"
) -> None:
    """one_model: with --model and what belongs to it alone. kv_cache_dtypes: the default."""
    group = parser.add_argument_group("model and engine (names as SGLang has them)")
    add = group.add_argument
    if one_model:
        add("--model", "--model-path", required=True, metavar="MODEL", help=MODEL_HELP)
        add("--tokenizer-path", metavar="DIR", help="tokenizer to use instead of the model's")
    add("--kv-cache-dtype", default=kv_cache_dtypes, metavar="DTYPE",
        help="format of the KV cache (qkv info lists them); with commas: several lanes; or the "
        f"JSON of a mapping or a list (default: {kv_cache_dtypes})")  # fmt: skip
    add("--quantization", metavar="NAME",
        help="what a 16-bit checkpoint is quantized to while it is loaded, or what the checkpoint "
        "must be (default: as it is; qkv info lists the names)")  # fmt: skip
    add("--prefill-quantization", metavar="NAME",
        help="other weights for the positions of prompts: a name as --quantization takes it, or "
        "another checkpoint of the model (default: the same weights)")  # fmt: skip
    add("--quantization-param-path", metavar="FILE", help="JSON file with KV scales")
    add("--fp8-gemm-backend", default="auto", metavar="NAME",
        help="GEMM for FP8 weights (default: auto; qkv info lists the names)")  # fmt: skip
    add("--fp4-gemm-backend", default="auto", metavar="NAME",
        help="GEMM for FP4 weights (default: auto; qkv info lists the names)")  # fmt: skip
    add("--compute-dtype", default="bf16", choices=("bf16", "float32"),
        help="float32: the slow reference arithmetic (default: bf16)")  # fmt: skip
    add("--activation-quant", default="checkpoint", choices=("checkpoint", "off", "int8"),
        help="int8: quantize each row of activations where weights are in integer codes: faster, "
        "less exact (default: checkpoint)")  # fmt: skip
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
    add("--device", default="auto", help="auto, cpu or cuda:0 (default: auto, which is cpu)")
    add("--threads", type=int, metavar="N", help="default: all that the process may use")
    add("--log-level", choices=("debug", "info", "warning", "error"), metavar="LEVEL",
        help="info: what is loaded, memory, KV cache and scales, on standard error")  # fmt: skip
    add("--random-seed", type=int, metavar="N", help="from which rows without a seed derive theirs")


def kv_cache_dtype(given: str) -> Any:
    if given.lstrip().startswith(("{", "[")):
        try:
            return json.loads(given)
        except (ValueError, RecursionError) as error:
            raise Problem(f"--kv-cache-dtype: not valid JSON: {error}") from error
    names = [name.strip() for name in given.split(",")]
    return names if len(names) > 1 else names[0]


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What Engine takes beside the model, its tokenizer and the KV formats. Turns the log on where
    that was asked for."""
    if args.log_level is not None:
        logging.basicConfig(format="%(levelname)s %(message)s")
        logging.getLogger("qkv").setLevel(args.log_level.upper())
    return {
        "quantization": args.quantization,
        "prefill_quantization": args.prefill_quantization,
        "quantization_param_path": args.quantization_param_path,
        "fp8_gemm_backend": args.fp8_gemm_backend,
        "fp4_gemm_backend": args.fp4_gemm_backend,
        "activation_quant": args.activation_quant,
        "compute_dtype": args.compute_dtype,
        "query_dtype": args.query_dtype,
        "device": args.device,
        "threads": args.threads,
        "mem_fraction": args.mem_fraction_static,
        "kv_tokens": args.max_total_tokens,
        "max_running": args.max_running_requests,
        "chunk_tokens": args.chunked_prefill_size,
        "max_model_len": args.context_length,
        "prefix_cache": not args.disable_radix_cache,
        "schedule": args.schedule,
        "seed": args.random_seed,
    }


def open_engine(args: argparse.Namespace) -> Engine:
    return Engine(
        args.model,
        kv_cache_dtype=kv_cache_dtype(args.kv_cache_dtype),
        tokenizer=args.tokenizer_path,
        **engine_arguments(args),
    )


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


def sampling_options(parser: argparse.ArgumentParser) -> None:
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


def sampling(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    values = defaults
    names = [*_SAMPLING, "stop", "stop_token_ids"]
    values |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return SamplingParams(ignore_eos=args.ignore_eos, **values)
