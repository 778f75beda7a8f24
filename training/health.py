"""What a glance at the figures would tell an experienced eye, said in words and once each."""

import math
from dataclasses import dataclass, field

import numpy as np

# Where each warning begins. They are about a run's health, so they err on the side of silence.
DATA_WAIT_SHARE = 0.10
RANK_SPEED_RATIO = 1.25
LOW_LOSS_SCALE = 4.0
PLATEAU_STEPS = 300  # after warm-up, before the unigram level is called a plateau
PLATEAU_MARGIN = 0.3  # nats: closer than this to the unigram level has learned no context
MIN_LABELS = 20_000  # counted before their entropy is trusted
MIN_SECONDS = 5.0  # of a window, before shares of its time are judged: a start is always uneven


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
class Health:
    """Checks every report's figures. `check` gives the sentences that have not been said yet."""

    plateau_from_step: int
    batch_rows: int
    unigram: UnigramLevel = field(default_factory=UnigramLevel)
    said: set[str] = field(default_factory=set)

    def check(self, step: int, figures: dict[str, float]) -> list[str]:
        found = {
            "rate": self._rate(figures),
            "plateau": self._plateau(step, figures),
            "scale": _loss_scale(figures),
            "data": _data_wait(figures),
            "ranks": _ranks(figures),
            "finite": _finite(figures),
        }
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

    def _rate(self, figures: dict[str, float]) -> str | None:
        if figures["learning_rate"] > 0 or figures["window_steps"] < 2:
            return None
        return (
            "the learning rate is zero: nothing is learned. The schedule is past its end (total_training_steps), or "
            "the peak is too small; see --lr_schedule, --rewarmup and --lr_offset"
        )

    def _plateau(self, step: int, figures: dict[str, float]) -> str | None:
        level = self.unigram.nats()
        if step < self.plateau_from_step or level is None or figures["mlm_loss"] < level - PLATEAU_MARGIN:
            return None
        return (
            f"the masked-LM loss {figures['mlm_loss']:.2f} is still at the unigram level ({level:.2f} nats): the model "
            f"knows how frequent words are, but uses no context yet. Likely causes, in this order: too few steps so "
            f"far; a learning rate too low or too high (now {figures['learning_rate']:.1e}); a batch too small "
            f"({self.batch_rows} rows); the same lines repeated in the data"
        )


def _loss_scale(figures: dict[str, float]) -> str | None:
    scale = figures.get("loss_scale")
    if scale is None or scale > LOW_LOSS_SCALE:
        return None
    return (
        f"the fp16 loss scale has fallen to {scale:g} after {figures['skipped_steps']:.0f} skipped steps: gradients "
        f"overflow again and again. Lower the learning rate, or train in bf16 (--precision bf16)"
    )


def _data_wait(figures: dict[str, float]) -> str | None:
    share = figures["data_wait_share"]
    if share <= DATA_WAIT_SHARE or _seconds(figures) < MIN_SECONDS:
        return None
    return (
        f"{share:.0%} of the time is spent waiting for data. Put the shards on a faster disk, prepare them with this "
        f"project (NVIDIA's chunks are slow to read), or leave a core free for the reader"
    )


def _ranks(figures: dict[str, float]) -> str | None:
    ratio = figures["slowest_over_fastest_rank"]
    if ratio <= RANK_SPEED_RATIO or _seconds(figures) < MIN_SECONDS:
        return None
    return (
        f"rank {figures['slowest_rank']:.0f} takes {ratio:.2f} times as long to compute as the fastest one, and all "
        f"wait for it: look for another job on its machine, a hot or slower device, or cores shared between ranks"
    )


def _seconds(figures: dict[str, float]) -> float:
    return figures["window_steps"] * figures["seconds_per_step"]


def _finite(figures: dict[str, float]) -> str | None:
    if math.isfinite(figures["loss"]):
        return None
    return (
        f"the loss is {figures['loss']}: this run is lost. Go back to an earlier checkpoint with a lower learning rate "
        f"or a longer warm-up"
    )
