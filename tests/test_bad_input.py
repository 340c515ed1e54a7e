"""Bad input ends in an error that names the thing; what is sound beside it runs on."""

from __future__ import annotations

import gc
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from core_runs import open_engine
from qkv import _core
from ref import make_tiny

# Case of fixtures/bad, what is raised, and what the message must name (regular expressions).
Q_PROJ = r"model\.layers\.0\.self_attn\.q_proj\.weight"
DOWN = r"model\.layers\.0\.mlp\.down_proj\.weight"
CASES: list[tuple[str, type[Exception], list[str]]] = [
    ("st-truncated-data", qkv.CheckpointError, ["model.safetensors", r"\d+"]),
    ("st-truncated-header", qkv.CheckpointError, ["model.safetensors", "header", "1120"]),
    ("st-header-length-huge", qkv.CheckpointError, ["header", "4611686018427387904"]),
    ("st-header-not-json", qkv.CheckpointError, ["model.safetensors"]),
    ("st-offsets-overlap", qkv.CheckpointError, [Q_PROJ + "|" + DOWN]),
    ("st-offsets-out-of-range", qkv.CheckpointError, [Q_PROJ, "98496"]),
    ("st-offsets-negative", qkv.CheckpointError, [Q_PROJ, "-64|negative|offset"]),
    ("st-shape-size-mismatch", qkv.CheckpointError, [Q_PROJ, "4160|65", "4096|8320"]),
    ("st-dtype-unknown", qkv.Error, [Q_PROJ, "Q17"]),
    ("st-missing-tensor", qkv.CheckpointError, [DOWN]),
    ("st-shape-transposed", qkv.CheckpointError, [DOWN, "64", "32"]),
    ("config-layers-too-many", qkv.CheckpointError, [r"model\.layers\.1\."]),
    ("config-negative-hidden", qkv.CheckpointError, ["hidden_size", "-32"]),
    ("config-unknown-arch", qkv.UnsupportedError, ["ForCausalLM", "LlamaForCausalLM"]),
    ("quant-gptq-but-bf16", qkv.Error, ["gptq"]),
    ("index-absent-file", qkv.CheckpointError, ["model-00002-of-00002.safetensors"]),
    ("gguf-bad-magic.gguf", qkv.CheckpointError, ["gguf-bad-magic.gguf", "GGUF"]),
    ("gguf-tensor-count-huge.gguf", qkv.CheckpointError, ["1152921504606846976", "tensor"]),
    ("gguf-kv-count-huge.gguf", qkv.CheckpointError, ["1152921504606846976"]),
    ("gguf-tensor-count-more.gguf", qkv.CheckpointError, ["gguf-tensor-count-more.gguf"]),
    ("gguf-truncated.gguf", qkv.CheckpointError, [r"weight", r"\d+"]),
    ("gguf-truncated-kv.gguf", qkv.CheckpointError, ["gguf-truncated-kv.gguf"]),
    ("gguf-ndims-huge.gguf", qkv.CheckpointError, ["4000000000", "4"]),
    ("gguf-type-unknown.gguf", qkv.Error, ["250"]),
    ("gguf-offset-out-of-range.gguf", qkv.CheckpointError, [r"weight", r"\d+"]),
    ("gguf-offset-misaligned.gguf", qkv.CheckpointError, [r"weight", "32"]),
    ("gguf-quant-row-not-multiple.gguf", qkv.CheckpointError, [r"weight", "Q4_K", "32", "256"]),
    ("gguf-arch-unknown.gguf", qkv.UnsupportedError, ["llama"]),
    (
        "fp8-nan-scale",
        qkv.CheckpointError,
        [Q_PROJ.replace("weight", "weight_scale"), "not a finite number"],
    ),
    ("fp8-scale-missing", qkv.CheckpointError, ["weight_scale"]),
    ("gptq-gidx-out-of-range", qkv.CheckpointError, ["g_idx", "1048576"]),
    ("gptq-qweight-short", qkv.CheckpointError, ["q_proj", "24"]),
    ("gptq-group-7", qkv.CheckpointError, ["scales", "group_size 7"]),
]


def load(path: Path) -> None:
    qkv.Engine(path, threads=1, kv_tokens=64, max_model_len=32).close()


@pytest.mark.parametrize(("case", "kind", "names"), CASES, ids=[case[0] for case in CASES])
def test_broken_checkpoint(
    fixtures_dir: Path, case: str, kind: type[Exception], names: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        load(fixtures_dir / "bad" / case)
    for name in names:
        assert re.search(name, str(caught.value)), f"{case}: {name} is not in: {caught.value}"


SOUND = ("ok-micro", "ok-micro.gguf", "fp8-zero-scale")


def test_every_case_has_a_row(fixtures_dir: Path) -> None:
    listed = {row["case"] for row in json.loads((fixtures_dir / "bad/CASES.json").read_text())}
    assert {row[0] for row in CASES} | set(SOUND) == listed


@pytest.mark.parametrize("case", SOUND)
def test_sound_model_runs(fixtures_dir: Path, case: str) -> None:
    """A scale of zero is a row of zeros, and no division by it."""
    path = fixtures_dir / "bad" / case
    with qkv.Engine(path, threads=1, kv_tokens=64, max_model_len=32) as engine:
        scores = engine.score([[1, 2, 3, 4, 5]], progress=False)
    assert np.isfinite(scores[0].token_logprobs).all()


def test_a_broken_model_leaves_nothing_behind(fixtures_dir: Path) -> None:
    """Descriptors and maps of a failed load are given back."""
    bad = fixtures_dir / "bad"
    cases = [
        "st-shape-transposed",
        "st-missing-tensor",
        "gguf-truncated.gguf",
        "st-header-not-json",
    ]

    def held() -> tuple[int, int]:
        gc.collect()  # tracebacks of the tests before may hold a checkpoint
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), maps.count("/bad/")

    before = held()
    for case in cases * 8:
        with pytest.raises(qkv.Error):
            load(bad / case)
    assert held() == before


@pytest.mark.parametrize("name", ["absent", "absent.gguf", "absent.safetensors"])
def test_absent_model(tmp_path: Path, name: str) -> None:
    with pytest.raises((OSError, qkv.Error)) as caught:
        _core.Checkpoint(str(tmp_path / name))
    assert name in str(caught.value)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(qkv.CheckpointError, match="safetensors|gguf"):
        _core.Checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.k_scale", "model.layers.1.extra.weight"]
)
def test_a_tensor_too_many(edited: Callable[..., Path], name: str) -> None:
    folder = edited(lambda tensors: tensors.update({name: np.ones(1, np.float32)}))
    with pytest.raises((qkv.CheckpointError, qkv.UnsupportedError), match=re.escape(name)):
        load(folder)


@pytest.mark.parametrize("compute_dtype", ["bf16", "float32"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_weight_that_is_not_finite(
    edited: Callable[..., Path], dtype: str, value: float, compute_dtype: str
) -> None:
    """Such weights loaded without a word, and every logit was NaN."""
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[name][3, 5] = value

    folder = edited(spoil, dtype)
    with pytest.raises(qkv.CheckpointError, match=re.escape(f"{name}: row 3, column 5 is ")):
        qkv.Engine(folder, threads=1, kv_tokens=64, compute_dtype=compute_dtype).close()


def test_every_prefix_of_a_gguf_header(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A file cut anywhere in its head is an error, wherever the cut falls."""
    whole = tmp_path / "whole.gguf"
    make_tiny.write_gguf(whole, "llama", tokenizer=False, num_hidden_layers=1)
    data = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for n in [*range(0, 1500, 7), len(data) - 1, len(data) - 4096]:
        cut.write_bytes(data[:n])
        with pytest.raises(qkv.CheckpointError):
            load(cut)


def test_every_header_length_of_safetensors(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    data = (folder / "model.safetensors").read_bytes()
    n_header = struct.unpack("<Q", data[:8])[0]
    for claimed in (0, 1, 7, n_header - 1, n_header + 1, len(data), 2**32, 2**63, 2**64 - 1):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", claimed) + data[8:])
        with pytest.raises(qkv.CheckpointError):
            load(folder)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        ({"hidden_act": "relu9"}, "relu9"),
        ({"head_dim": 10**6}, "head_dim"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"architectures": []}, "architectures"),
        ({"intermediate_size": 96.5}, "intermediate_size"),
    ],
    ids=str,
)
def test_config_out_of_range(
    tiny: Callable[..., Path], tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(qkv.Error, match=name):
        load(folder)


def test_unknown_architectures_are_refused_by_name(fixtures_dir: Path) -> None:
    """Whatever their weights are in; every other checkpoint of other tools loads."""
    known = set()
    for folder in sorted(fixtures_dir.iterdir()):
        if not (folder / "config.json").exists():
            continue
        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        try:
            load(folder)
            known.add(name)
        except qkv.UnsupportedError as error:
            assert name in str(error)
            assert name not in known
    assert known >= {"LlamaForCausalLM", "Qwen3ForCausalLM"}


# ---- prompts and parameters -----------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path]) -> Iterator[qkv.Engine]:
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=512, max_model_len=256) as made:
        yield made


GREEDY = qkv.SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["empty"]),
        ([], ["empty"]),
        (list(range(10)) * 30, ["300", "256"]),
        ([1, 2, 512], ["512"]),
        ([1, -1, 2], ["-1"]),
        ([1, 2**40], [str(2**40)]),
        ("half \ud83d a character", ["surrogate|Unicode|U\\+D83D|ud83d"]),
        ([1, "two", 3], ["two"]),
        (None, ["None"]),
        (3.5, ["3.5|float"]),
        ([[1, 2], [3]], [r"\[1, 2\] at position 0"]),
        (np.array([1.5, 2.0]), ["float64"]),
        ({"prompt": "a", "params": {"temperature": 10**400}}, ["temperature", "finite"]),
        ({"prompt": "a", "params": {"logit_bias": {"3": 10**400}}}, ["logit_bias", "finite"]),
        ({"messages": "text"}, ["messages", "list"]),
        ({"prompt_token_ids": "text"}, ["prompt_token_ids", "list"]),
    ],
    ids=[
        "empty",
        "no-ids",
        "long",
        "above",
        "negative",
        "huge",
        "surrogate",
        "str",
        "None",
        "float",
        "nested",
        "float-array",
        "huge-temperature",
        "huge-bias",
        "messages",
        "ids-text",
    ],
)
def test_a_bad_prompt_spoils_its_own_row(engine: qkv.Engine, prompt: Any, words: list[str]) -> None:
    good: list[Any] = ["The quick brown fox", [5, 6, 7, 8]]
    alone = engine.generate(good, GREEDY, progress=False)
    outputs = engine.generate([good[0], prompt, good[1]], GREEDY, progress=False)
    assert [o.index for o in outputs] == [0, 1, 2]
    assert outputs[1].error is not None
    for word in words:
        assert re.search(word, str(outputs[1].error), re.IGNORECASE), outputs[1].error
    for expected, got in zip(alone, (outputs[0], outputs[2]), strict=True):
        assert got.error is None
        assert list(got.token_ids) == list(expected.token_ids)
        assert np.array_equal(got.logprobs, expected.logprobs)


def test_a_request_that_can_never_fit(tiny: Callable[..., Path]) -> None:
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=64) as engine:
        params = [GREEDY, GREEDY.with_(max_tokens=100), GREEDY]
        outputs = engine.generate([[1, 2, 3]] * 3, params, progress=False)
        assert outputs[0].error is None and len(outputs[0].token_ids) == 5
        assert outputs[2].error is None and len(outputs[2].token_ids) == 5
        assert re.search("103|104", str(outputs[1].error)) and "64" in str(outputs[1].error)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": -1}, "max_tokens.*-1"),
        ({"temperature": -0.5}, "temperature.*-0.5"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"temperature": float("inf")}, "temperature.*inf"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, r"top_p.*1\.5"),
        ({"top_k": -2}, "top_k.*-2"),
        ({"min_p": 2.0}, "min_p"),
        ({"n": 0}, "n=0"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens.*9.*max_tokens.*3"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 1000}, "logprobs.*1000"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias"),
        ({"bad_words": [[]]}, "bad_words"),
    ],
    ids=str,
)
def test_contradictory_parameters(values: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        qkv.SamplingParams(**values)


def test_parameters_that_only_the_model_refutes(engine: qkv.Engine) -> None:
    """Ids beyond the vocabulary in stop_token_ids, logit_bias and bad_words: that row's error."""
    for values in (
        {"stop_token_ids": [99999]},
        {"logit_bias": {99999: 1.0}},
        {"bad_words": [[99999]]},
    ):
        params = [GREEDY, GREEDY.with_(**values), GREEDY]
        outputs = engine.generate([[1, 2, 3]] * 3, params, progress=False)
        assert outputs[0].error is None and outputs[2].error is None
        assert "99999" in str(outputs[1].error), values


def test_every_token_forbidden(engine: qkv.Engine) -> None:
    """No token is left to choose: the row's error. One left: that one."""
    vocab, eos = 512, sorted(engine.info["config"]["eos_ids"])
    ban = {token: -np.inf for token in range(vocab)}
    all_but_eos = {token: -np.inf for token in ban if token not in eos}
    all_but_nine = {token: -np.inf for token in ban if token != 9}
    forbidden = [
        GREEDY.with_(logit_bias=ban),
        GREEDY.with_(bad_words=[[token] for token in range(vocab)], temperature=1.0),
        GREEDY.with_(logit_bias=all_but_eos, min_tokens=1, ignore_eos=False),
        GREEDY.with_(logit_bias=all_but_nine, bad_words=[[9]]),
    ]
    for output in engine.generate([[1, 2, 3]] * 4, forbidden, progress=False):
        assert re.search("forbid all 512 tokens", str(output.error)), output
    output = engine.generate([1, 2, 3], GREEDY.with_(logit_bias=all_but_nine), progress=False)[0]
    assert output.token_ids.tolist() == [9] * 5


@pytest.mark.parametrize(
    ("prompt", "continuation", "words"),
    [
        ([1.7, 2], [3, 4], "1.7 at position 0"),
        ([1, 2], [3.9, 4], "3.9 at position 0"),
        (["1", "2"], [3], "'1' at position 0"),
        ([True, 2], [3], "True at position 0"),
        (b"ab", [3], "bytes"),
        ([1, 2], b"cd", "bytes"),
        (np.ones((2, 2), int), [3], r"\(2, 2\)"),
        (7, [3], "int"),
        ([1, 2], None, "NoneType"),
        ("a", "\ud800", r"U\+D800"),
        ({"text": "a"}, "b", "none of prompt"),
    ],
    ids=str,
)
def test_scored_tokens_are_checked_like_prompts(
    engine: qkv.Engine, prompt: Any, continuation: Any, words: str
) -> None:
    scores = engine.score([[1, 2], prompt], [[3, 4], continuation], progress=False)
    assert scores[0].error is None and len(scores[0].token_ids) == 2
    assert re.search(words, str(scores[1].error)), scores[1].error


def test_scored_rows_may_be_mappings(engine: qkv.Engine) -> None:
    plain = engine.score(["The fox"], [" jumps"], progress=False)[0]
    mapped = engine.score([{"prompt": "The fox"}], [" jumps"], progress=False)[0]
    assert plain.error is None and plain.total == mapped.total
    with pytest.raises(TypeError, match="continuations=5"):
        engine.score(["a"], 5, progress=False)


class Choosy:
    """A tokenizer that cannot read some texts nor write some tokens."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        if self.refused in ids:
            raise RuntimeError(f"no text for {self.refused}")
        return " ".join(str(index) for index in ids)

    refused = -1


def test_a_tokenizer_that_fails_spoils_the_row(tiny: Callable[..., Path]) -> None:
    own = Choosy()
    with qkv.Engine(tiny("llama"), threads=1, kv_tokens=512, tokenizer=own) as engine:
        rows: list[Any] = ["1 2 3", "one", "4 5", [7, 8]]
        outputs = engine.generate(rows, GREEDY, progress=False)
        assert [output.error is None for output in outputs] == [True, False, True, True]
        assert "Choosy.encode" in str(outputs[1].error) and "'one'" in str(outputs[1].error)
        own.refused = int(outputs[2].token_ids[2])
        assert own.refused not in outputs[0].token_ids
        for params in (GREEDY, GREEDY.with_(stop="no such text")):
            again = engine.generate(rows, params, progress=False)
            assert again[0].text == outputs[0].text and again[0].error is None
            assert f"no text for {own.refused}" in str(again[2].error)
        assert engine.generate([[7, 8]], GREEDY, progress=False)[0].error is None


def test_no_tokenizer_for_a_stop_string(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    (folder / "tokenizer.json").unlink()
    with qkv.Engine(folder, threads=1, kv_tokens=512) as engine:
        params = [GREEDY, GREEDY.with_(stop="x"), GREEDY.with_(bad_words=["x"])]
        outputs = engine.generate([[1, 2, 3]] * 3, params, progress=False)
        assert outputs[0].error is None and len(outputs[0].token_ids) == 5
        for output in outputs[1:]:
            assert "tokenizer.json" in str(output.error)


def test_the_model_is_deleted_under_the_engine(
    tiny: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama"), folder)
    with qkv.Engine(folder, threads=1, kv_tokens=512) as engine:
        (folder / "model.safetensors").write_bytes(b"")
        shutil.rmtree(folder)
        outputs = engine.generate([[1, 2, 3]] * 2, GREEDY, progress=False)
        assert [len(output.token_ids) for output in outputs] == [5, 5]
    # Not in silence: the tokenizer is read when first needed.
    assert [str(folder) in record.getMessage() for record in caplog.records] == [True]


def test_wrong_numbers_of_things(engine: qkv.Engine) -> None:
    with pytest.raises(ValueError, match="2.*3|3.*2"):
        engine.generate([[1], [2], [3]], [GREEDY, GREEDY], progress=False)
    with pytest.raises(TypeError):
        engine.generate([[1]], {"max_tokens": 3}, progress=False)  # type: ignore[arg-type]
    assert engine.generate([], GREEDY, progress=False) == []


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"kv_cache_dtype": "fp3"}, "fp3"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype"),
        ({"compute_dtype": "float8"}, "compute_dtype.*float8"),
        ({"device": "tpu"}, "device.*tpu"),
        ({"threads": 0}, "threads"),
        ({"threads": -3}, "threads.*-3"),
        ({"threads": 1025}, "threads=1025.*1024"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"max_running": 0}, "max_running"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"mem_fraction": 1.5}, r"mem_fraction.*1\.5"),
        ({"schedule": "lottery"}, "schedule.*lottery"),
        ({"quantization": "no-such"}, "no-such"),
        ({"max_model_len": 10**7}, "max_model_len.*10000000"),
    ],
    ids=str,
)
def test_bad_engine_options(tiny: Callable[..., Path], option: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError, qkv.Error), match=words):
        qkv.Engine(tiny("llama"), **option).close()


def test_a_pool_larger_than_the_memory(tiny: Callable[..., Path]) -> None:
    """Not left to the moment when the system notices that it promised too much."""
    with pytest.raises(MemoryError, match=r"kv_tokens=2147483647: 512\.00 GiB.* are free"):
        qkv.Engine(tiny("llama"), kv_tokens=2**31 - 1)


def test_options_may_be_numpy_numbers(tiny: Callable[..., Path]) -> None:
    folder = tiny("llama")
    with qkv.Engine(
        folder,
        kv_tokens=np.int64(100),
        threads=np.int32(1),
        chunk_tokens=np.uint8(16),
    ) as engine:
        assert engine.info["kv_tokens"] == 96
        assert engine.generate([[1, 2, 3]], GREEDY, progress=False)[0].error is None
    qkv.Engine(folder, threads=1, mem_fraction=np.float32(0.001)).close()


def test_an_instruction_set_that_is_not_there(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["sse9", *(name for name, usable in _core.isas() if not usable)]:
        with pytest.raises((ValueError, qkv.UnsupportedError), match=name):
            open_engine(tiny("llama"), kv_tokens=64, isa=name)
        monkeypatch.setenv("QKV_ISA", name)
        with pytest.raises((ValueError, qkv.UnsupportedError), match=name):
            open_engine(tiny("llama"), kv_tokens=64)
        monkeypatch.delenv("QKV_ISA")


def test_core_refuses_what_the_python_layer_would_have_caught(tiny: Callable[..., Path]) -> None:
    core = open_engine(tiny("llama"), kv_tokens=64, threads=1)
    prompt = np.array([1, 2, 3], np.int32)
    bad_calls: list[tuple[Any, dict[str, Any]]] = [
        (prompt.astype(np.int64), {}),
        (prompt.reshape(1, 3), {}),
        (np.zeros(0, np.int32), {}),
        (np.array([512], np.int32), {}),
        (np.arange(6, dtype=np.int32)[::2], {}),
        (prompt, {"lane": 1}),
        (prompt, {"max_tokens": -1}),
        (prompt, {"temperature": float("nan")}),
        (prompt, {"top_p": 0.0}),
        (prompt, {"n_top": 257}),
        (prompt, {"logprob_start": 0}),
        (prompt, {"bias_ids": np.array([1], np.int32)}),
        (prompt, {"bias_ids": prompt, "bias": np.zeros(2, np.float32)}),
        (prompt, {"max_tokens": 1000}),
    ]
    for tokens, options in bad_calls:
        with pytest.raises((ValueError, TypeError, qkv.OutOfPages)):
            core.add(tokens, **options)
    for call in (core.take, core.abort):
        with pytest.raises(ValueError, match="77"):
            call(77)
    assert core.step().n_rows == 0
    ident = core.add(prompt, max_tokens=2, temperature=0.0, ignore_eos=True)
    with pytest.raises((ValueError, qkv.Error)):
        core.take(ident)
    while ident not in core.step().finished:
        pass
    assert len(core.take(ident).token_ids) == 2
    core.close()
    with pytest.raises(qkv.Error, match="closed"):
        core.step()
