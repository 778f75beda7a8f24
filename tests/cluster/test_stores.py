"""Without a shared disk: data and checkpoints in a store that speaks S3, and disks that only one machine has."""

import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import h5py

from common.processes import USER_ERROR_EXIT_CODE
from tests.cluster.machines import LAST_RESORT, Machine, started, wait_until
from tests.cluster.runs import OUTPUT, documented, printed, run_to_end
from tests.cluster.test_launchers import documented_deepspeed
from tests.distributed.test_ranks import losses
from tests.integration.test_launcher_ends import write_endless
from tests.support import read_metrics, run_deepspeed, tiny_words, write_project
from tests.unit.data.stores import write_folder
from training.checkpoints.paths import MANIFEST, step_of

Machines = tuple[Machine, Machine]
PORT = 5000
COPY = "import fsspec, sys; s3 = fsspec.filesystem('s3'); s3.mkdir('bucket'); s3.put(*sys.argv[1:], recursive=True)"
LIST = "import fsspec; print(*fsspec.filesystem('s3').find('bucket/runs'))"


def write_manifest(folder: Path) -> None:
    """Describe the shards of a folder, so that they can be used from a store."""
    shards = {}
    for path in sorted(folder.iterdir()):
        with h5py.File(path) as file:
            shards[path.name] = len(file["input_ids"]), path.read_bytes()
    write_folder(folder, shards)


@contextmanager
def store(machine: Machine, folder: Path) -> Generator[dict[str, str]]:
    """A store on this machine, with the data of the project in `folder`; the variables with which ranks find it."""
    variables = {
        "AWS_ENDPOINT_URL": f"http://{machine.address}:{PORT}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    server = ["moto_server", "-H", machine.address, "-p", str(PORT)]
    with started(machine, server, folder / "server.txt"):
        wait_until(lambda: f":{PORT}" in machine.run("ss", "-ltn"), "a store")
        write_manifest(folder / "data")
        ask(machine, variables, COPY, f"{folder}/data/", "bucket/corpus/data/")
        yield variables


def ask(machine: Machine, variables: dict[str, str], program: str, *words: str) -> str:
    assignments = (f"{name}={value}" for name, value in variables.items())
    return machine.run("env", *assignments, sys.executable, "-c", program, *words)


def find_uploaded(machine: Machine, variables: dict[str, str]) -> str:
    """The tag of the newest complete checkpoint in the store, or ""."""
    paths = ask(machine, variables, LIST).split()
    return max((path.split("/")[-2] for path in paths if path.endswith(MANIFEST)), default="")


def remote_words(folder: Path) -> list[str]:
    return [*tiny_words(folder), "--data_path_prefix", "s3://bucket/corpus", "--data_cache", str(folder / "cache")]


def give_own_disk(machine: Machine, folder: Path) -> None:
    """A folder that only this machine has, and that ends with it."""
    folder.mkdir(exist_ok=True)
    machine.run("mount", "-t", "tmpfs", "tmpfs", str(folder))


def test_data_from_a_store(machines: Machines, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    limit = ["--max_steps", "4"]
    assert run_deepspeed([*write_project(whole), *limit], 2).returncode == 0
    write_project(tmp_path)
    for machine in machines:
        give_own_disk(machine, tmp_path / "cache")
    with store(machines[0], tmp_path) as variables:
        settings = tmp_path / "deepspeed_env"
        settings.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        command = documented_deepspeed(tmp_path, 1, "deepspeed_train.py", part="--data_path_prefix s3://bucket/corpus")
        words = [*command, *remote_words(tmp_path), *limit]
        assert run_to_end(machines[0], words, tmp_path, DS_ENV_FILE=str(settings)) == 0, printed(tmp_path)
    assert losses(tmp_path) == losses(whole)
    for machine in machines:
        assert "wiki_training_0.hdf5" in machine.run("find", str(tmp_path / "cache")), machine.name


def test_a_machine_vanishes_with_its_disk(machines: Machines, tmp_path: Path) -> None:
    """The other one fetches the newest checkpoint that was uploaded, and continues with the same losses.

    Until then it is refused: two runs must not upload to one place.
    """
    write_endless(tmp_path)
    give_own_disk(machines[0], tmp_path / "out")
    agent = documented("torchrun --standalone", {"8": "1"}, part="--upload_checkpoints")
    words = [*remote_words(tmp_path), "--save_every_steps", "5", "--upload_checkpoints", "s3://bucket/runs"]
    with ExitStack() as stack:
        variables = stack.enter_context(store(machines[1], tmp_path))
        stack.enter_context(started(machines[0], [*agent, *words], tmp_path / "first.txt", **variables))
        wait_until(lambda: find_uploaded(machines[1], variables) > "step_00000005", "an uploaded checkpoint")
        second = run_to_end(machines[1], ["python", "deepspeed_train.py", *words], tmp_path, **variables)
        assert second == USER_ERROR_EXIT_CODE, printed(tmp_path)
        assert "another run uploads there (process " in printed(tmp_path)
        assert " on worker-0); expected a URL and a job name that no other run uses" in printed(tmp_path)
        machines[0].lose_power()
        newest = find_uploaded(machines[1], variables)
        step = step_of(newest)
        limited = [*agent, *words, "--max_steps", str(step + 3)]
        process = stack.enter_context(started(machines[1], limited, tmp_path / OUTPUT, **variables))
        assert process.wait(LAST_RESORT) == 0, printed(tmp_path)
    assert f"fetching s3://bucket/runs/tiny/{newest}" in printed(tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == [step + 1, step + 2, step + 3]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert run_deepspeed([*write_endless(whole), "--max_steps", str(step + 3)], 1).returncode == 0
    assert losses(tmp_path) == losses(whole)[step:]
