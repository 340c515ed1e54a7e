"""How many bytes a KV pool takes. Layers that see everything keep every token; of layers with a
window, only what running sequences still see is kept, in a pool of their own (csrc/kv/window.h)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real

from . import _core
from .options import PAGE_TOKENS, free_memory
from .params import integer


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The pools of a lane, or of lanes that hold equally many tokens."""

    token_bytes: int  # of a token in the layers that see everything
    window_bytes: int = 0  # of a token in the others
    window: int = 0  # tokens, the largest; 0: there are no others
    max_running: int = 1  # sequences, in each lane
    chunk_tokens: int = 512

    def window_tokens(self, tokens: int) -> int:
        """That the layers with windows have room for beside so many in the others."""
        if not self.window:
            return 0
        return _core.window_tokens(self.window, tokens, self.max_running, self.chunk_tokens)

    def n_bytes(self, tokens: int) -> int:
        return tokens * self.token_bytes + self.window_tokens(tokens) * self.window_bytes

    def tokens_in(self, n_bytes: int, most: int) -> int:
        """The largest pool of whole pages, of at most `most` tokens, in so many bytes."""
        low, high = 0, max(most, 0) // PAGE_TOKENS
        while low < high:  # n_bytes() never falls
            middle = (low + high + 1) // 2
            if self.n_bytes(middle * PAGE_TOKENS) <= n_bytes:
                low = middle
            else:
                high = middle - 1
        return low * PAGE_TOKENS


def requests_in(
    n_bytes: int,
    request_tokens: int,
    *,
    token_bytes: int,
    window_bytes: int,
    window: int,
    chunk_tokens: int,
) -> tuple[int, Pool]:
    """How many requests, all grown to request_tokens, an engine with that max_running holds at a
    time in pools of so many bytes; and its pools."""
    request_tokens = -(-request_tokens // PAGE_TOKENS) * PAGE_TOKENS

    def pool(n: int) -> Pool:
        return Pool(
            token_bytes=token_bytes, window_bytes=window_bytes, window=window,
            max_running=max(n, 1), chunk_tokens=chunk_tokens,
        )  # fmt: skip

    low, high = 0, 2**24 // request_tokens + 1
    while low < high:
        middle = (low + high + 1) // 2
        if pool(middle).n_bytes(middle * request_tokens) <= n_bytes:
            low = middle
        else:
            high = middle - 1
    return low, pool(low)


#: Of what a GPU has free, for weights and cache; what is left is for steps.
GPU_FRACTION = 0.85


@dataclass(frozen=True)
class Memory:
    """Bytes that a device had left before the weights were loaded, and has after that."""

    before: int
    after: int
    is_own: bool = False  # a GPU's: nothing else wants it

    def __str__(self) -> str:
        weights = max(self.before - self.after, 0)
        return f"{self.before / 2**30:.2f} GiB are free, the weights take {weights / 2**30:.2f} GiB"


def check_size(kv_tokens: int | None, mem_fraction: float | None) -> None:
    """What an engine was asked for, whatever there is."""
    if kv_tokens is not None and mem_fraction is not None:
        raise ValueError("kv_tokens and mem_fraction both set the size of the KV pool: give one")
    if kv_tokens is not None:
        integer("kv_tokens", kv_tokens, PAGE_TOKENS)
    if mem_fraction is None:
        return
    if isinstance(mem_fraction, bool) or not isinstance(mem_fraction, Real):
        raise TypeError(f"mem_fraction={mem_fraction!r}: a number is needed")
    if not 0.0 < mem_fraction <= 1.0:
        raise ValueError(f"mem_fraction={mem_fraction}: must be in (0, 1]")


def tokens_of_engine(
    pool: Pool,
    memory: Memory,
    *,
    kv_tokens: int | None,
    mem_fraction: float | None,
    needed: int,
) -> int:
    """Tokens of each lane's pool, whole pages, of a size that check_size() has seen. By default, on
    a CPU, what the batch can need, at most a quarter of the memory that the weights leave free."""
    if kv_tokens is not None:
        tokens = kv_tokens // PAGE_TOKENS * PAGE_TOKENS
        if pool.n_bytes(tokens) > memory.after:
            # A system would promise it and end the process when it is used.
            raise MemoryError(
                f"kv_tokens={kv_tokens}: {pool.n_bytes(tokens) / 2**30:.2f} GiB; {memory}: "
                f"at most {pool.tokens_in(memory.after, tokens)} fit"
            )
        return tokens
    if mem_fraction is None and memory.is_own:
        mem_fraction = GPU_FRACTION
    if mem_fraction is None:
        budget = max(memory.after, 0) // 4
        most = needed
    else:
        # The fraction of the free memory for weights and cache together, as SGLang counts it.
        budget = memory.after - int(memory.before * (1.0 - float(mem_fraction)))
        most = 2**31 - PAGE_TOKENS if pool.token_bytes else needed
    tokens = pool.tokens_in(max(budget, 0), most)
    if tokens < PAGE_TOKENS:
        per_token = pool.token_bytes + pool.window_bytes
        raise MemoryError(
            f"no room for a KV pool: {memory}, a token {per_token} bytes: a larger mem_fraction, "
            "weights or a kv_cache_dtype of fewer bits"
        )
    return tokens


def sizing(
    pool: Pool,
    *,
    kv_tokens: int | None,
    mem_fraction: float | None,
    needed: int,
    weights_bytes: int | None,
) -> int | Callable[[int, int], int]:
    """What _core.Engine takes as kv_tokens. With weights_bytes it is planned in the host's memory,
    so that a pool that does not fit is said at once; None: a GPU's, which says what it has when the
    weights are there."""
    size = partial(
        tokens_of_engine, pool, kv_tokens=kv_tokens, mem_fraction=mem_fraction, needed=needed
    )
    if weights_bytes is not None:
        free = free_memory()
        return size(Memory(free, free - weights_bytes))
    return lambda before, now: size(Memory(before, now, is_own=True))
