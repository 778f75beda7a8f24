"""The rank of a process: from the variables of a launcher or of srun, or alone."""

import pytest
import torch

from common.errors import UserError
from tests.unit.training.in_process import own_environment
from training.runtime.ranks import RankInfo, pick_device, read_rank_info, share_cores


def test_a_process_alone_is_a_world_of_one() -> None:
    environment: dict[str, str] = {}
    assert read_rank_info(environment) == RankInfo(rank=0, local_rank=0, world_size=1, local_size=1)
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 < int(environment["MASTER_PORT"]) < 65536


def test_launchers_variables_are_kept() -> None:
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", "MASTER_PORT": "1"}
    environment["MASTER_ADDR"] = "node-a"
    assert read_rank_info(environment) == RankInfo(rank=5, local_rank=1, world_size=8, local_size=4)
    assert environment["MASTER_PORT"] == "1"


def test_sruns_variables() -> None:
    environment = {
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "16",
        "SLURM_NTASKS_PER_NODE": "8",
        "MASTER_ADDR": "node-a",
    }
    assert read_rank_info(environment) == RankInfo(rank=9, local_rank=1, world_size=16, local_size=8)
    assert environment["RANK"] == "9"


HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
MASTER = {"MASTER_ADDR": "node-a"}


@pytest.mark.parametrize(
    "variables",
    [
        {**OPEN_MPI, **MASTER},
        {**HYDRA, **MASTER},
        {**HYDRA, **MASTER, "WORLD_SIZE": "4", "LOCAL_SIZE": "2"},  # as `deepspeed --launcher mpich` exports them
        {**OPEN_MPI, **MASTER, **BATCH_SCRIPT},  # mpirun inside of sbatch
        {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", **MASTER}
        | {"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
        {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", **MASTER},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2", **MASTER}
        | {"PMI_RANK": "3", "PMI_SIZE": "4"},  # srun --mpi=pmi2
    ],
)
def test_variables_of_mpi_launchers(variables: dict[str, str]) -> None:
    environment = dict(variables)
    assert read_rank_info(environment) == RankInfo(rank=3, local_rank=1, world_size=4, local_size=2)
    assert (environment["RANK"], environment["LOCAL_SIZE"]) == ("3", "2")


def test_mpi_ranks_of_one_machine_need_no_address() -> None:
    environment = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert read_rank_info(environment).world_size == 4
    assert environment["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (OPEN_MPI, r"Open MPI started this process, but MASTER_ADDR is not set.*-x MASTER_ADDR=worker-0"),
        ({**HYDRA, **MASTER, "WORLD_SIZE": "1"}, r"as rank 3 of 4, but WORLD_SIZE is 1\. Unset"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", **MASTER},
            r"MPICH or Intel MPI .*not set: MPI_LOCALRANKID, MPI_LOCALNRANKS",
        ),
        ({"PMIX_RANK": "1"}, r"PMIX_RANK is 1, so a launcher started this process among others"),
        ({"FLUX_TASK_RANK": "2"}, r"FLUX_TASK_RANK is 2.*set RANK=0 and WORLD_SIZE=1 if every process is a run"),
        ({"LOCAL_RANK": "1"}, r"LOCAL_RANK is 1, so a launcher"),
    ],
)
def test_a_process_that_cannot_be_placed_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_rank_info(dict(variables))


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0"},
        BATCH_SCRIPT,
    ],
)
def test_signs_of_a_launcher_of_one_process_or_of_separate_runs(variables: dict[str, str]) -> None:
    assert read_rank_info(dict(variables)).world_size == 1


def test_a_world_of_one_needs_no_address() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1"}
    assert read_rank_info(environment) == RankInfo(rank=0, local_rank=0, world_size=1, local_size=1)
    assert {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys()


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(UserError, match=r"(?s)WORLD_SIZE: found 'two'.*RANK: found '-1'.*LOCAL_RANK: found 'x'"):
        read_rank_info({"RANK": "-1", "WORLD_SIZE": "two", "LOCAL_RANK": "x"})


def test_one_task_of_srun_is_a_world_of_one() -> None:
    environment = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert read_rank_info(environment).world_size == 1


def test_a_local_rank_beyond_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"LOCAL_RANK: found 2, but this machine has 2 GPUs\. .*CUDA_VISIBLE_DEVICES"):
        pick_device(RankInfo(rank=2, local_rank=2, world_size=4, local_size=4))


@pytest.mark.parametrize(("ranks", "cores", "share"), [(1, 8, 8), (2, 8, 4), (2, 2, 1), (3, 8, 2), (4, 2, 1)])
def test_ranks_share_the_cores_unless_the_user_sets_threads(
    ranks: int, cores: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(cores)))
    with own_environment():
        for rank in range(ranks):
            torch.set_num_threads(7)
            assert share_cores(RankInfo(rank, rank, ranks, ranks), {}) == share
        torch.set_num_threads(7)
        share_cores(RankInfo(0, 0, ranks, ranks), {"OMP_NUM_THREADS": "7"})
        assert torch.get_num_threads() == 7  # set by the user


AGENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node-a"}


@pytest.mark.parametrize(
    ("machines", "restarts", "is_shared", "is_refused"),
    [("1", "3", "True", False), ("2", "0", "True", False), ("2", "3", "False", False), ("2", "3", "True", True)],
)
def test_restarts_on_several_machines_need_a_new_store(
    machines: str, restarts: str, is_shared: str, is_refused: bool
) -> None:
    environment = {**AGENT, "GROUP_WORLD_SIZE": machines, "TORCHELASTIC_MAX_RESTARTS": restarts}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = is_shared
    if is_refused:
        with pytest.raises(UserError, match="SHARE_RDZV_TCP_STORE: it is not set, but torchrun runs on 2"):
            read_rank_info(environment)
    else:
        assert read_rank_info(environment).world_size == 2


@pytest.mark.parametrize("threads", ["2", "4,2"])
def test_openmps_thread_counts_are_taken(threads: str) -> None:
    with own_environment():
        assert share_cores(RankInfo(0, 0, 1, 1), {"OMP_NUM_THREADS": threads}) >= 1
