"""The tables of FORMATS.md that the code knows: method names, what is refused, GGUF types, and what
the fixtures' matrices become.

    python tests/tools/formats_doc.py [FIXTURES]      # rewrites them; without FIXTURES all but one
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from qkv import _core
from qkv.quantization import METHODS, counted_forms, detect, forms
from qkv.quantization.methods import REFUSED

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "FORMATS.md"
#: As _core.Checkpoint.forms spells them.
SPELLED = {"BF16X2": "2 bf16", "T4": "table of 16", "F16_SUB": "f16 x int8"}
SECTION = r"(<!-- {}: made by tests/tools/formats_doc.py -->\n).*?(<!-- end -->)"


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    heads = list(head)
    lines = [heads, ["---"] * len(heads), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def methods() -> str:
    rows = ((f"`{m.name}`", m.kind, m.does) for m in METHODS.values())
    return table(("`quantization=`", "kind", "here"), rows)


def refused() -> str:
    return table(("`quant_method`", "why, and what to do instead"), sorted(REFUSED.items()))


def gguf() -> str:
    """Types with a codec, from csrc/quant/formats.def."""
    text = (ROOT / "csrc/quant/formats.def").read_text()
    rows: list[tuple[str, ...]] = []
    for line in re.findall(r"^QKV_FORMAT\((.*)\)$", text, re.MULTILINE):
        fields = [field.strip() for field in line.split(",")]
        name, elems, n_bytes, gguf_id = fields[1].strip('"'), *map(int, fields[2:5])
        code, group, scale, minimum = (SPELLED.get(f, f.lower()) for f in fields[6:10])
        if gguf_id < 0 or code == "none":
            continue
        bits = f"{8 * n_bytes / elems:.4g}"
        groups = "" if group == "0" else f"{scale} by {group}"
        rows.append((name, bits, code, groups, "" if minimum == "none" else minimum))
    head = ("type", "bits a weight in the file", "codes", "scales", "minima")
    return table(head, sorted(rows))


def fixtures(folder: Path) -> str:
    """A checkpoint's matrices, and what they become."""
    rows = []
    for path in sorted(folder.iterdir()):
        if not (path / "config.json").exists() or not (path / "dequant.npz").exists():
            continue
        checkpoint = _core.Checkpoint(str(path))
        found = detect(checkpoint)
        inputs = {m.get("input", {"quant": "16 bits"})["quant"] for m in found.matrices.values()}
        counted = counted_forms(forms(checkpoint, found))
        packed = "; ".join(f"{count} as {form}" for form, count in counted.items())
        rows.append((path.name, found.method, packed, ", ".join(sorted(inputs))))
        checkpoint.close()
    return table(("checkpoint", "detected as", "matrices", "inputs want"), rows)


def replaced(text: str, name: str, content: str) -> str:
    """The document with the table `name` in its place."""
    found, count = re.subn(
        SECTION.format(name), lambda m: m[1] + content + m[2], text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{PATH.name} has {count} places for {name}")
    return found


def main() -> None:
    text = PATH.read_text()
    tables = {"methods": methods(), "refused": refused(), "gguf": gguf()}
    if len(sys.argv) > 1:
        tables["fixtures"] = fixtures(Path(sys.argv[1]))
    for name, content in tables.items():
        text = replaced(text, name, content)
    PATH.write_text(text)


if __name__ == "__main__":
    main()
