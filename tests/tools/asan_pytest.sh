#!/bin/bash
# Runs pytest on an extension that was built with ASan and UBSan:
#   PYTHON=.venv/bin/python asan_pytest.sh BUILD_BASE [pytest arguments]
# Python itself is not instrumented, so the runtimes are preloaded; its allocator is malloc, so that
# overruns of NumPy's and Python's memory are seen too; leaks are looked for in the C tests alone.
set -euo pipefail

base=$1
shift
lib=$(find "$base" -maxdepth 1 -type d -name 'lib.*' | head -n 1)
if [ -z "$lib" ]; then
    echo "$base: no lib.*: build it first (make pytest-asan)" >&2
    exit 1
fi
gcc=${CC:-gcc}
LD_PRELOAD="$("$gcc" -print-file-name=libasan.so) $("$gcc" -print-file-name=libubsan.so)" \
ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:handle_segv=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}" \
UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1" \
PYTHONMALLOC=malloc PYTHONPATH="$lib" QKV_SANITIZED=1 \
    exec "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider "$@"
