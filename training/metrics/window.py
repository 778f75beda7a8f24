"""The steps since the last report: what is counted in them, and the figures that come of it."""

import math
import time
from dataclasses import replace

import torch

from common.console import console
from common.memory import peak_resident_mib
from data.shards.schema import NO_LABEL
from data.stream.batches import Batch
from data.stream.loader import StepBatches
from training.build import Run
from training.engine.gradients import GradientNorm, GradientWatch
from training.faults.guard import StepLoss, guard_engine
from training.metrics.flops import MatmulProbe, model_flops
from training.metrics.formatting import train_line
from training.metrics.health import Health
from training.metrics.tally import Tally, summarize
from training.metrics.timing import SECTIONS, SectionTimer, training_seconds
from training.plan.outlook import find_early_end
from training.runtime import collectives

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PACE_EVERY_SECONDS = 5.0  # between two measurements of this rank's pace
READ_SECONDS = 1.0  # between two looks at a loss that is still being summed up
WATCHED_STEPS = 2  # a head whose labels are all missing in one batch is not yet a dead head


class MetricsWindow:
    """Counts while steps are taken; `report` turns the counts into figures for every sink."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.tally = Tally()
        guard_engine(run.engine)
        self.norm = GradientNorm(run.engine)
        self.watch: GradientWatch | None = GradientWatch(run.engine.module)
        self.health = Health(
            batch_rows=run.settings.deepspeed.batch.total,
            first_step=run.schedule.origin,
        )
        self.num_watched = 0  # steps, since this process began
        self.paces: list[float] = []  # each rank's seconds for the same work, in the last report
        probe = self._build_probe()
        self.matmul_speed, self.slowest_speed = self._measure_machine(probe)
        # Elsewhere the forward pass tells how fast a rank is, and the probe's tensors are not kept.
        needs_probe = run.settings.deepspeed.zero_stage == 3 and run.rank_info.world_size > 1
        self.probe = probe if needs_probe else None
        self.pace, self.paced_at = 0.0, -math.inf
        self.figures: dict[str, float] = {}
        self.rate = 0.0  # the last step's
        self.num_steps = 0
        self.num_micro_steps = 0
        self.seconds_per_micro_step = 0.0  # of the last report
        self.is_end_noted = False
        self.num_rows = 0  # over all ranks
        self.num_positions = 0  # tokens and padding, over all ranks
        self.flops = 0.0
        self.marks: list[tuple[int, int, int, torch.Tensor]] = []  # (step, first and next sample, sums so far)
        self.step_losses: list[StepLoss] = []  # of the last report
        self.phases = SectionTimer(run.device)
        self.read_at = 0.0

    def _build_probe(self) -> MatmulProbe:
        settings = self.run.settings
        tokens = settings.deepspeed.batch.micro * settings.flags.max_seq_length
        return MatmulProbe(settings.model_config, tokens, DTYPES[settings.precision], self.run.device)

    def _measure_machine(self, probe: MatmulProbe) -> tuple[float, float]:
        """FLOP/s of all ranks together and of the slowest, each measured while the others are."""
        collectives.all_ranks_barrier()
        speeds = collectives.all_ranks_gather(probe.measure_speed())
        return sum(speeds), min(speeds)

    def _own_pace(self, seconds: dict[str, float]) -> float:
        """This rank's seconds for work that is its own alone and as much on every rank.

        The forward pass, where it is that. The backward pass never is: gradients are reduced in it, and a fast rank
        waits there for a slow one. At ZeRO stage 3 the forward pass gathers parameters from all ranks, so there a few
        products are measured instead, now and then.
        """
        if self.run.settings.deepspeed.zero_stage < 3:
            return seconds["forward"]
        now = time.monotonic()
        if self.probe is not None and now - self.paced_at >= PACE_EVERY_SECONDS:
            with self.phases.measure("logging"):
                self.pace, self.paced_at = self.probe.measure_pace(self.slowest_speed), now
        return self.pace

    def count(self, batches: StepBatches) -> None:
        """Note a step's work, from the batches as they lie in host memory: nothing waits for the device."""
        self.num_steps += 1
        self.num_micro_steps += len(batches.micro_batches)
        rows = len(batches.rows) * self.run.rank_info.world_size
        self.num_rows += rows
        assert self.tally.sums is not None
        self.marks.append((self.run.state.step, batches.next_sample - rows, batches.next_sample, self.tally.sums))
        epoch = self.run.horizon.epoch_of(batches.next_sample - rows)
        for batch in batches.micro_batches:
            self.num_positions += batch.input_ids.numel() * self.run.rank_info.world_size
            self.flops += step_flops(self.run, batch)
            if self.run.rank_info.is_main:
                labels = batch.masked_lm_labels.numpy()
                self.health.unigram.add(labels.ravel())
                self.health.repeats.add(epoch, batch.input_ids.numpy(), labels)
        self.num_watched += 1
        if self.watch is not None and self.num_watched >= WATCHED_STEPS:
            self._say_dead_parameters()

    def _say_dead_parameters(self) -> None:
        assert self.watch is not None
        text = self.health.without_gradient(self.watch.finish())
        self.watch = None
        if text:
            console.warn(text)

    def report(self) -> None:
        """Figures of the window, over all ranks, to the console and every sink."""
        self.sum_up()
        self.tell()

    def sum_up(self) -> None:
        """Turn the counts into figures, and begin anew. Called by all ranks together."""
        self.step_losses = self._losses_by_step()
        self.figures = self._take()
        self.reset()

    def tell(self) -> None:
        run = self.run
        with self.phases.measure("logging"):
            left = seconds_left(run, self.seconds_per_micro_step)
            last = None if run.budget.total is not None else run.horizon.last_step()
            console.say(train_line(run.state.step, last, self.figures, left))
            self._note_early_end()
            is_warm = run.schedule_position() >= run.schedule.origin + run.schedule.warmup_steps
            for sentence in self.health.check(run.state.step, self.figures, self.paces, is_warm):
                console.warn(sentence)
            run.sinks.record("train", run.state.step, run.state.samples, self.figures)

    def _note_early_end(self) -> None:
        """Once: a time budget that the data does not last for."""
        run = self.run
        text = find_early_end(
            run.horizon, run.schedule, run.budget, seconds_to_last_step(run, self.seconds_per_micro_step)
        )
        if text and not self.is_end_noted:
            self.is_end_noted = True
            console.warn(text)

    def seconds_per_step(self) -> float:
        """Of the last report; before the first, of the steps so far."""
        return self.figures.get("seconds_per_step", self.phases.training_so_far() / max(1, self.num_steps))

    def loss_so_far(self) -> float | None:
        """This rank's mean loss since the last report. Waits for the device, so it is read once a second at most."""
        now = time.monotonic()
        if self.tally.sums is None or now - self.read_at < READ_SECONDS:
            return None
        self.read_at = now
        return summarize(dict(zip(self.tally.names, self.tally.sums.tolist(), strict=True)))["loss"]

    def reset(self) -> None:
        """Forget what was counted since the last report."""
        self.tally.sums = None
        self.num_steps, self.num_micro_steps, self.num_rows, self.num_positions = 0, 0, 0, 0
        self.flops, self.marks = 0.0, []

    def _losses_by_step(self) -> list[StepLoss]:
        """Each step's loss over all ranks, from the sums as they stood after it: one reduction for the window."""
        if not self.marks:
            return []
        sums = collectives.all_ranks_sum(torch.stack([mark[3] for mark in self.marks]))
        steps = torch.cat([sums[:1], sums.diff(dim=0)]).tolist()
        return [
            StepLoss(step, first, following, summarize(dict(zip(self.tally.names, values, strict=True)))["loss"])
            for (step, first, following, _), values in zip(self.marks, steps, strict=True)
        ]

    def _take(self) -> dict[str, float]:
        run, ranks = self.run, self.run.rank_info.world_size
        seconds = self.phases.lap()
        sums = self.tally.take(self._host_sums(seconds))
        elapsed = sums["training_seconds"] / ranks
        self.seconds_per_micro_step = elapsed / self.num_micro_steps
        run.state = replace(run.state, tokens=run.state.tokens + int(sums["num_tokens"]))
        norm = self.norm.value()
        self.paces = [sums[f"pace_{rank}"] for rank in range(ranks)]
        figures = {
            **summarize(sums),
            "learning_rate": self.rate,
            "grad_norm": math.nan if norm is None else norm,
            "epoch": run.plan.passes(run.state.samples),
            "tokens": float(run.state.tokens),
            "tokens_per_second": sums["num_tokens"] / elapsed,
            "samples_per_second": self.num_rows / elapsed,
            "seconds_per_step": elapsed / self.num_steps,
            "window_steps": float(self.num_steps),
            "padding_share": 1.0 - sums["num_tokens"] / self.num_positions,
            "masking_rate": sums["masked_lm_count"] / max(1.0, sums["num_tokens"]),
            "model_flops_per_second": sums["flops"] / elapsed,
            "matmul_share": sums["flops"] / elapsed / self.matmul_speed,
            "data_wait_share": sums["seconds_data_wait"] / ranks / elapsed,
            **{f"seconds_{phase}": sums[f"seconds_{phase}"] / ranks for phase in (*SECTIONS, "other")},
            "memory_gib": max(sums[f"memory_{rank}"] for rank in range(ranks)),
            "skipped_steps": float(run.engine.skipped_steps),
        }
        if min(self.paces) > 0:
            figures["slowest_over_fastest_rank"] = max(self.paces) / min(self.paces)
            figures["slowest_rank"] = float(self.paces.index(max(self.paces)))
        if run.settings.precision == "fp16":
            figures["loss_scale"] = float(run.engine.optimizer.loss_scale)
        return figures

    def _host_sums(self, seconds: dict[str, float]) -> dict[str, float]:
        """Values known to this process, named so that their sum over ranks is of use.

        A slot of its own for each rank, zero on all others, makes a gather of a sum.
        """
        rank_info = self.run.rank_info
        mine = {rank: float(rank == rank_info.rank) for rank in range(rank_info.world_size)}
        memory, pace = peak_memory_gib(self.run.device), self._own_pace(seconds)
        return {
            "flops": self.flops,
            "training_seconds": training_seconds(seconds),
            **{f"seconds_{phase}": seconds[phase] for phase in (*SECTIONS, "other")},
            **{f"pace_{rank}": flag * pace for rank, flag in mine.items()},
            **{f"memory_{rank}": flag * memory for rank, flag in mine.items()},
        }


def seconds_to_last_step(run: Run, seconds_per_micro_step: float) -> float:
    """To where steps and epochs end the run, by the micro-steps to come: steps may grow on the way."""
    steps = max(0, run.horizon.last_step() - run.state.step)
    return run.plan.micro_steps_in(run.state.samples, steps) * seconds_per_micro_step


def seconds_left(run: Run, seconds_per_micro_step: float) -> float:
    """To the end of the run at this pace, or of its time budget."""
    left = seconds_to_last_step(run, seconds_per_micro_step)
    return left if run.budget.total is None else min(left, max(0.0, run.budget.total - run.budget.used()))


def step_flops(run: Run, batch: Batch) -> float:
    masked = int((batch.masked_lm_labels != NO_LABEL).sum())
    kept = sum(scale > 0 for scale in run.engine.module.bert.encoder.branch_scales)
    return model_flops(run.settings.model_config, batch.input_mask.sum(1), masked, kept)


def peak_memory_gib(device: torch.device) -> float:
    """The most this process has held: on the GPU, or in main memory where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_resident_mib() / 1024
