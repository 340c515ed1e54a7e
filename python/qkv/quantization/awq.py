"""AWQ in the gemm layout (AutoAWQ, GPTQModel, AutoRound): [k_in, n_out / 8] words, whose nibble i
is column {0, 2, 4, 6, 1, 3, 5, 7}[i]; zero points in the same order, without an offset."""

from .gptq import codes_in, group_size, other_packing, zero_bias
from .matrix import Array, Codes, Matrix
from .names import by_substring, with_fused
from .reader import Reader, cdiv
from .section import Section
from .tensors import FLOATS, Module, Tensors


class AwqReader(Reader):
    def __init__(self, section: Section, tensors: Tensors, notes: list[str]) -> None:
        super().__init__(section, tensors, notes)
        for key in ("version", "checkpoint_format", "format"):
            name = section.text(key)
            if name is not None and name.lower() != "gemm":
                raise section.refuse(
                    f"{key} {name!r:.40} is another layout than gemm, which alone is supported: "
                    "save the checkpoint again with version gemm"
                )
        self._excluding = with_fused(by_substring(section.names("modules_to_not_convert")))

    def excluded(self, module: str) -> str | None:
        return self._excluding(module)

    def matrix(self, module: Module) -> Matrix | None:
        return read(self, module, self.section) if module.has("qweight") else None


def read(reader: Reader, module: Module, settings: Section) -> Matrix:
    tensors = reader.tensors
    key = "bits" if settings.has("bits") else "w_bit"
    bits = settings.integer(key)
    if bits != 4:
        raise settings.fail(f"{module.name}: {key} is {bits}, AWQ has 4")
    why = f"AWQ gemm with group_size {settings.data.get('group_size')!r:.20}"
    qweight = module.parts["qweight"]
    scales = module.need("scales", why)
    k_in, n_words = tensors.matrix_shape(qweight, ("I32", "U32"), why)
    n_out = 8 * n_words
    group = group_size(reader, settings, module, k_in)
    n_groups = 1 if group == 0 else cdiv(k_in, group)
    if tensors.shape(scales)[-1:] == (n_words,):
        raise other_packing(reader, module, "GPTQ")
    tensors.expect(scales, FLOATS, (n_groups, n_out), why)
    zero, also = _zeros(reader, module, settings, (n_groups, n_words))
    return Matrix(
        shape=(n_out, k_in),
        codes=Codes(
            tensor=qweight,
            bits=4,
            order="interleaved",
            meaning="offset" if zero is None else "unsigned",
        ),
        group=group,
        scale=Array(tensor=scales, transposed=True) if group else None,
        factor=None if group else Array(tensor=scales),
        zero=zero,
        also=(*also, *zero_bias(tensors, module)),
    )


def _zeros(
    reader: Reader, module: Module, settings: Section, shape: tuple[int, int]
) -> tuple[Codes | None, tuple[str, ...]]:
    """Zero points, or the tensor that says only that all are 8."""
    symmetric = settings.flag("zero_point") is False or settings.flag("sym") is True
    if not module.has("qzeros"):
        if not symmetric:
            module.need("qzeros", "AWQ with zero points")
        return None, ()
    qzeros = module.parts["qzeros"]
    reader.tensors.expect(qzeros, ("I32", "U32"), shape, "AWQ zero points, [groups, n_out / 8]")
    stored = codes_in(reader.tensors, qzeros, 4)
    if stored == {8}:
        return None, (qzeros,)
    if symmetric:
        raise reader.contradiction(
            module,
            f"zero_point is false, but {qzeros} holds {min(stored)} to {max(stored)} and not 8 "
            "alone: set zero_point to true if they are meant",
        )
    return Codes(tensor=qzeros, bits=4, order="interleaved"), ()
