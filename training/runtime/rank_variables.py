"""The environment variables with which launchers number the processes they start. Imports nothing that takes time."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherVariables:
    """What a launcher calls the variables that torch's launchers set."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str

    def is_in(self, environment: Mapping[str, str]) -> bool:
        return self.rank in environment

    def list_missing(self, environment: Mapping[str, str]) -> list[str]:
        names = (self.rank, self.world_size, self.local_rank, self.local_size)
        return [name for name in names if name not in environment]


SRUN = LauncherVariables("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
# The first of which all variables are set counts. srun is behind those that start their processes through it, and
# before the bare PMI variables that it sets itself.
KNOWN_LAUNCHERS = (
    LauncherVariables(
        "mpirun of Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    LauncherVariables(
        "mpirun of MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    LauncherVariables("mpirun of MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SRUN,
    LauncherVariables("a PMI launcher", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    LauncherVariables(
        "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
    ),
)
# Set for each process by launchers that do not give all four numbers.
SIGNS = ("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "MPI_LOCALRANKID", "LOCAL_RANK")


def has_launcher(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has numbered this process."""
    return "RANK" in environment or any(known.is_in(environment) for known in KNOWN_LAUNCHERS)


def printed_rank(environment: Mapping[str, str]) -> str:
    """This process's rank as its launcher writes it, "0" without a launcher."""
    names = ("RANK", *(known.rank for known in KNOWN_LAUNCHERS))
    return next((environment[name] for name in names if name in environment), "0")
