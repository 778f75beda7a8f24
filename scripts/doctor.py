"""Check this machine before a run: versions, accelerator and its speed, launcher, cores, limits, memory, disk.

With --hostfile, or under srun, torchrun or mpirun: check several machines together.
"""

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from common.console import console
from common.errors import run_command
from common.hardware import choose_accelerator
from common.help import Parser, positive_int
from common.memory import CONTROL_GROUPS, OWN_GROUP, find_control_groups
from common.stores import is_url
from common.words import counted
from scripts.doctor_hosts import MAX_SECONDS, all_ranks_check_machines, check_hosts, read_hosts
from training.runtime.launchers import find_deepspeed, given_rank

try:
    choose_accelerator()
    import torch

    from nvidia.config import BertConfig
    from nvidia.cpu.amx import HALF_MATMUL, ISA_LIMIT, ISA_WITHOUT_AMX, dies_of_illegal_instruction, read_cpu_flags
    from training.metrics.flops import measure_speeds
    from training.runtime.precision import find_abilities
    from training.runtime.ranks import read_rank_info
except (ImportError, OSError):  # missing or broken, which the report lists like any other problem
    torch = None  # type: ignore[assignment]

GIB = 2**30
MIN_SPEEDUP = 1.2  # of a precision that is recommended; the rest of a step does not get faster
INSTALL = "run pip install -r requirements.txt, then activate .venv"
BASE_MEMORY = "BERT-base with AdamW takes about 4 GiB on a CPU"
MAX_NAMED = 4  # failed or unavailable cases of a test that the report names
UNKNOWN = "unknown (the system does not report it)"


@dataclass(frozen=True)
class Finding:
    """The result of one check; `remedy` is None if all is well. `is_advice`: a run works without it."""

    topic: str
    text: str
    remedy: str | None = None
    is_advice: bool = False

    @property
    def is_problem(self) -> bool:
        return self.remedy is not None and not self.is_advice


def local_folder(text: str) -> Path:
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"found the URL {text}, expected a folder; leave the flag out: the start of a run checks data behind a URL"
        )
    return Path(text)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="doctor.py", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=positive_int, metavar="N", help="ranks to start here (default: one per GPU)")
    output = "output folder of the run (default: .)"
    add("--output_dir", type=Path, default=Path(), metavar="DIR", help=output)
    add("--hostfile", type=Path, metavar="FILE", help="check these machines together, through ssh")
    add("--master_port", type=positive_int, default=29500, metavar="N", help="port on the first host")
    timeout = f"give up on several machines after this time (default: {MAX_SECONDS})"
    add("--timeout", type=positive_int, default=MAX_SECONDS, metavar="SECONDS", help=timeout)
    add("--data_path_prefix", type=local_folder, metavar="DIR", help="data of the run, on several machines")
    accelerator = "also run the tests of tests/gpu on this GPU, about a minute, and report what may be trusted"
    add("--accelerator", action="store_true", help=accelerator)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; the exit code is 1 if there is a problem, and 0 if there is only advice."""
    flags = build_parser().parse_args(argv)
    if flags.hostfile is not None:
        data = [] if flags.data_path_prefix is None else ["--data_path_prefix", str(flags.data_path_prefix.absolute())]
        words = ["--output_dir", str(flags.output_dir.absolute()), "--timeout", str(flags.timeout), *data]
        return check_hosts(read_hosts(flags.hostfile), flags.master_port, words, flags.timeout)
    if torch is not None and given_rank() is not None and (rank_info := read_rank_info()).world_size > 1:
        return all_ranks_check_machines(rank_info, flags.data_path_prefix, flags.output_dir, flags.timeout)
    findings = check_machine(flags.ranks or max(1, torch.cuda.device_count() if torch else 1), flags.output_dir)
    if flags.accelerator:
        findings += check_trust()
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        mark = "!" if finding.is_problem else "-" if finding.remedy else " "
        console.say(f"{mark} {finding.topic:<{width}}  {finding.text}")
        if finding.remedy:
            console.say(f"  {'':<{width}}  → {finding.remedy}")
    problems = sum(finding.is_problem for finding in findings)
    advice = sum(finding.remedy is not None for finding in findings) - problems
    console.say(
        (f"! {counted(problems, 'problem')} found in {len(findings)} checks" if problems else "no problems found")
        + (f"; - advice on {counted(advice, 'check')}, without which a run works too" if advice else "")
    )
    return 1 if problems else 0


def check_machine(ranks: int, output_dir: Path) -> list[Finding]:
    allowed, memory = read_limits()
    without_torch = [Finding("accelerator", "unknown, because torch cannot be imported", INSTALL)]
    launcher, is_new_enough = find_deepspeed(), sys.version_info >= (3, 11)
    return [
        Finding("python", platform.python_version(), None if is_new_enough else "use Python 3.11 or newer"),
        *check_versions((PROJECT / "requirements.txt").read_text()),
        *(check_computing() if torch else without_torch),
        Finding("launcher", launcher or "the `deepspeed` command was not found", None if launcher else INSTALL),
        check_cores(ranks, len(os.sched_getaffinity(0)), allowed, dict(os.environ)),
        check_limits(allowed, memory),
        check_memory(Path("/proc/meminfo")),
        check_disk(output_dir),
    ]


def check_versions(requirements: str) -> list[Finding]:
    """Compare the installed versions with the pinned ones."""
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
        text = found if found == wanted else f"{found}, but this project is tested with {wanted}"
        findings.append(Finding(name, text, remedy, is_advice=found != "missing"))
    return findings


def check_computing() -> list[Finding]:
    speeds = measure_speeds(BertConfig(vocab_size=30528))
    return [check_accelerator(), check_instructions(read_cpu_flags()), check_speed(speeds)]


def check_speed(speeds: dict[str, float]) -> Finding:
    """Recommend the fastest precision: depending on the processor, bf16 is twice or half as fast as fp32."""
    text = ", ".join(f"{name} {speed / 1e9:,.0f}" for name, speed in speeds.items())
    fastest = max(speeds, key=lambda name: speeds[name])
    gain = speeds[fastest] / speeds["fp32"]
    advice = f"; --precision {fastest} is {gain:.1f} times as fast as fp32" if gain > MIN_SPEEDUP else ""
    return Finding("matmul", f"{text} GFLOP/s{advice}")


def check_accelerator() -> Finding:
    abilities = find_abilities()
    kinds = ", ".join(abilities.precisions)
    if not torch.cuda.is_available():
        built = "built for CUDA" if torch.version.cuda else "a CPU build"
        has_driver = shutil.which("nvidia-smi") is not None
        remedy = "a driver is installed, but torch finds no GPU; install its CUDA build" if has_driver else None
        return Finding("accelerator", f"none ({built} of torch); the CPU supports {kinds}", remedy)
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    count = torch.cuda.device_count()
    return Finding("accelerator", f"{count} × {abilities.name}, {memory:.0f} GiB each, supports {kinds}")


def check_trust() -> list[Finding]:
    """Run tests/gpu: attention backends against the plain formula, dropout, ZeRO stages, resume, export, compile."""
    topic = "GPU tests"
    if not torch:
        return [Finding(topic, "not run, because torch cannot be imported", INSTALL)]
    if not torch.cuda.is_available():
        remedy = "run it on a machine with a GPU"
        return [Finding(topic, "not run, because torch finds no CUDA device", remedy, is_advice=True)]
    if importlib.util.find_spec("pytest") is None:
        return [Finding(topic, "not run, because pytest is missing", "pip install -r requirements-dev.txt")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", f"--junitxml={report}"]
        outcome = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
        if not report.is_file():
            return [Finding(topic, f"pytest ended with code {outcome.returncode}", outcome.stdout[-500:].strip())]
        return read_trust(report.read_text())


def read_trust(report: str) -> list[Finding]:
    """One finding per test of a JUnit report: how many of its cases passed, which failed, which cannot run here."""
    cases: dict[str, tuple[list[str], list[str], list[str]]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        test, _, name = case.get("name", "").removesuffix("]").partition("[")
        passed, failed, skipped = cases.setdefault(test, ([], [], []))
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        reason = "" if outcome is None else outcome.get("message", "").split("\n")[0]
        if outcome is None:
            passed.append(name)
        elif outcome.tag == "skipped":
            skipped.append(reason or name)
        else:
            failed.append(f"{name} ({reason})")
    findings = []
    for test, (passed, failed, skipped) in cases.items():
        parts = [f"{len(passed)} passed"] + ([f"{len(failed)} failed"] if failed else [])
        parts += [f"not available: {'; '.join(sorted(set(skipped))[:MAX_NAMED])}"] if skipped else []
        remedy = f"do not rely on {'; '.join(failed[:MAX_NAMED])}" if failed else None
        findings.append(Finding("GPU", f"{test.removeprefix('test_').replace('_', ' ')}: {', '.join(parts)}", remedy))
    return findings


def check_instructions(cpu_flags: set[str]) -> Finding:
    """Detect CPUs that report AMX but cannot execute it, as some virtual machines do."""
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in cpu_flags]
    text = ", ".join(known) or UNKNOWN
    if "amx_bf16" not in cpu_flags or not dies_of_illegal_instruction(HALF_MATMUL, os.environ):
        return Finding("instructions", text)
    remedy = f"export {ISA_LIMIT}={ISA_WITHOUT_AMX} (training sets it automatically)"
    return Finding("instructions", f"{text}; amx_bf16 is reported but cannot be executed", remedy, is_advice=True)


def check_cores(num_ranks: int, visible: int, allowed: float | None, environment: dict[str, str]) -> Finding:
    """Compare the threads of all ranks with the cores they may use; what differs costs speed only.

    By default ranks share the visible cores, which can be more than a control group allows.
    """
    cores = visible if allowed is None else max(1, min(visible, int(allowed)))
    share = max(1, cores // num_ranks)
    found = f"{cores}" if cores == visible else f"{cores} of {visible} visible"
    ranks = counted(num_ranks, "rank")
    remedy = "unset OMP_NUM_THREADS; ranks then share the cores"
    if cores < visible:
        remedy = f"export OMP_NUM_THREADS={share}, or allow more cores; by default ranks share all {visible}"
    threads = environment.get("OMP_NUM_THREADS")
    if num_ranks > cores:
        advice = f"start at most {counted(cores, 'rank')} on this machine"
        return Finding("cores", f"{found}, for {ranks}", advice, True)
    if threads is None:
        return Finding("cores", f"{found}; {share} per rank for {ranks}", remedy if cores < visible else None, True)
    if not threads.isdecimal() or int(threads) < 1:
        return Finding("cores", f"{found}; OMP_NUM_THREADS is {threads!r}, expected a number of threads", remedy, True)
    total = int(threads) * num_ranks
    text = f"{found}; OMP_NUM_THREADS={threads} gives {counted(total, 'thread')} for {ranks}"
    if total > cores:
        return Finding("cores", text, remedy, True)
    if int(threads) < share and not (torch and torch.cuda.is_available()):
        return Finding("cores", text, f"idle cores: {cores - total}; export OMP_NUM_THREADS={share}", True)
    return Finding("cores", text)


def read_limits(root: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> tuple[float | None, float | None]:
    """Cores and GiB that the control groups of this process allow, as set by containers and schedulers.

    None means no limit. Reads cgroup v2, where the strictest of the nested groups counts, and v1.
    """
    groups = find_control_groups(root, own)
    quotas = [_words(group / "cpu.max") for group in groups]
    quotas.append([*_words(root / "cpu" / "cpu.cfs_quota_us"), *_words(root / "cpu" / "cpu.cfs_period_us")])
    sizes = [_words(group / "memory.max") for group in groups] + [_words(root / "memory" / "memory.limit_in_bytes")]
    cores = [int(quota) / int(period) for quota, period in (q for q in quotas if len(q) == 2) if quota.isdecimal()]
    memory = [int(size) / GIB for (size,) in (s for s in sizes if len(s) == 1) if size.isdecimal()]
    limits = [size for size in memory if size < 2**30]  # v1 writes about 2^63 bytes for "no limit"
    return min(cores, default=None), min(limits, default=None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def check_limits(cores: float | None, memory: float | None) -> Finding:
    """Limits of a container or a scheduler, which can be lower than what the machine has."""
    limits = [f"{cores:g} cores"] if cores is not None else []
    limits += [f"{memory:.1f} GiB of memory"] if memory is not None else []
    remedy = f"allow more memory; {BASE_MEMORY}" if memory is not None and memory < 4 else None
    return Finding("limits", ", ".join(limits) or "none set by a control group", remedy, is_advice=True)


def check_memory(meminfo: Path) -> Finding:
    if not meminfo.is_file():
        return Finding("memory", UNKNOWN)
    sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    total, free = (int(sizes[key].split()[0]) * 1024 / GIB for key in ("MemTotal", "MemAvailable"))
    remedy = f"close other programs; {BASE_MEMORY}" if free < 4 else None
    return Finding("memory", f"{total:.0f} GiB, {free:.0f} free", remedy, is_advice=True)


def check_disk(folder: Path) -> Finding:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / GIB
    if not existing.is_dir():
        return Finding("disk", f"{existing} is a file, not a folder", "pass another --output_dir")
    if not os.access(existing, os.W_OK):
        return Finding("disk", f"{existing} is not writable", "pass another --output_dir")
    remedy = "free some space, or set --keep_last; a checkpoint of BERT-base takes 1.3 GiB" if free < 5 else None
    return Finding("disk", f"{free:.0f} GiB free in {existing}", remedy, is_advice=True)


if __name__ == "__main__":
    run_command(main)
