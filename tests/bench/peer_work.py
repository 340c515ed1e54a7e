"""One engine, one model, the work of peers.py; run by it in that engine's own environment.

    peer_work.py ENGINE MODEL VOCABULARY OPTIONS     OPTIONS: JSON, what the engine's class takes
    peer_work.py export FOLDER OUT BITS              for OpenVINO, from safetensors

Prints one JSON line: tokens/s of the offline batch (prompt and output), of prefill and of decoding
alone, and which share of the machine other programs took meanwhile. Every engine gets the same
random token ids, decodes greedily past every end-of-text token, has no prefix cache (all prompts
differ anyway) and sees neither text nor tokenizer."""

from __future__ import annotations

import importlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

N_REQUESTS, N_IN, N_OUT = 64, 128, 64
N_PREFILL = 512
N_SHORT = 16  # prompt of the decoding alone
TRIES = 3

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]
CONTEXT = 1024


def load(name: str) -> Any:
    """What is installed in one engine's environment only."""
    return importlib.import_module(name)


def qkv(model: str, **options: Any) -> Generate:
    package = load("qkv")
    engine = package.Engine(
        model, prefix_cache=False, max_model_len=CONTEXT, max_running=N_REQUESTS, **options
    )

    def generate(prompts: Prompts, n_out: int) -> None:
        params = package.SamplingParams(max_tokens=n_out, temperature=0.0, ignore_eos=True)
        outputs = engine.generate(prompts, params, progress=False)
        assert all(len(output.token_ids) == n_out for output in outputs)

    return generate


def vllm(model: str, **options: Any) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # "auto" leaves a core unused
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    package = load("vllm")
    engine = package.LLM(
        model, skip_tokenizer_init=True, max_model_len=CONTEXT, max_num_seqs=N_REQUESTS,
        enable_prefix_caching=False, **{"dtype": "bfloat16", **options},
    )  # fmt: skip

    def generate(prompts: Prompts, n_out: int) -> None:
        params = package.SamplingParams(
            max_tokens=n_out, temperature=0.0, ignore_eos=True, detokenize=False
        )
        rows = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(rows, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == n_out for output in outputs)

    return generate


def transformers(model: str, **options: Any) -> Generate:
    torch, package = load("torch"), load("transformers")
    engine = package.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **options)

    def generate(prompts: Prompts, n_out: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = engine.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_out,
                min_new_tokens=n_out, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        assert out.shape[1] == ids.shape[1] + n_out

    return generate


def openvino(model: str, **options: Any) -> Generate:
    package, runtime, numpy = load("openvino_genai"), load("openvino"), load("numpy")
    scheduler = package.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_seqs = N_REQUESTS
    scheduler.enable_prefix_caching = False
    engine = package.ContinuousBatchingPipeline(model, scheduler, "CPU", options)

    def generate(prompts: Prompts, n_out: int) -> None:
        config = package.GenerationConfig()
        config.max_new_tokens = n_out
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        rows = [runtime.Tensor(numpy.array([prompt], numpy.int64)) for prompt in prompts]
        outputs = engine.generate(rows, [config] * len(rows))
        assert all(len(output.m_generation_ids[0]) == n_out for output in outputs)

    return generate


def llama_cpp(model: str, **options: Any) -> Generate:
    """Through the C functions, as llama.cpp's own batched example does it: prompts in batches of up
    to 2,048 rows, then a row of every sequence a step. `cache`: name of the KV cache's type."""
    package, numpy = load("llama_cpp"), load("numpy")
    silent = package.llama_log_callback(lambda *_: None)
    package.llama_log_set(silent, None)
    n_threads = len(os.sched_getaffinity(0))
    weights = package.llama_model_load_from_file(
        model.encode(), package.llama_model_default_params()
    )
    n_vocab = package.llama_vocab_n_tokens(package.llama_model_get_vocab(weights))
    settings = package.llama_context_default_params()
    settings.n_ctx = N_REQUESTS * (N_PREFILL + N_OUT)  # an equal part for each
    settings.n_batch = 2048
    settings.n_ubatch = 512
    settings.n_seq_max = N_REQUESTS
    settings.kv_unified = False
    settings.n_threads = settings.n_threads_batch = n_threads
    if "cache" in options:
        kind = getattr(package, f"GGML_TYPE_{options['cache'].upper()}")
        settings.type_k = settings.type_v = kind
    context = package.llama_init_from_model(weights, settings)
    batch = package.llama_batch_init(settings.n_batch, 0, 1)

    def add(token: int, position: int, sequence: int, wanted: bool) -> None:
        i = batch.n_tokens
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
        batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        batch.n_tokens += 1

    def best(row: int) -> int:
        logits = package.llama_get_logits_ith(context, row)
        return int(numpy.ctypeslib.as_array(logits, (n_vocab,)).argmax())

    def run(last: dict[int, int], tokens: list[int]) -> None:
        """Computes the batch; last: row -> sequence."""
        assert package.llama_decode(context, batch) == 0
        for row, sequence in last.items():
            tokens[sequence] = best(row)
        batch.n_tokens = 0
        last.clear()

    def generate(prompts: Prompts, n_out: int) -> None:
        package.llama_memory_clear(package.llama_get_memory(context), True)
        tokens = [0] * len(prompts)
        last: dict[int, int] = {}
        batch.n_tokens = 0
        for sequence, prompt in enumerate(prompts):
            if batch.n_tokens + len(prompt) > settings.n_batch:
                run(last, tokens)
            for at, token in enumerate(prompt):
                add(token, at, sequence, at + 1 == len(prompt))
            last[batch.n_tokens - 1] = sequence
        run(last, tokens)
        for step in range(n_out - 1):
            for sequence, prompt in enumerate(prompts):
                last[batch.n_tokens] = sequence
                add(tokens[sequence], len(prompt) + step, sequence, True)
            run(last, tokens)

    return generate


ENGINES = {e.__name__: e for e in (qkv, vllm, transformers, openvino, llama_cpp)}


def cpu_seconds() -> tuple[float, float]:
    """Of the whole machine, and of this process with its children; Linux."""
    with open("/proc/stat") as file:
        user, nice, system = file.readline().split()[1:4]
    ticks = float(os.sysconf("SC_CLK_TCK"))
    return (int(user) + int(nice) + int(system)) / ticks, sum(os.times()[:4])


def rates(generate: Generate, n_vocab: int) -> dict[str, float]:
    stream = random.Random(1)

    def prompts(n: int, length: int) -> Prompts:
        return [[stream.randrange(100, n_vocab) for _ in range(length)] for _ in range(n)]

    def seconds(n: int, length: int, n_out: int) -> float:
        rows = prompts(n, length)
        start = time.perf_counter()
        generate(rows, n_out)
        return time.perf_counter() - start

    seconds(4, N_IN, 4)  # warms up
    seconds(1, N_SHORT, 4)
    start, (all_before, own_before) = time.perf_counter(), cpu_seconds()
    batch = seconds(N_REQUESTS, N_IN, N_OUT)
    prefill = [seconds(1, N_PREFILL, 1) for _ in range(TRIES)]
    decode = [seconds(1, N_SHORT, 1 + N_OUT) - seconds(1, N_SHORT, 1) for _ in range(TRIES)]
    took, (all_after, own_after) = time.perf_counter() - start, cpu_seconds()
    others = (all_after - all_before) - (own_after - own_before)
    return {
        "others": others / took / (os.cpu_count() or 1),
        "batch": N_REQUESTS * (N_IN + N_OUT) / batch,
        "prefill": N_PREFILL / statistics.median(prefill),
        "decode": N_OUT / statistics.median(decode),
    }


def export(folder: str, out: str, bits: int) -> None:
    """OpenVINO's form: 16, 8 bits per channel with zero points, or 4 bits in groups of 64."""
    intel = load("optimum.intel")
    options: dict[str, Any] = {"load_in_8bit": False}
    if bits == 8:
        options = {"quantization_config": intel.OVWeightQuantizationConfig(bits=8)}
    elif bits == 4:
        scheme = intel.OVWeightQuantizationConfig(bits=4, sym=True, group_size=64, ratio=1.0)
        options = {"quantization_config": scheme}
    model = intel.OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, **options)
    model.save_pretrained(out)


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        sys.exit()
    engine_name, model_path, vocabulary, settings_json = sys.argv[1:]
    # Some engines write to the standard output; the result goes where it was before.
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measured = rates(ENGINES[engine_name](model_path, **json.loads(settings_json)), int(vocabulary))
    print(json.dumps(measured), file=result, flush=True)
    os._exit(0)  # without the engines' ways of shutting down
