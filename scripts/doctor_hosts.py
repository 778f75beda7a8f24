"""`doctor.py` on several machines: start it on the hosts of a hostfile, and print one table of all machines."""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common.console import console
from common.errors import RankLost, UserError
from common.words import aligned_table, counted

if TYPE_CHECKING:  # it imports torch, which may be what is missing
    from training.runtime.ranks import RankInfo

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
MAX_SECONDS = 60  # for all hosts together
REACH_SHARE = 0.25  # of it for ssh alone, so that a host that hangs leaves the others enough time
JOIN_SHARE = 0.67  # until all ranks have joined
COLUMNS = ("host", "Python", "torch", "deepspeed", "project", "data", "output", "disk", "clock", "interface", "GPUs")


def read_hosts(path: Path) -> list[str]:
    """The hosts of a hostfile of `deepspeed`: `worker-0 slots=8` on each line."""
    try:
        lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); expected lines like `worker-0 slots=8`") from None
    hosts = [words[0] for words in lines if words]
    if not hosts:
        raise UserError(f"{path}: no hosts; expected lines like `worker-0 slots=8`")
    return hosts


def check_hosts(hosts: Sequence[str], port: int, words: Sequence[str], seconds: float = MAX_SECONDS) -> int:
    """Run `doctor.py words` on all hosts at once, as ranks of one world; the exit code."""
    deadline = time.monotonic() + seconds
    answers = _run_on(dict.fromkeys(hosts, "true"), REACH_SHARE * seconds)
    failures = {host: reason for host, (_, _, reason) in answers.items() if reason}
    reached = [host for host in hosts if host not in failures]
    command = shlex.join([sys.executable, str(Path(__file__).with_name("doctor.py")), *words])
    commands = {}
    for rank, host in enumerate(reached):
        numbers = f"RANK={rank} WORLD_SIZE={len(reached)} LOCAL_RANK=0 LOCAL_SIZE=1"
        meeting = f"MASTER_ADDR={shlex.quote(reached[0])} MASTER_PORT={port}"
        commands[host] = f"cd {shlex.quote(str(Path.cwd()))} && exec env {numbers} {meeting} {command}"
    has_problems = False
    for rank, (host, (code, out, reason)) in enumerate(_run_on(commands, deadline - time.monotonic()).items()):
        if rank == 0 and out:  # the report
            console.say(out.rstrip())
            has_problems = code == 1
        elif reason:
            failures[host] = reason
    for host, reason in failures.items():
        console.say(f"! {host}: {reason}")
    return 1 if failures or has_problems else 0


def _run_on(commands: dict[str, str], seconds: float) -> dict[str, tuple[int, str, str]]:
    """Run a command on each host at the same time: exit code, output, and why it failed or ""."""
    deadline = time.monotonic() + seconds
    started = {
        host: subprocess.Popen([*SSH, host, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for host, command in commands.items()
    }
    results = {}
    for host, process in started.items():
        try:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            reason = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1] if process.returncode else ""
        except subprocess.TimeoutExpired:
            process.kill()
            out, reason = process.communicate()[0], f"no result within {seconds:.0f} s"
        results[host] = (process.returncode, out, reason)
    return results


def all_ranks_check_machines(
    rank_info: "RankInfo", data: Path | None, output: Path, seconds: float = MAX_SECONDS
) -> int:
    """As one of the ranks: join the others, compare the machines, and print the table on rank 0."""
    import torch

    from training.runtime import collectives
    from training.runtime.machine_check import all_ranks_report, find_problems
    from training.runtime.ranks import pick_device

    console.enable(rank_info.is_main)
    device = pick_device(rank_info) if torch.cuda.is_available() else torch.device("cpu")
    collectives.start(device, rank_info, seconds, join_timeout=timedelta(seconds=JOIN_SHARE * seconds))
    try:
        with collectives.reporting_lost_ranks():
            reports, link = all_ranks_report(rank_info, data, output)
    except RankLost as error:
        raise UserError(str(error)) from None
    collectives.leave()
    by_host = {report.host: report for report in reports}
    first = reports[0]
    rows = [
        (
            *(report.host, *report.versions.values(), report.data or "-", "seen" if report.sees_output else "NOT SEEN"),
            *(f"{report.disk_gib:.0f} GiB", f"{report.clock - first.clock:+.1f} s", report.interface, report.gpus),
        )
        for report in by_host.values()
    ]
    console.say("\n".join(aligned_table([COLUMNS, *rows])))
    console.say(
        f"all-reduce over {counted(len(reports), 'rank')} on {counted(len(by_host), 'machine')}: "
        f"latency {1e3 * link.latency:.2f} ms, {link.bandwidth / 1e9:.2f} GB/s per rank"
    )
    problems = find_problems(list(by_host.values()))
    for text, remedy in problems:
        console.say(f"! {text}\n  → {remedy}")
    console.say(f"! {counted(len(problems), 'problem')} found" if problems else "no problems found")
    return 1 if problems and rank_info.is_main else 0
