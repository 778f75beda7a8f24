"""What happens to a rank before its first step."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.patching import Fault, announce, before, die


def _late(fault: Fault) -> None:
    """A rank that does not come to where the others wait."""
    time.sleep(fault["seconds"])


def _meeting(fault: Fault) -> None:
    """Write `file` right before this rank meets the others; or, with `waits`, meet them when the file is there."""
    from training.runtime import meeting

    def begin(*_: Any) -> None:
        while fault.get("waits") and not Path(fault["file"]).exists():
            time.sleep(0.01)
        announce(fault)

    before(meeting, "meet", begin)


def _short_join(fault: Fault) -> None:
    """Wait less for the other ranks than ten minutes."""
    import datetime

    from training.runtime import meeting

    meeting.JOIN_TIMEOUT = datetime.timedelta(seconds=fault["seconds"])


def _short_collectives(fault: Fault) -> None:
    """How long the libraries wait for other ranks by default."""
    import datetime

    from torch.distributed import distributed_c10d

    from training.runtime import meeting

    meet = meeting.meet

    def meet_and_shorten(*args: Any) -> Any:
        store = meet(*args)
        seconds = datetime.timedelta(seconds=fault["seconds"])
        meeting.JOIN_TIMEOUT = distributed_c10d.default_pg_timeout = seconds
        return store

    meeting.meet = meet_and_shorten


def _hang_in_build(fault: Fault) -> None:
    from training import build as run

    before(run, "replace_blocks", lambda *_: (announce(fault), time.sleep(600)))


def _hang_in_initialize(fault: Fault) -> None:
    """Inside deepspeed.initialize(), where the others wait for this rank's weights."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    before(DeepSpeedEngine, "_broadcast_model", lambda *_: (announce(fault), time.sleep(600)))


def _impatient(fault: Fault) -> None:
    """A watchdog that counts `seconds` once a rank hangs and has written `file`: a slow start must not end the run."""
    from training.runtime import watchdog

    check_progress, intervals, seconds = watchdog.Watchdog._check_progress, watchdog.intervals, fault["seconds"]

    def check_when_stuck(self: watchdog.Watchdog, idle_seconds: float) -> None:
        if Path(fault["file"]).exists():
            self.stuck_seconds = seconds
            check_progress(self, idle_seconds)

    watchdog.Watchdog._check_progress = check_when_stuck  # type: ignore[method-assign]
    watchdog.intervals = lambda _: intervals(seconds)


def _compile(fault: Fault) -> None:
    """Build an extension before the engine, by the compiler in `folder`; with `dies`, killed once that has started."""
    import sys
    import threading

    from training import build as run

    folder = Path(fault["folder"])

    def die_in_between() -> None:
        while not (folder / "started").exists():
            time.sleep(0.01)
        die()

    def compile_something(*_: Any) -> None:
        from torch.utils import cpp_extension

        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where ninja is
        os.environ.update(CXX=str(folder / "c++"), TORCH_DONT_CHECK_COMPILER_ABI="1")
        options = {"is_python_module": False, "is_standalone": True}  # nothing to import of what only pretends
        cpp_extension.load("tiny", [str(folder / "tiny.cpp")], build_directory=str(folder), **options)

    if fault.get("dies"):
        threading.Thread(target=die_in_between, daemon=True).start()
    before(run, "put_in_engine", compile_something)


def _slow_to_tell(fault: Fault) -> None:
    """The rank whose it is to name the stuck one needs some time for it."""
    from training.runtime import watchdog

    before(watchdog.Watchdog, "_report", lambda *_: time.sleep(fault["seconds"]))


def _allow_fp16(_: Fault) -> None:
    """Compute in fp16 on a CPU that is slow at it: DeepSpeed would refuse, torch does not."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _self: True


def _claim_fp16(_: Fault) -> None:
    """The launcher believes so too, where it would go back to fp32."""
    from training.runtime.precision import Abilities
    from training.settings import checks

    checks.find_abilities = lambda: Abilities("CPU", ("fp32", "fp16", "bf16"))


def _no_compiler(_: Fault) -> None:
    """DeepSpeed's Muon compiles an Adam for the other parameters, or computes it without where it cannot."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def load(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler here")

    OpBuilder.load = load  # type: ignore[method-assign]


KINDS: dict[str, Callable[[Fault], None]] = {
    "late": _late,
    "meeting": _meeting,
    "impatient": _impatient,
    "short_join": _short_join,
    "short_collectives": _short_collectives,
    "hang_in_build": _hang_in_build,
    "hang_in_initialize": _hang_in_initialize,
    "compile": _compile,
    "slow_to_tell": _slow_to_tell,
    "allow_fp16": _allow_fp16,
    "claim_fp16": _claim_fp16,
    "no_compiler": _no_compiler,
}
