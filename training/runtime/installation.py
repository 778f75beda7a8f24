"""What is installed on a machine, and must be the same on all machines of a run."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

from training.runtime.ranks import RankInfo

PACKAGES = ("common", "data", "evaluation", "nvidia", "training")
SHOWN = 12  # characters of a digest


def describe_installation(rank_info: RankInfo, data_digest: str) -> dict[str, str]:
    """What must be equal on all machines, by name; nothing if the run has one. Takes a fraction of a second."""
    if rank_info.local_size == rank_info.world_size:
        return {}
    return {**read_versions(), "training data": data_digest[:SHOWN]}


def read_versions() -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("torch", "deepspeed")}
    return {"Python": platform.python_version(), **versions, "project": digest_of_project()[:SHOWN]}


def digest_of_project() -> str:
    """A digest of the sources that a run imports."""
    root = Path(__file__).parent.parent.parent
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def digest_of_data(folder: Path) -> str | None:
    """A digest of the manifests below `folder`, and of the names and sizes of its shards; None if there are none."""
    shards = sorted(path for pattern in ("*.hdf5", "*.h5") for path in folder.rglob(pattern))
    if not shards:
        return None
    digest = hashlib.sha256()
    for path in shards:
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode())
    for path in sorted(folder.rglob("manifest*.json")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:SHOWN]
