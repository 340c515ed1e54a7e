"""Proves that every line of a .def file has what belongs to it. Prints what is missing.

formats.def      a codec case and a row in tests/test_codec.py for every format with codes; unique
                 names and ids, sizes that agree with ggml's and safetensors' documents
kv_formats.def   unique names; a kernel test for every format that the CPU attends over
archs.def        csrc/model/arch_*.c under 181 lines, and a reference that tests/ref knows
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STRING_OR_WORD = re.compile(r'"([^"]*)"|([^\s,]+)')
MAX_ARCH_LINES = 180


def rows(path: str, macro: str) -> list[list[str]]:
    """The arguments of each `macro(...)` line; quotes removed."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / path).read_text(), flags=re.DOTALL)
    return [
        [quoted or word for quoted, word in STRING_OR_WORD.findall(inside)]
        for inside in re.findall(rf"^{macro}\((.*?)\)\s*$", text, re.MULTILINE | re.DOTALL)
    ]


def text_of(pattern: str) -> str:
    """All files that match, one after the other; empty if there is none."""
    return "\n".join(path.read_text() for path in sorted(ROOT.glob(pattern)))


def doubles(path: str, what: str, values: list[str]) -> Iterator[str]:
    for value in sorted({v for v in values if values.count(v) > 1}):
        yield f"{path}: {what} {value} stands twice"


def check_formats() -> Iterator[str]:
    path = "csrc/quant/formats.def"
    table = rows(path, "QKV_FORMAT")
    yield from doubles(path, "the name", [row[1] for row in table])
    yield from doubles(path, "the GGUF id", [row[4] for row in table if row[4] != "-1"])
    yield from doubles(path, "the safetensors name", [row[5] for row in table if row[5]])
    codec, tests = text_of("csrc/quant/codec*.c"), text_of("tests/test_codec*.py")
    for ident, name, elems, _size, _id, _st, code, group, scale, _min, _factor in table:
        if code == "NONE":
            continue
        if not re.search(rf"QKV_FORMAT_{ident}\b", codec):
            yield f"{path}: {name} has no case in csrc/quant/codec.c"
        if not re.search(rf'["\']{name}["\']', tests):
            yield f"{path}: {name} has no row in tests/test_codec.py"
        if (group == "0") != (scale == "NONE"):
            yield f"{path}: {name} has groups of {group} and {scale}"
        if group != "0" and int(elems) % int(group) != 0:
            yield f"{path}: {name}: a block of {elems} is not a whole number of groups of {group}"


def check_kv_formats() -> Iterator[str]:
    path = "csrc/kv/kv_formats.def"
    table = rows(path, "QKV_KV_FORMAT")
    yield from doubles(path, "the name", [row[1] for row in table])
    kernels = text_of("kernels/cpu/body_kv*.inc")
    tests = text_of("tests/c/test_attention*.c") + text_of("tests/c/test_kv_kernels*.c")
    for ident, name, *_ in table:
        if f"QKV_KV_{ident}" in kernels and f"QKV_KV_{ident}" not in tests:
            yield f"{path}: the CPU attends over {name}, but no test names QKV_KV_{ident}"


def check_archs() -> Iterator[str]:
    path = "csrc/model/archs.def"
    table = rows(path, "QKV_ARCH")
    yield from doubles(path, "the class name", [row[1] for row in table])
    files = sorted((ROOT / "csrc/model").glob("arch_*.c"))
    text = "\n".join(file.read_text() for file in files)
    reference = text_of("tests/ref/make_tiny.py")
    for row in table:
        describe = next((word for word in row if f"{word}(" in text), None)
        if describe is None:
            yield f"{path}: no csrc/model/arch_*.c defines what {row[1]} names ({', '.join(row)})"
        if row[1] not in reference:
            yield f"{path}: tests/ref/make_tiny.py makes no {row[1]}"
    for file in files:
        n_lines = len(file.read_text().splitlines())
        if n_lines > MAX_ARCH_LINES:
            yield f"csrc/model/{file.name}: {n_lines} lines, at most {MAX_ARCH_LINES}"


if __name__ == "__main__":
    found = [*check_formats(), *check_kv_formats(), *check_archs()]
    print("\n".join(found) or "definitions: complete")
    sys.exit(1 if found else 0)
