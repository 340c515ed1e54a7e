"""The C module: checkpoints, the engine, and what the tests need of the kernels.

Shapes and units stand in the docstrings of the C functions (`help(qkv._core.Engine)`).
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

class Error(Exception): ...
class CheckpointError(Error): ...
class UnsupportedError(Error): ...
class OutOfPages(Error): ...

@final
class Checkpoint:
    """Mapped files of a model, checked, without loading a weight."""

    def __new__(cls, path: str) -> Self: ...
    @property
    def left_out(self) -> tuple[int, str]:
        """(number of tensors that are no part of the text model, the first one's name): of a
        multimodal checkpoint; the others go by the names of a model of text alone."""
    @property
    def further(self) -> tuple[int, str]:
        """(number of tensors of layers that predict tokens after the next one, the name of one):
        they are not among the others."""
    @property
    def container(self) -> Literal["safetensors", "gguf"]: ...
    @property
    def folder(self) -> str: ...
    @property
    def files(self) -> list[str]: ...
    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """(name, format, shape outermost first, bytes) in the order of the files."""
    def metadata(self) -> dict[str, Any]:
        """GGUF key-values (arrays as lists); empty for safetensors."""
    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        matrices: str,
        arrays: dict[str, NDArray[np.float32]] | None = None,
    ) -> NDArray[np.float32]:
        """A quantized weight [rows, cols] as float32, from its description. KeyError: `matrices`
        does not describe it. CheckpointError: the tensors are not what the description says."""
    def forms(
        self,
        shapes: dict[str, tuple[int, int]],
        matrices: str,
        arrays: dict[str, NDArray[np.float32]] | None = None,
        float32: bool = False,
        int8: bool = False,
    ) -> dict[str, dict[str, Any]]:
        """What the CPU backend makes of each described weight, by its name: its form
        (csrc/quant/matrix.h) as "code", "group", "scale", "min", "row_scale", and "bytes".
        `shapes`: (rows, cols) of each, else KeyError; int8: for activations in int8.
        CheckpointError as matrix()."""
    def model_config(self) -> dict[str, Any]:
        """The validated numbers of csrc/model/config.h; raises as loading would."""
    def kv_scales(self) -> list[tuple[int, str, str, NDArray[np.float32]]]:
        """(layer, kind, tensor, values [1] or [n_kv_heads]) of each KV-cache scale in the files, by
        layer. kind: "k" and "v" are what an engine can apply (a kv_scale stands there as both);
        "q", "prob", "k_zero_point", "v_zero_point", "q_zero_point", "k_bias", "v_bias" are only
        listed, as is "unset" (-1: SGLang's way to say that there is none). Empty if there are
        none. CheckpointError, UnsupportedError as loading would; where the config is not supported,
        layers and heads are only checked against each other."""
    def dequantize(self, name: str, /) -> NDArray[np.float32]:
        """A tensor as float32 by the scalar codec, in its shape."""
    def bytes(self, name: str, /) -> NDArray[np.uint8]:
        """A tensor as it lies in the file, [n_bytes], a copy."""
    def quantize(
        self,
        name: str,
        shape: tuple[int, int],
        target: str,  # a name of csrc/quant/quantize.h
        matrices: str | None = None,  # descriptions, as Engine's; others are plain tensors
        arrays: dict[str, NDArray[np.float32]] | None = None,
        *,
        group: int = 0,  # of int4 and mlx targets; 0: theirs
        head_dim: int = 0,  # rows are a GGUF file's q or k, and put in others' order
        threads: int = 0,
    ) -> dict[str, NDArray[np.uint8] | None]:
        """A weight quantized by the rules of csrc/quant/quantize.h: the bytes of "codes", row by
        row, "scales", "mins" and "factor"; None for those that the target does not have. A
        k_scale of the description is multiplied into the values.
        ValueError, CheckpointError (values that are not finite too), and UnsupportedError where
        the target's groups do not divide the rows."""
    def close(self) -> None: ...

class Step(NamedTuple):
    n_rows: int  # rows computed
    n_prefill: int  # of these, prompt tokens (recomputation included)
    n_running: int  # sequences after the step
    n_waiting: int
    tokens: list[tuple[int, int]]  # (id, new token) of sequences added with watch=True
    finished: list[int]  # ids, to be taken

class Result(NamedTuple):
    token_ids: NDArray[np.int32]  # [n]
    logprobs: NDArray[np.float32]  # [n]
    top_ids: NDArray[np.int32]  # [n, n_top]
    top_logprobs: NDArray[np.float32]  # [n, n_top]
    # Of prompt tokens logprob_start .. n_prompt - 1, [m]; m = 0 if not asked for, less than all if
    # finish() ended the sequence inside its prompt.
    prompt_logprobs: NDArray[np.float32]
    prompt_ranks: NDArray[np.int32]
    prompt_top_ids: NDArray[np.int32]  # [m, prompt_n_top]
    prompt_top_logprobs: NDArray[np.float32]
    # Against the group's first lane, at the positions of prompt_logprobs, in nats: [m], or [0] for
    # the first lane and without a group.
    kl: NDArray[np.float32]  # sum of p_first * (ln p_first - ln p)
    kl_reverse: NDArray[np.float32]  # sum of p * (ln p - ln p_first)
    top1: NDArray[np.bool_]  # the same most likely token
    # "broken": another member was aborted or finished early, which ended this one, too, with the
    # figures that it had.
    comparison: Literal["none", "complete", "broken"]
    finish_reason: Literal["stop", "length", "abort"]  # "abort": comparison is "broken"
    stop_token: int  # the EOS or stop id that ended it (the last of token_ids), else -1
    queue_time: float  # seconds
    time_to_first_token: float
    total_time: float
    cached_tokens: int
    retractions: int

class LaneScores(NamedTuple):
    """A document in every lane; m figures, of tokens logprob_start .. n - 1."""

    logprobs: NDArray[np.float32]  # [n_lanes, m], natural
    # Against lane 0, in nats, as in Result: [n_lanes, m]. Row 0 is lane 0 itself: 0, 0, True.
    kl: NDArray[np.float32]
    kl_reverse: NDArray[np.float32]
    top1: NDArray[np.bool_]
    computed: int  # rows times layers that were computed
    skipped: int  # that were taken from lane 0; with `computed` (n - 1) * n_lanes * n_layers

class Simulation(NamedTuple):
    """What simulate() found, n requests. Virtual seconds from the start."""

    admitted: NDArray[np.float64]  # [n], the beginning of a request's first step
    first_token: NDArray[np.float64]  # [n]
    finished: NDArray[np.float64]  # [n]
    cached_tokens: NDArray[np.int32]  # [n], of the prompt, found in the prefix tree at first
    retractions: NDArray[np.int32]  # [n]
    seconds: float
    n_steps: int
    n_prefill: int  # prompt rows, recomputation included
    n_decode: int  # other rows
    n_attended: int  # tokens that a request attends to, summed over requests and steps
    most_running: int
    most_short: int  # requests that pages alone kept from running
    most_used_pages: int

@final
class Engine:
    """A model on a device with its KV pools. Sequences in, tokens out; one sample each."""

    def __new__(
        cls,
        path: str,
        *,
        kv_formats: Sequence[Sequence[tuple[str, str]]],  # [n_lanes][n_layers] (k, v)
        # Per lane; or what says so when the weights are loaded, from the bytes that the device had
        # left of memory of its own before that, and has now (0: it computes in the host's).
        kv_tokens: int | Callable[[int, int], int],
        # [n_layers, 2 (K, V), n_kv_heads], for every lane, or [n_lanes, n_layers, 2, n_kv_heads].
        # For formats with a layer scale; others ignore it. None: 1.0. The engine never takes
        # the checkpoint's by itself.
        kv_scales: NDArray[np.float32] | None = None,
        query_dtype: Literal["bf16", "fp8_e4m3"] = "bf16",
        # checkpoint: the input of each matrix is quantized as it wants it.
        # int8: rows of activations, for products with weights in integer codes; UnsupportedError if
        # there is no such weight.
        activation_quant: Literal["off", "int8", "checkpoint"] = "off",
        # Quantized weights, described in JSON (csrc/model/matrices.h), and the float32 arrays that
        # the descriptions name. None: all weights are plain.
        matrices: str | None = None,
        arrays: dict[str, NDArray[np.float32]] | None = None,
        # What weights are quantized to while loading: a name of csrc/quant/quantize.h, and after a
        # colon how they then want their input.
        online: str | None = None,
        # A second set of weights of the model, for the positions of prompts: path, matrices, arrays
        # and online as above, which then are for generated positions. CheckpointError if it is of
        # another model.
        prefill: tuple[str, str | None, dict[str, NDArray[np.float32]] | None, str | None]
        | None = None,
        threads: int = 0,  # 0: all that the process may use
        compute_dtype: Literal["bf16", "float32"] = "bf16",
        # "auto" or "cpu". For tests: "guard"; "fault:layer=3,kind=v_zero" and
        # "fault:layer=3,kind=k_rotate,head=0", which damage the cache of lanes that are not bf16.
        device: str = "auto",
        isa: str | None = None,
        max_running: int = 64,
        chunk_tokens: int = 512,
        max_model_len: int = 0,  # 0: the model's
        prefix_cache: bool = True,
        offline: bool = True,
        # Bytes done, bytes in all; returning False stops the loading (Error).
        progress: Callable[[int, int], bool | None] | None = None,
        log: Callable[[int, str], object] | None = None,  # level 0..2, line
        device_library: str | os.PathLike[str] | None = None,
        native_fp8: bool = False,  # FP8 by FP8 as they are, where a GPU can
        native_fp4: bool = False,  # NVFP4 by NVFP4, the same
    ) -> Self: ...
    @property
    def info(self) -> dict[str, Any]:
        """device, isa, threads, compute_dtype, activation_quant, matrices and of them int8_matrices
        (multiplied in int8) and quantized_inputs (as they want it), online_matrices (quantized
        while loading) and online_left (their rows do not divide into groups), products (matrices by
        how they are multiplied), prefill (these counts of a second set of weights, or None),
        query_dtype, config (as Checkpoint.model_config), kv_tokens, kv_window_tokens (of
        these, how many the layers with windows hold; 0: there are no such layers), max_model_len,
        max_running, chunk_tokens, n_lanes, max_logit_rows."""
    def memory(self) -> dict[str, Any]:
        """Bytes: weights (with a second set, prefill_weights of them are its), activations, kv (all
        lanes, reserved), kv_windows (of kv: of the layers with windows), kv_lanes (a list, by
        lane), kv_resident (of kv: pages that were used so far), hidden (rows that wait for a
        comparison), scratch."""
    def kv_scales(self, lane: int, /) -> NDArray[np.float32]:
        """[n_layers, 2, n_kv_heads], K then V: what the lane applies; 1 where it applies none."""
    def kv_counts(self, lane: int, /) -> dict[str, NDArray[Any]]:
        """Of what was stored since the last reset, [n_layers, 2, n_kv_heads]: n_values, n_clipped,
        n_flushed (int64; recomputed tokens count again), amax (float32, before the scale)."""
    def kv_counts_reset(self) -> None:
        """Of all lanes."""
    def kv_observe(self, lane: int, on: bool) -> None:
        """Counts |x| of everything stored from now on; on starts from empty histograms."""
    def kv_histogram(self, lane: int, /) -> NDArray[np.uint64]:
        """[n_layers, 2, n_kv_heads, 2048]: by the 11 bits of |x|'s float32 pattern below the sign.
        Error if the lane was never observed."""
    def counts(self) -> dict[str, int]:
        """The scheduler's counters (csrc/engine/scheduler.h): n_*, and since the last flush()
        most_running, most_short (sequences that pages alone kept from running) and
        most_used_pages; n_window_pages and so on of the pages of layers with windows."""
    def add(
        self,
        tokens: NDArray[np.int32],
        *,
        lane: int = 0,
        max_tokens: int = 128,  # 0: only the prompt's log-probabilities
        min_tokens: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,  # 64 bits
        sample: int = 0,
        stop_token_ids: NDArray[np.int32] | None = None,
        ignore_eos: bool = False,
        n_top: int = 0,  # alternatives per output token
        logprob_start: int = -1,  # first prompt position (>= 1) to report, -1: none
        prompt_n_top: int = 0,
        # Of two sets of weights, positions from here on use the one for generated positions; their
        # keys and values are never shared as a prefix. 0: the positions after the prompt.
        decode_start: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        bias_ids: NDArray[np.int32] | None = None,
        bias: NDArray[np.float32] | None = None,
        bad_words: Sequence[NDArray[np.int32]] = (),  # none of them will be in the output
        watch: bool = False,
        # Not 0: compared with the sequences of other lanes that have the same number. One per lane,
        # the same tokens and logprob_start (>= 1, below the number of tokens), max_tokens 0, and
        # group_size members, which all must come before one can finish. The lowest lane is the
        # first. The number is free again when the last member was added.
        group: int = 0,
        group_size: int = 0,
    ) -> int:
        """Queues a sequence and returns its id. ValueError for a bad argument, OutOfPages if it can
        never fit; the engine is as before then. max_tokens is cut so that the sequence stays within
        max_model_len; a prompt that leaves no room for one token is a ValueError."""
    def step(self) -> Step:
        """One step without the GIL. Nothing to do: n_rows is 0. If it raises, no sequence has
        changed and it can be tried again."""
    def take(self, id: int, /) -> Result:
        """The result of a finished sequence, which is forgotten. ValueError: no such id. Error: it
        has not finished."""
    def finish(self, id: int, n_keep: int) -> None:
        """Ends a sequence in any state as "stop" with the first n_keep output tokens; take() it
        then. The others of its group end as "abort", in the next step."""
    def allow(self, id: int, mask: NDArray[np.uint32], /) -> None:
        """Only tokens whose bits are set may come next in a sequence, until the next call: uint32
        [ceil(vocabulary / 32)], token t is bit t % 32 of word t // 32. If it leaves none that the
        other parameters allow, token 0 comes. ValueError: no such id, another number of words."""
    def abort(self, id: int, /) -> None:
        """Drops a sequence in any state; there is nothing to take. The others of its group end as
        "abort", in the next step."""
    def score_lanes(
        self, tokens: NDArray[np.int32], *, logprob_start: int = 1, decode_start: int = 0
    ) -> LaneScores:
        """All lanes over one document [n], n >= 2, in lockstep, without the scheduler: the bits
        that a group of all lanes gives (add()). Layers below the first one in which a lane's
        formats or applied scales differ from lane 0's are computed once, in lane 0; the lane's
        pool, counts and histograms are not touched there. decode_start as in add(). Empties the
        prefix trees. Signals are seen between chunks; after an exception the engine goes on.
        ValueError: a token, logprob_start, decode_start, more than max_model_len tokens, or more
        lanes than chunk_tokens + max_running. OutOfPages: the pools are too small. Error: sequences
        wait or run."""
    def limit(self, max_running: int, /) -> None:
        """From the next step on at most so many sequences run, 1 to the max_running of opening."""
    def flush(self) -> None:
        """Empties the prefix trees; the most_* of counts() begin anew."""
    def close(self) -> None: ...

def isas() -> list[tuple[str, bool]]:
    """(name, usable on this machine), best first."""

def formats() -> list[tuple[str, bool]]:
    """(weight format, has a codec)."""

def kv_formats() -> list[tuple[str, float]]:
    """(KV format, bits per element for a head of 128)."""

def kv_row_bytes(format: str, dim: int, /) -> int:
    """Of one token of one head of K or V, block scales included."""

def packed_bytes(
    format: str, n_out: int, k_in: int, float32: bool = False, int8: bool = False, /
) -> int:
    """Of a weight in the CPU backend, without loading it. int8: for activations in int8."""

def window_tokens(window: int, kv_tokens: int, max_running: int, chunk_tokens: int, /) -> int:
    """Tokens that the layers with windows (the largest of `window` tokens) hold beside a pool of
    kv_tokens, as an engine sizes it, with the blank page, which holds none."""

def parse_config(text: str, /) -> dict[str, Any]:
    """As Checkpoint.model_config, from the text of a config.json alone."""

def threads_available() -> int: ...
def simulate(
    requests: NDArray[np.int32],
    *,
    kv_tokens: int,
    max_running: int,
    chunk_tokens: int = 512,
    prefix_cache: bool = True,
    offline: bool = True,
    window: int = 0,
    step_seconds: float = 0.0,
    prefill_row_seconds: float = 0.0,
    decode_row_seconds: float = 0.0,
    kv_token_seconds: float = 0.0,
) -> Simulation:
    """The scheduler alone, with the seconds of a step from a cost model in place of the kernels
    (csrc/engine/simulate.h). requests [n, 4]: group (-1: none), tokens of the prompt that the group
    shares, its own (>= 1), output tokens (>= 1); all are known at the start, in this order. window:
    the largest of a layer; 0: none has one. Signals are seen between steps. ValueError for a bad
    argument; OutOfPages names the request that can never fit."""

def dequantize(format: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Blocks of a weight format as float32, by the scalar codec."""

def quantize(format: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round to nearest, for tests and tiny models."""
