"""Warnings that an experienced user would derive from the figures, each given once."""

import math
from collections.abc import Iterator, Sequence
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

    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # by id
    num_labels: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_labels >= MAX_LABELS

    def add(self, labels: np.ndarray) -> None:
        """`labels`: ids of masked tokens, -1 where nothing is predicted."""
        if not self.is_complete:
            seen = np.bincount(labels[labels >= 0], minlength=len(self.counts))
            seen[: len(self.counts)] += self.counts
            self.counts, self.num_labels = seen, int(seen.sum())

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
class Health:
    """Checks the figures of every report. `check` returns the warnings that were not given before."""

    batch_rows: int
    first_step: int = 0  # of the schedule: the step after it may have an lr of zero, where a warm-up begins
    unigram: UnigramLevel = field(default_factory=UnigramLevel)
    repeats: RowRepeats = field(default_factory=RowRepeats)
    times: list[list[float]] = field(default_factory=list)  # of reports to be judged: seconds, data wait, paces
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
        found = {**dict(self._find_in_figures(step, figures)), **dict(self._find_in_times(figures, paces))}
        new = {key: text for key, text in found.items() if key not in self.given}
        self.given.update(new)
        return list(new.values())

    def _find_in_figures(self, step: int, figures: dict[str, float]) -> Iterator[tuple[str, str]]:
        """Name and text of each warning that one report justifies."""
        loss, lr, scale = figures["loss"], figures["learning_rate"], figures.get("loss_scale", math.inf)
        if lr <= 0 and step > self.first_step + 1:
            yield (
                "lr",
                "the learning rate is zero, so the weights do not change. The schedule is past its end "
                "(total_training_steps), or its peak is too small; see --lr_schedule, --rewarmup and --lr_offset",
            )
        if plateau := self._plateau(step, figures["mlm_loss"], lr):
            yield "plateau", plateau
        if scale <= LOW_LOSS_SCALE:
            yield (
                "scale",
                f"the fp16 loss scale has fallen to {scale:g} after {figures['skipped_steps']:.0f} skipped steps, "
                f"because gradients overflow repeatedly. Lower the learning rate, or train in bf16 (--precision bf16)",
            )
        if not math.isfinite(loss):
            yield (
                "finite",
                f"the loss is {loss}, and training cannot recover. Restart from an earlier checkpoint with a lower "
                f"learning rate or a longer warm-up",
            )

    def _find_in_times(self, figures: dict[str, float], paces: Sequence[float]) -> Iterator[tuple[str, str]]:
        """Name and text of each warning about time, from as many reports as cover enough of it to be judged."""
        window = figures["window_steps"] * figures["seconds_per_step"]
        self.times.append([window, figures["data_wait_share"] * window, *paces])
        seconds, data_wait, *sums = map(sum, zip(*self.times, strict=True))
        if seconds < MIN_SECONDS:
            return
        self.times = []
        if data_wait > MAX_DATA_WAIT_SHARE * seconds:
            yield (
                "data",
                f"{data_wait / seconds:.0%} of the time is spent waiting for data. Put the shards on a faster disk, "
                f"prepare them with this project (the chunks of NVIDIA's files are slow to read), or leave a core free "
                f"for the reader",
            )
        if sums and max(sums) > MAX_RANK_SPEED_RATIO * min(sums):
            yield (
                "ranks",
                f"rank {sums.index(max(sums))} takes {max(sums) / max(min(sums), 1e-9):.2f} times as long to compute "
                f"as the fastest rank, and all ranks wait for it. Look for another job on its machine, a hot or slower "
                f"device, or cores that ranks share",
            )

    def _plateau(self, step: int, loss: float, lr: float) -> str | None:
        if self.warm_step is None or step < self.warm_step + PLATEAU_STEPS or "plateau" in self.given:
            return None
        level = self.unigram.nats()
        if level is None or abs(loss - level) > PLATEAU_MARGIN:
            return None
        what = (
            f"the masked-LM loss {loss:.2f} is still at the unigram level ({level:.2f} nats): the model has learned "
            f"word frequencies, but does not use context yet."
        )
        causes, share = [], self.repeats.share()
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
            return f"{what} Likely causes: {'; '.join(causes)}"
        return (
            f"{what} Neither repeated rows ({share:.0%}), nor the batch size ({self.batch_rows} rows per step), nor "
            f"the learning rate (now {lr:.1e}) explains it. It may take more steps; if the loss was lower before, try "
            f"a longer warm-up or a lower peak"
        )


def describe_without_gradient(names: list[str]) -> str:
    """The warning about parameters that got no gradient in the first steps."""
    parts = sorted({name.rsplit(".", 1)[0] for name in names})
    listed = ", ".join(parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")
    return (
        f"{counted(len(names), 'parameter')} got no gradient in the first steps: {listed}. They will not change. A "
        f"head without gradient means that its loss is missing; check that the data has its labels"
    )
