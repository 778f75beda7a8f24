"""The environment variables with which launchers number the processes they start. Imports nothing that takes time."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from common.errors import UserError

OWN_RUN = "set RANK=0 and WORLD_SIZE=1 if every process is a run of its own"


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


def take_over(environment: MutableMapping[str, str]) -> bool:
    """Set torch's variables from those of the launcher; False if there is none and the process is alone.

    UserError if a launcher has started this process among others, and not said as which.
    """
    found = next((known for known in KNOWN_LAUNCHERS if not known.list_missing(environment)), None)
    if found is SRUN and not _is_started_by_srun(environment):
        found = None
    if found is None:
        _refuse_unplaced(environment)
        return False
    numbers = {
        "RANK": environment[found.rank],
        "WORLD_SIZE": environment[found.world_size],
        "LOCAL_RANK": environment[found.local_rank],
        "LOCAL_SIZE": environment[found.local_size],
    }
    contradicting = [
        f"{name} is {environment[name]}" for name in numbers if environment.get(name, numbers[name]) != numbers[name]
    ]
    if contradicting:
        raise UserError(
            f"environment variables: {found.launcher} started this process as rank {numbers['RANK']} of "
            f"{numbers['WORLD_SIZE']}, but {', '.join(contradicting)}. Unset what was exported by hand"
        )
    if numbers["WORLD_SIZE"] != "1" and "MASTER_ADDR" not in environment:
        if found is SRUN or numbers["LOCAL_SIZE"] != numbers["WORLD_SIZE"]:
            raise UserError(_missing_address(found))
        environment["MASTER_ADDR"] = "127.0.0.1"
    environment.update(numbers)
    return True


def _missing_address(found: LauncherVariables) -> str:
    start = f"{found.launcher} started this process, but MASTER_ADDR is not set; ranks need it to find each other"
    if found is SRUN:
        return f"{start}. Start it with scripts/slurm.sh, or export MASTER_ADDR (the first node's name) and MASTER_PORT"
    return (
        f"{start}. Export the name of rank 0's machine, for example with "
        f'`deepspeed --launcher openmpi --launcher_args "-x MASTER_ADDR=worker-0"`'
    )


def _is_started_by_srun(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks of srun, or a single one with MASTER_ADDR set.

    A batch script has srun's variables too, but not those of a step.
    """
    return "MASTER_ADDR" in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _refuse_unplaced(environment: Mapping[str, str]) -> None:
    for known in KNOWN_LAUNCHERS:
        if not known.is_in(environment) or environment.get(known.world_size) == "1":
            continue
        if known is SRUN and not _is_started_by_srun(environment):
            continue
        missing = known.list_missing(environment)
        advice = "Start with `deepspeed`, `torchrun` or srun"
        if known is SRUN:
            advice = "Start it with scripts/slurm.sh, or pass srun --ntasks-per-node"
        raise UserError(
            f"environment variables: {known.launcher} started this process ({known.rank} is "
            f"{environment[known.rank]}), but these are not set: {', '.join(missing)}; expected them, because every "
            f"process would train alone and overwrite the others' files otherwise. {advice}, or {OWN_RUN}"
        )
    signs = [f"{name} is {environment[name]}" for name in SIGNS if environment.get(name, "0") != "0"]
    if signs and not any(environment.get(known.world_size) == "1" for known in KNOWN_LAUNCHERS):
        raise UserError(
            f"environment variables: {', '.join(signs)}, so a launcher started this process among others, but RANK and "
            f"WORLD_SIZE are not set; expected both. Start with `deepspeed`, `torchrun` or srun, or {OWN_RUN}"
        )
