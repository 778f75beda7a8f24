"""Sums of the model's losses and counts, and the report window: what the steps since the last report amount to."""

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from common.memory import peak_resident_mib
from data.shards.schema import NO_LABEL
from data.stream.loader import StepBatches
from nvidia.config import BertConfig
from training.metrics.flops import RankPace, model_flops
from training.metrics.timing import SECTIONS, SectionTimer
from training.runtime import collectives
from training.runtime.ranks import RankInfo

READ_SECONDS = 1.0  # between two reads of a loss that is still being summed


class Tally:
    """Sums of the model's details. Adding is asynchronous; reading waits for the device."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None
        self.names: tuple[str, ...] = ()

    def add(self, details: Any) -> None:
        """Add the details of one forward pass: a named tuple of 0-dim tensors."""
        values = torch.stack([value.detach().double() for value in details])
        self.names = details._fields
        self.sums = values if self.sums is None else self.sums + values

    def all_ranks_total(self) -> dict[str, float]:
        """The sums over all ranks, by name."""
        assert self.sums is not None, "all_ranks_total() before the first add()"
        return dict(zip(self.names, collectives.all_ranks_sum(self.sums.clone()).tolist(), strict=True))


class BatchSpread(Tally):
    """How much the masked-LM loss differs between micro-batches: the uncertainty of its mean over all of them."""

    def add(self, details: Any) -> None:
        """Add the details of one forward pass. Asynchronous, as Tally.add()."""
        loss, count = details.masked_lm_loss_sum.detach().double(), details.masked_lm_count.detach().double()
        values = torch.stack([loss, count, loss * loss, loss * count, count * count, (count > 0).double()])
        self.sums = values if self.sums is None else self.sums + values

    def all_ranks_standard_error(self) -> float | None:
        """The standard error of the mean masked-token loss, in nats; None: there are fewer than two micro-batches."""
        assert self.sums is not None, "all_ranks_standard_error() before the first add()"
        loss, count, squares, products, counts, batches = collectives.all_ranks_sum(self.sums.clone()).tolist()
        if batches < 2:
            return None
        mean = loss / count
        residuals = max(0.0, squares - 2 * mean * products + mean * mean * counts)
        return math.sqrt(residuals * batches / (batches - 1)) / count


def summarize(sums: dict[str, float]) -> dict[str, float]:
    """Means per masked token and per sentence pair from a tally's sums. Without pairs there are no figures of them."""
    masked, pairs = max(sums["masked_lm_count"], 1.0), sums["next_sentence_count"]
    mlm = sums["masked_lm_loss_sum"] / masked
    figures = {"loss": mlm, "mlm_loss": mlm, "mlm_accuracy": sums["masked_lm_correct"] / masked}
    if not pairs:
        return figures
    nsp = sums["next_sentence_loss_sum"] / pairs
    return {**figures, "loss": mlm + nsp, "nsp_loss": nsp, "nsp_accuracy": sums["next_sentence_correct"] / pairs}


class StepLoss(NamedTuple):
    """The loss of one step over all ranks, and its samples. Each step is settled once."""

    step: int
    first_sample: int
    next_sample: int
    loss: float
    num_tokens: int = 0  # real tokens


class WindowReport(NamedTuple):
    """A closed window, the same on all ranks."""

    figures: dict[str, float]
    settled: list[StepLoss]  # the steps that all_ranks_settle() has not returned before
    paces: list[float]  # each rank's seconds for the same work
    seconds_per_micro_step: float


@dataclass
class MetricsWindow:
    """Counts steps as they are taken; `all_ranks_close` turns the counts into figures and starts the next window.

    A checkpoint within a window calls `all_ranks_settle`, so that reports keep their regular steps.
    """

    config: BertConfig
    rank_info: RankInfo
    device: torch.device
    timer: SectionTimer
    pace: RankPace
    matmul_speed: float  # FLOP/s of plain products, all ranks

    def __post_init__(self) -> None:
        self.seconds_per_step_before: float | None = None  # of the previous window
        self.read_at = 0.0
        self.reset()

    def reset(self) -> None:
        """Discard what was counted since the last report."""
        self.steps: list[tuple[int, int, int]] = []  # (step, first sample, next sample)
        self.sums: list[torch.Tensor] = []  # of each step, on the device
        self.num_settled = 0  # steps
        self.names: tuple[str, ...] = ()  # of the sums
        self.num_micro_steps = 0
        self.num_rows = 0  # over all ranks
        self.num_positions = 0  # tokens and padding, over all ranks
        self.flops = 0.0  # of this rank

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def num_unsettled(self) -> int:
        return len(self.steps) - self.num_settled

    def count(self, step: int, tally: Tally, batches: StepBatches, num_layers: int) -> None:
        """Count a step that was applied. Reads the batches in host memory, and never waits for the device.

        `num_layers`: blocks that took part.
        """
        assert tally.sums is not None
        rows = len(batches.rows) * self.rank_info.world_size
        self.steps.append((step, batches.next_sample - rows, batches.next_sample))
        self.sums.append(tally.sums)
        self.names = tally.names
        self.num_micro_steps += len(batches.micro_batches)
        self.num_rows += rows
        for batch in batches.micro_batches:
            self.num_positions += batch.input_ids.numel() * self.rank_info.world_size
            num_masked = int((batch.masked_lm_labels != NO_LABEL).sum())
            self.flops += model_flops(self.config, batch.input_mask.sum(1), num_masked, num_layers)

    def seconds_per_step(self) -> float:
        """Seconds per step in the last report; before the first, in the steps so far."""
        if self.seconds_per_step_before is not None:
            return self.seconds_per_step_before
        return self.timer.training_so_far() / max(1, self.num_steps)

    def loss_so_far(self) -> float | None:
        """This rank's mean loss since the last report. Waits for the device, so returns None within READ_SECONDS."""
        now = time.monotonic()
        if not self.sums or now - self.read_at < READ_SECONDS:
            return None
        self.read_at = now
        return summarize(dict(zip(self.names, torch.stack(self.sums).sum(0).tolist(), strict=True)))["loss"]

    def all_ranks_settle(self) -> list[StepLoss]:
        """Settle the steps that are not settled yet, by one reduction. The window stays open."""
        return self._settle(collectives.all_ranks_sum(torch.stack(self.sums[self.num_settled :])))

    def _settle(self, by_step: torch.Tensor) -> list[StepLoss]:
        """`by_step` [steps, names]: sums of the last steps over all ranks; those settled before are left out."""
        unsettled = by_step[len(by_step) - self.num_unsettled :].tolist()
        sums = [dict(zip(self.names, values, strict=True)) for values in unsettled]
        steps = zip(self.steps[self.num_settled :], sums, strict=True)
        self.num_settled = self.num_steps
        return [StepLoss(*step, summarize(each)["loss"], int(each["num_tokens"])) for step, each in steps]

    def all_ranks_close(self) -> WindowReport:
        """The figures of this window over all ranks, by one reduction. Then the next window begins."""
        ranks, seconds = self.rank_info.world_size, self.timer.lap()
        host = self._host_values(seconds)
        by_step = torch.stack(self.sums)  # [steps, names]
        values = torch.cat([by_step.flatten(), by_step.new_tensor(list(host.values()))])
        totals = collectives.all_ranks_sum(values)
        by_step = totals[: by_step.numel()].view(by_step.shape)
        sums = dict(
            zip((*self.names, *host), [*by_step.sum(0).tolist(), *totals[by_step.numel() :].tolist()], strict=True)
        )
        elapsed = sums["training_seconds"] / ranks
        paces = [sums[f"pace_{rank}"] for rank in range(ranks)]
        figures = {
            **summarize(sums),
            "tokens_per_second": sums["num_tokens"] / elapsed,
            "samples_per_second": self.num_rows / elapsed,
            "seconds_per_step": elapsed / self.num_steps,
            "window_steps": float(self.num_steps),
            "padding_share": 1.0 - sums["num_tokens"] / self.num_positions,
            "masking_rate": sums["masked_lm_count"] / max(1.0, sums["num_tokens"]),
            "model_flops_per_second": sums["flops"] / elapsed,
            "matmul_share": sums["flops"] / elapsed / self.matmul_speed,
            "data_wait_share": sums["seconds_data_wait"] / ranks / elapsed,
            **{f"seconds_{section}": sums[f"seconds_{section}"] / ranks for section in (*SECTIONS, "other")},
            "memory_gib": max(sums[f"memory_{rank}"] for rank in range(ranks)),
        }
        if min(paces) > 0:
            figures["slowest_over_fastest_rank"] = max(paces) / min(paces)
            figures["slowest_rank"] = float(paces.index(max(paces)))
        report = WindowReport(figures, self._settle(by_step), paces, elapsed / self.num_micro_steps)
        self.seconds_per_step_before = figures["seconds_per_step"]
        self.reset()
        return report

    def _host_values(self, seconds: dict[str, float]) -> dict[str, float]:
        """Values known to this process, named so that their sum over ranks is useful.

        A value per rank, zero on all other ranks, turns the sum into a gather.
        """
        own = {rank: float(rank == self.rank_info.rank) for rank in range(self.rank_info.world_size)}
        with self.timer.measure("logging"):
            pace = self.pace.measure(seconds)
        memory = peak_memory_gib(self.device)
        return {
            "flops": self.flops,
            "training_seconds": seconds["training"],
            **{f"seconds_{section}": seconds[section] for section in (*SECTIONS, "other")},
            **{f"pace_{rank}": flag * pace for rank, flag in own.items()},
            **{f"memory_{rank}": flag * memory for rank, flag in own.items()},
        }


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has used: of the GPU, or main memory where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_resident_mib() / 1024
