"""What a glance at the figures would tell an experienced eye, said in words and once each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Where each warning begins. They are about a run's health, so they err on the side of silence.
DATA_WAIT_SHARE = 0.10
RANK_SPEED_RATIO = 1.25
LOW_LOSS_SCALE = 4.0
PLATEAU_STEPS = 300  # after warm-up, before the unigram level is called a plateau
PLATEAU_MARGIN = 0.3  # nats: closer than this to the unigram level has learned how frequent words are, and no context
MIN_LABELS = 20_000  # counted before their entropy is trusted
MIN_SECONDS = 10.0  # of training, before shares of its time are judged: a start is always uneven
# What keeps a model at the unigram level, where the figures show it.
REPEATED_SHARE = 0.2  # of the rows seen
SMALL_BATCH = 32  # rows a step
LOW_RATE = 2e-5
MAX_ROWS = 20_000  # whose repeats are counted


@dataclass
class UnigramLevel:
    """The cross entropy of always guessing by frequency, from the masked tokens seen on this rank."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, labels: np.ndarray) -> None:
        """`labels`: ids of masked tokens, -1 where there is none."""
        seen = np.bincount(labels[labels >= 0])
        if len(seen) > len(self.counts):
            self.counts = np.pad(self.counts, (0, len(seen) - len(self.counts)))
        self.counts[: len(seen)] += seen

    def nats(self) -> float | None:
        total = int(self.counts.sum())
        if total < MIN_LABELS:
            return None
        shares = self.counts[self.counts > 0] / total
        return float(-(shares * np.log(shares)).sum())


@dataclass
class RowRepeats:
    """How many of the first rows seen on this rank had come before, within one epoch and without regard to masks."""

    epoch: int | None = None
    num_rows: int = 0
    seen: set[int] = field(default_factory=set)

    def add(self, epoch: int, input_ids: np.ndarray, labels: np.ndarray) -> None:
        """`input_ids` and `labels` [B, S] as the model gets them; labels are -1 where nothing is predicted."""
        self.epoch = epoch if self.epoch is None else self.epoch
        if epoch != self.epoch or self.num_rows >= MAX_ROWS:
            return
        originals = np.where(labels >= 0, labels, input_ids)
        self.seen.update(hash(row.tobytes()) for row in originals)
        self.num_rows += len(originals)

    def share(self) -> float:
        return 1.0 - len(self.seen) / self.num_rows if self.num_rows else 0.0


@dataclass
class Stretch:
    """Reports put together until they are long enough to be judged, however few steps each one has."""

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
    """Checks every report's figures. `check` gives the sentences that have not been said yet."""

    batch_rows: int
    first_step: int = 0  # of the schedule: the step after it may have a rate of zero, where a warm-up begins
    unigram: UnigramLevel = field(default_factory=UnigramLevel)
    repeats: RowRepeats = field(default_factory=RowRepeats)
    stretch: Stretch = field(default_factory=Stretch)
    said: set[str] = field(default_factory=set)
    warm_step: int | None = None  # the first report's after the warm-up

    def check(
        self, step: int, figures: dict[str, float], paces: Sequence[float] = (), is_warm: bool = True
    ) -> list[str]:
        """`paces`: each rank's seconds for the same work. `is_warm`: the schedule's warm-up is over."""
        if is_warm and self.warm_step is None:
            self.warm_step = step
        found = {
            "rate": self._rate(step, figures),
            "plateau": self._plateau(step, figures),
            "scale": _loss_scale(figures),
            "finite": _finite(figures),
        }
        self.stretch.add(figures, paces)
        if self.stretch.seconds >= MIN_SECONDS:
            found |= {"data": _data_wait(self.stretch), "ranks": _ranks(self.stretch)}
            self.stretch = Stretch()
        fresh = {key: text for key, text in found.items() if text and key not in self.said}
        self.said.update(fresh)
        return list(fresh.values())

    def without_gradient(self, names: list[str]) -> str | None:
        """The sentence about parameters that got no gradient in a step, or None."""
        if not names:
            return None
        parts = sorted({name.rsplit(".", 1)[0] for name in names})
        listed = ", ".join(parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")
        return (
            f"{len(names)} parameters got no gradient in the first steps: {listed}. They will stay as they are; a head "
            f"without gradient means that its loss is missing (no labels in the data?)"
        )

    def _rate(self, step: int, figures: dict[str, float]) -> str | None:
        if figures["learning_rate"] > 0 or step <= self.first_step + 1:
            return None
        return (
            "the learning rate is zero: nothing is learned. The schedule is past its end (total_training_steps), or "
            "the peak is too small; see --lr_schedule, --rewarmup and --lr_offset"
        )

    def _plateau(self, step: int, figures: dict[str, float]) -> str | None:
        level = self.unigram.nats()
        if self.warm_step is None or step < self.warm_step + PLATEAU_STEPS or level is None:
            return None
        if abs(figures["mlm_loss"] - level) > PLATEAU_MARGIN:
            return None
        return (
            f"the masked-LM loss {figures['mlm_loss']:.2f} is still at the unigram level ({level:.2f} nats): the model "
            f"knows how frequent words are, but uses no context yet. {self._plateau_cause(figures['learning_rate'])}"
        )

    def _plateau_cause(self, rate: float) -> str:
        """What the figures show of the known causes; where they show none, that."""
        share = self.repeats.share()
        causes = []
        if share > REPEATED_SHARE:
            causes.append(f"the data repeats itself ({share:.0%} of the rows seen had come before): remove duplicates")
        if self.batch_rows < SMALL_BATCH:
            causes.append(
                f"the batch is small ({self.batch_rows} rows a step): raise train_batch_size or "
                f"gradient_accumulation_steps"
            )
        if 0 < rate < LOW_RATE:
            causes.append(f"the learning rate is low (now {rate:.1e}): raise learning_rate")
        if causes:
            return f"Likely here: {'; '.join(causes)}"
        return (
            f"Neither repeated rows ({share:.0%} of those seen), nor the batch ({self.batch_rows} rows a step), nor a "
            f"low rate (now {rate:.1e}) explains it: it may take more steps, or a longer warm-up or a lower peak where "
            f"the loss has been lower"
        )


def _loss_scale(figures: dict[str, float]) -> str | None:
    scale = figures.get("loss_scale")
    if scale is None or scale > LOW_LOSS_SCALE:
        return None
    return (
        f"the fp16 loss scale has fallen to {scale:g} after {figures['skipped_steps']:.0f} skipped steps: gradients "
        f"overflow again and again. Lower the learning rate, or train in bf16 (--precision bf16)"
    )


def _data_wait(stretch: Stretch) -> str | None:
    share = stretch.data_wait / stretch.seconds
    if share <= DATA_WAIT_SHARE:
        return None
    return (
        f"{share:.0%} of the time is spent waiting for data. Put the shards on a faster disk, prepare them with this "
        f"project (NVIDIA's chunks are slow to read), or leave a core free for the reader"
    )


def _ranks(stretch: Stretch) -> str | None:
    if not stretch.paces or max(stretch.paces) <= RANK_SPEED_RATIO * min(stretch.paces):
        return None
    ratio = max(stretch.paces) / max(min(stretch.paces), 1e-9)
    return (
        f"rank {stretch.paces.index(max(stretch.paces))} takes {ratio:.2f} times as long to compute as the fastest "
        f"one, and all wait for it: look for another job on its machine, a hot or slower device, or cores shared "
        f"between ranks"
    )


def _finite(figures: dict[str, float]) -> str | None:
    if math.isfinite(figures["loss"]):
        return None
    return (
        f"the loss is {figures['loss']}: this run is lost. Go back to an earlier checkpoint with a lower learning rate "
        f"or a longer warm-up"
    )
