"""Faults that a test puts into a rank: what happens is real, and where it happens is patched in from outside.

A fault is a dictionary: its `kind`, the `rank` it is for (left out: all), and what its kind needs. `kill` needs a
`stage` of a save and the `step` of that save; SIGKILL comes right before that stage begins.
"""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Fault = dict[str, Any]
# The moments of a save, in order; "between_files" is after the first of DeepSpeed's files on that rank.
SAVE_STAGES = ("before", "first_file", "between_files", "manifest", "rename", "pointer", "retire", "after")


def put_in(fault: Fault, rank: int) -> None:
    if fault.get("rank", rank) == rank:
        KINDS[fault["kind"]](fault)


def _before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Have `action` called with the same arguments right before `owner.name`."""
    original = getattr(owner, name)

    def patched(*args: Any, **options: Any) -> Any:
        action(*args, **options)
        return original(*args, **options)

    setattr(owner, name, patched)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill(fault: Fault) -> None:
    """kill -9 at a stage of the save of `step`."""
    from training import checkpoint, checkpoint_files

    stage, tag = fault["stage"], f"step_{fault['step']:08d}"
    files: list[str] = []

    def at_file(_self: Any, state_dict: Any, path: str) -> None:
        if tag in path:
            files.append(path)
            if len(files) == (1 if stage == "first_file" else 2):
                _die()

    def at_save(_self: Any, _engine: Any, state: Any, *_: Any, **__: Any) -> None:
        if checkpoint.tag_of(state) == tag:
            _die()

    def named(path: Path, *_: Any) -> None:
        if tag in str(path):
            _die()

    if stage == "before":
        _before(checkpoint.CheckpointFolder, "save", at_save)
    elif stage in ("first_file", "between_files"):
        _before(checkpoint_files.CheckedFiles, "save", at_file)
    elif stage == "manifest":
        _before(checkpoint, "write_manifest", named)
    elif stage == "rename":
        _before(checkpoint, "publish", named)
    elif stage == "pointer":
        _before(checkpoint, "point_to", lambda _folder, found: _die() if found == tag else None)
    elif stage == "retire":
        _before(checkpoint, "retire", lambda _folder, tags, *_: _die() if tag in tags else None)
    else:
        assert stage == "after", stage
        original = checkpoint.commit

        def commit(folder: Path, staged: Path, *rest: Any) -> None:
            original(folder, staged, *rest)
            named(staged)

        checkpoint.commit = commit


def _not_a_number(fault: Fault) -> None:
    """Spoil one gradient of this rank in the steps that begin at the given samples."""
    from training import engine, loop

    original = engine.take_step

    def take_step(target: Any, step: Any, *rest: Any) -> bool:
        handle = None
        if step.next_sample in fault["next_samples"]:
            parameter = target.module.bert.embeddings.LayerNorm.weight
            handle = parameter.register_hook(lambda gradient: gradient * float(fault.get("value", "nan")))
        try:
            return original(target, step, *rest)
        finally:
            if handle is not None:
                handle.remove()

    loop.take_step = take_step  # type: ignore[assignment]


def _loss_is_not_a_number(fault: Fault) -> None:
    """What a forward pass that overflows in fp16 leaves in the sums of the step of these samples."""
    from training import loop

    original = loop.take_step

    def take_step(target: Any, step: Any, tally: Any, *rest: Any) -> bool:
        is_taken = original(target, step, tally, *rest)
        if step.next_sample in fault["next_samples"]:
            tally.sums = tally.sums * float("nan")
        return is_taken

    loop.take_step = take_step


def _spoil_weights(fault: Fault) -> None:
    """Before the step of these samples make the model forget, so that the loss jumps; healed by going back.

    With `always` it happens whenever that step number comes again, whatever samples it is of.
    """
    from deepspeed.runtime.zero import GatheredParameters

    from training import loop

    done: list[int] = []

    def spoil(target: Any, step: Any, *_: Any) -> None:
        is_due = step.next_sample == fault["next_sample"] and not done
        if fault.get("always"):
            is_due = target.global_steps - target.skipped_steps == fault["next_sample"] // 8 - 1
        if is_due:
            done.append(1)
            weight = target.module.bert.embeddings.word_embeddings.weight
            with torch.no_grad(), GatheredParameters([weight], modifier_rank=0, enabled=hasattr(weight, "ds_id")):
                weight.mul_(-30.0)

    _before(loop, "take_step", spoil)


def _die_in_rollback(fault: Fault) -> None:
    """Killed right before going back for the `number`th time."""
    from training import loop

    calls: list[int] = []

    def count(*_: Any) -> None:
        calls.append(1)
        if len(calls) == fault["number"]:
            _die()

    _before(loop, "go_back", count)


def _hang(fault: Fault) -> None:
    """Stop moving at the step of these samples: by sleeping, or with the whole process stopped."""
    from training import loop

    def hang(_engine: Any, step: Any, *_: Any) -> None:
        if step.next_sample == fault["next_sample"]:
            if fault.get("how") == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)

    _before(loop, "take_step", hang)


def _late(fault: Fault) -> None:
    """A rank that does not come to where the others wait."""
    time.sleep(fault["seconds"])


def _short_join(fault: Fault) -> None:
    """Wait less for the other ranks than ten minutes."""
    import datetime

    from training import distributed

    distributed.JOIN_TIMEOUT = datetime.timedelta(seconds=fault["seconds"])


def _short_collectives(fault: Fault) -> None:
    """What the libraries would wait for other ranks, if nobody told them to wait longer."""
    import datetime

    from torch.distributed import distributed_c10d

    from training import distributed

    meet = distributed._meet

    def meet_and_shorten(*args: Any) -> Any:
        store = meet(*args)
        seconds = datetime.timedelta(seconds=fault["seconds"])
        distributed.JOIN_TIMEOUT = distributed_c10d.default_pg_timeout = seconds
        return store

    distributed._meet = meet_and_shorten


def _hang_in_build(_: Fault) -> None:
    from training import run

    _before(run, "replace_blocks", lambda *_: time.sleep(600))


def _hang_in_initialize(_: Fault) -> None:
    """Inside deepspeed.initialize(), where the others wait for this rank's weights."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    _before(DeepSpeedEngine, "_broadcast_model", lambda *_: time.sleep(600))


def _compile(fault: Fault) -> None:
    """Build an extension before the engine, by the compiler in `folder`; with `dies`, killed once that has started."""
    import sys
    import threading

    from training import run

    folder = Path(fault["folder"])

    def die_in_between() -> None:
        while not (folder / "started").exists():
            time.sleep(0.01)
        _die()

    def compile_something(*_: Any) -> None:
        from torch.utils import cpp_extension

        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where ninja is
        os.environ.update(CXX=str(folder / "c++"), TORCH_DONT_CHECK_COMPILER_ABI="1")
        options = {"is_python_module": False, "is_standalone": True}  # nothing to import of what only pretends
        cpp_extension.load("tiny", [str(folder / "tiny.cpp")], build_directory=str(folder), **options)

    if fault.get("dies"):
        threading.Thread(target=die_in_between, daemon=True).start()
    _before(run, "put_in_engine", compile_something)


def _slow_to_tell(fault: Fault) -> None:
    """The rank whose it is to name the stuck one needs some time for it."""
    from training import watchdog

    _before(watchdog.Watchdog, "_tell", lambda *_: time.sleep(fault["seconds"]))


def _slow_steps(fault: Fault) -> None:
    """Give signals time to arrive between two steps."""
    from training import loop

    _before(loop, "take_step", lambda *_: time.sleep(fault["seconds"]))


def _slow_forward(fault: Fault) -> None:
    """A rank whose device is slower than the others'."""
    from nvidia.modelingpreln import BertForPreTrainingPreLN
    from training import flops

    _before(BertForPreTrainingPreLN, "forward", lambda *_, **__: time.sleep(fault["seconds"]))
    _before(flops, "linear", lambda *_: time.sleep(fault["seconds"] / 20))


def _stop_in_accumulation(fault: Fault) -> None:
    """Asked to stop between the second and the third micro-step of the step of these samples."""
    from training import engine

    original = engine.seed_of

    def seed_of(purpose: str, *numbers: int) -> int:
        if purpose == "dropout" and numbers[1] == fault["next_sample"] and numbers[2] == 1:
            _ask_to_stop()
        return original(purpose, *numbers)

    engine.seed_of = seed_of


def _believe_in_space(_: Fault) -> None:
    """A disk that another process fills after we have looked."""
    from training import checkpoint

    checkpoint.CheckpointFolder.size_of_next = lambda *_: 0  # type: ignore[method-assign]


def _slow_commit(fault: Fault) -> None:
    from training import checkpoint

    _before(checkpoint, "write_manifest", lambda *_: time.sleep(fault["seconds"]))


def _no_commit(fault: Fault) -> None:
    """The disk is full when the manifest of `step` or of a later one is written."""
    from training import checkpoint

    def refuse(staged: Path, *_: Any) -> None:
        if int(staged.name.removeprefix("step_")) >= fault["step"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staged))

    _before(checkpoint, "write_manifest", refuse)


def _ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _stop_in_commit(fault: Fault) -> None:
    """Asked to stop while the checkpoint of `step` is being committed, in the middle of the next step."""
    from training import checkpoint

    _before(checkpoint, "write_manifest", lambda *_: _ask_to_stop())


def _stop_at(fault: Fault) -> None:
    """Asked to stop right before the step of these samples."""
    from training import loop

    def ask(_engine: Any, step: Any, *_: Any) -> None:
        if step.next_sample == fault["next_sample"]:
            os.kill(os.getpid(), fault.get("signal", signal.SIGTERM))

    _before(loop, "take_step", ask)


def _stop_in_validation(_: Fault) -> None:
    from training import validation

    _before(validation, "evaluation_batches", lambda *_, **__: _ask_to_stop())


def _worse_validation(_: Fault) -> None:
    from training import loop

    original = loop.validate

    def validate(*args: Any) -> dict[str, float] | None:
        figures = original(*args)
        return None if figures is None else {**figures, "mlm_loss": figures["mlm_loss"] + 9.0}

    loop.validate = validate


def _reader_dies(fault: Fault) -> None:
    """A shard is lost under this rank's reader when it comes to it again: the library's own error comes of it.

    Reads are counted from the first call of the loop's function `since` on, where that is given.
    """
    from data.reader import ShardFile
    from training import loop

    files: list[Path] = []

    def lose(self: Any, *_: Any, **__: Any) -> None:
        files.append(self.path)
        if fault["name"] == self.path.name and files.count(self.path) > fault["reads"]:
            self._file.close()

    if "since" in fault:
        _before(loop, fault["since"], lambda *_: None if files else _before(ShardFile, "read", lose))
    else:
        _before(ShardFile, "read", lose)


def _slow_reader(fault: Fault) -> None:
    """One that is never ahead of the training."""
    from data.loader import TrainingStream

    _before(TrainingStream, "_make_step", lambda *_: time.sleep(fault["seconds"]))


def _lose_output(fault: Fault) -> None:
    """Standard output (and with `both` errors too) leads to a full disk, or to a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    target = os.open("/dev/full", os.O_WRONLY) if fault["how"] == "full" else writer
    for descriptor in (1, 2) if fault.get("both") else (1,):
        os.dup2(target, descriptor)


def _file_elsewhere(_: Fault) -> None:
    """What this rank writes lands on a disk that rank 0 does not see."""
    from training import checkpoint_files, manifest

    manifest.APPEARING_SECONDS = 0.3
    original = checkpoint_files.CheckedFiles.save

    def save(self: Any, state_dict: Any, path: str) -> None:
        original(self, state_dict, path)
        if int(os.environ["RANK"]) == 1:
            Path(path).unlink()

    checkpoint_files.CheckedFiles.save = save  # type: ignore[method-assign]


def _origin_vanishes(fault: Fault) -> None:
    """The run that owns the checkpoint `tag` removes it right after it was chosen."""
    from training import run

    original = run.find_origin

    def find_origin(*args: Any) -> Any:
        origin = original(*args)
        if origin is not None and origin.tag == fault["tag"]:
            origin.path.rename(origin.folder / f".dropped_{origin.tag}")
        return origin

    run.find_origin = find_origin


def _fill_disk(fault: Fault) -> None:
    """Another process takes the last byte of the disk of `folder` right before the step of these samples."""
    from training import loop

    def fill(_engine: Any, step: Any, *_: Any) -> None:
        if step.next_sample == fault["next_sample"]:
            free = os.statvfs(fault["folder"])
            Path(fault["folder"], "filler").write_bytes(b"x" * (free.f_bavail * free.f_frsize))

    _before(loop, "take_step", fill)


def _patience(fault: Fault) -> None:
    """Wait less for space than people would want to."""
    from training import saving

    saving.RETRY_SECONDS = 0.1
    saving.Saver.save_last.__defaults__ = (None, float(fault["seconds"]))


def _allow_fp16(_: Fault) -> None:
    """Compute in fp16 on a CPU that is slow at it: DeepSpeed would refuse, torch does not."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _self: True


def _claim_fp16(_: Fault) -> None:
    """The launcher believes so too, where it would go back to fp32."""
    from training import settings
    from training.precision import Abilities

    settings.find_abilities = lambda: Abilities("CPU", fp16=True, bf16=True)


def _no_compiler(_: Fault) -> None:
    """DeepSpeed's Muon compiles an Adam for the other parameters, or computes it without where it cannot."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def load(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")

    OpBuilder.load = load  # type: ignore[method-assign]


def _forget_optimizer_state(_: Fault) -> None:
    """Resharding that loses what the optimizer knew."""
    from training import zero_files

    whole = zero_files.ZeroCheckpoint.read

    def without_state(folder: Path) -> zero_files.ZeroCheckpoint:
        saved = whole(folder)
        for states in saved.tensors.values():
            for key in states.keys() - {zero_files.WEIGHT}:
                states[key] = states[key] * 0
        return saved

    zero_files.ZeroCheckpoint.read = without_state  # type: ignore[method-assign,assignment]


KINDS: dict[str, Callable[[Fault], None]] = {
    "allow_fp16": _allow_fp16,
    "claim_fp16": _claim_fp16,
    "believe_in_space": _believe_in_space,
    "compile": _compile,
    "die_in_rollback": _die_in_rollback,
    "file_elsewhere": _file_elsewhere,
    "fill_disk": _fill_disk,
    "forget_optimizer_state": _forget_optimizer_state,
    "hang": _hang,
    "hang_in_build": _hang_in_build,
    "hang_in_initialize": _hang_in_initialize,
    "kill": _kill,
    "late": _late,
    "lose_output": _lose_output,
    "loss_is_not_a_number": _loss_is_not_a_number,
    "no_commit": _no_commit,
    "no_compiler": _no_compiler,
    "not_a_number": _not_a_number,
    "origin_vanishes": _origin_vanishes,
    "patience": _patience,
    "reader_dies": _reader_dies,
    "short_collectives": _short_collectives,
    "short_join": _short_join,
    "slow_commit": _slow_commit,
    "slow_forward": _slow_forward,
    "slow_reader": _slow_reader,
    "slow_steps": _slow_steps,
    "slow_to_tell": _slow_to_tell,
    "spoil_weights": _spoil_weights,
    "stop_at": _stop_at,
    "stop_in_accumulation": _stop_in_accumulation,
    "stop_in_commit": _stop_in_commit,
    "stop_in_validation": _stop_in_validation,
    "worse_validation": _worse_validation,
}
