"""Builds qkv._core: host C from csrc/, kernels from kernels/cpu/, each isa_*.c a static
archive of its own so that only that archive is compiled with its instruction set's flags.

With nvcc and NVIDIA's headers it also builds qkv/_qkv_cuda.so from kernels/cuda, which is opened at
run time; nothing of CUDA is in _core.

Environment: QKV_DEBUG=1 (asserts, -g), QKV_WERROR=1, QKV_EMULATE_AVX512=1 (its intrinsics are
those of tests/c/emulated: tests on machines without AVX-512 or AMX), QKV_BUILD_BASE, CFLAGS.
CUDA: QKV_CUDA=0, 1 or auto (the default: where nvcc is), QKV_CUDA_ARCHS=80,90a, CUDA_HOME,
QKV_CUBLAS_INCLUDE (the folder of cublasLt.h).
`python setup.py build_ext --inplace` alone does not link: use `build_clib build_ext --inplace`.
tests/tools/ctests.py imports this file for the flags.
"""

from __future__ import annotations

import glob
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from sysconfig import get_path
from typing import Any

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wvla", "-Wstrict-prototypes", "-Wmissing-prototypes"]
COMMON = ["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
HOST_FLAGS = [*COMMON, "-O2", *WARNINGS, "-Wconversion"]
# No errno from sqrtf and friends, so that they are one instruction; nothing of -ffast-math else.
# What gcc guesses at -O3 about bounds in unrolled vector loops is shown, but fails no build.
GUESSES = ["-Wno-unknown-warning-option", "-Wno-error=array-bounds", "-Wno-error=stringop-overflow"]
KERNEL_FLAGS = [*COMMON, "-O3", "-fno-math-errno", *WARNINGS, *GUESSES]

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
BF16 = [*AVX512, "-mavx512bf16", "-mavx512vbmi"]
AMX = [*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
ISA_FLAGS = {"scalar": [], "avx2": AVX2, "avx512": AVX512, "avx512bf16": BF16, "amx": AMX}
# For tests where it is not there: dispatch.c calls it usable, its intrinsics are the tests' own.
EMULATE = ["-DQKV_EMULATE_AVX512=1"]
EMULATED = [*EMULATE, "-Itests/c/emulated", *AVX2]
EMULATED_BF16 = [*EMULATED, "-D__AVX512VBMI__"]
EMULATED_ISAS = {"avx512": EMULATED, "avx512bf16": EMULATED_BF16, "amx": EMULATED_BF16}
# -O1 with the inlining that the kernels live on: with -O2 the sanitizers compile for minutes.
DEBUG_FLAGS = ["-O1", "-finline-functions", "-finline-small-functions", "-g1", "-UNDEBUG"]
INCLUDE_DIRS = ["csrc", "kernels/cpu"]


def flag_set(name: str) -> bool:
    """Whether an environment variable is 1; anything but 0 and 1 is an error."""
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        raise SystemExit(f"{name}={value}: must be 0 or 1")
    return value == "1"


def mode_flags() -> list[str]:
    """What the environment adds to every file's flags."""
    flags = []
    if flag_set("QKV_DEBUG"):
        flags += [*DEBUG_FLAGS, "-DQKV_DEBUG=1"]
    if flag_set("QKV_WERROR"):
        flags += ["-Werror"]
    return flags


def isa_of(source: str) -> str:
    return os.path.basename(source).split("_")[1]


def isa_flags(name: str) -> list[str]:
    emulated = EMULATED_ISAS if flag_set("QKV_EMULATE_AVX512") else {}
    return emulated.get(name, ISA_FLAGS[name])


def dispatch_flags() -> list[str]:
    return EMULATE if flag_set("QKV_EMULATE_AVX512") else []


def host_sources(*, binding: bool) -> list[str]:
    """C files of csrc/; csrc/py only with `binding`."""
    found = sorted(glob.glob("csrc/**/*.c", recursive=True))
    return [path for path in found if binding or not path.startswith(os.path.join("csrc", "py"))]


def kernel_sources() -> tuple[list[str], list[str]]:
    """(files for any processor, isa_*.c that this machine's compiler takes)."""
    found = sorted(glob.glob("kernels/cpu/*.c"))
    isas = [path for path in found if os.path.basename(path).startswith("isa_")]
    plain = [path for path in found if path not in isas]
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return plain, [path for path in isas if x86 or isa_of(path) == "scalar"]


def headers() -> list[str]:
    patterns = [
        f"{at}/*.{kind}" for at in ("csrc/**", "kernels/cpu") for kind in ("h", "def", "inc")
    ]
    return sorted(path for p in patterns for path in glob.glob(p, recursive=True))


# ---- CUDA: one library of its own, with its own copy of the C files that it needs ----

CUDA_HOST = [
    "csrc/backend/contract.c",
    *("csrc/base/log.c", "csrc/base/mem.c", "csrc/base/os_posix.c", "csrc/base/status.c"),
    *("csrc/base/threads.c", "csrc/kv/kv_formats.c", "csrc/quant/codec.c"),
    *("csrc/quant/codec_iq.c", "csrc/quant/formats.c", "csrc/quant/matrix.c"),
    "csrc/quant/matrix_check.c",
]
CUDA_INCLUDES = ["-Icsrc", "-Ikernels/cuda"]
CUDA_LIBRARY = "_qkv_cuda.so"
RELEASE_ARCHS = "80,86,89,90a,100a,120a"
# A struct and a function of one name are C's custom, which is all that plain -Wshadow finds.
EMULATED_FLAGS = ["-x", "c++", "-DQKV_EMULATE", "-std=c++17", "-O2", "-g1", "-fPIC", "-pthread",
                  "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off",
                  "-Wall", "-Wextra", "-Wshadow=local", "-Wno-missing-field-initializers",
                  "-Wno-unknown-pragmas"]  # fmt: skip


def cuda_sources(*, emulated: bool) -> list[str]:
    """gemm_lt.cu is for GPUs alone, emulate.cu and gemm_reference.cu for the emulation."""
    other = {"gemm_lt.cu"} if emulated else {"emulate.cu", "gemm_reference.cu"}
    found = sorted(glob.glob("kernels/cuda/**/*.cu", recursive=True))
    return [path for path in found if os.path.basename(path) not in other]


def cuda_host_commands() -> list[tuple[str, list[str]]]:
    cc = ["gcc", *HOST_FLAGS, "-fPIC", *mode_flags(), *CUDA_INCLUDES]
    return [(path, cc) for path in CUDA_HOST]


def cuda_emulated_commands() -> list[tuple[str, list[str]]]:
    """(source, what compiles it) of the library that runs the kernels on the processor."""
    werror = ["-Werror"] if flag_set("QKV_WERROR") else []
    cxx = ["g++", *EMULATED_FLAGS, *werror, *CUDA_INCLUDES]
    return [(p, cxx) for p in cuda_sources(emulated=True)] + cuda_host_commands()


def cuda_headers() -> str | None:
    """The folder with cublasLt.h: the toolkit's own, or that of the wheel nvidia-cublas."""
    nvcc = os.path.realpath(shutil.which("nvcc") or "")
    toolkit = os.environ.get("CUDA_HOME", os.path.dirname(os.path.dirname(nvcc)))
    folders = [os.path.join(toolkit, "include"), "/usr/local/cuda/include"]
    folders += [os.path.join(p, "nvidia", "cu13", "include") for p in sys.path]
    folders += [path for path in (os.environ.get("QKV_CUBLAS_INCLUDE"),) if path]
    return next((f for f in folders if os.path.isfile(os.path.join(f, "cublasLt.h"))), None)


def cuda_missing() -> str:
    """What keeps the library from being built; empty if nothing does."""
    if shutil.which("nvcc") is None:
        return "no nvcc"
    return "" if cuda_headers() else "no cublasLt.h (pip install nvidia-cublas, or the toolkit's)"


def cuda_commands() -> list[tuple[str, list[str]]]:
    gencode = []
    archs = os.environ.get("QKV_CUDA_ARCHS", RELEASE_ARCHS).split(",")
    for arch in archs:
        gencode += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    plain = [arch for arch in archs if arch.isdigit()]  # PTX of the newest without an a: for later
    if plain:
        gencode += ["-gencode", f"arch=compute_{plain[-1]},code=compute_{plain[-1]}"]
    werror = ["-Werror", "all-warnings"] if flag_set("QKV_WERROR") else []
    nvcc = ["nvcc", "-x", "cu", "-std=c++17", "-O3", "-lineinfo", *gencode, *werror]
    nvcc += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-Wall"]
    nvcc += [*CUDA_INCLUDES, "-isystem", cuda_headers() or ""]
    return [(p, nvcc) for p in cuda_sources(emulated=False)] + cuda_host_commands()


def cuda_link(objects: list[str]) -> list[str]:
    """The runtime inside, cuBLASLt opened when it is needed: it loads where no driver is."""
    return ["nvcc", "-shared", "-cudart", "static", *objects, "-Xlinker", "-z,defs", "-ldl", "-lm"]


def build_cuda(folder: str, temp: str) -> bool:
    """Whether qkv/_qkv_cuda.so was put into `folder`."""
    wanted = os.environ.get("QKV_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"QKV_CUDA={wanted}: must be 0, 1 or auto")
    missing = cuda_missing()
    if wanted == "0" or (wanted == "auto" and missing):
        return False
    if missing:
        raise SystemExit(f"QKV_CUDA=1: {missing}")
    os.makedirs(temp, exist_ok=True)

    def compile_one(item: tuple[str, list[str]]) -> str:
        source, command = item
        target = os.path.join(temp, os.path.basename(source) + ".o")
        subprocess.run([*command, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, cuda_commands()))
    subprocess.run([*cuda_link(objects), "-o", os.path.join(folder, CUDA_LIBRARY)], check=True)
    return True


def build_folders() -> dict[str, dict[str, str]]:
    """One place for objects, by kind of build, for every command: setuptools would put those of an
    editable install into a temporary folder and compile all of them each time."""
    kind = "debug" if flag_set("QKV_DEBUG") else "release"
    if flag_set("QKV_EMULATE_AVX512"):
        kind += "-emulated"
    base = os.environ.get("QKV_BUILD_BASE", os.path.join("build", kind))
    temp = os.path.join(base, f"temp-{sys.implementation.cache_tag}")
    return {
        "build": {"build_base": base, "build_temp": temp},
        "build_clib": {"build_clib": os.path.join(base, "clib"), "build_temp": temp},
        "build_ext": {"build_temp": temp},
    }


def commands() -> dict[str, Any]:
    """build_clib and build_ext that compile as many files at a time as there are processors, and
    build_py that puts the .pth file beside the packages (python/qkv_lm_eval_hook.py says why)."""
    from setuptools.command.build_clib import build_clib
    from setuptools.command.build_ext import build_ext
    from setuptools.command.build_py import build_py

    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    class Clib(build_clib):
        def build_libraries(self, libraries: list[Any]) -> None:
            list(pool.map(lambda one: build_clib.build_libraries(self, [one]), libraries))

    class Ext(build_ext):
        def build_extension(self, ext: Any) -> None:
            whole, single = self.compiler.compile, self.compiler._compile
            jobs: list[Future[Any]] = []

            def compile_all(*args: Any, **options: Any) -> Any:
                objects = whole(*args, **options)
                list(map(Future.result, jobs))
                return objects

            self.compiler._compile = lambda *args: jobs.append(pool.submit(single, *args))
            self.compiler.compile = compile_all
            super().build_extension(ext)

        def run(self) -> None:
            super().run()
            folder = os.path.dirname(self.get_ext_fullpath("qkv._core"))
            self.cuda = build_cuda(folder, os.path.join(self.build_temp, "cuda"))

        def get_outputs(self) -> list[str]:
            library = os.path.join(self.build_lib, "qkv", CUDA_LIBRARY)
            outputs: list[str] = super().get_outputs()
            return [*outputs, library] if getattr(self, "cuda", False) else outputs

    class Py(build_py):
        def run(self) -> None:
            super().run()
            if not self.editable_mode:
                self.copy_file("python/qkv_lm_eval.pth", self.build_lib)

    return {"build_clib": Clib, "build_ext": Ext, "build_py": Py}


def main() -> None:
    import numpy
    from setuptools import Extension, setup

    def library(name: str, sources: list[str], flags: list[str]) -> tuple[str, dict[str, Any]]:
        cflags = [*KERNEL_FLAGS, *flags, *mode_flags()]
        info = {"sources": sources, "include_dirs": INCLUDE_DIRS, "cflags": cflags}
        return name, info | {"obj_deps": {"": headers()}}

    plain, isas = kernel_sources()
    # The order matters to the linker: the dispatcher first, then the tables that it refers to.
    libraries = [library("qkvcpu", plain, dispatch_flags())]
    libraries += [
        library(f"qkv_{os.path.basename(p)[:-2]}", [p], isa_flags(isa_of(p))) for p in isas
    ]
    # As system headers: our warnings are not for other people's inline functions.
    system = [f"-isystem{get_path('include')}", f"-isystem{numpy.get_include()}"]
    core = Extension(
        "qkv._core",
        sources=host_sources(binding=True),
        include_dirs=INCLUDE_DIRS,
        depends=[*headers(), *plain, *isas],
        extra_compile_args=[*system, *HOST_FLAGS, *mode_flags()],
        extra_link_args=["-pthread", "-lm"],
    )
    options = {"options": build_folders(), "cmdclass": commands()}
    setup(ext_modules=[core], libraries=libraries, **options)


if __name__ == "__main__":
    main()
