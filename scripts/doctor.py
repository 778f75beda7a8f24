"""Examine this machine before a run: versions, accelerator and its speed, launcher, cores, limits, memory, disk."""

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from common.console import console
from common.errors import run_command
from common.help import Parser, positive_int
from training.runtime.launchers import find_deepspeed

try:
    import torch

    from nvidia.config import BertConfig
    from training.metrics.flops import MatmulProbe
    from training.settings.precision import (
        HALF_MATMUL,
        ISA_LIMIT,
        ISA_WITHOUT_AMX,
        avoid_broken_amx,
        dies_of_illegal_instruction,
        find_abilities,
        read_cpu_flags,
    )
except (ImportError, OSError):  # missing, or broken: a finding among the others
    torch = None

GIB = 2**30
WORTH_IT = 1.2  # times as fast: less is lost again outside of products
INSTALL = "pip install -r requirements.txt, then activate .venv"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. Without a remedy all is well."""

    topic: str
    text: str
    remedy: str | None = None


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="doctor.py", description=__doc__)
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="ranks to be started here (default: one a GPU)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path(), metavar="DIR", help="where a run would write (default: here)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when something needs a remedy, for scripts that ask."""
    flags = build_parser().parse_args(argv)
    findings = examine(flags.ranks or max(1, torch.cuda.device_count() if torch else 1), flags.output_dir)
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        console.say(f"{'!' if finding.remedy else ' '} {finding.topic:<{width}}  {finding.text}")
        if finding.remedy:
            console.say(f"  {'':<{width}}  → {finding.remedy}")
    problems = sum(finding.remedy is not None for finding in findings)
    console.say(f"{problems} of {len(findings)} need attention" if problems else "all is well")
    return 1 if problems else 0


def examine(ranks: int, output_dir: Path) -> list[Finding]:
    allowed, memory = read_limits()
    return [
        examine_python(),
        *examine_versions((PROJECT / "requirements.txt").read_text()),
        *(examine_computing() if torch else [examine_without_torch()]),
        examine_launcher(),
        examine_cores(ranks, len(os.sched_getaffinity(0)), allowed, dict(os.environ)),
        examine_limits(allowed, memory),
        examine_memory(Path("/proc/meminfo")),
        examine_disk(output_dir),
    ]


def examine_python() -> Finding:
    is_new_enough = sys.version_info >= (3, 11)
    return Finding("python", platform.python_version(), None if is_new_enough else "use Python 3.11 or newer")


def examine_versions(requirements: str) -> list[Finding]:
    """Installed versions against the pinned ones."""
    findings = []
    for line in requirements.splitlines():
        name, _, wanted = line.partition("==")
        if not wanted:
            continue
        try:
            found = metadata.version(name).split("+")[0]  # torch adds its build: 2.13.0+cpu
        except metadata.PackageNotFoundError:
            found = "missing"
        remedy = None if found == wanted else f"pip install {line.strip()}"
        text = found if found == wanted else f"{found}, but {wanted} is what this project is tested with"
        findings.append(Finding(name, text, remedy))
    return findings


def examine_without_torch() -> Finding:
    return Finding("accelerator", "torch cannot be imported, so neither it nor the instructions are known", INSTALL)


def examine_computing() -> list[Finding]:
    return [examine_accelerator(), examine_instructions(read_cpu_flags()), examine_speed(measure_speeds())]


def measure_speeds() -> dict[str, float]:
    """FLOP/s of BERT-base's products in each precision that a run could have here; about a second."""
    avoid_broken_amx()
    abilities, base = find_abilities(), BertConfig(vocab_size=30528)
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        name: MatmulProbe(base, 2048, kind, device).measure_speed()
        for name, kind in kinds.items()
        if abilities.can(name)
    }


def examine_speed(speeds: dict[str, float]) -> Finding:
    """Which precision is the fast one is a matter of the processor: half precision can be twice or half as fast."""
    text = ", ".join(f"{name} {speed / 1e9:,.0f}" for name, speed in speeds.items())
    fastest = max(speeds, key=lambda name: speeds[name])
    gain = speeds[fastest] / speeds["fp32"]
    advice = f"; --precision {fastest} is {gain:.1f} times as fast as fp32" if gain > WORTH_IT else ""
    return Finding("matmul", f"{text} GFLOP/s{advice}")


def examine_accelerator() -> Finding:
    abilities = find_abilities()
    kinds = ", ".join(kind for kind in ("fp32", "fp16", "bf16") if abilities.can(kind))
    if not torch.cuda.is_available():
        built = "built for CUDA" if torch.version.cuda else "a CPU build"
        has_driver = shutil.which("nvidia-smi") is not None
        remedy = "a driver is here, but torch sees no GPU: install torch's CUDA build" if has_driver else None
        return Finding("accelerator", f"none ({built} of torch); the CPU computes in {kinds}", remedy)
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    count = torch.cuda.device_count()
    return Finding("accelerator", f"{count} × {abilities.name}, {memory:.0f} GiB each, computes in {kinds}")


def examine_instructions(cpu_flags: set[str]) -> Finding:
    """The trap of CPUs that announce AMX and do not execute it."""
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in cpu_flags]
    text = ", ".join(known) or "the system does not say"
    if "amx_bf16" not in cpu_flags or not dies_of_illegal_instruction(HALF_MATMUL, os.environ):
        return Finding("instructions", text)
    return Finding(
        "instructions",
        f"{text}; but amx_bf16 is announced and not executed",
        f"export {ISA_LIMIT}={ISA_WITHOUT_AMX} (training finds out and sets it by itself)",
    )


def examine_launcher() -> Finding:
    found = find_deepspeed()
    if found is None:
        return Finding("launcher", "no `deepspeed` command", INSTALL)
    return Finding("launcher", found)


def examine_cores(ranks: int, visible: int, allowed: float | None, environment: dict[str, str]) -> Finding:
    """Threads that ranks would take together against the cores they may use.

    Left alone, ranks share the cores that they see, and that is more than a control group may allow them.
    """
    cores = visible if allowed is None else max(1, min(visible, int(allowed)))
    share = max(1, cores // ranks)
    found = f"{cores}" if cores == visible else f"{cores} of the {visible} that are seen"
    mended = "unset OMP_NUM_THREADS: ranks share the cores by themselves"
    if cores < visible:
        mended = f"export OMP_NUM_THREADS={share}, or allow more cores: ranks would share all {visible} among them"
    threads = environment.get("OMP_NUM_THREADS")
    if ranks > cores:
        return Finding("cores", f"{found}, for {ranks} ranks", f"start at most {cores} ranks on this machine")
    if threads is None:
        return Finding("cores", f"{found}, {share} for each of {ranks} ranks", mended if cores < visible else None)
    if not threads.isdecimal() or int(threads) < 1:
        return Finding("cores", f"{found}; OMP_NUM_THREADS is {threads!r}, no number of threads", mended)
    total = int(threads) * ranks
    text = f"{found}; OMP_NUM_THREADS={threads} makes {total} threads in {ranks} ranks"
    if total > cores:
        return Finding("cores", text, mended)
    if int(threads) < share and not (torch and torch.cuda.is_available()):
        return Finding("cores", text, f"{cores - total} of them stay idle: export OMP_NUM_THREADS={share}")
    return Finding("cores", text)


def read_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[float | None, float | None]:
    """Cores and GiB that this process's control group may use, as containers and schedulers set them; None: no limit.

    In the second version's layout the strictest of the groups that it is in, or in the first version's files.
    """
    lines = own.read_text().splitlines() if own.is_file() else []
    inner = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    groups = [root.joinpath(*inner.split("/")[:depth]) for depth in range(len(inner.split("/")) + 1)]
    quotas = [_words(group / "cpu.max") for group in groups]
    quotas.append([*_words(root / "cpu" / "cpu.cfs_quota_us"), *_words(root / "cpu" / "cpu.cfs_period_us")])
    sizes = [_words(group / "memory.max") for group in groups] + [_words(root / "memory" / "memory.limit_in_bytes")]
    cores = [int(quota) / int(period) for quota, period in (q for q in quotas if len(q) == 2) if quota.isdecimal()]
    memory = [int(size) / GIB for (size,) in (s for s in sizes if len(s) == 1) if size.isdecimal()]
    return min(cores, default=None), min((size for size in memory if size < 2**30), default=None)  # 2^60 is "none"


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def examine_limits(cores: float | None, memory: float | None) -> Finding:
    """What a container or a scheduler allows, which is less than what the machine shows."""
    told = [f"{cores:g} cores"] if cores is not None else []
    told += [f"{memory:.1f} GiB of memory"] if memory is not None else []
    is_tight = memory is not None and memory < 4
    remedy = "allow more memory: BERT-base with AdamW takes about 4 GiB on a CPU" if is_tight else None
    return Finding("limits", ", ".join(told) or "none by a control group", remedy)


def examine_memory(meminfo: Path) -> Finding:
    if not meminfo.is_file():
        return Finding("memory", "the system does not say")
    sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    total, free = (int(sizes[key].split()[0]) * 1024 / GIB for key in ("MemTotal", "MemAvailable"))
    remedy = "close other programs: BERT-base with AdamW takes about 4 GiB on a CPU" if free < 4 else None
    return Finding("memory", f"{total:.0f} GiB, {free:.0f} free", remedy)


def examine_disk(folder: Path) -> Finding:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free / GIB
    if not there.is_dir():
        return Finding("disk", f"{there} is a file, not a folder", "pass another --output_dir")
    if not os.access(there, os.W_OK):
        return Finding("disk", f"{there} cannot be written", "pass another --output_dir")
    remedy = "make room: a checkpoint of BERT-base takes 1.3 GiB; --keep_last bounds their number" if free < 5 else None
    return Finding("disk", f"{free:.0f} GiB free in {there}", remedy)


if __name__ == "__main__":
    run_command(main)
