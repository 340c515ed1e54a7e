"""Builds the CUDA backend for tests.

  cuda_build.py --emulated          python/qkv/_qkv_cuda_emulated.so: every kernel on the processor
  cuda_build.py --emulated --asan   build/cuda/_qkv_cuda_asan.so: the same under ASan and UBSan
  cuda_build.py [--archs 80,90a]    build/cuda/_qkv_cuda.so and bench_cuda with nvcc, and
                                    a look at ptxas' report: attention and products must not spill

Sources and flags come from setup.py, which builds the library that a wheel carries. Without nvcc or
NVIDIA's headers the second says what is missing and exits with 3, which `make cuda` shows.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
EMULATED = ROOT / "python" / "qkv" / "_qkv_cuda_emulated.so"
OUT = ROOT / "build" / "cuda"
MISSING = 3


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("qkv_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_stale(target: Path, command: list[str]) -> bool:
    """`target` is missing, was made by another command, or is older than what it read."""
    deps, saved = target.with_suffix(".d"), target.with_suffix(".cmd")
    if not (target.exists() and deps.exists() and saved.exists()):
        return True
    if saved.read_text() != " ".join(command):
        return True
    built = target.stat().st_mtime
    names = deps.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    return any(not (ROOT / n).exists() or (ROOT / n).stat().st_mtime > built for n in names)


class Build:
    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.failed = False
        self.report = ""

    def compile(self, target: Path, command: list[str]) -> Path:
        target.parent.mkdir(parents=True, exist_ok=True)
        log = target.with_suffix(".log")
        if is_stale(target, command):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            text = done.stdout + done.stderr
            if done.returncode != 0:
                print(text, end="", flush=True)
                self.failed = True
                target.unlink(missing_ok=True)
                return target
            log.write_text(text)
            target.with_suffix(".cmd").write_text(" ".join(command))
        self.report += log.read_text()
        return target

    def all(self, work: list[tuple[Path, list[str]]]) -> list[str]:
        with ThreadPoolExecutor(self.jobs) as pool:
            made = list(pool.map(lambda item: self.compile(*item), work))
        return [str(path) for path in made]

    def link(self, target: Path, command: list[str]) -> bool:
        if not self.failed:
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh = target.with_name(f"{target.name}.{os.getpid()}")  # a process may have it open
            done = subprocess.run([*command, "-o", str(fresh)], cwd=ROOT)
            self.failed = done.returncode != 0
            if not self.failed:
                fresh.replace(target)
        return not self.failed


def spills(report: str) -> list[str]:
    """Kernels that spill registers, out of what `ptxas -v` printed."""
    found = []
    for name, spilled in re.findall(
        r"Function properties for (\S+)\n.*?(\d+ bytes spill stores)", report
    ):
        if not spilled.startswith("0 "):
            found.append(f"{name}: {spilled}")
    return found


def build_emulated(jobs: int, asan: bool) -> bool:
    setup, build = load_setup(), Build(jobs)
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if asan else []
    out = OUT / ("asan" if asan else "emulated")
    library = OUT / "_qkv_cuda_asan.so" if asan else EMULATED
    work = []
    for source, command in setup.cuda_emulated_commands():
        target = out / f"{Path(source).stem}.o"
        work.append((target, [*command, *sanitize, "-MMD", "-c", source, "-o", str(target)]))
    objects = build.all(work)
    newest = max((os.path.getmtime(path) for path in objects if os.path.exists(path)), default=0)
    if not build.failed and library.exists() and library.stat().st_mtime > newest:
        return True
    # What the sanitizers need is in the program that loads it.
    more = sanitize or ["-Wl,-z,defs"]
    return build.link(library, ["g++", "-shared", *objects, "-pthread", *more, "-lm"])


def build_cuda(jobs: int, archs: str) -> int:
    setup, build = load_setup(), Build(jobs)
    os.environ["QKV_CUDA_ARCHS"] = archs
    missing = setup.cuda_missing()
    if missing:
        print(f"cuda: not built, {missing}")
        return MISSING
    work = []
    for source, command in setup.cuda_commands():
        target = OUT / "nvcc" / f"{Path(source).stem}.o"
        more = ["-Xptxas", "-v"] if source.endswith(".cu") else []
        work.append((target, [*command, *more, "-MMD", "-c", source, "-o", str(target)]))
    # Beside the library: the bench for a GPU, which loads it.
    nvcc = next(command for source, command in setup.cuda_commands() if source.endswith(".cu"))
    cc = next(command for source, command in setup.cuda_commands() if source.endswith(".c"))
    for source, command in (
        ("tests/bench/bench_cuda.cu", nvcc),
        ("csrc/backend/backend_load.c", cc),
    ):
        target = OUT / "nvcc" / f"{Path(source).stem}.o"
        work.append((target, [*command, "-MMD", "-c", source, "-o", str(target)]))
    *objects, bench, loader = build.all(work)
    build.link(OUT / "_qkv_cuda.so", setup.cuda_link(objects))
    host = [str(OUT / "nvcc" / f"{Path(source).stem}.o") for source in setup.CUDA_HOST]
    build.link(OUT / "bench_cuda", ["nvcc", "-cudart", "static", bench, loader, *host, "-ldl"])
    for line in spills(build.report):
        print(f"cuda: spills registers: {line}")
        build.failed = True
    n_kernels = len(re.findall(r"Compiling entry function", build.report))
    print(f"cuda: {n_kernels} kernels for {archs}, {'FAILED' if build.failed else 'no spills'}")
    return 1 if build.failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--asan", action="store_true")
    parser.add_argument("--archs", default="80,90a")
    parser.add_argument("-j", "--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.emulated:
        return 0 if build_emulated(args.jobs, args.asan) else 1
    return build_cuda(args.jobs, args.archs)


if __name__ == "__main__":
    sys.exit(main())
