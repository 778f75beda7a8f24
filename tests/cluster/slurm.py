"""A real Slurm on the machines of a test: munged and slurmd on each, slurmctld on the first."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.machines import LAST_RESORT, PATHS, Machine, wait_until
from tests.support import PROJECT

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
CPUS = 4  # that each machine claims to have
CONFIG = """\
ClusterName=test
SlurmctldHost=worker-0
SlurmUser=root
AuthInfo=socket=/run/munge/socket
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=300
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=requeue_setup_env_fail,sched_interval=2
NodeName=worker-0 NodeAddr=10.77.0.1 CPUs={cpus} State=UNKNOWN
NodeName=worker-1 NodeAddr=10.77.0.2 CPUs={cpus} State=UNKNOWN
PartitionName=normal Nodes=worker-[0-1] Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
PartitionName=urgent Nodes=worker-[0-1] State=UP PriorityTier=10
"""


class Slurm:
    def __init__(self, machines: Sequence[Machine], folder: Path) -> None:
        missing = [name for name in PROGRAMS if shutil.which(name, path=PATHS) is None]
        if missing:
            pytest.skip(f"not installed: {', '.join(missing)}")
        self.machines, self.folder = machines, folder
        folder.mkdir()
        (folder / "state").mkdir()
        self.config = folder / "slurm.conf"
        self.config.write_text(CONFIG.format(folder=folder, cpus=CPUS))
        key = folder / "munge.key"
        key.write_bytes(b"0123456789abcdef" * 8)
        key.chmod(0o400)
        for machine in machines:  # each has its own /run
            machine.run("mkdir", "-p", "/run/munge")
            munge = ["--socket=/run/munge/socket", f"--log-file={folder}/munged-{machine.name}.log"]
            munge += [f"--key-file={key}", "--pid-file=/run/munge/pid", "--seed-file=/run/munge/seed"]
            machine.run("munged", "--force", *munge)
        self._start(machines[0], "slurmctld")
        for machine in machines:
            self._start(machine, "slurmd", "-N", machine.name)
        wait_until(self._is_ready, "two idle nodes")

    def _start(self, machine: Machine, program: str, *words: str) -> None:
        machine.run(*self._with_config(program), "-f", str(self.config), *words)

    def _with_config(self, *words: str) -> list[str]:
        return ["env", f"SLURM_CONF={self.config}", *words]

    def _is_ready(self) -> bool:
        states = self.ask("sinfo", "-h", "-N", "-p", "normal", "-o", "%T").split()
        return states == ["idle", "idle"]

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            self.machines[0].command(*self._with_config(*words)),
            capture_output=True,
            text=True,
            timeout=LAST_RESORT,
            cwd=PROJECT,
        )
        return done.stdout if done.returncode == 0 else f"error: {done.stderr}"

    def command(self, *words: str) -> list[str]:
        return self._with_config(*words)

    def submit(self, *words: str) -> int:
        answer = self.ask("sbatch", "--parsable", *words)
        assert answer.strip().isdecimal(), answer
        return int(answer)

    def show(self, job: int, key: str) -> str:
        """A field of `scontrol show job`, such as JobState."""
        fields = self.ask("scontrol", "show", "job", str(job)).split()
        return next((field.partition("=")[2] for field in fields if field.startswith(f"{key}=")), "")

    def wait_for(self, job: int, *states: str) -> str:
        wait_until(lambda: self.show(job, "JobState") in states, f"job {job} in {', '.join(states)}")
        return self.show(job, "JobState")

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("slurm*.log")))
