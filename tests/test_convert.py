"""`qkv convert`: what it writes is read back without a flag, to the values that quantizing while
loading gives; the bytes are those that compressed-tensors and MLX have read (tests/tools/
record_convert.py), and a failure leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv import _core, cli
from qkv.quantization import METHODS, convert, detect, shards
from qkv.quantization.wire import to_core
from ref import make_tiny, stored

TOOL = Path(__file__).parent / "tools" / "record_convert.py"
_spec = importlib.util.spec_from_file_location("record_convert", TOOL)
assert _spec is not None and _spec.loader is not None
record_convert = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(record_convert)

SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
PROMPT = list(range(3, 35))
RECORDED = json.loads((Path(__file__).parent / "data" / "convert.json").read_text())


def logprobs(model: Path, **options: Any) -> np.ndarray[Any, Any]:
    with qkv.Engine(model, kv_tokens=256, threads=1, compute_dtype="float32", **options) as engine:
        (score,) = engine.score([PROMPT], progress=False)
    return np.array(score.token_logprobs[1:])


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    checkpoint = _core.Checkpoint(str(folder))
    found = {name: (dtype, shape) for name, dtype, shape, _ in checkpoint.tensors()}
    checkpoint.close()
    return found


@pytest.mark.parametrize("name", convert.names())
def test_the_engine_reads_what_was_written(
    tiny: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    model, out = tiny("llama", **SHAPE), tmp_path / "out"
    done = convert.convert(model, out, name)
    assert done.n_quantized == (16 if name.startswith("mlx") else 14)
    assert done.left == [] and os.listdir(tmp_path) == ["out"]
    checkpoint = _core.Checkpoint(str(out))
    found = detect(checkpoint)
    checkpoint.close()
    assert found.method == ("mlx" if name.startswith("mlx") else "compressed-tensors")
    assert len(found.matrices) == done.n_quantized and found.notes == []
    # NVFP4's inputs need a calibrated scale, which a checkpoint without one does not prescribe.
    mode = "off" if METHODS[name].target == "nvfp4:nvfp4" else "checkpoint"
    np.testing.assert_array_equal(
        logprobs(out), logprobs(model, quantization=name, activation_quant=mode)
    )


@pytest.mark.parametrize(
    ("per", "declares", "strategy"),
    [(1, True, "tensor"), (2, True, "attn_head"), (1, False, None)],
)
def test_scales_of_the_kv_cache_are_kept(
    tiny: Callable[..., Path], tmp_path: Path, per: int, declares: bool, strategy: str | None
) -> None:
    """Whatever they are called, and a declared FP8 cache stays one."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny("llama", **SHAPE), model)
    config = json.loads((model / "config.json").read_text())
    scales = {
        f"model.layers.{layer}.self_attn.{kind}_proj.output_scale": np.full(
            per, value * 2.0**layer, np.float32
        )
        for layer in range(2)
        for kind, value in (("k", 0.5), ("v", 0.75))
    }
    make_tiny.write_safetensors(
        model / "model.safetensors",
        make_tiny.make_tensors(config, 0) | scales,
        dict.fromkeys(scales, "F32"),
    )
    if declares:
        own = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
        (model / "hf_quant_config.json").write_text(json.dumps(own))
    assert convert.convert(model, out, "int8").notes == []
    written = _core.Checkpoint(str(out))
    found = {(layer, kind): values.tolist() for layer, kind, _, values in written.kv_scales()}
    written.close()
    assert found == {
        (layer, kind): [value * 2.0**layer] * per
        for layer in range(2)
        for kind, value in (("k", 0.5), ("v", 0.75))
    }
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = section["kv_cache_scheme"]
    assert (scheme and scheme["strategy"]) == strategy
    assert qkv.kv_scales.declared(str(out))[0] == ("fp8_e4m3" if declares else "")
    # MLX has no name for them.
    assert convert.convert(model, tmp_path / "mlx", "mlx_q4").notes[-1].startswith("4 scales")


@pytest.mark.parametrize("name", convert.names())
def test_fused_matrices_in_every_format(tmp_path: Path, name: str) -> None:
    """q, k and v as one tensor, gate and up as another: a matrix like any other."""
    model, out = tmp_path / "model", tmp_path / "out"
    make_tiny.write(model, "phi3", **SHAPE)
    done = convert.convert(model, out, name)
    assert done.n_quantized == (10 if name.startswith("mlx") else 8) and done.left == []
    mode = "off" if METHODS[name].target == "nvfp4:nvfp4" else "checkpoint"
    np.testing.assert_array_equal(
        logprobs(out), logprobs(model, quantization=name, activation_quant=mode)
    )


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_llama3_scaling_is_found_in_its_divisors(tmp_path: Path) -> None:
    shape = {**SHAPE, "rope_theta": 500000.0}
    make_tiny.write_gguf(tmp_path / "m.gguf", "llama", codec=_core, rope_scaling=LLAMA3, **shape)
    convert.convert(tmp_path / "m.gguf", tmp_path / "out", "int8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"] == LLAMA3
    online = logprobs(tmp_path / "m.gguf", quantization="int8")
    assert np.abs(logprobs(tmp_path / "out") - online).max() < 1e-4
    other = {**LLAMA3, "low_freq_factor": 2.0}
    make_tiny.write_gguf(tmp_path / "o.gguf", "llama", codec=_core, rope_scaling=other, **shape)
    with pytest.raises(qkv.UnsupportedError, match="rope_freqs.weight has other numbers"):
        convert.convert(tmp_path / "o.gguf", tmp_path / "out2", "int8")
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3", "glm4", "gemma2", "gemma3"])
def test_gguf_becomes_a_folder(tmp_path: Path, arch: str) -> None:
    """The same floats as GGUF and as safetensors: the same checkpoint, but for the config's and the
    norms' precision."""
    shape = {**SHAPE, "head_dim": 32} if arch in ("qwen3", "glm4", "gemma2", "gemma3") else SHAPE
    make_tiny.write(tmp_path / "folder", arch, seed=6, dtype="F32", **shape)
    make_tiny.write_gguf(tmp_path / "m.gguf", arch, seed=6, types="F32", codec=_core, **shape)
    for source, out in (("folder", "a"), ("m.gguf", "b")):
        convert.convert(tmp_path / source, tmp_path / out, "w8a8_fp8")
    a, b = tmp_path / "a", tmp_path / "b"
    assert tensors(a) == tensors(b)
    first, second = _core.Checkpoint(str(a)), _core.Checkpoint(str(b))
    for name in tensors(a):
        if arch.startswith("gemma") and "norm" in name:  # stored plus one
            np.testing.assert_allclose(
                first.dequantize(name), second.dequantize(name), atol=1e-6, err_msg=name
            )
        else:
            np.testing.assert_array_equal(first.bytes(name), second.bytes(name), err_msg=name)
    first.close()
    second.close()
    online = logprobs(tmp_path / "m.gguf", quantization="w8a8_fp8", activation_quant="off")
    off = np.abs(logprobs(b, activation_quant="off") - online).max()
    assert off < 1e-4 if arch.startswith("gemma") else off == 0
    text = "a plain sentence"
    with qkv.Engine(a, kv_tokens=64) as x, qkv.Engine(b, kv_tokens=64) as y:
        assert x.tokenizer.encode(text) == y.tokenizer.encode(text)


def weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The values of described weights."""
    checkpoint = _core.Checkpoint(str(path))
    described = detect(checkpoint).matrices
    matrices, arrays = to_core(described)
    found = {
        name: checkpoint.matrix(name, (shapes[name][0], shapes[name][1]), matrices, arrays)
        for name in described
    }
    checkpoint.close()
    return found


@pytest.mark.parametrize(
    "name", ["gptq-int4-g32-descact-asym-qwen3-s", "ct-w8a8-int8-qwen3-s", "bnb-nf4-llama-g"]
)
def test_quantized_checkpoints_are_converted_again(
    fixtures_dir: Path, tmp_path: Path, name: str
) -> None:
    done = convert.convert(fixtures_dir / name, tmp_path / "out", "w8a8_fp8")
    assert any("accuracy must be validated again" in note for note in done.notes)
    shapes = {name: shape for name, (_, shape) in tensors(tmp_path / "out").items()}
    before, after = weights(fixtures_dir / name, shapes), weights(tmp_path / "out", shapes)
    assert set(before) <= set(after)
    for weight in before:
        off = np.linalg.norm(before[weight] - after[weight]) / np.linalg.norm(before[weight])
        assert 0 < off < 0.03  # e4m3: half of 2^-3, uniform
    assert np.isfinite(logprobs(tmp_path / "out")).all()


def write_awq(folder: Path) -> dict[str, Any]:
    """A llama in ModelOpt's NVFP4_AWQ; what its weights are, the scales of inputs in them."""
    stream = np.random.default_rng(3)
    config = make_tiny.make_config("llama", **SHAPE)
    tensors: dict[str, stored.Tensor] = {}
    meant: dict[str, Any] = {}
    for name, values in make_tiny.make_tensors(config, 0).items():
        module = name.removesuffix(".weight")
        if "_proj" not in name:
            tensors[name] = ("F32", values)
            meant[name] = values
            continue
        n, k = values.shape
        codes = stream.integers(0, 16, (n, k))
        scale = stream.integers(0x28, 0x38, (n, k // 16))
        by = stream.uniform(0.5, 2, (1, k)).astype(np.float32)[0]
        tensors[name] = ("U8", codes[:, 0::2] | codes[:, 1::2] << 4)
        tensors[f"{module}.weight_scale"] = ("F8_E4M3", scale)
        tensors[f"{module}.weight_scale_2"] = ("F32", np.float32(0.0625))
        tensors[f"{module}.input_scale"] = ("F32", np.float32(1))
        tensors[f"{module}.pre_quant_scale"] = ("F32", by)
        e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] + [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        blocks = np.repeat(stored.floats("F8_E4M3", scale), 16, axis=1)
        meant[name] = np.float32(0.0625) * (blocks * e2m1.astype(np.float32)[codes]) * by
    folder.mkdir()
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    stored.write(folder / "model.safetensors", tensors)
    return meant


def test_scales_of_inputs_go_into_the_weights(tmp_path: Path) -> None:
    """No written format has ModelOpt's pre_quant_scale: what is written is what the products of
    both give, to the last bit, and a module that stays has it, too."""
    meant = write_awq(tmp_path / "awq")
    (tmp_path / "plain").mkdir()
    config = make_tiny.make_config("llama", **SHAPE)
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    make_tiny.write_safetensors(tmp_path / "plain" / "model.safetensors", meant, "F32")
    for source in ("awq", "plain"):
        out = tmp_path / f"{source}-out"
        done = convert.convert(tmp_path / source, out, "w8a8_fp8", ignore=["re:.*up_proj"])
        assert done.n_quantized == 12
        assert any("pre_quant_scale" in note for note in done.notes) == (source == "awq")
    a, b = (
        _core.Checkpoint(str(tmp_path / "awq-out")),
        _core.Checkpoint(str(tmp_path / "plain-out")),
    )
    wanted = {name: dtype for name, dtype, *_ in b.tensors()}
    assert {name for name, *_ in a.tensors()} == set(wanted)
    for name, dtype in wanted.items():
        if dtype == "F32" and "up_proj" in name:  # of plain floats, which stay as they are
            bits = a.bytes(name).view(np.uint16)
            np.testing.assert_array_equal(bits, make_tiny.bf16_bits(meant[name]).reshape(-1))
        else:
            np.testing.assert_array_equal(a.bytes(name), b.bytes(name), err_msg=name)
    a.close()
    b.close()
    read: dict[str, Any] = {
        "kv_tokens": 64,
        "threads": 1,
        "compute_dtype": "float32",
        "activation_quant": "off",
    }
    with qkv.Engine(tmp_path / "awq", **read) as x, qkv.Engine(tmp_path / "plain", **read) as y:
        first, second = (e.score([PROMPT], progress=False)[0].token_logprobs[1:] for e in (x, y))
    np.testing.assert_allclose(first, second, atol=1e-4)


def test_every_fixture_is_converted_or_refused(fixtures_dir: Path, tmp_path: Path) -> None:
    """The reason names what stands in the way; what is written is read without a flag. Experts in
    one tensor were once written under names that no reader has."""
    reasons = {
        "fp8-block-deepseekv3": "DeepseekV3ForCausalLM",
        "gptoss-mxfp4": "_proj: quantized experts in one tensor",
    }
    refused = {}
    n_converted = 0
    for folder in sorted(fixtures_dir.iterdir()):
        if not (folder / "meta.json").exists():
            continue
        source = next(folder.glob("*.gguf"), folder)
        out = tmp_path / folder.name
        try:
            done = convert.convert(source, out, "w8a8_fp8")
        except qkv.UnsupportedError as error:
            refused[folder.name] = str(error)
            assert reasons[folder.name] in str(error) and not out.exists()
            continue
        checkpoint = _core.Checkpoint(str(out))
        found = detect(checkpoint)
        checkpoint.close()
        assert (found.method, len(found.matrices)) == ("compressed-tensors", done.n_quantized)
        assert done.n_quantized > 0 and found.notes == []
        with qkv.Engine(out, kv_tokens=16, threads=1):
            pass
        shutil.rmtree(out)
        n_converted += 1
    assert refused.keys() <= reasons.keys() and n_converted > 20


def test_gguf_blocks_are_converted_again(fixtures_dir: Path, tmp_path: Path) -> None:
    source = next((fixtures_dir / "gguf-q4_k_m-llama-g").glob("*.gguf"))
    done = convert.convert(source, tmp_path / "out", "w8a8_int8")
    assert any("GGUF blocks" in note for note in done.notes)
    off = np.abs(
        logprobs(tmp_path / "out", activation_quant="off")
        - logprobs(source, quantization=None, activation_quant="off")
    )
    assert 0 < off.mean() < 0.2


def test_ignored_and_undividable_modules_stay(tmp_path: Path) -> None:
    shape = {**SHAPE, "intermediate_size": 240}
    make_tiny.write(tmp_path / "m", "llama", seed=1, **shape)
    done = convert.convert(
        tmp_path / "m", tmp_path / "out", "mxfp4", ignore=["*.0.self_attn.*", "re:.*up_proj"]
    )
    assert done.left == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert done.n_quantized == 14 - 2 - 2 - 4
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in section["ignore"] and "model.layers.1.mlp.up_proj" in section["ignore"]
    assert tensors(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"][0] == "BF16"
    with qkv.Engine(tmp_path / "out", kv_tokens=64) as engine:
        assert engine.info["quantization"]["method"] == "compressed-tensors"


def test_shards_have_an_index(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", **SHAPE)
    done = convert.convert(model, tmp_path / "out", "fp8", shard_bytes=200_000)
    assert len(done.files) > 1
    for file in done.files:
        assert (tmp_path / "out" / file).stat().st_size < 200_000 + 20_000
    index = json.loads((tmp_path / "out" / shards.INDEX).read_text())
    assert set(index["weight_map"].values()) == set(done.files)
    whole = convert.convert(model, tmp_path / "whole", "fp8")
    assert whole.files == ["model.safetensors"]
    np.testing.assert_array_equal(logprobs(tmp_path / "out"), logprobs(tmp_path / "whole"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


@pytest.mark.parametrize("case", sorted(RECORDED["cases"]))
def test_recorded_bytes(tmp_path: Path, case: str) -> None:
    """The file that the formats' own tools have read, to these values."""
    recorded = RECORDED["cases"][case]
    record_convert.write_source(tmp_path / "source")
    record_convert.convert(tmp_path / "source", tmp_path / "out", case)
    assert record_convert.digest(tmp_path / "out") == recorded["file"]
    values = record_convert.read(tmp_path / "out")
    assert record_convert.values_digest(values) == recorded["values"]
    # NVFP4: the tool divides the scales first.
    assert recorded["tool"] == ("1 ulp" if case == "nvfp4" else "same")


def test_every_target_is_recorded() -> None:
    recorded = {METHODS[case.partition(" ")[0]].target for case in RECORDED["cases"]}
    assert recorded == {METHODS[name].target for name in convert.names()}


def test_nothing_is_left_of_a_failure(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", **SHAPE)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        convert.convert(model, tmp_path / "there", "fp8")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: type("U", (), {"free": 1000}))
        with pytest.raises(OSError, match="are needed, 1000 are free"):
            convert.convert(model, tmp_path / "out", "fp8")
    calls = []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:  # the weights are there, config.json is being written
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            convert.convert(model, tmp_path / "out", "fp8")
    assert os.listdir(tmp_path) == ["there"] and os.listdir(tmp_path / "there") == ["file"]
    if os.path.exists("/dev/full"):
        with pytest.raises(OSError):
            convert.convert(model, "/dev/full/out", "fp8")


@pytest.mark.parametrize(
    ("name", "group", "ignore", "message"),
    [
        ("gptq", None, [], "must be one of"),
        ("fp8", 64, [], "has groups of its own"),
        ("int4", 48, [], "must be one of 16"),
        ("int4", None, ["re:("], "ignore"),
    ],
)
def test_wrong_arguments(
    tiny: Callable[..., Path], tmp_path: Path, name: str, group: int | None, ignore: list[str],
    message: str,
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=message):
        convert.convert(
            tiny("llama", **SHAPE), tmp_path / "out", name, group_size=group, ignore=ignore
        )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("ignore", "near"),
    [
        ("down_porj", "down_proj"),
        ("model.layers.0.self_attn.q_prj", r"model\.layers\.0\.self_attn\.q_proj"),
        ("re:model\\.layer\\.0", r"model\.layers\.0"),
    ],
)
def test_a_pattern_that_is_no_module_s(
    tiny: Callable[..., Path], tmp_path: Path, ignore: str, near: str
) -> None:
    """It was once taken without a word, and the module it meant was quantized."""
    with pytest.raises(ValueError, match=f"no module of this name; there is .*{near}"):
        convert.convert(
            tiny("llama", **SHAPE), tmp_path / "out", "fp8", ignore=["*.up_proj", ignore]
        )
    assert not os.listdir(tmp_path)


def test_the_head_may_be_named_where_it_is_the_embedding(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny("llama", **SHAPE, tie_word_embeddings=True)
    assert convert.convert(path, tmp_path / "out", "fp8", ignore=["lm_head"]).n_quantized > 0


@pytest.mark.parametrize("ignore", ["*.down_proj", [7], [None]])
def test_what_to_ignore_is_a_list_of_strings(
    tiny: Callable[..., Path], tmp_path: Path, ignore: Any
) -> None:
    """Each letter of one string was once a pattern, which matches nothing."""
    with pytest.raises(TypeError, match="^ignore=.*: a list of strings"):
        convert.convert(tiny("llama", **SHAPE), tmp_path / "out", "fp8", ignore=ignore)
    assert not os.listdir(tmp_path)


def test_experts_in_one_tensor_stay_and_are_named(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    done = convert.convert(tiny("gpt_oss"), tmp_path / "out", "w8a8_fp8")
    assert done.n_quantized == 8 and not done.left
    (note,) = done.notes
    assert note.startswith("4 tensors hold all experts of a layer and stay as they are")
    assert "model.layers.0.mlp.experts.down_proj" in note
    section = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.experts" in section["ignore"]
    with qkv.Engine(tmp_path / "out", kv_tokens=16, threads=1):
        pass


def test_command(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(tiny("llama", **SHAPE)), str(tmp_path / "out")
    assert cli.main(["convert", model, out, "--quantization", "int4", "--group-size", "64"]) == 0
    assert "14 matrices in int4" in capsys.readouterr().out
    assert cli.main(["convert", model, out, "--quantization", "int4"]) == 1
    assert cli.main(["convert", model, out + "2", "--quantization", "int5"]) == 2
