"""The machines of a run, compared before it: what each has, what differs, and how fast they reach each other."""

import hashlib
import os
import platform
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from uuid import uuid4

import psutil
import torch

from common.errors import UserError
from training.runtime import collectives
from training.runtime.ranks import RankInfo

GIB = 2**30
MIN_DISK_GIB = 5.0
MAX_CLOCK_SECONDS = 5.0  # of difference that is not worth mentioning
BANDWIDTH_BYTES = 2**24
MISSING = "missing"
PACKAGES = ("common", "data", "evaluation", "nvidia", "training")
SHOWN = 12  # characters of a digest


def describe_installation(rank_info: RankInfo, data_digest: str) -> dict[str, str]:
    """What must be equal on all machines, by name; nothing if the run has one. Takes a fraction of a second."""
    if rank_info.local_size == rank_info.world_size:
        return {}
    return {**read_versions(), "training data": data_digest[:SHOWN]}


def read_versions() -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("torch", "deepspeed")}
    return {"Python": platform.python_version(), **versions, "project": digest_of_project()}


def digest_of_project() -> str:
    """A digest of the sources that a run imports."""
    root = Path(__file__).parent.parent.parent
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return _digest(path.relative_to(root).as_posix().encode() + path.read_bytes() for path in paths)


def digest_of_data(folder: Path) -> str | None:
    """A digest of the manifests below `folder`, and of the names and sizes of its shards; None if there are none."""
    shards = sorted(path for pattern in ("*.hdf5", "*.h5") for path in folder.rglob(pattern))
    sizes = [f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode() for path in shards]
    manifests = [path.read_bytes() for path in sorted(folder.rglob("manifest*.json"))]
    return _digest([*sizes, *manifests]) if shards else None


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:SHOWN]


@dataclass(frozen=True)
class MachineReport:
    """What one machine found out about itself. Texts, because they are shown and compared."""

    host: str
    versions: dict[str, str]
    data: str  # digest
    sees_output: bool
    disk_gib: float
    gpus: str
    interface: str
    address: str  # that its own name has, where the other ranks look for it
    clock: float  # seconds since the epoch, at the same moment on all machines


@dataclass(frozen=True)
class LinkReport:
    """A collective over all machines."""

    latency: float  # seconds of the smallest all-reduce
    bandwidth: float  # bytes per second and rank that a large one moves


def all_ranks_report(rank_info: RankInfo, data: Path | None, output: Path) -> tuple[list[MachineReport], LinkReport]:
    """The report of each rank, on all ranks. Writes one small file to `output`, and removes it."""
    token = collectives.all_ranks_from_main(lambda: _write_token(output))
    collectives.all_ranks_barrier()
    clock = time.time()  # right after a collective, so that all read it at the same moment
    existing = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    report = MachineReport(
        host=socket.gethostname(),
        versions=read_versions(),
        data="" if data is None else digest_of_data(data) or MISSING,
        sees_output=token.is_file(),
        disk_gib=shutil.disk_usage(existing).free / GIB,
        gpus=describe_gpus(),
        interface=find_interface(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        address=_own_address(),
        clock=clock,
    )
    reports = collectives.all_ranks_gather(report)
    link = all_ranks_measure_link(rank_info.world_size)
    if rank_info.is_main:
        token.unlink(missing_ok=True)
    return reports, link


def _write_token(output: Path) -> Path:
    try:
        output.mkdir(parents=True, exist_ok=True)
        token = output.absolute() / f".doctor_{uuid4().hex}"
        token.touch()
    except OSError as error:
        raise UserError(f"{output}: cannot be written to ({error.strerror}); pass another --output_dir") from None
    return token


def all_ranks_measure_link(world_size: int) -> LinkReport:
    """Takes about a second on gigabit Ethernet."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    small, large = torch.zeros(1, device=device), torch.zeros(BANDWIDTH_BYTES // 4, device=device)
    latency = statistics.median(_all_ranks_time_sum(small) for _ in range(20))
    seconds = min(_all_ranks_time_sum(large) for _ in range(3))
    return LinkReport(latency, 2 * (world_size - 1) / world_size * BANDWIDTH_BYTES / seconds)


def _all_ranks_time_sum(values: torch.Tensor) -> float:
    began = time.monotonic()
    collectives.all_ranks_sum(values)
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.monotonic() - began


def find_interface(address: str, port: int) -> str:
    """The interface through which this machine reaches `address`. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            return str(name)
    return f"unknown ({own})"


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "unknown"


def describe_gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, driver {driver}"


def find_problems(reports: Sequence[MachineReport]) -> list[tuple[str, str]]:
    """What is wrong, with the machine's name first, and what to do about it. The first machine is the reference."""
    first, problems = reports[0], []
    for report in reports:
        host = report.host
        for name, version in report.versions.items():
            if version != (expected := first.versions.get(name)):
                text = f"{host}: {name} {version}, but {first.host} has {expected}"
                problems.append((text, "install the same on all machines"))
        if report.data == MISSING:
            problems.append((f"{host}: no shards in --data_path_prefix", "mount the folder there, or copy it"))
        elif report.data != first.data != MISSING:
            problems.append((f"{host}: other data ({report.data}) than {first.host} ({first.data})", "copy it again"))
        if not report.sees_output:
            problems.append((f"{host}: does not see --output_dir of {first.host}", "put it on a shared file system"))
        if report.disk_gib < MIN_DISK_GIB:
            problems.append((f"{host}: {report.disk_gib:.1f} GiB free in --output_dir", "free some space there"))
        if report.gpus != first.gpus:
            problems.append((f"{host}: GPUs {report.gpus}, but {first.host} has {first.gpus}", "use equal machines"))
        if report.address.startswith("127.") and len({each.host for each in reports}) > 1:
            remedy = "give it its real address in /etc/hosts, or export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            problems.append((f"{host}: its own name has the address {report.address}, which no other reaches", remedy))
        if abs(report.clock - first.clock) > MAX_CLOCK_SECONDS:
            seconds = report.clock - first.clock
            remedy = "run NTP there; training works, but the times in logs differ"
            problems.append((f"{host}: its clock is {seconds:+.0f} s from that of {first.host}", remedy))
    return problems
