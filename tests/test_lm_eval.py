"""lm-evaluation-harness on this engine (qkv.integrations.lm_eval), with the demo model. Skipped
where the harness is not installed: `pip install qkv[eval]`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import tasks

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: qkv[eval] brings it")

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from qkv.integrations.lm_eval import QkvLM, main  # noqa: E402

pytestmark = pytest.mark.slow
BOS = 1  # of the demo model
QUESTIONS = ["What is the capital of France?", "How many legs has a spider?"]


@pytest.fixture(scope="module")
def lm(demo_model: Path) -> QkvLM:
    return QkvLM(str(demo_model), kv_tokens=4096, max_length=2048)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[qkv.Engine]:
    with qkv.Engine(demo_model, kv_tokens=4096) as made:
        yield made


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, entry, place) for place, entry in enumerate(arguments)]


def test_the_harness_finds_the_model_and_passes_its_arguments(demo_model: Path) -> None:
    """As its command line does: everything as text, and three arguments that every model gets."""
    found = get_model("qkv").create_from_arg_string(
        f"pretrained={demo_model},kv_cache_dtype=fp8_e4m3,kv_tokens=512,max_length=128",
        {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"},
    )
    assert isinstance(found, QkvLM)
    assert found.engine.info["kv_cache_dtype"] == ["fp8_e4m3"]
    assert found.engine.info["kv_tokens"] == 512
    assert found.max_length == 128 and found.max_gen_toks == 256
    assert found.get_model_info()["qkv"]["kv_cache_dtype"] == ["fp8_e4m3"]
    assert found.tokenizer_name == str(demo_model).replace("/", "__")


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, qkv.integrations.lm_eval;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loglikelihoods_are_those_of_score(lm: QkvLM, engine: qkv.Engine) -> None:
    pairs = [
        ("The capital of France is", " Paris"),
        ("The capital of France is", " London"),
        ("Two plus two is ", "four"),  # the space goes to the continuation
        ("1, 2, 3,", " 4, 5, 6"),
    ]
    got = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    scores = engine.score(*map(list, zip(*pairs, strict=True)), progress=False)
    assert got == [(score.total, score.greedy) for score in scores]
    assert {greedy for _, greedy in got} == {True, False}


def test_an_empty_context_is_the_prefix_token(lm: QkvLM, engine: qkv.Engine) -> None:
    (got,) = lm.loglikelihood(requests("loglikelihood", ("", "Hello world")), disable_tqdm=True)
    ids = engine.tokenizer.encode("Hello world", add_special_tokens=False)
    (score,) = engine.score([[BOS]], [ids], progress=False)
    assert got == (score.total, score.greedy)


def test_long_texts_are_cut_and_windowed_as_the_harness_says(
    demo_model: Path, engine: qkv.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """max_length=8: the model sees eight tokens at most, and each token is predicted once."""
    lm = QkvLM(str(demo_model), kv_tokens=512, max_length=8)
    text = "The quick brown fox jumps over the lazy dog, and then it does so again."
    ids = engine.tokenizer.encode(text)
    assert 16 < len(ids) < 24
    contexts = [[BOS], [ids[7]], ids[len(ids) - 9 : 16]]
    scores = engine.score(contexts, [ids[:8], ids[8:16], ids[16:]], progress=False)
    got = lm.loglikelihood_rolling(
        requests("loglikelihood_rolling", (text,), ("",)), disable_tqdm=True
    )
    assert got == [sum(score.total for score in scores), 0.0]

    with caplog.at_level("WARNING", "qkv"):
        (cut,) = lm.loglikelihood(requests("loglikelihood", (text, " Yes.")), disable_tqdm=True)
    whole = engine.tokenizer.encode(text + " Yes.")
    n_new = len(whole) - len(ids)
    (score,) = engine.score([whole[-9:-n_new]], [whole[-n_new:]], progress=False)
    assert cut == (score.total, score.greedy)
    assert "1 of 1 contexts are cut on the left to fit into max_length=8" in caplog.text
    with pytest.raises(ValueError, match="a continuation of .* max_length is 8"):
        lm.loglikelihood(requests("loglikelihood", ("A", text)), disable_tqdm=True)


def test_bos_is_written_once(demo_model: Path) -> None:
    """Its tokenizer adds none."""
    text, with_bos = "Hi", "<|im_start|>Hi"
    plain = QkvLM(str(demo_model), kv_tokens=256)
    ids = plain.tok_encode(text)
    assert BOS not in ids and plain.tok_encode(with_bos) == [BOS, *ids]
    adding = QkvLM(str(demo_model), kv_tokens=256, add_bos_token=True)
    assert adding.tok_encode(text) == adding.tok_encode(with_bos) == [BOS, *ids]
    assert adding.tok_encode(text, add_special_tokens=False) == ids


def test_texts_are_those_of_generate(lm: QkvLM, engine: qkv.Engine) -> None:
    prompts = [f"Question: {question}\nAnswer:" for question in QUESTIONS]
    asked = {"until": ["\n", ""], "max_gen_toks": 24, "do_sample": False, "temperature": 0.7}
    got = lm.generate_until(
        requests("generate_until", *((prompt, asked) for prompt in prompts)), disable_tqdm=True
    )
    params = qkv.SamplingParams(max_tokens=24, temperature=0, stop="\n")
    assert got == [out.text for out in engine.generate(prompts, params, progress=False)]
    assert any(got) and not any("\n" in text for text in got)


def test_sampled_repeats_differ_and_come_again(lm: QkvLM) -> None:
    row = ("Once upon a time", {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12})
    first = lm.generate_until(requests("generate_until", row, row, row), disable_tqdm=True)
    assert len(set(first)) == 3
    assert lm.generate_until(requests("generate_until", row, row, row), disable_tqdm=True) == first


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, {"max_tokens": 256, "temperature": 0.0}),
        ({"max_new_tokens": 7, "max_gen_toks": 5}, {"max_tokens": 5}),
        ({"do_sample": False, "temperature": 0.9}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"until": "Q:", "stop": ["A:"]}, {"stop": ("Q:", "A:"), "stop_token_ids": ()}),
        ({"until": ["<|im_end|>"]}, {"stop": ("<|im_end|>",), "stop_token_ids": (2,)}),
        ({"num_beams": 1}, {"max_tokens": 256}),
    ],
)
def test_generation_kwargs(lm: QkvLM, given: dict[str, Any], expected: dict[str, Any]) -> None:
    params = lm.sampling_params(given)
    assert {name: getattr(params, name) for name in expected} == expected


def test_chat_templates(lm: QkvLM, engine: qkv.Engine) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}]
    text = lm.apply_chat_template(messages[:1])
    assert text == engine.tokenizer.apply_chat_template(messages[:1])
    # What the template wrote is not written twice; SmolLM2's begins with BOS.
    assert text.startswith("<|im_start|>")
    assert lm.tok_encode(text) == engine.tokenizer.encode(text, add_special_tokens=False)
    assert lm.apply_chat_template(messages, add_generation_prompt=False).endswith("\nIt is ")
    assert lm.chat_template(False) is None
    assert lm.chat_template(True) == engine.tokenizer.templates["default"]
    with pytest.raises(ValueError, match="chat template 'rag': the model has default"):
        lm.chat_template("rag")


def test_a_template_without_system_messages(demo_model: Path) -> None:
    lm = QkvLM(str(demo_model), kv_tokens=256)
    lm.tokenizer.templates["default"] = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}[{{ m.content }}]{% endfor %}"
    )
    user = {"role": "user", "content": "Hi"}
    assert lm.apply_chat_template([{"role": "system", "content": "Be brief."}, user]) == "[Hi]"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dtype": "bfloat16"}, r"unknown model argument 'dtype'; known: pretrained, max_length"),
        ({"max_model_len": 64}, r"unknown model argument 'max_model_len'"),
        ({"kv_cache_dtype": ["bf16", "fp8_e4m3"]}, r"one format for each run"),
        ({"kv_cache_dtype": "fp7"}, r"kv_cache_dtype='fp7': must be one of"),
        ({"max_length": 0}, r"max_length=0: must be within 1"),
        ({"device": "tpu"}, r"device='tpu'"),
    ],
)
def test_bad_arguments(demo_model: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QkvLM(str(demo_model), **arguments)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"num_beams": 4}, "num_beams: there is no beam search"),
        ({"length_penalty": 2}, "unknown sampling parameter 'length_penalty'"),
        ({"until": 3}, "until=3: a string or a list of strings"),
        ({"max_gen_toks": 2048}, "max_gen_toks=2048: must be below max_length=2048"),
    ],
)
def test_bad_generation_kwargs(lm: QkvLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lm.generate_until(requests("generate_until", ("Hi", given)), disable_tqdm=True)


def test_a_row_without_an_answer_is_an_error(lm: QkvLM) -> None:
    """The harness would count it as wrong."""
    rows = requests("loglikelihood", ("The", " end"), ("The", ""))
    with pytest.raises(qkv.Error, match="1 of 2 requests failed; request 1: the continuation has"):
        lm.loglikelihood(rows, disable_tqdm=True)


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **config: Any) -> str:
    """A task of the harness over rows in a JSON file; JSON is YAML."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config |= {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    (folder / f"{name}.yaml").write_text(json.dumps(config))
    return name


def test_the_harness_runs_its_tasks(
    lm: QkvLM, engine: qkv.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MMLU items and questions through simple_evaluate, against qkv.tasks over the engine."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    mmlu = tasks.task("mmlu")
    items = sorted(mmlu.items(), key=lambda item: len(item.prompt))[:3]
    mean = {"aggregation": "mean", "higher_is_better": True}
    choice = write_task(
        tmp_path,
        "qkv_test_choice",
        [{"prompt": item.prompt, "gold": "ABCD".index(item.reference)} for item in items],
        output_type="multiple_choice",
        doc_to_text="{{prompt}}",
        doc_to_choice=["A", "B", "C", "D"],
        doc_to_target="{{gold}}",
        metric_list=[{"metric": "acc", **mean}],
    )
    write = write_task(
        tmp_path,
        "qkv_test_write",
        [{"question": question, "gold": "?"} for question in QUESTIONS],
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{gold}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match", **mean}],
    )
    found = simple_evaluate(
        model=lm,
        tasks=[choice, write],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        apply_chat_template=False,
        bootstrap_iters=0,
    )
    samples = found["samples"]
    pairs = [(item.prompt, letter) for item in items for letter in item.choices]
    scores = engine.score(*map(list, zip(*pairs, strict=True)), progress=False)
    values = np.array([score.total for score in scores]).reshape(-1, 4)
    got = [[float(entry[0]) for entry in row["filtered_resps"]] for row in samples[choice]]
    assert np.array_equal(np.array(got), values)
    right = [
        mmlu.grade(item, list(row))["correct"] for item, row in zip(items, values, strict=True)
    ]
    assert found["results"][choice]["acc,none"] == pytest.approx(np.mean(right))

    params = qkv.SamplingParams(max_tokens=8, temperature=0, stop="\n")
    texts = [out.text for out in engine.generate(QUESTIONS, params, progress=False)]
    assert [row["filtered_resps"][0] for row in samples[write]] == texts


def test_the_command_knows_the_harness_own_models_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["qkv-lm-eval", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert "lm-eval" in capsys.readouterr().out
    assert get_model("dummy").__name__ == "DummyLM"
