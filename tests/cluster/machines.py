"""Machines of a test: namespaces of this one, with their own network, host name, processes and mounts.

Their only network is a link between them. Each lives as long as the pipe to its first process is open, so that nothing
is left behind however a test ends.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support import PROJECT

PROGRAMS = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "sshd", "pdsh")
# Seconds after which a test fails, whatever it waits for: no test may depend on how busy the machine is.
LAST_RESORT = 600.0
PATHS = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The first process of a machine: it sets the machine up, reports that, and ends with the pipe to the test.
INIT = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/sshd
hostname {name}
for file in hosts ssh/ssh_config; do mount --bind {folder}/$(basename $file) /etc/$file; done
ip link set lo up
echo ready
set +e
read -r _
"""
SSHD = """\
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/{name}.pid
PermitRootLogin yes
StrictModes no
UsePAM no
SetEnv {variables}
"""
SSH = """\
Host *
    IdentityFile {folder}/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    ConnectTimeout 60
    ServerAliveInterval 0
"""


def find_missing(programs: Sequence[str] = PROGRAMS) -> str | None:
    """Why machines cannot be made here; None if they can."""
    missing = [name for name in programs if shutil.which(name, path=PATHS) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    trial = subprocess.run(["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "true"], capture_output=True)
    return f"namespaces are not permitted: {trial.stderr.decode().strip()}" if trial.returncode else None


class Machine:
    """One machine. `folder` is shared by all machines of a test, and holds the keys."""

    def __init__(self, folder: Path, name: str, address: str) -> None:
        self.folder, self.name, self.address = folder, name, address
        # A session of its own: Ctrl-C in the terminal of the tests ends a machine through its pipe.
        unshare = ["unshare", "--net", "--uts", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child"]
        self._outer = subprocess.Popen(
            [*unshare, "bash", "-c", INIT.format(folder=folder, name=name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{name}.log").open("w"),
            text=True,
            start_new_session=True,
        )
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == "ready\n", f"{name} did not start"
        self.init = psutil.Process(self._outer.pid).children()[0]

    def command(self, *words: str) -> list[str]:
        """`words` as a command of the test's own machine that runs them on this one."""
        inside = ["nsenter", "--target", str(self.init.pid), "--net", "--uts", "--pid", "--mount", "--wd=."]
        return [*inside, "env", f"PATH={PATHS}", *words]

    def run(self, *words: str, timeout: float = LAST_RESORT) -> str:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def start_sshd(self, **variables: str) -> None:
        """`variables` are set in every session."""
        config = self.folder / f"{self.name}.sshd"
        settings = {"PATH": PATHS, "OMP_NUM_THREADS": "1", **variables}
        assignments = " ".join(f'"{name}={value}"' for name, value in settings.items())
        config.write_text(SSHD.format(folder=self.folder, name=self.name, variables=assignments))
        self.run("/usr/sbin/sshd", "-f", str(config))

    def stop_sshd(self) -> None:
        """Connections that exist stay."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if process.name() == "sshd" and process.ppid() == self.init.pid:
                    process.kill()
                    process.wait(LAST_RESORT)

    def cut_link(self) -> None:
        """As if the cable was pulled: packets are lost, and no connection is reset."""
        self.run("ip", "link", "set", "eth0", "down")

    def mend_link(self) -> None:
        self.run("ip", "link", "set", "eth0", "up")

    def shift_clock(self, seconds: int) -> None:
        """The clock that Python programs of this machine read; the system has one for all namespaces.

        It changes a start-up file of Python that other machines go on seeing as it is.
        """
        site = Path(psutil.__file__).parent.parent
        startup = min(site.glob("*.pth"), default=None)
        if startup is None:
            pytest.skip(f"no .pth file in {site} to change the clock with")
        changed = self.folder / startup.name
        change = f"time.__dict__.update(time=(lambda real: lambda: real() + {seconds})(time.time), is_shifted=True)"
        shift = f"import time; hasattr(time, 'is_shifted') or {change}\n"  # Python may read the file twice
        changed.write_text(f"{startup.read_text().rstrip()}\n{shift}")
        self.run("mount", "--bind", str(changed), str(startup))

    def processes(self) -> list[psutil.Process]:
        """All but the first one, except those that have ended and not been waited for."""
        if not self.init.is_running():
            return []
        found = []
        inside = (Path(f"/proc/{self.init.pid}/ns/pid")).readlink()
        for process in psutil.process_iter(["pid", "status"]):
            with suppress(OSError, psutil.NoSuchProcess):
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == inside and process != self.init:
                    found.append(process)
        return [process for process in found if process.info["status"] != psutil.STATUS_ZOMBIE]

    def ranks(self) -> list[psutil.Process]:
        return [process for process in self.processes() if _is_rank(process)]

    def lose_power(self) -> None:
        """All its processes end at once, and no connection is closed. It can be connected again."""
        self.cut_link()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def power_off(self) -> None:
        """All its processes end at once, and its address no longer answers; nor does the other end of its link."""
        with suppress(psutil.NoSuchProcess):
            self.init.kill()
        self._outer.wait(LAST_RESORT)
        assert self._outer.stdin is not None
        self._outer.stdin.close()


def _is_rank(process: psutil.Process) -> bool:
    """Not a launcher that has the script in its command line, nor a worker of the loader."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return "python" in words[:1][0].rpartition("/")[2] and "deepspeed_train.py" in words[1:3] if words else False


def write_shared_files(folder: Path, addresses: dict[str, str]) -> None:
    """Keys, and the files that are mounted over those of /etc. `addresses`: of each machine's name."""
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {name}\n" for name, a in addresses.items()))
    (folder / "ssh_config").write_text(SSH.format(folder=folder))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)


def connect(one: Machine, other: Machine) -> None:
    """A link between two machines, each end called eth0."""
    ends = ["ip", "link", "add", "eth0", "netns", str(one.init.pid), "type", "veth"]
    subprocess.run([*ends, "peer", "name", "eth0", "netns", str(other.init.pid)], check=True)
    for machine in (one, other):
        machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        machine.run("ip", "link", "set", "eth0", "up")


@contextmanager
def two_machines(folder: Path) -> Generator[tuple[Machine, Machine]]:
    addresses = {"worker-0": "10.77.0.1", "worker-1": "10.77.0.2"}
    write_shared_files(folder, addresses)
    machines: list[Machine] = []
    try:
        machines += (Machine(folder, name, address) for name, address in addresses.items())
        connect(*machines)
        for machine in machines:
            machine.start_sshd()
        yield machines[0], machines[1]
    finally:
        for machine in machines:
            machine.power_off()


@contextmanager
def started(machine: Machine, words: Sequence[str], output: Path, **env: str) -> Generator[subprocess.Popen[str]]:
    """A command on a machine, in a session of its own; it is killed at the end. `output` gets all it prints."""
    with output.open("a") as stream:
        process = subprocess.Popen(
            machine.command(*(f"{name}={value}" for name, value in env.items()), *words),
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_signals,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _hear_signals() -> None:
    """The tests may run below nohup or in the background, where these are ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(is_true: Callable[[], object], what: str, seconds: float = LAST_RESORT) -> None:
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < seconds, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
