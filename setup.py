"""Builds qkv._core: host C from csrc/, kernels from kernels/cpu/, one static archive per
instruction set so that only that archive is compiled with its flags.

Environment: QKV_DEBUG=1 (asserts, -g), QKV_WERROR=1, QKV_EMULATE_DPBF16=1 (the avx512bf16 tier
with its one missing instruction emulated: tests on machines that lack it), QKV_BUILD_BASE, CFLAGS.
`python setup.py build_ext --inplace` alone does not link: use `build_clib build_ext --inplace`.
tests/tools/ctests.py imports this file for the flags.
"""

from __future__ import annotations

import glob
import os
import platform
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
BF16 = [*AVX512, "-mavx512bf16"]
ISA_FLAGS = {"scalar": [], "avx2": AVX2, "avx512": AVX512, "avx512bf16": BF16}
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
    if flag_set("QKV_EMULATE_DPBF16"):
        flags += ["-DQKV_EMULATE_DPBF16=1"]
    return flags


def isa_of(source: str) -> str:
    return os.path.basename(source)[len("isa_") : -len(".c")]


def isa_flags(name: str) -> list[str]:
    emulated = name == "avx512bf16" and flag_set("QKV_EMULATE_DPBF16")
    return AVX512 if emulated else ISA_FLAGS[name]


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


def build_folders() -> dict[str, dict[str, str]]:
    """One place for objects, by kind of build, for every command: setuptools would put those of an
    editable install into a temporary folder and compile all of them each time."""
    kind = "debug" if flag_set("QKV_DEBUG") else "release"
    if flag_set("QKV_EMULATE_DPBF16"):
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
    libraries = [library("qkvcpu", plain, [])]
    libraries += [library(f"qkvcpu_{isa_of(p)}", [p], isa_flags(isa_of(p))) for p in isas]
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
