"""Tokenizers against what other projects' code gives for the same vocabularies."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv import vocab
from qkv.tokenizer import BYTES, Tokenizer, from_user

DATA = Path(__file__).parent / "data"

TEXTS = [
    "Hello, world!",
    "  two  spaces\tand\ttabs\n\n\nnewlines \n",
    "It's 1,234 and I'M sure we'LL see",
    "Füße, naïve café, Straße",
    "\u4f60\u597d\uff0c\u4e16\u754c 2026",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 ok \U0001f3f3\ufe0f\u200d\U0001f308",
    "",
    " ",
]


def load(path: Path) -> Tokenizer:
    checkpoint = qkv._core.Checkpoint(str(path))
    try:
        return Tokenizer.from_gguf(checkpoint.metadata())
    finally:
        checkpoint.close()


def check_recorded(tokenizer: Tokenizer, name: str) -> None:
    recorded = json.loads((DATA / f"tokenizer_{name}.json").read_text())
    assert len(recorded["rows"]) > 10
    for row in recorded["rows"]:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]
        ids = [index for index in row["ids"] if index not in tokenizer.special_ids]
        plain = row["text"]
        for token in ("<|im_start|>", "<|im_end|>"):
            plain = plain.replace(token, "")
        assert tokenizer.decode(ids) == plain


def check_incremental(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Pieces joined are the whole, and no piece holds half a character."""
    whole = tokenizer.decode_output(ids)
    decoder = tokenizer.decoder()
    pieces = [decoder.push(index) for index in ids]
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + decoder.flush() == whole


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen25"])
def test_real_vocabulary(name: str, request: pytest.FixtureRequest) -> None:
    fixture = {"smollm2": "demo_model", "gemma3": "gemma_model", "qwen25": "qwen_model"}[name]
    tokenizer = load(request.getfixturevalue(fixture))
    check_recorded(tokenizer, name)
    rng = random.Random(7)
    for text in TEXTS:
        check_incremental(tokenizer, tokenizer.encode(text))
    for _ in range(50):
        check_incremental(tokenizer, [rng.randrange(tokenizer.vocab_size) for _ in range(40)])


def test_folder_gives_what_the_library_recorded(fixtures_dir: Path) -> None:
    folder = fixtures_dir / "tokenizers/tok-llama-4096"
    tokenizer = Tokenizer.from_folder(folder)
    rows = json.loads((folder / "expected.json").read_text())["encode"]
    assert len(rows) > 5
    for row in rows:
        assert tokenizer.encode(row["text"]) == row["ids_default"]
        assert tokenizer.encode(row["text"], add_special_tokens=False) == row["ids_plain"]
        assert tokenizer.decode(row["ids_plain"], skip_special_tokens=False) == row["decoded"]
    batch = [row["text"] for row in rows]
    assert tokenizer.encode_batch(batch) == [row["ids_default"] for row in rows]


def as_gguf(folder: Path, pre: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter would write for a byte-level BPE tokenizer."""
    state = json.loads((folder / "tokenizer.json").read_text())
    size = len(state["model"]["vocab"]) + len(state["added_tokens"])
    tokens, types = [""] * size, [vocab.NORMAL] * size
    for token, index in state["model"]["vocab"].items():
        tokens[index] = token
    for entry in state["added_tokens"]:
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = vocab.CONTROL if entry["special"] else vocab.USER_DEFINED
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    found: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    if config.get("bos_token"):
        found["tokenizer.ggml.bos_token_id"] = tokens.index(config["bos_token"])
    return found | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index(config["eos_token"]),
        "tokenizer.chat_template": config["chat_template"],
    }


@pytest.mark.parametrize(
    ("folder", "pre"),
    [("base-llama31-rope-tiny", "llama-bpe"), ("base-qwen3-s-tiny", "qwen2")],
)
def test_gguf_vocabulary_is_the_folder_one(fixtures_dir: Path, folder: str, pre: str) -> None:
    theirs = Tokenizer.from_folder(fixtures_dir / folder)
    ours = Tokenizer.from_gguf(as_gguf(fixtures_dir / folder, pre))
    texts = [*TEXTS, "<|im_start|>user\nhi<|eot_id|>", "e\u0301 " * 3]
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        check_incremental(ours, ids)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)


@pytest.mark.parametrize("name", sorted(vocab.PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_all_of_a_text(name: str) -> None:
    letters = [char for char, _ in sorted(BYTES.items(), key=lambda entry: entry[1])]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*letters, "<eot>"],
        "tokenizer.ggml.token_type": [vocab.NORMAL] * 256 + [vocab.CONTROL],
        "tokenizer.ggml.bos_token_id": 256,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in [*TEXTS, "f(x)=[1234,5]\r\n\n  'tis the DON'T-case\u3042\u30a2 \uac00 $+<=>^~|`"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert bytes(ids).decode() == text
        assert tokenizer.decode(ids) == text


def pre_tokenized(name: str, text: str) -> list[str]:
    tokens = [char for char, _ in sorted(BYTES.items(), key=lambda entry: entry[1])]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name}
    tokenizer = vocab.from_gguf(metadata | {"tokenizer.ggml.tokens": tokens}).tokenizer
    assert tokenizer.pre_tokenizer is not None
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["Don", "'t", " pay", " 12345", " $", " --", "  ", " now"]),
        ("llama-bpe", ["Don", "'t", " pay", " ", "123", "45", " $", " --", "  ", " now"]),
        ("qwen2", ["Don", "'t", " pay", " ", *"12345", " $", " --", "  ", " now"]),
        ("smollm", ["Don", "'t", " pay", " ", *"12345", " $", " --", "  ", " now"]),
        ("gpt-4o", ["Don't", " pay", " ", "123", "45", " $", " --", "  ", " now"]),
        ("tekken", ["Don", "'t", " pay", " ", *"12345", " $", " --", "  ", " now"]),
        ("deepseek-v3", ["Don", "'t", " pay", " ", "123", "45", " $", " --", "  ", " now"]),
    ],
)
def test_pre_tokenizers(name: str, pieces: list[str]) -> None:
    """Written out by hand from the patterns."""
    assert pre_tokenized(name, "".join(pieces)) == pieces


def test_real_gguf_of_a_fixture(fixtures_dir: Path) -> None:
    tokenizer = load(fixtures_dir / "gguf-q4_k_m-llama-g/gguf-q4_k_m-llama-g.gguf")
    beside = Tokenizer.from_folder(fixtures_dir / "ct-fp8-static-kv-llama-g")
    for text in TEXTS:
        assert tokenizer.encode(text) == beside.encode(text)


PIECES = [
    ("<unk>", 0.0, vocab.UNKNOWN),
    ("<s>", 0.0, vocab.CONTROL),
    ("</s>", 0.0, vocab.CONTROL),
    ("<tool>", 0.0, vocab.USER_DEFINED),
    *((f"<0x{byte:02X}>", 0.0, vocab.BYTE) for byte in range(256)),
    ("▁t", -1.0, vocab.NORMAL),
    ("he", -2.0, vocab.NORMAL),
    ("▁the", -3.0, vocab.NORMAL),
    ("▁a", -4.0, vocab.NORMAL),
    ("th", -5.0, vocab.NORMAL),
    ("▁", -6.0, vocab.NORMAL),
    ("t", -7.0, vocab.NORMAL),
    ("h", -8.0, vocab.NORMAL),
    ("e", -9.0, vocab.NORMAL),
    ("a", -10.0, vocab.NORMAL),
]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    found = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in PIECES],
        "tokenizer.ggml.scores": [score for _, score, _ in PIECES],
        "tokenizer.ggml.token_type": [kind for _, _, kind in PIECES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return found | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [PIECES[index][0] for index in tokenizer.encode(text)]


def test_sentencepiece_merges_follow_the_scores() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    # "▁t" (-1) and "he" (-2) are better than "th" (-5), and join to "▁the".
    assert pieces_of(tokenizer, "the") == ["<s>", "▁the"]
    assert pieces_of(tokenizer, "a the") == ["<s>", "▁a", "▁the"]
    assert pieces_of(tokenizer, "ath") == ["<s>", "▁a", "th"]
    assert pieces_of(tokenizer, "a<tool>") == ["<s>", "▁a", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("a the")) == "a the"
    assert tokenizer.decode_output(tokenizer.encode("a the")) == " a the"


def test_sentencepiece_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    assert pieces_of(tokenizer, "ß") == ["<s>", "▁", "<0xC3>", "<0x9F>"]
    ids = tokenizer.encode("aß\U0001f308")
    assert tokenizer.decode(ids) == "aß\U0001f308"
    check_incremental(tokenizer, ids)
    # Cut inside the last character: the whole ends with a replacement, pieces before do not.
    decoder = tokenizer.decoder()
    assert "".join(decoder.push(index) for index in ids[:-1]) == " aß"
    assert decoder.flush() == "\ufffd"


def test_sentencepiece_flags() -> None:
    plain = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert pieces_of(plain, "the") == ["t", "he"]
    ended = Tokenizer.from_gguf(sentencepiece(add_eos_token=True))
    assert pieces_of(ended, "a") == ["<s>", "▁a", "</s>"]
    assert (ended.bos_id, ended.eos_id) == (1, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "rwkv"}, ["rwkv", "gpt2", "llama"]),
        ({"model": "gpt2", "pre": "klingon"}, ["klingon", "llama-bpe", "qwen2", "smollm"]),
        ({"scores": [0.0]}, ["scores", "1", str(len(PIECES))]),
        ({"scores": None}, ["scores"]),
        ({"token_type": [1, 2]}, ["token_type", "2"]),
        ({"bos_token_id": 100000}, ["bos_token_id", "100000"]),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["q z"]}, ["merges", "q z"]),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["qz"]}, ["merges", "qz"]),
        ({"tokens": None}, ["tokens"]),
        ({"model": "gpt2", "pre": ["gpt-2"]}, ["pre", "gpt-2"]),
        ({"scores": ["a"] * len(PIECES)}, ["scores[0]", "'a'"]),
    ],
)
def test_broken_vocabulary(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(qkv.Error) as caught:
        Tokenizer.from_gguf(sentencepiece(**changes))
    for word in words:
        assert word in str(caught.value)


def test_a_long_piece_ends_soon() -> None:
    """As many ways to cut it as there are lengths of pieces, not as it has characters."""
    tokens = ["<unk>", "a", "b", "a" * 2_000_000, "ab"]
    metadata = sentencepiece(tokens=tokens, scores=[0.0] * 5, token_type=[2, 1, 1, 1, 1])
    metadata |= {"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("ab", add_special_tokens=False) == [4]


def test_names_of_chat_templates_that_are_no_list() -> None:
    metadata = sentencepiece() | {"tokenizer.chat_templates": 5}
    assert not Tokenizer.from_gguf(metadata).has_chat_template


def test_unnamed_pre_tokenizer_warns() -> None:
    metadata = sentencepiece(model="gpt2")
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre"):
        Tokenizer.from_gguf(metadata)


def test_lone_surrogate(fixtures_dir: Path) -> None:
    tokenizer = Tokenizer.from_folder(fixtures_dir / "base-qwen3-s-tiny")
    with pytest.raises(ValueError, match=r"surrogate U\+D800 at character 3"):
        tokenizer.encode("abc\ud800")


def copy_with(folder: Path, to: Path, **changes: Any) -> Path:
    config = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (to / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    return to


def test_bos_flag_of_llama_class(fixtures_dir: Path, tmp_path: Path) -> None:
    folder = fixtures_dir / "base-llama31-rope-tiny"
    bos = Tokenizer.from_folder(folder).bos_id
    for name, flag, first in (
        ("LlamaTokenizerFast", False, None),
        ("LlamaTokenizerFast", True, bos),
        ("PreTrainedTokenizerFast", False, bos),  # there the post-processor decides
    ):
        copy_with(folder, tmp_path, tokenizer_class=name, add_bos_token=flag)
        ids = Tokenizer.from_folder(tmp_path).encode("a")
        assert (ids[0] == bos) == (first is not None)
        assert ids.count(bos) <= 1  # type: ignore[arg-type]


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(qkv.CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(qkv.CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"\xff", "tokenizer.json"),
        ("tokenizer_config.json", b'{"a": ' + b"[" * 100_000, "tokenizer_config.json: .*recursion"),
        ("tokenizer_config.json", "{}".encode("utf-16"), "tokenizer_config.json: .*utf-8"),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}', r"tokenizer_config.json: .*U\+D800"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: .*utf-8"),
        ("additional_chat_templates/a.jinja", b"\xff", "a.jinja: .*utf-8"),
    ],
)
def test_broken_file(
    fixtures_dir: Path, tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    copy_with(fixtures_dir / "base-qwen3-s-tiny", tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(qkv.CheckpointError, match=words):
        Tokenizer.from_folder(tmp_path)


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy whose tokenizer.json has other entries; those of the model are merged."""
    copy_with(folder, to)
    content = json.loads((folder / "tokenizer.json").read_text())
    changes["model"] = content["model"] | changes.get("model", {})
    (to / "tokenizer.json").write_text(json.dumps(content | changes))
    return to


def test_an_id_far_beyond_the_others(fixtures_dir: Path, tmp_path: Path) -> None:
    """Costs what one token costs: there is no table up to it."""
    folder = fixtures_dir / "base-qwen3-s-tiny"
    entries = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    far = {"model": {"vocab": entries | {"zzzz": 4_000_000_000}}}
    tokenizer = Tokenizer.from_folder(changed(folder, tmp_path, **far))
    ids = tokenizer.encode("some text")
    assert tokenizer.decode(ids) == "some text"
    assert tokenizer.decode([4_000_000_000, 3_999_999_999, -1]) == "zzzz"
    assert tokenizer.decoder().push(4_000_000_000) == "zzzz"


def test_what_the_library_raises(fixtures_dir: Path, tmp_path: Path) -> None:
    """Plain exceptions, and the panics of its Rust code, which are no Exception."""
    folder = fixtures_dir / "base-qwen3-s-tiny"
    words = {"type": "WordLevel", "vocab": {"q": 0}, "unk_token": "<u>"}
    for change in (
        {"model": words},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<zz>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ):
        changed(folder, tmp_path, **change)
        # Versions of the library differ in whether they notice when they read the file.
        with pytest.raises(qkv.Error, match="tokenizer"):
            Tokenizer.from_folder(tmp_path).encode("some text")
        with pytest.raises(qkv.Error, match="tokenizer"):
            Tokenizer.from_folder(tmp_path).encode_batch(["some text", "more"])
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(qkv.CheckpointError, match=r"tokenizer\.json: .*charsmap"):
        Tokenizer.from_folder(changed(folder, tmp_path, normalizer=broken))


class Letters:
    """A tokenizer of the caller's own: bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


def test_own_tokenizer() -> None:
    tokenizer = from_user(Letters())
    ids = tokenizer.encode("a\u4f60\U0001f308b")
    assert tokenizer.decode(ids) == "a\u4f60\U0001f308b"
    decoder = tokenizer.decoder()
    pieces = [decoder.push(index) for index in ids]
    assert [piece for piece in pieces if piece] == ["a", "\u4f60", "\U0001f308", "b"]
    assert decoder.flush() == ""
    with pytest.raises(qkv.Error, match="apply_chat_template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    with pytest.raises(TypeError, match="encode and decode"):
        from_user(5)


class Numbers(Letters):
    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def test_own_tokenizer_that_fails() -> None:
    tokenizer = from_user(Numbers())
    assert tokenizer.encode("1 2") == [1, 2]
    with pytest.raises(qkv.Error, match=r"Numbers\.encode: invalid literal"):
        tokenizer.encode("1 x")


def test_import_takes_no_model_libraries() -> None:
    names = "('torch', 'transformers', 'huggingface_hub', 'scipy')"
    code = f"import sys, qkv; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
