"""Loading, as CSV: its speed against copying and its peak memory.

    bench_load.py MODEL.gguf ... [--threads 2] [--rounds 5]

Timed is the C engine's opening (mapping, binding, packing, pools; no tokenizer) with the file in
the page cache. `of_copy` is file bytes per second over those of copying a mapped file into fresh
huge pages with as many threads, measured in the same run (limits.h). Peaks are those of another
process, above what it held before: `anon_mib` and `file_mib` are sampled while it loads, `peak_mib`
is the kernel's VmHWM, and `of_held` is that over weights + KV pool."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from qkv import _core

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ROOT / "build/ctests/bench/bench_limits"
COPY = "copy of a mapped file into fresh huge pages"
KV_TOKENS = 4096


def open_engine(path: str, threads: int) -> _core.Engine:
    checkpoint = _core.Checkpoint(path)
    n_layers = checkpoint.model_config()["n_layers"]
    checkpoint.close()
    formats = [[("bf16", "bf16")] * n_layers]
    return _core.Engine(
        path, kv_formats=formats, kv_tokens=KV_TOKENS, threads=threads, max_running=1,
        chunk_tokens=64,
    )  # fmt: skip


def status_kib(key: str, process: int | str = "self") -> int:
    with open(f"/proc/{process}/status") as status:
        return next((int(line.split()[1]) for line in status if line.startswith(key)), 0)


def load_once(path: str, threads: int) -> None:
    """The other process: says what it holds before and after, in KiB."""
    open_engine(path, threads).close()  # code, threads' stacks
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins anew
    print(status_kib("RssAnon:"), status_kib("RssFile:"), status_kib("VmHWM:"), flush=True)
    engine = open_engine(path, threads)
    memory = engine.memory()
    print(memory["weights"] + memory["kv"] >> 10, status_kib("VmHWM:"), flush=True)
    sys.stdin.readline()


def peaks_mib(path: str, threads: int) -> tuple[float, float, float, float]:
    """Anonymous, of files, both at once, and what the engine says that it holds."""
    command = [sys.executable, __file__, "--once", path, "--threads", str(threads)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    before = [int(word) for word in child.stdout.readline().split()]
    most = [0, 0]
    end = time.monotonic() + 0.1
    while time.monotonic() < end or status_kib("RssAnon:", child.pid) > most[0]:
        now = [status_kib(key, child.pid) for key in ("RssAnon:", "RssFile:")]
        if now[0] > most[0]:
            end = time.monotonic() + 0.1
        most = [max(pair) for pair in zip(most, now, strict=True)]
    held, whole = (int(word) for word in child.stdout.readline().split())
    child.communicate("\n")
    return (
        (most[0] - before[0]) / 1024,
        (most[1] - before[1]) / 1024,
        (whole - before[2]) / 1024,
        held / 1024,
    )


def seconds(path: str, threads: int) -> float:
    begin = time.perf_counter()
    engine = open_engine(path, threads)
    end = time.perf_counter()
    engine.close()
    return end - begin


def copy_limit(threads: int) -> float:
    build = [sys.executable, str(ROOT / "tests/tools/ctests.py"), "--bench", "--build-only"]
    subprocess.run([*build, "limits"], check=True)
    done = subprocess.run(
        [str(LIMITS), str(threads), COPY], check=True, capture_output=True, text=True
    )
    return float(done.stdout.splitlines()[-1].split(",")[-2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.once:
        load_once(args.once, args.threads)
        return
    limit = copy_limit(args.threads)
    print(f"# copy into fresh huge pages: {limit:.2f} GB/s")
    print("model,file_mib,seconds,gb_s,of_copy,anon_mib,file_mib,peak_mib,held_mib,of_held")
    for path in args.models:
        n_bytes = Path(path).stat().st_size
        seconds(path, args.threads)  # reads the file
        took = statistics.median(seconds(path, args.threads) for _ in range(args.rounds))
        rate = n_bytes / took * 1e-9
        anon, mapped, peak, held = peaks_mib(path, args.threads)
        print(
            f"{Path(path).name},{n_bytes / 2**20:.0f},{took:.4f},{rate:.2f},{rate / limit:.3f},"
            f"{anon:.0f},{mapped:.0f},{peak:.0f},{held:.0f},{peak / held:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
