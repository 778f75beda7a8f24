"""Kill runs, resume them, and compare with runs that were left alone: python -m tests.kill_campaign --kills 300

Each case trains a tiny model with dropout and gradient accumulation, kills one rank, all ranks or their launcher with
SIGKILL at a stage of a save or at a random moment, starts the same command again (killing it again while there are
kills left for the case), and then requires the same losses, samples, pointer and weights, bit for bit.
--victims selects what may be killed. The last line is JSON.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from common.console import console
from common.errors import run_command
from tests.faults.saving import REPLACE_STAGES, SAVE_STAGES
from tests.rank_server import Outcome, RankServer
from tests.support import read_metrics, write_project
from training.checkpoints.folder import CheckpointFolder
from training.export.hugging_face import read_weights

NUM_STEPS = 8
SAVE_EVERY = 2
REPLACED_STEP = 7
VICTIMS = ("one", "all", "launcher")
FLAGS = ["--max_steps", str(NUM_STEPS), "--save_every_steps", str(SAVE_EVERY), "--keep_last", "2"]


@dataclass(frozen=True)
class Setup:
    """The configuration of a run."""

    zero_stage: int
    num_ranks: int
    precision: str = "fp32"
    is_replacing: bool = False  # the last rows give no step, so that the last checkpoint takes the place of one before

    @property
    def name(self) -> str:
        ending = ", replacing" if self.is_replacing else ""
        return f"ZeRO {self.zero_stage}, {self.num_ranks} ranks, {self.precision}{ending}"

    def write(self, folder: Path) -> list[str]:
        block = {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        accumulation = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
        words = write_project(folder, zero_optimization={"stage": self.zero_stage}, **accumulation, **block)
        if not self.is_replacing:
            return [*words, *FLAGS]
        path = folder / "model.json"
        path.write_text(path.read_text().replace('"num_epochs": 100', '"num_epochs": 1'))
        return [*words, *FLAGS, "--save_every_steps", str(REPLACED_STEP)]

    def faults(self) -> list[dict[str, Any]]:
        last = [{"kind": "not_a_number", "next_samples": [8 * NUM_STEPS]}] if self.is_replacing else []
        return [*last, *([{"kind": "allow_fp16"}] if self.precision == "fp16" else [])]


@dataclass(frozen=True)
class Kill:
    """At a stage of a save (`stage`, `step`), or `after` so many seconds.

    `victim` is a rank's number, "all", or "launcher": then the ranks notice and save. With `is_early` or `is_late` the
    steps of the run are slow, so that it cannot be over before the kill, on any machine.
    """

    stage: str | None = None
    step: int = 4
    after: float = 0.0
    is_early: bool = False  # while the ranks start
    is_late: bool = False  # counted from when the run has written its first figures
    victim: int | str = 0

    @property
    def moment(self) -> str:
        return "random" if self.stage is None else self.stage

    @property
    def victim_kind(self) -> str:
        return self.victim if isinstance(self.victim, str) else "one"

    def faults(self) -> list[dict[str, Any]]:
        """At a stage, rank 0, which reaches all of them, kills the others too."""
        # Ranks check on their launcher once a second: without slow steps a run often ends before the next check.
        is_slow = self.victim == "launcher" or self.is_early or self.is_late
        faults: list[dict[str, Any]] = [{"kind": "slow_steps", "seconds": 0.4}] if is_slow else []
        if self.stage is not None:
            who = {"rank": 0, "who": self.victim} if isinstance(self.victim, str) else {"rank": self.victim}
            faults.append({"kind": "kill", "stage": self.stage, "step": self.step} | who)
        return faults


@dataclass
class Trace:
    """The results of a run: losses and samples by step, validation, and the last weights."""

    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    pointer: str = ""  # what `latest` names
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Trace":
        rows = read_metrics(folder, "train")
        found = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
        newest = found.folder / found.choose(None)
        return cls(
            [row["loss"] for row in rows],
            [row["samples"] for row in rows],
            [row["mlm_loss"] for row in read_metrics(folder, "validation")],
            (found.folder / "latest").read_text(),
            {name: tensor.clone() for name, tensor in read_weights(newest).items()},
        )

    def differences(self, other: "Trace") -> list[str]:
        """What differs in `other`, bit for bit."""
        names = ("losses", "samples", "validation", "pointer")
        found = [name for name in names if getattr(self, name) != getattr(other, name)]
        if self.weights.keys() != other.weights.keys() or any(
            not torch.equal(tensor, other.weights[name]) for name, tensor in self.weights.items()
        ):
            found.append("weights")
        return found


def train(server: RankServer, setup: Setup, folder: Path, kill: Kill | None = None) -> Outcome:
    """One start of the command, perhaps with a kill."""
    options: dict[str, Any] = {"faults": setup.faults(), "grace": 5.0}
    if kill is not None:
        options["has_launcher"] = kill.victim == "launcher"
        options["faults"] += kill.faults()
        once = {"once": str(folder / "out" / "runs" / "tiny" / "metrics.jsonl")} if kill.is_late else {}
        if kill.stage is None and kill.victim == "launcher":
            options["launcher_dies"] = {"after": kill.after, **once}
        elif kill.stage is None:
            ranks = [kill.victim] if isinstance(kill.victim, int) else list(range(setup.num_ranks))
            options["signals"] = [{"after": kill.after, "signal": int(signal.SIGKILL), "ranks": ranks, **once}]
    return server.run(setup.write(folder), setup.num_ranks, folder, **options)


def leave_alone(server: RankServer, setup: Setup, folder: Path) -> tuple[Trace, float]:
    """The uninterrupted run and how long it took."""
    outcome = train(server, setup, folder)
    assert outcome.codes == [0] * setup.num_ranks, outcome.text
    return Trace.of(folder), outcome.seconds


def interrupt(
    server: RankServer, setup: Setup, kills: Sequence[Kill], folder: Path, expected: Trace
) -> tuple[int, list[str]]:
    """How many of `kills` hit a living process, and what differs from `expected` in the end."""
    hits = 0
    for kill in kills:
        codes = train(server, setup, folder, kill).codes
        hits += any(codes) if kill.victim == "launcher" else -signal.SIGKILL in codes
    outcome = train(server, setup, folder)
    if outcome.codes != [0] * setup.num_ranks:
        return hits, [f"exit codes {outcome.codes}: {outcome.text[-2000:]}"]
    return hits, expected.differences(Trace.of(folder))


SETUPS = [
    *(Setup(stage, ranks, precision) for precision in ("fp32", "fp16") for stage in (0, 1, 2, 3) for ranks in (1, 2)),
    Setup(1, 2, "bf16"),
    Setup(3, 2, "bf16"),
    Setup(0, 1, is_replacing=True),
    Setup(1, 2, is_replacing=True),
]
Hits = Counter[tuple[str, str, str]]  # setup, victim, moment


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS, help="what may be killed")
    arguments = parser.parse_args(argv)
    hits: Hits = Counter()
    wrong: list[str] = []
    try:
        attack(arguments.kills, random.Random(arguments.seed), arguments.victims, hits, wrong)
    except KeyboardInterrupt:
        console.warn("interrupted; this was seen until then")
    say_table(hits)
    console.say(json.dumps({"kills": sum(hits.values()), "wrong": len(wrong)}))
    return 1 if wrong else 0


def attack(num_kills: int, generator: random.Random, victims: Sequence[str], hits: Hits, wrong: list[str]) -> None:
    """Case after case, all setups in turn, until `num_kills` have hit; what happens is added to `hits` and `wrong`."""
    references: dict[Setup, tuple[Trace, float]] = {}
    with (
        RankServer() as server,
        tempfile.TemporaryDirectory() as scratch,
        console.progress(total=num_kills, desc="kills", unit="kill", in_lines=True) as bar,
    ):
        for setup in cycle(SETUPS):
            if setup not in references:
                references[setup] = leave_alone(server, setup, Path(scratch) / "alone" / str(len(references)))
            expected, seconds = references[setup]
            kills = draw(generator, setup, victims, seconds)
            folder = Path(scratch) / "case"
            num_hits, differences = interrupt(server, setup, kills, folder, expected)
            hits[setup.name, kills[-1].victim_kind, kills[-1].moment] += num_hits
            bar.update(num_hits)
            if differences:
                wrong.append(f"{setup.name}: {kills}: {differences}")
                console.warn(wrong[-1])
            shutil.rmtree(folder)
            if sum(hits.values()) >= num_kills:
                return


def draw(generator: random.Random, setup: Setup, victims: Sequence[str], seconds: float) -> list[Kill]:
    """One kill at a stage, or up to three at random moments of the same run."""
    kind = generator.choice(victims)
    victim = generator.randrange(setup.num_ranks) if kind == "one" else kind
    if generator.random() < 0.6:
        stage = generator.choice(REPLACE_STAGES if setup.is_replacing else SAVE_STAGES)
        if kind == "one" and stage not in ("before", "first_file"):
            victim = 0  # the later stages are rank 0's
        return [Kill(stage, REPLACED_STEP if setup.is_replacing else generator.choice([2, 4, 6, 8]), victim=victim)]
    if kind == "launcher":
        return [Kill(after=generator.uniform(0.3, seconds), victim=victim)]
    return [Kill(after=generator.uniform(0.0, seconds), victim=victim) for _ in range(generator.randint(1, 3))]


def say_table(hits: Hits) -> None:
    moments = [*SAVE_STAGES, *REPLACE_STAGES, "random"]
    console.say(f"{'kills that hit':32}" + "".join(f"{moment:>14}" for moment in moments))
    for place, names in ((0, [setup.name for setup in SETUPS]), (1, VICTIMS)):
        for name in names:
            found: Counter[str] = Counter()
            for key, count in hits.items():
                found[key[2]] += count if key[place] == name else 0
            console.say(f"{name:32}" + "".join(f"{found[moment]:>14}" for moment in moments))


if __name__ == "__main__":
    sys.argv[0] = "tests/kill_campaign.py"
    run_command(main)
