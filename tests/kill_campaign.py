"""Kill runs, resume them, and compare with runs that were left alone: python -m tests.kill_campaign --kills 300

Each case trains a tiny model with dropout and gradient accumulation, kills one or all ranks with SIGKILL at a stage of
a save or at a random moment, or their launcher, starts the same command again (killing it again while there are kills
left for the case), and then asks for the same losses, samples, pointer and weights, bit for bit. The last line is JSON.
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
from tests.faults.saving import SAVE_STAGES
from tests.rank_server import Outcome, RankServer
from tests.support import read_metrics, write_project
from training.checkpoint import CheckpointFolder
from training.export import read_weights

NUM_STEPS = 8
SAVE_EVERY = 2
FLAGS = ["--max_steps", str(NUM_STEPS), "--save_every_steps", str(SAVE_EVERY), "--keep_last", "2"]


@dataclass(frozen=True)
class Setup:
    """How a run is put together."""

    zero_stage: int
    num_ranks: int
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"ZeRO {self.zero_stage}, {self.num_ranks} ranks, {self.precision}"

    def write(self, folder: Path) -> list[str]:
        block = {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        accumulation = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
        words = write_project(folder, zero_optimization={"stage": self.zero_stage}, **accumulation, **block)
        return [*words, *FLAGS]

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [{"kind": "allow_fp16"}] if self.precision == "fp16" else []


@dataclass(frozen=True)
class Kill:
    """At a stage of a save (`stage`, `step`), or `after` so many seconds. `rank` None: all ranks.

    `is_launcher`: it is their launcher that is killed; the ranks notice and save.
    """

    stage: str | None = None
    step: int = 4
    after: float = 0.0
    rank: int | None = 0
    is_launcher: bool = False

    @property
    def moment(self) -> str:
        if self.is_launcher:
            return "launcher"
        return "random" if self.stage is None else self.stage


@dataclass
class Trace:
    """What a run leaves: losses and samples by step, validation, and the last weights."""

    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    pointer: str = ""  # what `latest` names
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Trace":
        rows = read_metrics(folder, "train")
        found = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
        return cls(
            [row["loss"] for row in rows],
            [row["samples"] for row in rows],
            [row["mlm_loss"] for row in read_metrics(folder, "validation")],
            (found.folder / "latest").read_text(),
            {name: tensor.clone() for name, tensor in read_weights(found.folder / found.choose(None)).items()},
        )

    def differences(self, other: "Trace") -> list[str]:
        """In what `other` is not the same, bit for bit."""
        names = ("losses", "samples", "validation", "pointer")
        found = [name for name in names if getattr(self, name) != getattr(other, name)]
        if self.weights.keys() != other.weights.keys() or any(
            not torch.equal(tensor, other.weights[name]) for name, tensor in self.weights.items()
        ):
            found.append("weights")
        return found


def train(server: RankServer, setup: Setup, folder: Path, kill: Kill | None = None) -> Outcome:
    """One start of the command, perhaps with a kill."""
    faults, signals = list(setup.faults), []
    ranks = list(range(setup.num_ranks)) if kill is None or kill.rank is None else [kill.rank]
    if kill is not None and kill.stage is not None:
        faults += [{"kind": "kill", "rank": rank, "stage": kill.stage, "step": kill.step} for rank in ranks]
    elif kill is not None and not kill.is_launcher:
        signals = [{"after": kill.after, "signal": int(signal.SIGKILL), "ranks": ranks}]
    options: dict[str, Any] = {"launcher_dies": kill.after} if kill is not None and kill.is_launcher else {}
    words = setup.write(folder)
    return server.run(words, setup.num_ranks, folder, faults=faults, signals=signals, grace=5.0, **options)


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
        hits += any(codes) if kill.is_launcher else -signal.SIGKILL in codes
    outcome = train(server, setup, folder)
    if outcome.codes != [0] * setup.num_ranks:
        return hits, [f"exit codes {outcome.codes}: {outcome.text[-2000:]}"]
    return hits, expected.differences(Trace.of(folder))


SETUPS = [
    *(Setup(stage, ranks, precision) for precision in ("fp32", "fp16") for stage in (0, 1, 2, 3) for ranks in (1, 2)),
    Setup(1, 2, "bf16"),
    Setup(3, 2, "bf16"),
]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    hits: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    try:
        attack(arguments.kills, random.Random(arguments.seed), hits, wrong)
    except KeyboardInterrupt:
        console.warn("interrupted; this was seen until then")
    say_table(hits)
    console.say(json.dumps({"kills": sum(hits.values()), "wrong": len(wrong)}))
    return 1 if wrong else 0


def attack(num_kills: int, generator: random.Random, hits: Counter[tuple[str, str]], wrong: list[str]) -> None:
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
            kills = draw(generator, setup, seconds)
            folder = Path(scratch) / "case"
            num_hits, differences = interrupt(server, setup, kills, folder, expected)
            hits[setup.name, kills[-1].moment] += num_hits
            bar.update(num_hits)
            if differences:
                wrong.append(f"{setup.name}: {kills}: {differences}")
                console.warn(wrong[-1])
            shutil.rmtree(folder)
            if sum(hits.values()) >= num_kills:
                return


def draw(generator: random.Random, setup: Setup, seconds: float) -> list[Kill]:
    """One kill at a stage, or up to three at random moments of the same run."""
    rank = generator.choice([None, *range(setup.num_ranks)])
    if generator.random() < 0.6:
        stage = generator.choice(SAVE_STAGES)
        if stage not in ("before", "first_file"):
            rank = 0  # the later stages are rank 0's
        return [Kill(stage, step=generator.choice([2, 4, 6, 8]), rank=rank)]
    if generator.random() < 0.25:
        return [Kill(after=generator.uniform(0.3, seconds), is_launcher=True)]
    return [Kill(after=generator.uniform(0.0, seconds), rank=rank) for _ in range(generator.randint(1, 3))]


def say_table(hits: Counter[tuple[str, str]]) -> None:
    moments = [*SAVE_STAGES, "random", "launcher"]
    console.say(f"{'kills that hit':26}" + "".join(f"{moment:>14}" for moment in moments))
    for setup in SETUPS:
        console.say(f"{setup.name:26}" + "".join(f"{hits[setup.name, moment]:>14}" for moment in moments))


if __name__ == "__main__":
    sys.argv[0] = "tests/kill_campaign.py"
    run_command(main)
