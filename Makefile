# Everything happens in one virtual environment, .venv. On a fresh Debian this needs python3 (with
# venv and headers), gcc and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc)
CTESTS := $(BIN)/python tests/tools/ctests.py -j $(JOBS)
# A file's tests stay together, they share what they have made.
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile
C_FILES := $(shell find csrc kernels tests/c tests/fuzz -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh') \
	tests/bench/bench_cuda.cu
BUILD_FILES := $(shell find csrc kernels -name '*.c' -o -name '*.h' -o -name '*.inc' -o -name '*.def')
PY_FILES := setup.py python tests
USABLE_ISAS := from qkv import _core; print(*(name for name, usable in _core.isas() if usable))
KERNEL_TESTS := $(patsubst tests/c/test_%.c,%,$(wildcard $(foreach name,\
	linear attention* forms int8 kv_kernels kv_pool sample rope,tests/c/test_$(name).c)))
T ?= gguf
SECONDS_PER_TARGET ?= 60
CUDA_ARCHS ?= 80,90a
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# `pip install .` builds the CUDA library where nvcc is; here `make cuda` does.
export QKV_CUDA ?= 0

.DEFAULT_GOAL := help
.PHONY: help demo test dev check format format-check lint layers stubs ctests asan ubsan tsan \
	pytest-fast pytest-asan fuzz fuzz-replay isa isa-models cuda cuda-asan cuda-check \
	cuda-ctests cuda-gpu bench soak soak-models dist clean

help:
	@echo "make demo          is an FP8 KV cache safe for a small real model? GSM8K, MMLU, and a page"
	@echo "make test          all tests"
	@echo "make dev           editable install with asserts on"
	@echo "make check         what to run before a commit (< 90 s)"
	@echo "make format        clang-format and ruff, in place"
	@echo "make asan tsan     C tests, emulated kernels, fuzz replay and pytest under ASan+UBSan; C tests"
	@echo "                   under TSan"
	@echo "make fuzz T=gguf   fuzz one target for SECONDS_PER_TARGET=60 s; make fuzz-replay: the corpus"
	@echo "make isa           parity of every instruction set, AVX-512 and AMX emulated where one is not"
	@echo "                   there; isa-models: whole models on the emulated ones, some minutes"
	@echo "make cuda          the CUDA library with nvcc; cuda-check: its kernels, emulated; cuda-gpu: on"
	@echo "                   the GPU that is there"
	@echo "make bench         all benches as CSV, and what moved against tests/bench/baseline.csv"
	@echo "make soak          what takes too long for CI"
	@echo "make dist          sdist and wheel, installed into a clean environment and tried"
	@echo "make clean         remove build/, dist/ and .venv"

# ---- environment ----------------------------------------------------------------------------

$(VENV)/tools.stamp:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "setuptools>=77" "numpy>=2.0"
	@touch $@

# Objects are kept under build/, so that only what changed is compiled.
$(VENV)/core.stamp: $(VENV)/tools.stamp setup.py pyproject.toml $(BUILD_FILES)
	$(BIN)/pip install -q --no-build-isolation -e .
	@touch $@

$(VENV)/test.stamp: $(VENV)/core.stamp
	$(BIN)/pip install -q --no-build-isolation -e ".[test]"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/tools.stamp pyproject.toml | $(VENV)/core.stamp
	$(BIN)/pip install -q --no-build-isolation -e ".[dev]"
	@touch $@

dev: $(VENV)/tools.stamp
	QKV_DEBUG=1 QKV_WERROR=1 $(BIN)/pip install --no-build-isolation -e ".[dev]"
	@touch $(VENV)/core.stamp $(VENV)/test.stamp $(VENV)/dev.stamp

$(VENV)/report.stamp: $(VENV)/tools.stamp pyproject.toml | $(VENV)/core.stamp
	$(BIN)/pip install -q --no-build-isolation -e ".[report]"
	@touch $@

# ---- the two commands -----------------------------------------------------------------------

# About a minute on two cores of a Zen 4 machine.
DEMO := --kv-cache-dtype bf16,fp8_e4m3 --tasks gsm8k,mmlu,wikitext2 \
	--limit gsm8k=6,mmlu=32,wikitext2=4 --max-tokens 96 --rerun-items 6 --html build/demo.html

demo: $(VENV)/report.stamp
	@$(BIN)/qkv demo-model > /dev/null
	@mkdir -p build
	@$(BIN)/qkv compare demo $(DEMO)
	@echo
	@echo "SmolLM2-135M is too small for these questions, and a model that cannot do a task cannot lose"
	@echo "it: UNINFORMATIVE is all that its answers can say. The KL figures are real: they show how far"
	@echo "an FP8 KV cache moves this model's predictions. For a verdict take a larger model and more"
	@echo "items: qkv compare --help"

test: $(VENV)/test.stamp
	$(CTESTS)
	$(PYTEST) tests

# ---- before a commit ------------------------------------------------------------------------

check: format-check lint layers stubs ctests fuzz-replay pytest-fast

format: $(VENV)/dev.stamp
	$(BIN)/clang-format -i $(C_FILES) $(shell find csrc kernels -name '*.inc')
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/ruff check --fix $(PY_FILES)

format-check: $(VENV)/dev.stamp
	$(BIN)/clang-format --dry-run -Werror $(C_FILES) $(shell find csrc kernels -name '*.inc')
	$(BIN)/ruff format --check $(PY_FILES)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/mypy

layers:
	$(PYTHON) tests/tools/check_layers.py
	$(PYTHON) tests/tools/check_defs.py

stubs: $(VENV)/dev.stamp $(VENV)/core.stamp
	$(BIN)/python -m mypy.stubtest qkv._core

ctests: $(VENV)/tools.stamp
	QKV_WERROR=1 $(CTESTS)

fuzz-replay: $(VENV)/tools.stamp
	$(CTESTS) --fuzz-replay

pytest-fast: $(VENV)/test.stamp
	$(PYTEST) tests -m "not slow"

# ---- deeper ---------------------------------------------------------------------------------

asan ubsan: $(VENV)/tools.stamp pytest-asan cuda-asan
	$(CTESTS) --variant asan
	$(CTESTS) --fuzz-replay

tsan: $(VENV)/tools.stamp
	$(CTESTS) --variant tsan threads scheduler engine

# The extension is built into build/asan and found there before the installed one.
pytest-asan: $(VENV)/test.stamp
	CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" \
	LDFLAGS="-fsanitize=address,undefined" QKV_DEBUG=1 QKV_BUILD_BASE=build/asan \
	$(BIN)/python setup.py -q build_py build_clib build_ext
	PYTHON=$(BIN)/python bash tests/tools/asan_pytest.sh build/asan -n $(JOBS) --dist loadfile $(ASAN_TESTS)

fuzz: $(VENV)/tools.stamp
	$(CTESTS) --fuzz $(T) --seconds $(SECONDS_PER_TARGET)

# Whole models on every instruction set of this machine. The C tests of kernels go through all of
# them by themselves; here once more with AVX-512 and AMX emulated, for machines that lack one.
isa: $(VENV)/test.stamp
	$(BIN)/qkv info
	for isa in $$($(BIN)/python -c "$(USABLE_ISAS)"); do \
		echo "== $$isa"; \
		QKV_ISA=$$isa $(BIN)/python -m pytest -q -n $(JOBS) tests/test_models.py || exit 1; \
	done
	if $(BIN)/python -c "$(USABLE_ISAS)" | grep -qw amx; then \
		echo "== nothing to emulate"; \
	else \
		QKV_WERROR=1 QKV_EMULATE_AVX512=1 $(CTESTS) $(KERNEL_TESTS); \
	fi

# Whole models on AVX-512 and AMX, emulated; built and found as the extension of pytest-asan is.
isa-models: $(VENV)/test.stamp
	QKV_EMULATE_AVX512=1 QKV_DEBUG=1 QKV_BUILD_BASE=build/emulated \
	$(BIN)/python setup.py -q build_py build_clib build_ext
	for isa in avx512 avx512bf16 amx; do \
		PYTHONPATH=$$(ls -d build/emulated/lib.*) QKV_ISA=$$isa $(BIN)/python -m pytest -q \
			-p no:cacheprovider -n $(JOBS) tests/test_models.py || exit 1; \
	done

# NVIDIA's headers, 400 MB with the library; only where there is a compiler for them.
$(VENV)/cublas.stamp: $(VENV)/tools.stamp
	if command -v nvcc > /dev/null; then $(BIN)/pip install -q "nvidia-cublas>=13,<14"; fi
	@touch $@

# Exit status 3: nothing was built, and why. Not a failure, but not silent either.
cuda: $(VENV)/cublas.stamp
	@$(BIN)/python tests/tools/cuda_build.py -j $(JOBS) --archs $(CUDA_ARCHS) || [ $$? -eq 3 ]

# Kernels against the scalar codecs and references in double, run by the emulation; then engines.
cuda-check: cuda-ctests $(VENV)/test.stamp
	$(BIN)/python -m pytest -q tests/test_cuda_emulated.py

cuda-ctests: $(VENV)/tools.stamp
	$(BIN)/python tests/tools/cuda_build.py --emulated -j $(JOBS)
	QKV_TEST_BACKEND=python/qkv/_qkv_cuda_emulated.so $(CTESTS) $(CUDA_TESTS)

cuda-asan: $(VENV)/tools.stamp
	$(BIN)/python tests/tools/cuda_build.py --emulated --asan -j $(JOBS)
	QKV_TEST_BACKEND=build/cuda/_qkv_cuda_asan.so $(CTESTS) --variant asan $(CUDA_TESTS)

# The same tests of kernels on the GPU that is there, then under NVIDIA's checkers.
CUDA_TESTS := attention attention_kv attention_latent cuda_memory cuda_steps forms linear moe moe_forms sample
cuda-gpu: cuda
	QKV_TEST_BACKEND=build/cuda/_qkv_cuda.so $(CTESTS) $(CUDA_TESTS)
	for tool in memcheck racecheck synccheck; do for name in $(CUDA_TESTS); do \
		QKV_TEST_BACKEND=build/cuda/_qkv_cuda.so compute-sanitizer --tool $$tool \
			--error-exitcode 1 build/ctests/plain/test_$$name || exit 1; \
	done; done
	LD_LIBRARY_PATH=$$(ls -d $(VENV)/lib/python3*/site-packages/nvidia/cu13/lib) build/cuda/bench_cuda

bench: $(VENV)/core.stamp
	$(BIN)/python tests/bench/run_benches.py

# Gemma-3-270M, Qwen2.5-Coder-0.5B and -1.5B (1.9 GB), into the cache folder where the tests look.
soak-models: $(VENV)/core.stamp
	$(BIN)/python tests/tools/soak_models.py $${XDG_CACHE_HOME:-$$HOME/.cache}/qkv
	$(BIN)/qkv demo-model

soak: $(VENV)/test.stamp soak-models
	$(BIN)/python -m pytest -q tests --soak
	for target in $(patsubst tests/fuzz/fuzz_%.c,%,$(wildcard tests/fuzz/fuzz_*.c)); do \
		$(CTESTS) --fuzz $$target --seconds 300 || exit 1; \
	done
	$(BIN)/python tests/tools/kill_runs.py build/kills --kills 10000 --rows 100 --rounds 200
	$(BIN)/python tests/bench/bench_dataset.py many --rows 1000000
	$(BIN)/python tests/bench/bench_experts.py --share 0.55 --check --folder build
	$(MAKE) isa asan tsan

# The second wheel, with the CUDA library in it, where there is nvcc.
dist: $(VENV)/dev.stamp $(VENV)/cublas.stamp
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m pytest -q tests/test_sdist_wheel.py --soak

clean:
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache
	find python tests -name '*.so' -o -name __pycache__ | xargs rm -rf
