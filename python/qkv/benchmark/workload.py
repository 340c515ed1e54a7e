"""What users send: prompts by length and group, in an order that a seed decides."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import options


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`users` who each send the next of `requests` prompts when their last one is answered.

    Of the prompts, each of `groups` has the same share, which begins with its `shared_tokens`;
    `input_tokens` follow that are no other prompt's. spread: lengths of input and output are drawn
    evenly from (1 - spread) to (1 + spread) times the given ones."""

    users: int
    requests: int
    input_tokens: int
    output_tokens: int
    groups: int = 0
    shared_tokens: int = 0
    spread: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        grown = [_most(n, self.spread) for n in (self.input_tokens, self.output_tokens)]
        return self.shared_tokens + sum(grown)

    def draw(self, seed: int) -> NDArray[np.int32]:
        """[requests, 4] int32: group (-1: none), shared, own and output tokens, in order."""
        random = np.random.default_rng(seed)
        table = np.empty((self.requests, 4), np.int32)
        grouped = self.groups > 0 and self.shared_tokens > 0
        table[:, 0] = np.arange(self.requests) % self.groups if grouped else -1
        random.shuffle(table[:, 0])
        table[:, 1] = self.shared_tokens if grouped else 0
        for column, mean in ((2, self.input_tokens), (3, self.output_tokens)):
            low = max(1, mean - (_most(mean, self.spread) - mean))
            table[:, column] = random.integers(low, _most(mean, self.spread) + 1, self.requests)
        return table


def _most(mean: int, spread: float) -> int:
    return mean + int(mean * spread)


def prompts(table: NDArray[np.int32], vocab: int, seed: int) -> list[NDArray[np.int32]]:
    """Random token ids for the rows of Workload.draw(), after a number: they sort as those of the
    simulation do, by group and then as they stand, so that both take the same steps."""
    random = np.random.default_rng((seed, 1))
    shared: dict[int, NDArray[np.int32]] = {}
    found = []
    for place, (group, n_shared, n_own, _) in enumerate(table.tolist()):
        if n_shared and group not in shared:
            shared[group] = random.integers(0, vocab, n_shared, np.int32)
            _number(shared[group], group, int(table[:, 0].max()), vocab)
        own = random.integers(0, vocab, n_own, np.int32)
        _number(own, place, len(table) - 1, vocab)
        found.append(np.concatenate([shared[group], own]) if n_shared else own)
    return found


def _number(ids: NDArray[np.int32], number: int, largest: int, vocab: int) -> None:
    """The first ids become the digits of `number`, as many as `largest` has, if they are there."""
    n_digits = 1
    while vocab**n_digits <= largest:
        n_digits += 1
    for place in range(min(n_digits, len(ids))):
        ids[place] = number // vocab ** (n_digits - 1 - place) % vocab


def least_prefill(table: NDArray[np.int32]) -> int:
    """Prompt tokens to compute if each group's prefix is computed once, page by page (what does not
    fill a page is every request's own)."""
    n_tokens = int(table[:, 1:3].sum())
    saved = 0
    for group in np.unique(table[table[:, 0] >= 0, 0]):
        rows = table[table[:, 0] == group]
        saved += (len(rows) - 1) * (int(rows[0, 1]) // options.PAGE_TOKENS * options.PAGE_TOKENS)
    return n_tokens - saved
