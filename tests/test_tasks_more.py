"""Tasks beside the harness's: text in windows, needles in long texts, and the user's own rows."""

from __future__ import annotations

import hashlib
from functools import cache

import pytest

from qkv import tasks


class Letters:
    """A tokenizer: one token a character, and BOS or EOS where it has them."""

    def __init__(self, before: list[int], after: list[int]) -> None:
        self.before, self.after = before, after
        self.encoded: list[int] = []  # lengths of what was asked for

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(len(text))
        ids = [ord(letter) + 10 for letter in text]
        return [*self.before, *ids, *self.after] if add_special_tokens else ids


# Text in windows.


@cache
def wikitext() -> tasks.Task:
    return tasks.task("wikitext2")


def test_wikitext_is_the_canonical_file() -> None:
    data = wikitext().text().encode()
    assert len(data) == 1290590
    assert hashlib.sha256(data).hexdigest() == (
        "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
    )


@pytest.mark.parametrize(("before", "after"), [([], []), ([1], []), ([1], [2]), ([], [2])])
def test_windows(before: list[int], after: list[int]) -> None:
    """Joined they are the text, BOS at the head of each; nothing is left out between two."""
    made, text = Letters(before, after), wikitext().text()
    windows = wikitext().windows(made.encode, length=100_000)
    assert made.encoded.count(len(text)) == 1  # tokenized once, as a whole
    assert [key for key, _ in windows] == [f"wikitext2-100000-{place}" for place in range(12)]
    assert {len(ids) for _, ids in windows} == {100_000}
    assert all(ids[: len(before)] == before for _, ids in windows)
    joined = "".join(chr(token - 10) for _, ids in windows for token in ids[len(before) :])
    assert text.startswith(joined)
    assert len(joined) == 12 * (100_000 - len(before))
    assert wikitext().windows(made.encode, length=100_000, limit=3) == windows[:3]
    assert wikitext().windows(made.encode, length=100_000, limit=99) == windows


def test_windows_have_the_length_of_512() -> None:
    (key, ids), *rest = wikitext().windows(Letters([1], []).encode, limit=2)
    assert (key, len(ids), len(rest)) == ("wikitext2-512-0", 512, 1)


def test_windows_that_cannot_be() -> None:
    encode = Letters([1], []).encode
    with pytest.raises(ValueError, match="length 1: must be at least 2 tokens"):
        wikitext().windows(encode, length=1)
    with pytest.raises(ValueError, match="length 2000000: wikitext2 has 12[0-9]* tokens"):
        wikitext().windows(encode, length=2_000_000)
    with pytest.raises(ValueError, match="limit 0: must be at least 1"):
        wikitext().windows(encode, limit=0)
    with pytest.raises(ValueError, match="gsm8k: has items, not windows"):
        tasks.task("gsm8k").windows(encode)


def test_text_has_no_questions() -> None:
    assert (wikitext().kind, len(wikitext()), list(wikitext().places(5))) == ("text", 0, [])
    with pytest.raises(ValueError, match="wikitext2.*a text, not questions"):
        tasks.load("wikitext2")
    with pytest.raises(ValueError, match="wikitext2 has no answers"):
        tasks.task("wikitext2", extraction="strict")
    with pytest.raises(ValueError, match="wikitext2 generates nothing"):
        tasks.task("wikitext2", max_tokens=9)
