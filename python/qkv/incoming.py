"""Rows as they come in: prompts, token ids, messages and mappings with what belongs to a row."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._core import Error
from .outputs import Key
from .params import SamplingParams

ParamsArgument = SamplingParams | Sequence[SamplingParams] | None


@dataclass(kw_only=True)
class Item:
    """A row as it comes in, before it has token ids."""

    index: int
    key: Key = None
    text: str | None = None
    add_special_tokens: bool = True
    ids: NDArray[np.int32] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    logprob_start: int = 1  # first prompt token whose log-probability is reported
    decode_start: int = 0  # first token that is a continuation's, 0: none
    compare: bool = False  # of the prompt's tokens, each lane with the first
    error: str | None = None
    too_long: bool = False  # that is the error


def token_array(given: Any, vocab: int) -> NDArray[np.int32]:
    """Token ids checked against the vocabulary; ValueError names the first that is not of it."""
    try:
        array = np.asarray(given)
    except ValueError:  # lists of several lengths
        array = np.empty(len(given), object)
    if array.size == 0:
        raise ValueError("the prompt is empty")
    listed = isinstance(given, (list, tuple))
    sound = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
    if not sound or (listed and bool in set(map(type, given))):  # NumPy takes True for 1
        if listed:
            for place, entry in enumerate(given):
                in_range = isinstance(entry, (int, np.integer)) and 0 <= entry < vocab
                if not in_range or isinstance(entry, bool):
                    raise ValueError(
                        f"token id {entry!r:.40} at position {place}: an integer below the "
                        f"vocabulary's {vocab} is needed"
                    )
        raise ValueError(f"token ids must be a list of integers, not {array.dtype} {array.shape}")
    wrong = np.flatnonzero((array < 0) | (array >= vocab))
    if wrong.size:
        place = int(wrong[0])
        raise ValueError(
            f"token id {int(array[place])} at position {place}: the vocabulary has {vocab}"
        )
    return np.ascontiguousarray(array, np.int32)


def is_ids(value: Any) -> bool:
    """One prompt given as token ids."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and np.issubdtype(value.dtype, np.integer)
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and isinstance(value[0], (int, np.integer))
    )


def as_rows(prompts: Any) -> Iterable[Any]:
    """One prompt or many, as an iterable of prompts."""
    if isinstance(prompts, (str, Mapping)) or is_ids(prompts):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts={prompts!r:.100}: text, token ids, or an iterable of these")
    return prompts


def length(rows: Iterable[Any]) -> int | None:
    return len(rows) if isinstance(rows, Sized) else None


def each_params(params: ParamsArgument, count: int | None) -> Iterator[SamplingParams] | None:
    """Parameters for each row, checked; None if there is one set for all (as given, or default)."""
    if params is None or isinstance(params, SamplingParams):
        return None
    if isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
        raise TypeError(f"params={params!r:.100}: SamplingParams, or a list with one for each row")
    for place, entry in enumerate(params):
        if not isinstance(entry, SamplingParams):
            raise TypeError(f"params[{place}]={entry!r:.100}: SamplingParams are needed")
    if count is not None and len(params) != count:
        raise ValueError(f"params has {len(params)} entries for {count} prompts")
    return iter(params)


def items(
    rows: Iterable[Any], params: ParamsArgument, build: Callable[[Item, Any], None]
) -> Iterator[Item]:
    """Items of rows. `build` fills in what the row holds; ValueError, TypeError and Error in it are
    the row's. So is a ValueError in the place of a row: whoever reads them could not read it."""
    own = each_params(params, length(rows))
    common = params if isinstance(params, SamplingParams) else SamplingParams()
    for index, row in enumerate(rows):
        chosen = common if own is None else next(own, None)
        if chosen is None:
            raise ValueError(f"params has {index} entries and there are more prompts")
        item = Item(index=index, params=chosen)
        try:
            if isinstance(row, ValueError):
                raise row
            if isinstance(row, Mapping):
                row = unwrap(item, row)
            build(item, row)
        except (ValueError, TypeError, Error) as error:
            item.error = str(error)
        yield item
    if own is not None and next(own, None) is not None:
        raise ValueError("params has more entries than there are prompts")


def unwrap(item: Item, row: Mapping[str, Any]) -> Any:
    """A row as a mapping: prompt, prompt_token_ids or messages, and key and params if it likes;
    other entries are the caller's own."""
    key = row.get("key")
    if key is not None and not isinstance(key, (str, int)):
        raise TypeError(f"key={key!r}: text or an integer")
    item.key = key
    params = row.get("params")
    if isinstance(params, Mapping):
        params = SamplingParams.from_mapping(params)
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params={params!r:.100}: SamplingParams or a mapping")
        item.params = params
    for name in ("prompt", "prompt_token_ids", "messages"):
        given = row.get(name)
        if given is None:
            continue
        if name != "prompt" and isinstance(given, (str, bytes, Mapping)):
            raise TypeError(f"{name}={given!r:.100}: a list is needed")
        return given
    raise ValueError("the row has none of prompt, prompt_token_ids, messages")


def conversations(given: Any) -> Iterable[Any]:
    """One conversation or many."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError("conversations: lists of {'role': ..., 'content': ...}")
    if isinstance(given, Mapping):
        return [given]
    if isinstance(given, Sequence) and given and isinstance(given[0], Mapping):
        if "role" in given[0]:
            return [given]
    many: Iterable[Any] = given
    return many
