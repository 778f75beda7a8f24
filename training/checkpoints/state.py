"""The training state: what a run needs to resume, beside DeepSpeed's own files, and every change of it in training.

It is readable JSON in the checkpoint. The files beside the checkpoints record what may be newer: `best.json`,
`skips.json` and `time_spent.json`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, PlainValidator, TypeAdapter, ValidationError

from common.console import console
from common.errors import UserError, shortened
from common.files import write_atomically, write_plainly
from common.json_files import load_json
from common.validation import describe_value
from nvidia.cpu.libraries import Libraries
from training.checkpoints.paths import BEST, SKIPS, STATE, TIME_SPENT, tag_of_step
from training.plan.time_budget import MAX_SECONDS

ROLLBACK = "rollback"  # third element of an entry of skips.json that a rollback added
Ranges = tuple[tuple[int, int], ...]  # (first sample, one past the last)


def as_ranges(content: Any) -> Ranges:
    """Ranges of samples from a JSON list of [first, end] or [first, end, "rollback"]; ValueError for anything else."""
    for entry in content if isinstance(content, list) else [content]:
        is_range = isinstance(entry, list) and entry[2:] in ([], [ROLLBACK])
        if not is_range or [type(number) for number in entry[:2]] != [int, int] or not 0 <= entry[0] < entry[1] < 2**63:
            raise ValueError(f"found {shortened(entry)}, expected [first, end] with 0 <= first < end")
    return tuple((entry[0], entry[1]) for entry in content)


def _check_size(number: Any) -> Any:
    if not 0 <= number < 2**63:
        raise ValueError(f"found {shortened(number)}, expected 0 to 2^63 - 1")
    return number


Count = Annotated[int, AfterValidator(_check_size)]
Seconds = Annotated[float, AfterValidator(_check_size)]
SavedRanges = Annotated[Ranges, PlainValidator(as_ranges)]


@dataclass(frozen=True)
class TrainingState:
    """The position of a run and the settings it must resume with.

    The order of samples and the dropout of every rank follow from `seed` and `samples`, so no random state is saved.
    """

    step: Count  # optimizer steps applied, including those of an earlier phase
    start_step: Count  # the step at which this run began; not 0 when it began from another run's checkpoint
    samples: Count  # the data cursor: rows consumed from this run's data
    tokens: Count  # real tokens seen in this run
    seed: Count
    world_size: Count
    zero_stage: Count
    precision: str
    data_digest: str
    tokenizer_digest: str | None
    best_validation_loss: float | None
    model_config: dict[str, Any]
    is_preln: bool
    is_kernel: bool = False  # whether the weights have the names of DeepSpeed's fused layers
    seconds: Seconds = 0.0  # that this run has taken, over all its restarts
    longest_pause: Seconds = 0.0  # seconds of the longest validation or save; --time_budget reserves time for the last
    skips: SavedRanges = ()  # samples that training skips
    rollbacks: SavedRanges = ()  # those of `skips` that a rollback added, as opposed to the user
    recipe: dict[str, Any] | None = None  # batch, schedule and optimizer, to report changes on resume
    data_summary: str | None = None  # files and rows, to report changes on resume
    best_tag: str | None = None  # with --keep_best or --keep_best_by: the best checkpoint
    best_is_only: bool = False  # whether that checkpoint was saved only for its figure
    best_by: str | None = None  # the probe that chose it; None: the validation loss
    probe_name: str | None = None  # the probe of best_probe
    best_probe: float | None = None  # its highest value
    probe_units: dict[str, Count] | None = None  # of each probe, which are the same for the whole run
    checks_without_gain: Count = 0  # measurements since the last improvement, for --stop_after_no_gain
    processor: str | None = None  # the kind of processor for which cpu_libraries were chosen
    cpu_libraries: Libraries | None = None  # results differ in their last bits; None: the model is too small to matter


STATE_TYPE = TypeAdapter(TrainingState)


def read_state(checkpoint: Path) -> TrainingState:
    """The state of a checkpoint that passed its manifest. The file is untrusted: every value is checked."""
    path = checkpoint / STATE
    content = load_json(path, "the state of a run")
    names = {field.name for field in fields(TrainingState)}
    required = {field.name for field in fields(TrainingState) if field.default is MISSING}
    if not required <= set(content) <= names:
        missing, unknown = (
            ", ".join(sorted(keys)) or "none" for keys in (required - set(content), set(content) - names)
        )
        raise UserError(
            f"{path}: was written by another version of this project (missing keys: {missing}; unknown keys: "
            f"{shortened(unknown)}); expected the keys of this version. Use the version that wrote it"
        )
    try:
        state = STATE_TYPE.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, detail["loc"]))
        raise UserError(f"{path}: {key}: {describe_value(detail)}. Use another checkpoint") from None
    if state.world_size < 1 or state.zero_stage > 3 or state.start_step > state.step:
        raise UserError(
            f"{path}: world_size {state.world_size}, zero_stage {state.zero_stage}, start_step {state.start_step} and "
            f"step {state.step} contradict each other. Use another checkpoint"
        )
    return state


class Skips(NamedTuple):
    """Ranges of samples to skip. `rollbacks` are those that a rollback added; only they count against its limit."""

    ranges: Ranges
    rollbacks: Ranges = ()

    def merged(self, other: "Skips") -> "Skips":
        return Skips(*(tuple(dict.fromkeys((*mine, *theirs))) for mine, theirs in zip(self, other, strict=True)))

    def next_sample(self, sample: int, num_rows: int) -> int:
        """Where the next step of `num_rows` samples can begin without a skipped one: at `sample`, or later.

        A range can begin inside a step when the batch has grown since; the rows before it are then skipped too.
        """
        for first, end in sorted(self.ranges):
            if sample < end and first < sample + num_rows:
                sample = end
        return sample

    def entries(self) -> list[list[Any]]:
        """The content of `skips.json`."""
        return [[*pair, ROLLBACK] if pair in self.rollbacks else list(pair) for pair in self.ranges]


@dataclass(frozen=True)
class Best:
    """The content of `best.json`: the checkpoint, its loss or probe, and whether it was saved only for that."""

    tag: str
    mlm_loss: float | None = None  # None: it was chosen by a probe
    is_only_best: bool = False
    probe: str | None = None
    value: float | None = None  # of the probe

    @property
    def cost(self) -> float | None:
        """Lower is better, among those chosen by the same figure. None: that figure is not known."""
        if self.probe is None:
            return self.mlm_loss
        return None if self.value is None else -self.value


BEST_TYPE = TypeAdapter(Best)


class Progress:
    """Owns the run's TrainingState. It is the same on all ranks, so every method must be called on all of them."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state

    @property
    def step(self) -> int:
        """Optimizer steps applied."""
        return self.state.step

    @property
    def samples(self) -> int:
        """The data cursor: the sample that the next step begins with."""
        return self.state.samples

    @property
    def skips(self) -> Skips:
        return Skips(self.state.skips, self.state.rollbacks)

    def advance(self, step: int, next_sample: int) -> None:
        """Count the rows of a step as consumed. `step` stays the same where the engine skipped it."""
        self.state = replace(self.state, step=step, samples=next_sample)

    def move_cursor(self, sample: int) -> None:
        """Continue reading at `sample`: past skipped samples, or back at the first of several bad steps."""
        self.state = replace(self.state, samples=sample)

    def add_tokens(self, num_tokens: int) -> None:
        self.state = replace(self.state, tokens=self.state.tokens + num_tokens)

    def set_seconds(self, seconds: float) -> None:
        """Set the time used so far, by rank 0's clock."""
        self.state = replace(self.state, seconds=seconds)

    def note_validation(
        self, mlm_loss: float, *, is_kept: bool, is_saved_anyway: bool, is_watched: bool = False
    ) -> Best | None:
        """Record a validation loss.

        `is_kept`: --keep_best asks for a checkpoint of the lowest loss. Returns the mark for it when this is the lowest
        so far, or None. `is_saved_anyway`: this step's checkpoint is due for another reason too. `is_watched`:
        --stop_after_no_gain goes by it.
        """
        lowest = self.state.best_validation_loss
        is_gain = math.isfinite(mlm_loss) and (lowest is None or mlm_loss < lowest)
        if is_watched:
            self._count_check(is_gain)
        if not is_gain:
            return None
        self.state = replace(self.state, best_validation_loss=mlm_loss)
        return self._mark(Best(tag_of_step(self.step), mlm_loss, not is_saved_anyway)) if is_kept else None

    def note_probe(self, name: str, value: float, *, is_kept: bool, is_saved_anyway: bool) -> Best | None:
        """Record the value of the probe `name`, by which --keep_best_by or --stop_after_no_gain goes."""
        highest = self.state.best_probe if self.state.probe_name == name else None
        is_gain = math.isfinite(value) and (highest is None or value > highest)
        self._count_check(is_gain)
        if not is_gain:
            return None
        self.state = replace(self.state, probe_name=name, best_probe=value)
        best = Best(tag_of_step(self.step), None, not is_saved_anyway, probe=name, value=value)
        return self._mark(best) if is_kept else None

    def _count_check(self, is_gain: bool) -> None:
        checks = 0 if is_gain else self.state.checks_without_gain + 1
        self.state = replace(self.state, checks_without_gain=checks)

    def _mark(self, best: Best) -> Best:
        self.state = replace(self.state, best_tag=best.tag, best_is_only=best.is_only_best, best_by=best.probe)
        return best

    def set_probe_units(self, units: dict[str, int]) -> None:
        """Record how many units of each probe are scored, for the whole run."""
        self.state = replace(self.state, probe_units=units)

    def roll_back(self, saved: TrainingState, skipped: Ranges) -> None:
        """Return to `saved`, an earlier state of this run, and skip the samples `skipped` from now on."""
        skips = self.skips.merged(Skips(skipped, skipped))
        self.state = replace(
            saved,
            world_size=self.state.world_size,
            seconds=self.state.seconds,  # the time is used all the same
            recipe=self.state.recipe,
            data_summary=self.state.data_summary,
            probe_units=self.state.probe_units,
            skips=skips.ranges,
            rollbacks=skips.rollbacks,
        )


def read_best(folder: Path, tags: Sequence[str]) -> Best | None:
    """The content of `best.json` if it can be read and names one of `tags`."""
    try:
        best = BEST_TYPE.validate_json((folder / BEST).read_bytes(), strict=True)
    except (OSError, ValueError):
        return None
    return best if best.cost is not None and best.tag in tags else None


def write_best(folder: Path, best: Best) -> None:
    content = {key: value for key, value in asdict(best).items() if value is not None}
    write_atomically(folder / BEST, json.dumps(content) + "\n")


def write_skips(folder: Path, skips: Skips) -> None:
    """Save `skips` for a restart that comes before the next checkpoint, which contains them too."""
    try:
        write_atomically(folder / SKIPS, json.dumps(skips.entries()) + "\n")
    except OSError as error:
        console.warn(
            f"{folder / SKIPS}: cannot be written ({error.strerror}). The next checkpoint records the skipped samples."
        )


def read_skips(folder: Path) -> Skips:
    try:
        entries = json.loads((folder / SKIPS).read_text())
        return Skips(as_ranges(entries), as_ranges([entry for entry in entries if entry[2:]]))
    except FileNotFoundError:
        return Skips(())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder / SKIPS}: cannot be read ({error}). Correct it, or remove it to skip only the samples that the "
            f"checkpoint lists"
        ) from None


def note_time_spent(folder: Path, seconds: float) -> None:
    """Record the time used since the last checkpoint too, for a process that is killed before it saves again."""
    write_plainly(folder / TIME_SPENT, json.dumps({"seconds": seconds}) + "\n")


def read_time_spent(folder: Path) -> float:
    """The seconds that note_time_spent() recorded last; 0 if they cannot be read: then the checkpoint's time counts."""
    try:
        seconds = float(json.loads((folder / TIME_SPENT).read_text())["seconds"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0.0
    return seconds if 0 <= seconds <= MAX_SECONDS else 0.0
