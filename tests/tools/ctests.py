"""Builds and runs the C tests and the fuzz targets, without Python in them.

  ctests.py [--variant plain|asan|tsan] [NAME ...]     tests/c/test_NAME.c, all by default; linked
                                                       with tests/c/NAME_*.c
  ctests.py --fuzz-replay [NAME ...]                   tests/fuzz/fuzz_NAME.c over their corpus
  ctests.py --fuzz NAME --seconds 60                   libFuzzer where clang is, else our mutator
  ctests.py --bench [NAME ...]                         tests/bench/bench_NAME.c, optimized, CSV

Each program is linked with an archive of all objects of its variant, so it gets what it needs and
nothing more. Sources, flags and instruction sets come from setup.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = ["-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
# All but the benches are debug builds: asserts on and the check() functions called.
VARIANTS = {
    "plain": [],
    "asan": ["-fsanitize=address,undefined", *SANITIZE],
    "tsan": ["-fsanitize=thread", *SANITIZE],
    "fuzzer": ["-fsanitize=address,undefined,fuzzer-no-link", *SANITIZE],
    "bench": ["-DNDEBUG"],
}


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("qkv_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Build:
    """Objects of one variant, rebuilt when a file that they include has changed."""

    def __init__(self, variant: str, out: Path, compiler: str, jobs: int) -> None:
        self.setup = load_setup()
        self.objects = self.out = out / variant
        if self.setup.flag_set("QKV_EMULATE_AVX512"):
            self.out = out / (variant + "-emulated")
        self.compiler = compiler
        self.flags = VARIANTS[variant]
        if variant != "bench":
            os.environ["QKV_DEBUG"] = "1"
        self.jobs = jobs
        self.failed: list[str] = []
        self.objects.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(exist_ok=True)

    def is_stale(self, target: Path, command: list[str]) -> bool:
        """`target` is missing, was built by another command, or is older than what it read."""
        deps, saved = target.with_suffix(".d"), target.with_suffix(".cmd")
        if not (target.exists() and deps.exists() and saved.exists()):
            return True
        if saved.read_text() != " ".join(command):
            return True
        built = target.stat().st_mtime
        for name in deps.read_text().replace("\\\n", " ").split(":", 1)[1].split():
            path = ROOT / name
            if not path.exists() or path.stat().st_mtime > built:
                return True
        return False

    def compile(self, source: str, flags: list[str]) -> Path:
        # Only what is emulated differs from the plain objects.
        folder = self.out if set(self.setup.EMULATE) <= set(flags) else self.objects
        target = folder / (source.replace("/", "__")[: -len(".c")] + ".o")
        includes = [f"-I{path}" for path in [*self.setup.INCLUDE_DIRS, "tests/c"]]
        command = [self.compiler, *flags, *self.setup.mode_flags(), *self.flags, *includes]
        command += ["-MMD", "-c", source, "-o", str(target)]
        if self.is_stale(target, command):
            target.unlink(missing_ok=True)
            if self.run(command):
                target.with_suffix(".cmd").write_text(" ".join(command))
            else:
                self.failed.append(source)
        return target

    def run(self, command: list[str]) -> bool:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.stdout or done.stderr:
            print(done.stdout + done.stderr, end="", flush=True)
        return done.returncode == 0

    def library(self) -> Path:
        plain, isas = self.setup.kernel_sources()
        kernel = self.setup.KERNEL_FLAGS
        work = [(path, self.setup.HOST_FLAGS) for path in self.setup.host_sources(binding=False)]
        dispatch = [*kernel, *self.setup.dispatch_flags()]
        work += [(p, dispatch if p.endswith("/dispatch.c") else kernel) for p in plain]
        work += [(p, [*kernel, *self.setup.isa_flags(self.setup.isa_of(p))]) for p in isas]
        with ThreadPoolExecutor(self.jobs) as pool:
            objects = list(pool.map(lambda item: self.compile(*item), work))
        archive = self.out / "libqkv.a"
        archive.unlink(missing_ok=True)
        there = [str(path) for path in objects if path.exists()]
        self.run(["ar", "rcs", str(archive), *there])
        return archive

    def programs(self, sources: list[list[str]], archive: Path) -> list[Path | None]:
        """One program per list of sources, named after the first; None where it did not build."""
        # Tests convert freely, and gcc cannot know that a CHECK_OK ends the program.
        flags = [flag for flag in self.setup.HOST_FLAGS if flag != "-Wconversion"]
        flags.append("-Wno-error=maybe-uninitialized")

        # Each once: programs share some of them.
        distinct = list(dict.fromkeys(source for group in sources for source in group))
        with ThreadPoolExecutor(self.jobs) as pool:
            compiled = pool.map(lambda source: self.compile(source, flags), distinct)
            object_of = dict(zip(distinct, compiled, strict=True))

        def build(group: list[str]) -> Path | None:
            objects = [object_of[source] for source in group]
            if not all(path.exists() for path in objects):
                return None
            program = self.out / Path(group[0]).stem
            link = [self.compiler, *self.flags, *map(str, objects), str(archive)]
            newest = max(path.stat().st_mtime for path in [*objects, archive])
            if program.exists() and program.stat().st_mtime > newest:
                return program
            if self.run([*link, "-lm", "-pthread", "-ldl", "-o", str(program)]):
                return program
            self.failed.append(group[0])
            return None

        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(build, sources))


def environment() -> dict[str, str]:
    env = dict(os.environ)
    env.setdefault("ASAN_OPTIONS", "detect_leaks=1:allocator_may_return_null=1")
    env.setdefault("UBSAN_OPTIONS", "print_stacktrace=1")
    env.setdefault("TSAN_OPTIONS", "halt_on_error=1")
    return env


def run_all(programs: list[tuple[str, list[str]]], jobs: int, timeout: float) -> list[str]:
    """Runs each, `jobs` at a time; returns the names of those that failed."""

    def run(program: tuple[str, list[str]]) -> str | None:
        name, command = program
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment(), capture_output=True, text=True,
                timeout=timeout, errors="replace",
            )  # fmt: skip
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, text = -1, f"still running after {timeout:.0f} s\n"
        took = time.monotonic() - start
        last = text.strip().splitlines()[-1] if text.strip() else ""
        if code == 0:
            print(f"ok   {name}  {took:.1f} s  {last}", flush=True)
            return None
        print(f"FAIL {name}  {took:.1f} s  exit {code}\n{text}", flush=True)
        return name

    with ThreadPoolExecutor(jobs) as pool:
        return [name for name in pool.map(run, programs) if name is not None]


def named(folder: str, prefix: str, names: list[str]) -> list[str]:
    """tests/<folder>/<prefix>_<name>.c for the names, or all of them; unknown names end the run."""
    found = {p.stem[len(prefix) + 1 :]: p for p in sorted((ROOT / folder).glob(f"{prefix}_*.c"))}
    unknown = [name for name in names if name not in found]
    if unknown:
        sys.exit(f"{folder}: no {prefix}_{unknown[0]}.c; there are: {', '.join(found)}")
    return [str(found[name].relative_to(ROOT)) for name in names or found]


def parts_of(test: str) -> list[str]:
    found = (ROOT / "tests/c").glob(Path(test).stem[len("test_") :] + "_*.c")
    return sorted(str(path.relative_to(ROOT)) for path in found)


def corpus(source: str) -> list[str]:
    folder = ROOT / "tests/fuzz/corpus" / Path(source).stem[len("fuzz_") :]
    return sorted(str(path) for path in folder.glob("*") if path.is_file())


def fuzz(build: Build, source: str, archive: Path, seconds: int) -> int:
    name = Path(source).stem[len("fuzz_") :]
    grown = build.out / f"corpus_{name}"
    grown.mkdir(exist_ok=True)
    if build.compiler == "clang":
        build.flags = [flag.replace("fuzzer-no-link", "fuzzer") for flag in build.flags]
        program = build.programs([[source]], archive)[0]
        seeds = [str(grown), str(ROOT / "tests/fuzz/corpus" / name)]
        command = [str(program), f"-max_total_time={seconds}", "-rss_limit_mb=2048", *seeds]
    else:
        program = build.programs([[source, "tests/fuzz/replay_main.c"]], archive)[0]
        command = [str(program), "--mutate", str(seconds), str(grown / "crash"), *corpus(source)]
    if program is None:
        return 1
    return subprocess.run(command, cwd=ROOT, env=environment()).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--variant", choices=["plain", "asan", "tsan"], default="plain")
    parser.add_argument("--fuzz-replay", action="store_true")
    parser.add_argument("--fuzz", metavar="NAME")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "ctests")
    parser.add_argument("-j", "--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.chdir(ROOT)

    has_clang = shutil.which("clang") is not None
    fuzzing = bool(args.fuzz or args.fuzz_replay)
    compiler = "clang" if args.fuzz and has_clang else os.environ.get("CC", "gcc")
    variant = "fuzzer" if compiler == "clang" and args.fuzz else "asan" if fuzzing else args.variant
    variant = "bench" if args.bench else variant
    build = Build(variant, args.out.resolve(), compiler, args.jobs)
    archive = build.library()
    if args.fuzz:
        return fuzz(build, named("tests/fuzz", "fuzz", [args.fuzz])[0], archive, args.seconds)

    if args.bench:
        programs = build.programs([[p] for p in named("tests/bench", "bench", args.names)], archive)
        wanted = [] if args.build_only else [str(p) for p in programs if p is not None]
        codes = [subprocess.run([path], cwd=ROOT).returncode for path in wanted]
        return 1 if build.failed or any(codes) else 0
    if args.fuzz_replay:
        sources = named("tests/fuzz", "fuzz", args.names)
        programs = build.programs([[path, "tests/fuzz/replay_main.c"] for path in sources], archive)
    else:
        sources = named("tests/c", "test", args.names)
        programs = build.programs([[path, *parts_of(path)] for path in sources], archive)
    runs = []
    for source, program in zip(sources, programs, strict=True):
        if program is not None:
            runs.append((source, [str(program), *(corpus(source) if args.fuzz_replay else [])]))
    failed = [] if args.build_only else run_all(runs, args.jobs, timeout=600)
    for source in build.failed:
        print(f"FAIL {source}: does not build")
    if not sources:
        print("FAIL nothing to run")
        return 1
    print(f"{variant}: {len(sources)} programs, {len(failed) + len(build.failed)} failures")
    return 1 if failed or build.failed else 0


if __name__ == "__main__":
    sys.exit(main())
