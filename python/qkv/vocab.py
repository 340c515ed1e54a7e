"""The vocabulary inside a GGUF file, as a `tokenizers.Tokenizer`.

A byte-level BPE ("gpt2") names its pre-tokenizer in tokenizer.ggml.pre; the names are llama.cpp's
(src/llama-vocab.cpp) and the patterns those of the models' own tokenizer.json. A SentencePiece
vocabulary ("llama") stores scores instead of merges: two pieces are merged where their joint is a
piece, the best score first (SentencePiece's BPE), so the merges follow from the scores.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ._core import CheckpointError, UnsupportedError

# tokenizer.ggml.token_type, as llama.h numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SLASHED_REST}"
_GPT4O = rf"{_CASED % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_SLASHED_REST}"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_CJK_OLD = "[一-龥ࠀ-一가-\ud7ff]+"


@dataclass(frozen=True)
class _Pre:
    """A pre-tokenizer: patterns applied one after the other, each splitting what is left."""

    patterns: tuple[str, ...]
    nfc: bool = False  # text is normalized to NFC first
    ignore_merges: bool = False  # a word that is a token as a whole is not built from merges
    add_bos: bool = False  # unless the file says


_DIGITS_GPT2 = _Pre((r"\p{N}", _GPT2))
_PRES: dict[str, _Pre] = {
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Pre((_GPT2,)),
    "llama-bpe": _Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "qwen2": _Pre((_QWEN2,), nfc=True),
    "qwen35": _Pre((_QWEN35,), nfc=True),
    "stablelm2": _Pre((_QWEN2,), nfc=True),
    "smollm": _DIGITS_GPT2,
    "dbrx": _Pre((_LLAMA3,)),
    "tekken": _Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _Pre((_GPT4O,)),
    "deepseek-v3": _Pre((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OLD, r"\p{N}")),
    "falcon": _Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
}
# Names under which models with the same rule were registered.
_SAME: dict[str, tuple[str, ...]] = {
    "gpt-2": ("gpt2", "phi-2", "olmo", "mpt", "jais", "trillion", "a.x-4.0", "mellum"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral"),
    "qwen2": ("deepseek-r1-qwen", "hunyuan", "megrez"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone"),
    "dbrx": ("smaug-bpe", "chatglm-bpe", "glm4"),
    "gpt-4o": ("llama4",),
}
PRE_TOKENIZERS: dict[str, _Pre] = _PRES | {
    name: _PRES[base] for base, names in _SAME.items() for name in names
}


@dataclass(frozen=True)
class GgufVocab:
    """The tokenizer and what the file says about its special tokens."""

    tokenizer: Tokenizer
    tokens: list[str]
    special_ids: dict[str, int]  # "bos", "eos", "unk", "pad": those that the file names
    chat_template: str | None


def _integer_key(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise CheckpointError(f"tokenizer.ggml.{name} is {value!r}, the vocabulary has {count}")
    return value


def _list_key(metadata: Mapping[str, Any], name: str, count: int | None) -> Sequence[Any] | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise CheckpointError(f"tokenizer.ggml.{name} is no array")
    if count is not None and len(value) != count:
        raise CheckpointError(f"tokenizer.ggml.{name} has {len(value)} entries, tokens {count}")
    return value


def from_gguf(metadata: Mapping[str, Any]) -> GgufVocab:
    """Builds the tokenizer that the metadata of a GGUF file describes."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _list_key(metadata, "tokens", None)
    if model in (None, "none") or tokens is None:
        raise CheckpointError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens)")
    tokens = [str(token) for token in tokens]
    types = list(_list_key(metadata, "token_type", len(tokens)) or ())
    ids = _special_ids(metadata, len(tokens))
    if not types:
        # Without types only the tokens that the file names are known to be special.
        types = [CONTROL if place in ids.values() else NORMAL for place in range(len(tokens))]
    if model == "gpt2":
        tokenizer, add_bos = _byte_bpe(metadata, tokens)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens, types), True
    else:
        raise UnsupportedError(
            f"tokenizer.ggml.model {model!r} is not known; known: gpt2 (BPE), llama (SentencePiece)"
        )
    _add_tokens(tokenizer, tokens, types, model == "llama")
    _add_template(metadata, tokenizer, tokens, ids, add_bos)
    template = metadata.get("tokenizer.chat_template")
    return GgufVocab(tokenizer, tokens, ids, str(template) if template else None)


def _special_ids(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id"}
    names["pad"] = "padding_token_id"
    ids = {short: _integer_key(metadata, name, count) for short, name in names.items()}
    return {short: value for short, value in ids.items() if value is not None}


def _byte_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        warnings.warn(
            "the GGUF file names no pre-tokenizer (tokenizer.ggml.pre): the default one is used",
            stacklevel=2,
        )
        name = "default"
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"tokenizer.ggml.pre {name!r} is not known; known: {known}")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for entry in _list_key(metadata, "merges", None) or ():
        # The two halves are separated by the first space that is not the first character.
        at = str(entry).find(" ", 1)
        left, right = str(entry)[:at], str(entry)[at + 1 :]
        if at < 0 or left + right not in vocab or left not in vocab or right not in vocab:
            raise CheckpointError(f"tokenizer.ggml.merges: {entry!r} is not of the vocabulary")
        merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges, fuse_unk=False)
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]
) -> Tokenizer:
    scores = _list_key(metadata, "scores", len(tokens))
    if scores is None:
        raise CheckpointError("tokenizer.ggml.scores is missing: a SentencePiece model has them")
    for index, score in enumerate(scores):
        if not isinstance(score, (int, float)):
            raise CheckpointError(f"tokenizer.ggml.scores[{index}] is {score!r:.100}, no number")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = _integer_key(metadata, "unknown_token_id", len(tokens))
    if unknown is None:
        unknown = next((index for index, kind in enumerate(types) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(tokens, types, scores, vocab),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "▁")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(
    tokens: list[str], types: Sequence[int], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to build a piece from two, best piece first."""
    mergeable = {
        token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, UNUSED)
    }
    # Only where both halves have a length that some piece has: a piece of megabytes ends soon too.
    lengths = {len(token) for token in mergeable if token}
    ordered = sorted(lengths)
    found: list[tuple[float, int, int, str, str]] = []
    for index, piece in enumerate(tokens):
        if piece not in mergeable or len(piece) < 2:
            continue
        for at in ordered:
            if at >= len(piece):
                break
            if len(piece) - at not in lengths:
                continue
            left, right = piece[:at], piece[at:]
            if left in mergeable and right in mergeable:
                # Ties within a piece: shorter ids first, as the pieces were learnt.
                found.append((-scores[index], vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_tokens(
    tokenizer: Tokenizer, tokens: list[str], types: Sequence[int], sentencepiece: bool
) -> None:
    """Control tokens are special; user-defined ones are found in text before anything else. A
    SentencePiece one may hold the space symbol and is then looked for in the normalized text."""
    added = []
    for token, kind in zip(tokens, types, strict=True):
        special = kind in (CONTROL, UNKNOWN)
        if special or kind == USER_DEFINED:
            normalized = sentencepiece and not special and "▁" in token
            added.append(AddedToken(token, special=special, normalized=normalized))
    tokenizer.add_tokens(added)


def _add_template(
    metadata: Mapping[str, Any],
    tokenizer: Tokenizer,
    tokens: list[str],
    ids: Mapping[str, int],
    add_bos: bool,
) -> None:
    single: list[str] = ["$A"]
    for name, default, place in (("bos", add_bos, 0), ("eos", False, 2)):
        flag = metadata.get(f"tokenizer.ggml.add_{name}_token")
        if not (name in ids and default if flag is None else flag):
            continue
        if name not in ids:
            raise CheckpointError(f"tokenizer.ggml.add_{name}_token is set but there is no {name}")
        single.insert(place, tokens[ids[name]])
    if len(single) > 1:
        special = [(tokens[index], index) for index in ids.values()]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            special_tokens=special,
        )
