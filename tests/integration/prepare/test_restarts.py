"""Killed at any moment, the prepare command resumes to the same bytes; finished, it does nothing."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from common.errors import UserError
from data import prepare
from data.preparation import output, work_folder
from data.preparation.pipeline import run_task
from data.preparation.reading import PIECE_BYTES
from tests.integration.prepare.corpora import ROOT, digests, run, write_corpus, write_one_document


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def test_killed_within_one_document_it_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While reading, while encoding and while cutting, one after the other."""
    (tmp_path / "in").mkdir()
    for number in range(4):
        write_one_document(tmp_path / "in" / f"{number}.txt", "running", seed=number)
    path = tmp_path / "in"
    monkeypatch.setattr("data.preparation.reading.PIECE_BYTES", 200_000)
    run(path, tmp_path / "whole", "--validation_share", "0")
    for stage in ("reading", "encoding", "cutting"):
        left = iter(range(3))

        def until(function: Any, job: Any, at: str, *arguments: Any, stage: str = stage, left: Any = left) -> Any:
            if at == stage and next(left, None) is None:
                raise Killed
            return run_task(function, job, at, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr("data.preparation.pipeline.run_task", until)
            with pytest.raises(Killed):
                run(path, tmp_path / "killed", "--validation_share", "0")
    run(path, tmp_path / "killed", "--validation_share", "0")
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def test_an_unfinished_run_of_another_version_is_started_over(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it has written shards, which no manifest lists yet."""
    printed = {
        work_folder.WORK_FORMAT - 1: "begun by another version of this program; starting over",
        work_folder.WORK_FORMAT: "resuming an earlier run",
    }
    for version, message in printed.items():
        output = tmp_path / str(version)

        def kill(function: Any, job: Any, stage: str, *arguments: Any, output: Path = output) -> Any:
            if stage == "writing" and list(output.glob("32/*.hdf5")):
                raise Killed
            return run_task(function, job, stage, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr("data.preparation.pipeline.run_task", kill)
            patch.setattr(work_folder, "WORK_FORMAT", version)
            with pytest.raises(Killed):
                run(corpus, output)
        assert len(list(output.glob("32/*.hdf5"))) == 1
        capsys.readouterr()
        run(corpus, output)
        found = capsys.readouterr().out
        assert [text for text in printed.values() if text in found] == [message]
    first, second = (digests(tmp_path / str(version)) for version in printed)
    assert first == second


def test_finished_it_does_nothing_and_says_so(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(corpus, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    run(corpus, tmp_path)
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert not (tmp_path / ".work").exists()
    with pytest.raises(UserError, match="--overwrite"):
        run(corpus, tmp_path, "--masking_rate", "0.2")
    run(corpus, tmp_path, "--masking_rate", "0.2", "--overwrite")


@pytest.mark.parametrize(
    ("flags", "lose"),
    [([], Path.unlink), (["--keep_work"], Path.unlink), (["--keep_work"], lambda path: os.truncate(path, 1000))],
    ids=["lost", "lost, work kept", "cut short, work kept"],
)
def test_a_lost_shard_is_made_again(
    flags: list[str],
    lose: Callable[[Path], None],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(corpus, tmp_path, *flags)
    before = digests(tmp_path)
    lost, *others = sorted((tmp_path / "32").glob("training*"))
    written = [path.stat().st_mtime_ns for path in others]
    lose(lost)
    run(corpus, tmp_path, *flags)
    if flags:
        assert [path.stat().st_mtime_ns for path in others] == written, "the others are not made again"
    printed = capsys.readouterr()
    assert "nothing to do" not in printed.out
    assert f"{lost.name} is not as manifest.json lists it" in printed.err
    assert digests(tmp_path) == before


def test_shards_of_another_tool_are_replaced_only_with_overwrite(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "32").mkdir()
    for name in ("wiki_training_0.hdf5", "books_test_0.h5"):
        (tmp_path / "32" / name).write_bytes(b"weeks of work")
    with pytest.raises(UserError, match=r"holds 2 HDF5 files .* such as books_test_0.h5; .*--overwrite"):
        run(corpus, tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["32", "books_test_0.h5", "wiki_training_0.hdf5"]
    run(corpus, tmp_path, "--overwrite")
    assert not list(tmp_path.glob("32/*_0.h*"))


# The command, which does not come further than a stage, so that it is not over before it is killed.
HANGING_AFTER = """
import time
from common.errors import run_command
from data import prepare
from data.preparation.pipeline import Pipeline

run_stage = Pipeline.run_stage


def run_stage_and_hang(self, name, *rest):
    results = run_stage(self, name, *rest)
    time.sleep(600 if name == "{stage}" else 0)
    return results


Pipeline.run_stage = run_stage_and_hang
run_command(prepare.main)
"""


@pytest.mark.usefixtures("heard_interrupts")
def test_killed_at_any_moment_and_started_again_it_gives_the_same_bytes(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 8_000)
    assert corpus.stat().st_size > 2 * PIECE_BYTES
    arguments = ["--input", str(corpus), "--vocab_size", "300", "--max_seq_length", "32", "--dupe_factor", "2",
                 "--shard_rows", "4000", "--workers", "2"]  # fmt: skip
    whole = [sys.executable, "-m", "data.prepare", *arguments, "--output_dir", str(tmp_path / "whole")]
    subprocess.run(whole, cwd=ROOT, check=True, capture_output=True, timeout=300)
    arguments += ["--output_dir", str(tmp_path / "killed")]
    monkey = random.Random(3)
    done = tmp_path / "killed" / ".work" / "done"
    for stage, number in {"reading": signal.SIGINT, "encoding": signal.SIGKILL, "writing": signal.SIGKILL}.items():
        command = [sys.executable, "-c", HANGING_AFTER.format(stage=stage), *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 120
        while process.poll() is None and not list(done.glob(f"{stage}.*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(monkey.random() * 0.05)
        assert process.poll() is None, f"ended before it could be killed while {stage}"
        os.killpg(process.pid, number)
        _, printed = process.communicate()
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert "run the same command again to resume" in printed
            assert "Traceback" not in printed
        else:
            assert process.returncode == -number
    command = [sys.executable, "-m", "data.prepare", *arguments]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def is_worker(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:  # it has ended by now
        return False


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.txt", 8_000)
    command = [sys.executable, "-m", "data.prepare", "--input", str(corpus), "--vocab_size", "300", "--workers", "2",
               "--output_dir", str(tmp_path / "out"), "--max_seq_length", "32"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    workers: list[psutil.Process] = []
    while len(workers) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        workers = [child for child in children if is_worker(child)]
    assert len(workers) == 2
    time.sleep(1)  # until they watch their parent
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive


@pytest.mark.parametrize(
    ("module", "moment"), [(prepare, "_report"), (output, "write_manifest"), (work_folder, "close_work")]
)
def test_killed_at_the_very_end_it_still_leaves_a_report_and_no_work(
    corpus: Path, tmp_path: Path, module: ModuleType, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, moment, kill)
        with pytest.raises(Killed):
            run(corpus, tmp_path)
    run(corpus, tmp_path)
    assert not (tmp_path / ".work").exists()
    assert (tmp_path / "32" / "report.md").is_file()
    assert (tmp_path / "32" / "manifest.json").is_file()


@pytest.mark.parametrize("is_lost", [False, True], ids=["all shards there", "a shard lost meanwhile"])
@pytest.mark.parametrize("num_removed", [0, 1, 8])  # of the nine folders in it
def test_killed_while_it_removes_its_work_folder_it_uses_what_is_left(
    corpus: Path, tmp_path: Path, num_removed: int, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a tree are removed in any order; the marker may have been the first of the one being removed."""
    removed = []

    def remove(folder: Path, *_: object, **__: object) -> None:
        if len(removed) == num_removed:
            (folder / work_folder.MARKER).unlink(missing_ok=True)
            raise Killed
        removed.append(folder)
        shutil.rmtree(folder)

    with monkeypatch.context() as patch:
        patch.setattr(work_folder, "shutil", SimpleNamespace(rmtree=remove))
        with pytest.raises(Killed):
            run(corpus, tmp_path)
    before = digests(tmp_path)
    if is_lost:
        sorted((tmp_path / "32").glob("training*"))[1].unlink()
    run(corpus, tmp_path)
    assert digests(tmp_path) == before
    assert not (tmp_path / ".work").exists()


def test_killed_while_it_writes_its_marker_it_starts_over(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / ".work").mkdir()
    (tmp_path / ".work" / f".{work_folder.MARKER}.123.tmp").touch()
    run(corpus, tmp_path)
    assert not (tmp_path / ".work").exists()
