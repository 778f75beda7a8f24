"""Warnings that an experienced user would derive from the figures, each given once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.words import counted

# Thresholds of the warnings. They avoid false alarms rather than missed ones.
MAX_DATA_WAIT_SHARE = 0.10
MAX_RANK_SPEED_RATIO = 1.25
LOW_LOSS_SCALE = 4.0
PLATEAU_STEPS = 300  # after warm-up, before a loss at the unigram level is called a plateau
PLATEAU_MARGIN = 0.3  # nats: a loss closer to the unigram level reflects word frequencies only, not context
MIN_LABELS = 20_000  # counted before their entropy is trusted
MAX_LABELS = 1_000_000  # counted: more would change the entropy by less than 0.02 nats
MIN_SECONDS = 10.0  # of training, before shares of its time are judged: the start of a run is always uneven
# Causes of a plateau that the figures can show.
REPEATED_SHARE = 0.2  # of the rows seen
SMALL_BATCH = 32  # rows per step
LOW_LR = 2e-5
MAX_ROWS = 20_000  # checked for repeats


@dataclass
class UnigramLevel:
    """The cross entropy of predicting by word frequency, from the masked tokens seen on this rank."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    num_labels: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_labels >= MAX_LABELS

    def add(self, labels: np.ndarray) -> None:
        """`labels`: ids of masked tokens, -1 where nothing is predicted."""
        if self.is_complete:
            return
        seen = np.bincount(labels[labels >= 0])
        if len(seen) > len(self.counts):
            self.counts = np.pad(self.counts, (0, len(seen) - len(self.counts)))
        self.counts[: len(seen)] += seen
        self.num_labels += int(seen.sum())

    def nats(self) -> float | None:
        """None: too few labels."""
        if self.num_labels < MIN_LABELS:
            return None
        shares = self.counts[self.counts > 0] / self.num_labels
        return float(-(shares * np.log(shares)).sum())


@dataclass
class RowRepeats:
    """How many of the first rows seen on this rank occurred before, within one epoch and regardless of masks."""

    epoch: int | None = None
    num_rows: int = 0
    seen: set[int] = field(default_factory=set)
    is_complete: bool = False

    def add(self, epoch: int, input_ids: np.ndarray, labels: np.ndarray) -> None:
        """`input_ids` and `labels` [B, S] as the model gets them; labels are -1 where nothing is predicted."""
        self.epoch = epoch if self.epoch is None else self.epoch
        self.is_complete = self.is_complete or epoch != self.epoch or self.num_rows >= MAX_ROWS
        if self.is_complete:
            return
        originals = np.where(labels >= 0, labels, input_ids)
        self.seen.update(hash(row.tobytes()) for row in originals)
        self.num_rows += len(originals)

    def share(self) -> float:
        return 1.0 - len(self.seen) / self.num_rows if self.num_rows else 0.0


@dataclass
class TimeShares:
    """Consecutive reports, combined until they cover enough time to be judged."""

    seconds: float = 0.0
    data_wait: float = 0.0
    paces: tuple[float, ...] = ()  # each rank's seconds for the same work

    def add(self, figures: dict[str, float], paces: Sequence[float]) -> None:
        seconds = figures["window_steps"] * figures["seconds_per_step"]
        self.seconds += seconds
        self.data_wait += figures["data_wait_share"] * seconds
        before = self.paces or (0.0,) * len(paces)
        self.paces = tuple(one + other for one, other in zip(before, paces, strict=True))


@dataclass
class Health:
    """Checks the figures of every report. `check` returns the warnings that were not given before."""

    batch_rows: int
    first_step: int = 0  # of the schedule: the step after it may have an lr of zero, where a warm-up begins
    unigram: UnigramLevel = field(default_factory=UnigramLevel)
    repeats: RowRepeats = field(default_factory=RowRepeats)
    time: TimeShares = field(default_factory=TimeShares)
    given: set[str] = field(default_factory=set)
    warm_step: int | None = None  # of the first report after the warm-up

    @property
    def needs_rows(self) -> bool:
        """Whether the plateau warning can still come, and its counts are not complete."""
        return "plateau" not in self.given and not (self.unigram.is_complete and self.repeats.is_complete)

    def watch_rows(self, epoch: int, input_ids: np.ndarray, labels: np.ndarray) -> None:
        """`input_ids` and `labels` [B, S] of this rank."""
        self.unigram.add(labels.ravel())
        self.repeats.add(epoch, input_ids, labels)

    def check(
        self, step: int, figures: dict[str, float], paces: Sequence[float] = (), is_warm: bool = True
    ) -> list[str]:
        """`paces`: each rank's seconds for the same work. `is_warm`: the schedule's warm-up is over."""
        if is_warm and self.warm_step is None:
            self.warm_step = step
        found = {
            "lr": self._zero_lr(step, figures),
            "plateau": self._plateau(step, figures),
            "scale": _loss_scale(figures),
            "finite": _finite(figures),
        }
        self.time.add(figures, paces)
        if self.time.seconds >= MIN_SECONDS:
            found |= {"data": _data_wait(self.time), "ranks": _slow_rank(self.time)}
            self.time = TimeShares()
        new = {key: text for key, text in found.items() if text and key not in self.given}
        self.given.update(new)
        return list(new.values())

    def _zero_lr(self, step: int, figures: dict[str, float]) -> str | None:
        if figures["learning_rate"] > 0 or step <= self.first_step + 1:
            return None
        return (
            "the learning rate is zero, so the weights do not change. The schedule is past its end "
            "(total_training_steps), or its peak is too small; see --lr_schedule, --rewarmup and --lr_offset"
        )

    def _plateau(self, step: int, figures: dict[str, float]) -> str | None:
        if self.warm_step is None or step < self.warm_step + PLATEAU_STEPS or "plateau" in self.given:
            return None
        level = self.unigram.nats()
        if level is None or abs(figures["mlm_loss"] - level) > PLATEAU_MARGIN:
            return None
        return (
            f"the masked-LM loss {figures['mlm_loss']:.2f} is still at the unigram level ({level:.2f} nats): the model "
            f"has learned word frequencies, but does not use context yet. "
            f"{self._plateau_cause(figures['learning_rate'])}"
        )

    def _plateau_cause(self, lr: float) -> str:
        """The known causes that the figures show, or a sentence that they show none."""
        share = self.repeats.share()
        causes = []
        if share > REPEATED_SHARE:
            causes.append(f"the data repeats itself ({share:.0%} of the rows occurred before): remove duplicates")
        if self.batch_rows < SMALL_BATCH:
            causes.append(
                f"the batch is small ({counted(self.batch_rows, 'row')} per step): raise train_batch_size or "
                f"gradient_accumulation_steps"
            )
        if 0 < lr < LOW_LR:
            causes.append(f"the learning rate is low (now {lr:.1e}): raise learning_rate")
        if causes:
            return f"Likely causes: {'; '.join(causes)}"
        return (
            f"Neither repeated rows ({share:.0%}), nor the batch size ({self.batch_rows} rows per step), nor the "
            f"learning rate (now {lr:.1e}) explains it. It may take more steps; if the loss was lower before, try a "
            f"longer warm-up or a lower peak"
        )


def _loss_scale(figures: dict[str, float]) -> str | None:
    scale = figures.get("loss_scale")
    if scale is None or scale > LOW_LOSS_SCALE:
        return None
    return (
        f"the fp16 loss scale has fallen to {scale:g} after {figures['skipped_steps']:.0f} skipped steps, because "
        f"gradients overflow repeatedly. Lower the learning rate, or train in bf16 (--precision bf16)"
    )


def _data_wait(time: TimeShares) -> str | None:
    share = time.data_wait / time.seconds
    if share <= MAX_DATA_WAIT_SHARE:
        return None
    return (
        f"{share:.0%} of the time is spent waiting for data. Put the shards on a faster disk, prepare them with this "
        f"project (the chunks of NVIDIA's files are slow to read), or leave a core free for the reader"
    )


def _slow_rank(time: TimeShares) -> str | None:
    if not time.paces or max(time.paces) <= MAX_RANK_SPEED_RATIO * min(time.paces):
        return None
    ratio = max(time.paces) / max(min(time.paces), 1e-9)
    return (
        f"rank {time.paces.index(max(time.paces))} takes {ratio:.2f} times as long to compute as the fastest rank, and "
        f"all ranks wait for it. Look for another job on its machine, a hot or slower device, or cores that ranks share"
    )


def _finite(figures: dict[str, float]) -> str | None:
    if math.isfinite(figures["loss"]):
        return None
    return (
        f"the loss is {figures['loss']}, and training cannot recover. Restart from an earlier checkpoint with a lower "
        f"learning rate or a longer warm-up"
    )


def describe_without_gradient(names: list[str]) -> str:
    """The warning about parameters that got no gradient in the first steps."""
    parts = sorted({name.rsplit(".", 1)[0] for name in names})
    listed = ", ".join(parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")
    return (
        f"{counted(len(names), 'parameter')} got no gradient in the first steps: {listed}. They will not change. A "
        f"head without gradient means that its loss is missing; check that the data has its labels"
    )
