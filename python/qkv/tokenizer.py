"""Text to token ids and back, from a model folder, a GGUF file or the caller's own tokenizer."""

import codecs
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from . import chat_template, vocab
from ._core import Checkpoint, CheckpointError, Error

# Of these classes transformers adds BOS by add_bos_token, whatever tokenizer.json's own
# post-processor says (transformers 4 and 5, LlamaTokenizer and its relatives).
_FLAG_DECIDES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
# A character has at most four bytes: what has not become one after so many tokens never will.
_LONGEST_WAIT = 8
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself where it is one in Latin-1,
    else the next free one from U+0100 (GPT-2's encoder)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTES = _byte_alphabet()


@contextmanager
def _errors_as(kind: type[Error], where: str) -> Iterator[None]:
    """What a tokenizer raises, as an error of ours. The library raises plain Exception, and where
    its Rust code panics a PanicException, which is none."""
    try:
        yield
    except Exception as error:
        raise kind(f"{where}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"{where}: {error}") from error


def check_text(text: str) -> None:
    """ValueError for text that UTF-8 cannot hold, with the place."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}"
        ) from None


class Decoder(Protocol):
    """Output tokens one by one; text as soon as its characters are whole."""

    def push(self, token: int) -> str: ...
    def flush(self) -> str: ...


class _ByteDecoder:
    """For vocabularies whose tokens are bytes."""

    def __init__(self, table: Mapping[int, bytes], skip: frozenset[int]) -> None:
        self._table = table
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        return self._utf8.decode(self._table.get(token, b""))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TextDecoder:
    """For any tokenizer: decodes a window with and without the new tokens. Text that ends with the
    replacement character may be half a character and waits for the next token."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # the tokens last given out, as context, then those waiting
        self._given = 0

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._given])
        return self._decode(self._window)[len(before) :]

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._new_text()
        waiting = len(self._window) - self._given
        if not text or (text.endswith("\ufffd") and waiting < _LONGEST_WAIT):
            return ""
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._given = len(self._window)
        return text


class Tokenizer:
    """A tokenizer with its chat template.

    encode(text) adds the special tokens that the model's own post-processor adds (usually BOS).
    decode(ids) leaves special tokens out unless told otherwise. apply_chat_template(messages) gives
    text that already holds its special tokens: encode it with add_special_tokens=False."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})  # "bos_token": "<s>" and so on
        self.templates = dict(templates or {})  # "default", and others by name
        self._add_bos = add_bos
        self._special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._table: dict[int, bytes] | None = None
        self._strip = False
        self._kind = self._read_decoder()

    def _read_decoder(self) -> str:
        """What kind of decoder there is: "byte" (byte-level BPE), "spm" (▁ for a space, bytes as
        <0xXX>), or "other"."""
        decoder = _decoder_state(self._backend)
        steps = decoder.get("decoders", [decoder]) if decoder else []
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return "byte"
        spm = ["Replace", "ByteFallback", "Fuse"]
        if kinds in (spm, [*spm, "Strip"]) and _is_space_symbol(steps[0]):
            if kinds[-1] == "Strip":
                strip = steps[-1]
                self._strip = True
                if (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
                    return "other"
            return "spm"
        return "other"

    @property
    def vocab_size(self) -> int:
        """Ids that have a token. The model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("eos_token"))

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def token_id(self, token: str | None) -> int | None:
        """The id of a token by its exact content."""
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        check_text(text)
        with _errors_as(Error, "tokenizer"):
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._with_bos(list(ids)) if add_special_tokens else list(ids)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """The same for many valid texts, on all cores."""
        with _errors_as(Error, "tokenizer"):
            rows = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        if not add_special_tokens:
            return [list(row.ids) for row in rows]
        return [self._with_bos(list(row.ids)) for row in rows]

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_id
        if self._add_bos is None or bos is None:
            return ids
        has = bool(ids) and ids[0] == bos
        if self._add_bos and not has:
            return [bos, *ids]
        return ids[1:] if has and not self._add_bos else ids

    def decode(
        self, ids: Sequence[int] | NDArray[np.integer[Any]], *, skip_special_tokens: bool = True
    ) -> str:
        text = self._decode_all([int(index) for index in ids], skip_special_tokens)
        # The space that encoding put before the first word.
        return text[1:] if self._strip and self._kind == "spm" and text[:1] == " " else text

    def decode_output(
        self, ids: Sequence[int] | NDArray[np.integer[Any]], *, skip_special_tokens: bool = True
    ) -> str:
        """Text that continues a prompt: prompt + this is the whole, so a leading space stays."""
        return self._decode_all([int(index) for index in ids], skip_special_tokens)

    def _decode_all(self, ids: list[int], skip: bool) -> str:
        if self._kind == "other":
            with _errors_as(Error, "tokenizer"):
                return self._backend.decode(ids, skip_special_tokens=skip)
        table = self._bytes()
        skipped = self._special_ids if skip else frozenset()
        joined = b"".join(table.get(index, b"") for index in ids if index not in skipped)
        return joined.decode("utf-8", "replace")

    def decoder(self, *, skip_special_tokens: bool = True) -> Decoder:
        """For output tokens one by one: never half a character; all pieces and the flush joined
        are decode_output() of the same ids."""
        if self._kind == "other":
            return _TextDecoder(lambda ids: self._decode_all(ids, skip_special_tokens))
        skip = self._special_ids if skip_special_tokens else frozenset()
        return _ByteDecoder(self._bytes(), skip)

    def _bytes(self) -> dict[int, bytes]:
        """The bytes of each token. Ids may have gaps, also large ones."""
        if self._table is not None:
            return self._table
        entries = self._backend.get_vocab(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        convert = _byte_level_bytes if self._kind == "byte" else _piece_bytes
        table = {index: convert(token) for token, index in entries.items()}
        if self._kind == "byte":
            for index, special in added.items():
                # Not written in the byte alphabet, unless every character happens to be of it: the
                # library decodes it as such then, and so do we.
                table[index] = _byte_level_bytes(special.content)
        self._table = table
        return table

    def to_json(self) -> str:
        """What tokenizer.json holds."""
        return self._backend.to_str()

    @property
    def has_chat_template(self) -> bool:
        return bool(self.templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> str:
        """The conversation as one prompt, by the model's template (or the one given). Other
        options go to the template (enable_thinking=False, for example)."""
        source = chat_template if chat_template is not None else self._template(tools)
        return _render(
            source,
            messages,
            self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            **options,
        )

    def _template(self, tools: Any) -> str:
        if not self.templates:
            raise Error(
                "the model has no chat template: pass chat_template=, or prompts to generate()"
            )
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" not in self.templates:
            raise Error(f"several chat templates and no default: {', '.join(self.templates)}")
        return self.templates["default"]

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From the key-values of a GGUF file."""
        found = vocab.from_gguf(metadata)
        names = {f"{name}_token": found.tokens[index] for name, index in found.special_ids.items()}
        templates = {} if found.chat_template is None else {"default": found.chat_template}
        named = metadata.get("tokenizer.chat_templates")
        for name in named if isinstance(named, list) else ():
            templates[str(name)] = str(metadata.get(f"tokenizer.chat_template.{name}", ""))
        return cls(found.tokenizer, special_tokens=names, templates=templates)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> "Tokenizer":
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja of a model folder."""
        path = Path(folder)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{path}: there is no tokenizer.json (give tokenizer=, or token ids)"
            )
        with _errors_as(CheckpointError, str(file)):
            backend = tokenizers.Tokenizer.from_file(str(file))
        # What the file says about padding and cutting is for training batches.
        backend.no_padding()
        backend.no_truncation()
        config = _read_json(path / "tokenizer_config.json")
        with _errors_as(CheckpointError, str(path / "tokenizer_config.json")):
            special = {name: _content(config.get(name)) for name in _SPECIAL_NAMES}
        return cls(
            backend,
            special_tokens={name: token for name, token in special.items() if token is not None},
            templates=_templates(path, config),
            add_bos=_bos_flag(config, backend, special["bos_token"]),
        )


_render = chat_template.render


def _decoder_state(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    if backend.decoder is None:
        return {}
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state


def _is_space_symbol(step: Mapping[str, Any]) -> bool:
    return bool(step["content"] == " " and step["pattern"] == {"String": "▁"})


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(BYTES[char] for char in token)
    except KeyError:
        return token.encode("utf-8", "replace")


def _piece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode("utf-8", "replace")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with _errors_as(CheckpointError, str(path)):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def _content(token: Any) -> str | None:
    """A special token is its text, or an object that holds it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    check_text(token)
    return token


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. A .jinja file goes before the entry in tokenizer_config.json."""
    found: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        found["default"] = entry
    elif isinstance(entry, list):
        for item in entry:
            if isinstance(item, Mapping) and isinstance(item.get("template"), str):
                found[str(item.get("name", "default"))] = item["template"]
    legacy = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    file = path / "chat_template.jinja"
    if file.is_file():
        found["default"] = _read_template(file)
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = _read_template(extra)
    return found


def _read_template(file: Path) -> str:
    with _errors_as(CheckpointError, str(file)):
        return file.read_text(encoding="utf-8")


def _bos_flag(
    config: Mapping[str, Any], backend: tokenizers.Tokenizer, bos: str | None
) -> bool | None:
    """Whether add_bos_token overrules the post-processor; None: it does not."""
    flag = config.get("add_bos_token")
    if not isinstance(flag, bool) or bos is None or backend.token_to_id(bos) is None:
        return None
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    return flag if name in _FLAG_DECIDES else None


class _Foreign(Tokenizer):
    """The caller's own object with encode and decode (transformers' are such)."""

    def __init__(self, tokenizer: Any) -> None:
        self._own = tokenizer
        self._encode_takes = _takes(tokenizer.encode, "add_special_tokens")
        self._decode_takes = _takes(tokenizer.decode, "skip_special_tokens")
        self.special_tokens = {}
        self.templates = {}
        self._special_ids = frozenset(getattr(tokenizer, "all_special_ids", ()))

    @property
    def vocab_size(self) -> int:
        return len(self._own) if hasattr(self._own, "__len__") else int(self._own.vocab_size)

    @property
    def bos_id(self) -> int | None:
        return getattr(self._own, "bos_token_id", None)

    @property
    def eos_id(self) -> int | None:
        return getattr(self._own, "eos_token_id", None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        check_text(text)
        options = {"add_special_tokens": add_special_tokens} if self._encode_takes else {}
        with _errors_as(Error, f"{type(self._own).__name__}.encode"):
            return [int(index) for index in self._own.encode(text, **options)]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(
        self, ids: Sequence[int] | NDArray[np.integer[Any]], *, skip_special_tokens: bool = True
    ) -> str:
        options = {"skip_special_tokens": skip_special_tokens} if self._decode_takes else {}
        with _errors_as(Error, f"{type(self._own).__name__}.decode"):
            return str(self._own.decode([int(index) for index in ids], **options))

    decode_output = decode

    def decoder(self, *, skip_special_tokens: bool = True) -> Decoder:
        return _TextDecoder(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens) if ids else ""
        )

    @property
    def has_chat_template(self) -> bool:
        return hasattr(self._own, "apply_chat_template")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> str:
        if not self.has_chat_template:
            raise Error(f"{type(self._own).__name__} has no apply_chat_template")
        given = {"tools": tools, "documents": documents, "chat_template": chat_template}
        options |= {name: value for name, value in given.items() if value is not None}
        return str(
            self._own.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        )


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(
        item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()
    )


def from_user(given: Any) -> Tokenizer:
    """What tokenizer= may be: a folder or its tokenizer.json, a tokenizers.Tokenizer, or an object
    with encode and decode."""
    if isinstance(given, Tokenizer):
        return given
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        return Tokenizer.from_folder(path.parent if path.name == "tokenizer.json" else path)
    if isinstance(given, tokenizers.Tokenizer):
        return Tokenizer(given)
    if callable(getattr(given, "encode", None)) and callable(getattr(given, "decode", None)):
        return _Foreign(given)
    raise TypeError(f"tokenizer={given!r:.100}: a path or an object with encode and decode")


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a checkpoint, without loading weights."""
    checkpoint = Checkpoint(os.fspath(path))
    try:
        if checkpoint.container == "gguf":
            try:
                return Tokenizer.from_gguf(checkpoint.metadata())
            except Error as error:
                raise type(error)(f"{os.fspath(path)}: {error}") from error
        return Tokenizer.from_folder(checkpoint.folder)
    finally:
        checkpoint.close()
