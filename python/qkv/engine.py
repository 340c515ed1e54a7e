"""Engine: a model with its KV cache; many prompts in, their outputs back."""

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from . import _core, incoming, kv_scales, kv_scales_file, models, options, pools, run, weight_set
from ._core import Checkpoint, Error
from .chat_template import check_messages
from .incoming import Item, ParamsArgument
from .kv_scales import KvScaleTable
from .outputs import RequestOutput, Score
from .params import SamplingParams, flag, integer
from .progress import Loading, Progress, write_log
from .run import Hook, Run, Seq
from .structured import Guides
from .tokenizer import Tokenizer, from_user, load_tokenizer

Prompt = str | Sequence[int] | NDArray[np.integer[Any]] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]] | Mapping[str, Any]

# Rows given to the scheduler at once: it orders them by shared prefixes. Past this a longer list
# costs memory and gains nothing.
_LIST_WINDOW = 8192
# For an input that may be endless, in units of max_running.
_STREAM_WINDOW = 4

_log = logging.getLogger("qkv")


class Engine:
    """A model on a device with its KV cache.

    model: a folder with safetensors, a .gguf file, a hub name ("owner/model"), or "demo".
    quantization: None loads what the checkpoint holds. A name that makes something (qkv info lists
        them) quantizes a 16-bit checkpoint while it is loaded, one matrix at a time; any other must
        be what the checkpoint is. info has how many matrices were quantized, and how many stay
        because their rows do not divide into groups; info["quantization"] what was found in the
        checkpoint, in which forms it runs, what fell back, and what else a user should know.
    prefill_quantization: other weights for the positions of prompts, over the same KV cache:
        a name as quantization takes it, which makes them of the same checkpoint ("unquant": as they
        are), or the path of another checkpoint of the model, of which every number that matters
        must be the same. Generated positions always use the model's own weights, when they are
        computed again, too; so do the tokens of a continuation in score(). Prefixes are then shared
        up to a prompt's end. info["prefill"] has what info has of the other weights.
    kv_cache_dtype: "auto", a name (qkv info lists them), a mapping with "default", "k", "v" and
        "layers", or a list of these: lanes over the same weights. A mapping may also have "scales"
        (a side file for this lane, or 1.0 whatever the checkpoint carries) and "name".
    kv_tokens, mem_fraction: the size of the KV pool, in tokens or as the fraction of the free
        memory that weights and cache may take. By default what max_running sequences can need, at
        most a quarter of the memory that is free beside the weights; on a GPU, weights and cache
        take 0.85 of what it has free. Layers with a window have a smaller pool, for the windows
        of max_running sequences.
    fp8_gemm_backend, fp4_gemm_backend: "auto", or a name of qkv info; info has what was taken.
    activation_quant: "checkpoint" as the checkpoint prescribes, "off" never; "int8" quantizes each
        row of activations for products with weights in integer codes: faster, less exact, and the
        same bits whatever the batch. info has how many matrices that concerns.
    mla_prefill: "absorbed", the one form of latent attention that gives the same bits in any chunk
        and after any prefix hit; "expanded" is refused with the reason.
    seed: from which the seeds of rows without one are derived (None: 0), so runs can be repeated.
    tokenizer: a folder, or an object with encode and decode, instead of the model's own.

    Prompts are text, token ids, or a mapping with "prompt" (or "prompt_token_ids", "messages"),
    "key" and "params". A row that cannot be answered has its reason in output.error; the others
    are not touched. Ctrl-C returns within one step: rows that were finished by then are in
    engine.interrupted (and in the exception's `outputs`), and the engine goes on working.

    One thread at a time: a second one gets an Error. close() (or `with`) gives the memory back.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        kv_cache_dtype: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = "auto",
        quantization: str | None = None,
        prefill_quantization: str | os.PathLike[str] | None = None,
        quantization_param_path: str | os.PathLike[str] | None = None,
        fp8_gemm_backend: str = "auto",
        fp4_gemm_backend: str = "auto",
        activation_quant: str = "checkpoint",
        compute_dtype: str = "bf16",
        query_dtype: str = "bf16",
        mla_prefill: str = "absorbed",
        device: str = "auto",
        threads: int | None = None,
        mem_fraction: float | None = None,
        kv_tokens: int | None = None,
        max_running: int | None = None,
        chunk_tokens: int = 512,
        max_model_len: int | None = None,
        prefix_cache: bool = True,
        schedule: str = "offline",
        tokenizer: Any = None,
        seed: int | None = None,
    ) -> None:
        options.one_of("compute_dtype", compute_dtype, ("bf16", "float32"))
        options.check_device(device)
        library = options.device_library(device)
        pools.check_size(kv_tokens, mem_fraction)
        options.one_of("schedule", schedule, ("offline", "fcfs"))
        options.check_arithmetic(
            device=device,
            fp8_gemm_backend=fp8_gemm_backend,
            fp4_gemm_backend=fp4_gemm_backend,
            activation_quant=activation_quant,
            query_dtype=query_dtype,
            compute_dtype=compute_dtype,
        )
        options.check_latent(mla_prefill)
        options.check_scales_file(quantization_param_path)
        options.check_quantization(quantization, prefill_quantization)
        flag("prefix_cache", prefix_cache)
        self._seed = 0 if seed is None else integer("seed", seed, 0, 2**64 - 1)
        self._max_running = integer(
            "max_running", options.DEFAULT_MAX_RUNNING if max_running is None else max_running, 1
        )
        integer("chunk_tokens", chunk_tokens, 1)
        if max_model_len is not None:
            integer("max_model_len", max_model_len, 1)
        if threads is not None:
            integer("threads", threads, 1, 1024)
        own = None if tokenizer is None else from_user(tokenizer)

        self._path = models.resolve(model)
        self._tokenizer: Tokenizer | None = own
        self._tokenizer_error: Exception | None = None
        int8 = activation_quant == "int8"
        checkpoint = Checkpoint(self._path)
        try:
            self._container = checkpoint.container
            self._folder = checkpoint.folder
            self._weights = weight_set.read(
                checkpoint, self._path, quantization, compute_dtype, int8
            )
            config = checkpoint.model_config()
            carried = checkpoint.kv_scales()
            self._model_types = kv_scales.model_types(checkpoint)
        finally:
            checkpoint.close()
        self._prefill = weight_set.for_prompts(
            prefill_quantization, self._weights, compute_dtype, int8
        )
        sets = [self._weights] if self._prefill is None else [self._weights, self._prefill]
        for note in [note for weights in sets for note in weights.summary["notes"]]:
            _log.warning("%s", note)
        self._vocab = int(config["vocab"])
        self._eos_ids = frozenset(int(token) for token in config["eos_ids"])
        n_layers, n_kv_heads = int(config["n_layers"]), int(config["n_kv_heads"])
        taken, key = kv_scales.declared(self._folder) if self._container != "gguf" else ("", "")
        self._lanes = options.lanes(
            kv_cache_dtype, n_layers, compute_dtype=compute_dtype, declared=taken
        )
        self._auto = None
        if options.asks_for_auto(kv_cache_dtype):
            auto = options.auto_format(compute_dtype, taken)
            self._auto = {"taken": auto, "why": kv_scales.auto_reason(auto, key, compute_dtype)}
            _log.info("kv_cache_dtype auto: %s (%s)", auto, self._auto["why"])
        files = {lane.scales for lane in self._lanes if isinstance(lane.scales, str)}
        if quantization_param_path is not None:
            files.add(os.fspath(quantization_param_path))
        side_files = {
            path: kv_scales_file.read_side_file(
                path, n_layers=n_layers, n_kv_heads=n_kv_heads, model_types=self._model_types
            )
            for path in files
        }
        self._scales = kv_scales.resolve(
            self._lanes,
            n_kv_heads=n_kv_heads,
            file=None
            if quantization_param_path is None
            else side_files[os.fspath(quantization_param_path)],
            carried=carried,
            query_dtype=query_dtype,
            own=side_files,
            latent=bool(config["kv_rank"]),
        )
        length = max_model_len or int(config["max_positions"])
        token_bytes, window_bytes = options.split_token_bytes(config, self._lanes)
        pool = pools.Pool(
            token_bytes=token_bytes,
            window_bytes=window_bytes,
            window=options.window_of(config),
            max_running=-(-self._max_running // len(self._lanes)),
            chunk_tokens=chunk_tokens,
        )
        pool_tokens = pools.sizing(
            pool,
            kv_tokens=kv_tokens,
            mem_fraction=mem_fraction,
            needed=self._max_running * (length + options.PAGE_TOKENS),
            weights_bytes=sum(weights.n_bytes for weights in sets) if library is None else None,
        )
        self._lock = threading.RLock()
        self._seqs: dict[int, run.Seq] = {}
        self._abandoned: deque[int] = deque()  # a generator may be collected in any thread
        self._n_groups = 0
        self.interrupted: list[RequestOutput] = []
        _, matrices, arrays, online = self._weights.to_core()
        loading = Loading()
        try:
            self._core = _core.Engine(
                self._path,
                kv_formats=[lane.layers for lane in self._lanes],
                kv_tokens=pool_tokens,
                kv_scales=self._scales.values,
                query_dtype="fp8_e4m3" if query_dtype == "fp8_e4m3" else "bf16",
                activation_quant=cast(Literal["off", "int8", "checkpoint"], activation_quant),
                matrices=matrices,
                arrays=arrays,
                online=online,
                prefill=None if self._prefill is None else self._prefill.to_core(),
                threads=threads or 0,
                compute_dtype="float32" if compute_dtype == "float32" else "bf16",
                device=device,
                device_library=library,
                native_fp8=fp8_gemm_backend == "cublaslt",
                native_fp4=fp4_gemm_backend == "cublaslt",
                max_running=self._max_running,
                chunk_tokens=chunk_tokens,
                max_model_len=max_model_len or 0,
                prefix_cache=prefix_cache,
                offline=schedule == "offline",
                log=write_log,
                progress=loading,
            )
        finally:
            loading.close()
        kv_scales.write_log(self._scales)
        asked = {"fp8_gemm_backend": fp8_gemm_backend, "fp4_gemm_backend": fp4_gemm_backend}
        dequantized = compute_dtype == "float32"
        counts = self._core.info
        self._kv_tokens = int(counts["kv_tokens"])
        isa = counts["isa"]
        self._facts = self._weights.facts(counts, asked, dequantized, isa)
        self._prefill_facts = (
            None
            if self._prefill is None
            else self._prefill.facts(counts["prefill"], asked, dequantized, isa)
        )

    # What is loaded.

    @property
    def tokenizer(self) -> Tokenizer:
        """.encode(text), .decode(ids), .apply_chat_template(messages). Read when first needed:
        prompts given as token ids can do without."""
        if self._tokenizer is None:
            if self._tokenizer_error is not None:
                raise self._tokenizer_error
            try:
                self._tokenizer = load_tokenizer(self._path)
            except (Error, OSError) as error:
                self._tokenizer_error = error
                raise
        return self._tokenizer

    @cached_property
    def _guides(self) -> Guides:
        """Read when first needed. UnsupportedError."""
        return Guides(self.tokenizer, self._vocab, sorted(self._eos_ids))

    @property
    def _text_tokenizer(self) -> Tokenizer | None:
        """None where the model has no tokenizer: outputs then have token ids and no text."""
        known = self._tokenizer_error is not None
        try:
            return self.tokenizer
        except (Error, OSError) as error:
            if not known:
                _log.warning("outputs have no text: %s", error)
            return None

    @property
    def info(self) -> dict[str, Any]:
        """What runs: model, device, instruction set, threads, arithmetic, sizes, KV formats."""
        return {
            "model": self._path,
            "container": self._container,
            # quantization (method, source, matrices, forms, inputs, ignored, fallbacks, notes),
            # online_quantization, the GEMM backends.
            **self._facts,
            **self._core.info,
            # Of the weights for prompts: model, these, and the core's counts; None: the same.
            "prefill": self._prefill_facts,
            "kv_cache_dtype": [lane.name for lane in self._lanes],
            # What "auto" took and why; None if it was not asked for.
            "kv_cache_dtype_auto": self._auto,
        }

    def kv_scales(self) -> KvScaleTable:
        """The scales of keys and values by lane and layer: value, source, whether applied and else
        why not, and of what was stored so far the shares that were clipped and flushed to zero and
        the largest magnitude. Prints as a table."""
        counts = {lane.name: self._core.kv_counts(i) for i, lane in enumerate(self._lanes)}
        return kv_scales.with_counts(self._scales.rows, counts)

    def memory(self) -> dict[str, Any]:
        """Bytes held: weights (with a second set, prefill_weights of them are its), kv (all pools;
        kv_windows of the layers with windows, kv_lanes by name, kv_resident what was used so far),
        activations, hidden (rows that wait for
        a comparison), scratch; total."""
        held = dict(self._core.memory())
        names = [lane.name for lane in self._lanes]
        held["kv_lanes"] = dict(zip(names, held["kv_lanes"], strict=True))
        parts = ("weights", "kv", "activations", "hidden", "scratch")
        held["total"] = sum(held[part] for part in parts)
        return held

    def __repr__(self) -> str:
        lanes = ", ".join(lane.name for lane in self._lanes)
        return f"Engine({self._path!r}, kv_cache_dtype={lanes}, kv_tokens={self._kv_tokens})"

    # Running.

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: ParamsArgument = None,
        *,
        on_finish: Hook | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt; outputs in the order of the prompts.

        params: one for all, or a list with one for each. on_finish(output) runs once for every
        answered row and its mapping is stored in output.scores; an exception in it is stored as
        scores["error"] of that row. qkv.hooks has some."""
        rows = incoming.as_rows(prompts)
        entries = incoming.items(rows, params, self._prompt_item)
        return self._collect(entries, rows, on_finish, progress)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: ParamsArgument = None,
        *,
        on_finish: Hook | None = None,
        progress: bool | Progress = False,
    ) -> Iterator[RequestOutput]:
        """Continues each prompt; outputs as they finish (output.index is the place in the input).
        The prompts may be an endless iterator: a few times max_running of them are under way."""
        rows = incoming.as_rows(prompts)
        incoming.each_params(params, incoming.length(rows))
        entries = incoming.items(rows, params, self._prompt_item)
        return self._start(
            entries, rows, on_finish, progress, self._max_running * _STREAM_WINDOW
        ).results()

    def chat(
        self,
        conversations: Conversation | Iterable[Conversation],
        params: ParamsArgument = None,
        *,
        on_finish: Hook | None = None,
        progress: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers each conversation, a list of {"role": ..., "content": ...}, put into text by the
        model's chat template; `template_options` go to the template."""
        tokenizer = self.tokenizer
        if not tokenizer.has_chat_template and "chat_template" not in (template_options or {}):
            tokenizer.apply_chat_template([{"role": "user", "content": ""}])  # raises, saying so
        rows = incoming.conversations(conversations)

        def build(item: Item, messages: Any) -> None:
            item.text = tokenizer.apply_chat_template(
                check_messages(messages), **(template_options or {})
            )
            # The template has written the special tokens itself.
            item.add_special_tokens = False

        return self._collect(incoming.items(rows, params, build), rows, on_finish, progress)

    def score(
        self,
        prompts: Prompt | Iterable[Prompt],
        continuations: Any = None,
        *,
        top: int = 0,
        progress: bool = True,
    ) -> list[Score]:
        """Log-probabilities of given tokens, without generating: of each prompt's own tokens from
        the second on, or of its continuation (one for each prompt).

        Two strings are tokenized together, as lm-evaluation-harness does: white space at the end of
        the prompt goes to the continuation, whose tokens are those of the whole text past as many
        as the prompt alone has. BOS is added as in generate(). `top`: so many alternatives
        for each token. Never holds more than a few rows of the vocabulary.

        With several lanes score.lanes has each lane's, and all but the first lane's have kl,
        kl_reverse and top1 against the first."""
        integer("top", top, 0, 256)
        rows = incoming.as_rows(prompts)
        if continuations is not None:
            if isinstance(continuations, str) or incoming.is_ids(continuations):
                continuations = [continuations]
            if not isinstance(continuations, Iterable) or isinstance(continuations, bytes):
                raise TypeError(
                    f"continuations={continuations!r:.100}: text, token ids, or a list of these"
                )
            pairs = list(rows)
            others = list(continuations)
            if len(pairs) != len(others):
                raise ValueError(f"{len(others)} continuations for {len(pairs)} prompts")
            rows = [(prompt, other) for prompt, other in zip(pairs, others, strict=True)]
        params = SamplingParams(max_tokens=0, prompt_logprobs=top)
        build = self._prompt_item if continuations is None else self._pair_item
        starts: dict[int, int] = {}

        def remember(item: Item, row: Any) -> None:
            item.params, item.compare = params, True
            build(item, row)
            starts[item.index] = item.logprob_start

        outputs = self._collect(incoming.items(rows, params, remember), rows, None, progress)
        return [Score.of(output, starts.get(output.index, 1)) for output in outputs]

    def close(self) -> None:
        """Gives the memory back. The engine cannot be used afterwards."""
        with self._exclusive():
            self._core.close()
            self._seqs.clear()
            if "_guides" in vars(self):
                self._guides.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Inside.

    def _prompt_item(self, item: Item, row: Any) -> None:
        if isinstance(row, str):
            item.text = row
        elif isinstance(row, Sequence) and row and isinstance(row[0], Mapping):
            item.text = self.tokenizer.apply_chat_template(check_messages(row))
            item.add_special_tokens = False
        elif isinstance(row, (list, tuple, np.ndarray)):
            item.ids = incoming.token_array(row, self._vocab)
        else:
            raise TypeError(f"a prompt is text or token ids, not {type(row).__name__}")

    def _pair_item(self, item: Item, pair: tuple[Any, Any]) -> None:
        prompt, continuation = pair
        if isinstance(prompt, Mapping):
            prompt = incoming.unwrap(item, prompt)
        if isinstance(prompt, str) and isinstance(continuation, str):
            kept = prompt.rstrip()
            continuation = prompt[len(kept) :] + continuation
            item.text = kept + continuation
            ids = self.tokenizer.encode(item.text)
            start = len(self.tokenizer.encode(kept))
        else:
            first = self._plain_ids(prompt, True)
            ids = [*first, *self._plain_ids(continuation, False)]
            start = len(first)
        item.ids = incoming.token_array(ids, self._vocab)
        if start < 1:
            raise ValueError("the prompt has no tokens: the first one cannot be scored")
        if start >= len(ids):
            raise ValueError("the continuation has no tokens of its own")
        item.logprob_start = item.decode_start = start

    def _plain_ids(self, given: Any, special: bool) -> list[int]:
        if isinstance(given, str):
            return self.tokenizer.encode(given, add_special_tokens=special)
        if not isinstance(given, (list, tuple, np.ndarray)):
            raise TypeError(f"a prompt is text or token ids, not {type(given).__name__}")
        return incoming.token_array(given, self._vocab).tolist() if len(given) else []

    def _start(
        self,
        entries: Iterator[Item],
        rows: Iterable[Any],
        on_finish: Hook | None,
        progress: bool | Progress,
        window: int,
    ) -> Run:
        if on_finish is not None and not callable(on_finish):
            raise TypeError(f"on_finish={on_finish!r:.100}: a function is needed")
        total = incoming.length(rows)
        bar = progress if isinstance(progress, Progress) else Progress(progress, total)
        return Run(self, entries, window=window, on_finish=on_finish, progress=bar)

    def _collect(
        self,
        entries: Iterator[Item],
        rows: Iterable[Any],
        on_finish: Hook | None,
        progress: bool,
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        window = max(_LIST_WINDOW, self._max_running * _STREAM_WINDOW)
        with self._exclusive():
            self.interrupted = []
            current = self._start(entries, rows, on_finish, progress, window)
            try:
                for output in current.results():
                    outputs.append(output)
            except BaseException as error:
                outputs += current.finished()
                self.interrupted = sorted(outputs, key=lambda output: output.index)
                if isinstance(error, KeyboardInterrupt):
                    error.outputs = self.interrupted  # type: ignore[attr-defined]
                raise
        outputs.sort(key=lambda output: output.index)
        return outputs

    def _next_group(self) -> int:
        """A number for sequences of several lanes that are compared."""
        self._n_groups += 1
        return self._n_groups

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise Error("the engine is in use by another thread")
        try:
            yield
        finally:
            self._lock.release()

    def _abort(self, number: int) -> None:
        """Forgets a sequence; before the next step if another thread has the engine."""
        if not self._lock.acquire(blocking=False):
            self._abandoned.append(number)
            return
        try:
            self._core.abort(number)
        finally:
            self._lock.release()

    def _pump(self) -> int:
        """One step. What it finished goes to the runs that own the sequences. Returns the tokens
        computed."""
        while self._abandoned:
            with suppress(ValueError):  # not there: it finished in the step
                self._core.abort(self._abandoned.pop())
        try:
            step = self._core.step()
        except (Error, MemoryError):  # nothing has changed
            raise
        except BaseException:  # of a signal's handler: it runs when the call returns
            self._recover()
            raise
        ended = list(step.finished)
        gone = set(ended)
        for number, token in step.tokens:
            seq = self._seqs.get(number)
            if seq is None:
                continue
            seq.count += 1
            if self._follow(number, seq, token, number not in gone) and number not in gone:
                self._core.finish(number, seq.count)
                ended.append(number)
        for number in ended:
            seq = self._seqs.pop(number, None)
            if seq is not None:
                seq.row.run.finish(number, seq, self._core.take(number))
                continue
            with suppress(ValueError):  # not there: its run was dropped meanwhile
                self._core.take(number)
        if step.n_rows == 0 and not ended:
            raise Error(f"nothing to compute while {len(self._seqs)} sequences are open")
        return step.n_rows

    def _follow(self, number: int, seq: Seq, token: int, goes_on: bool) -> bool:
        """Shows a token to what watches its sequence. Whether that ends it."""
        if seq.guide is not None:
            seq.guide.push(token)
            if goes_on and seq.guide.error is None:
                self._core.allow(number, seq.guide.mask())
            if seq.guide.error is not None:
                return True
        if seq.watch is None or seq.watch.hit is not None:
            return False
        return seq.watch.push(token)

    def _recover(self) -> None:
        """After a step whose outcome an interrupt took: what finished in it is kept."""
        for number, seq in list(self._seqs.items()):
            try:
                result = self._core.take(number)
            except (Error, ValueError):  # not finished
                if seq.watch is not None:
                    seq.watch.error = "an interrupt hid a token from the search for stop strings"
                if seq.guide is not None:
                    seq.guide.error = "an interrupt hid a token from the structured output"
                continue
            del self._seqs[number]
            if seq.watch is not None:
                for token in result.token_ids[seq.watch.count :]:
                    seq.watch.push(int(token))
            seq.row.run.finish(number, seq, result)
