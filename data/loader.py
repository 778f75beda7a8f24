"""Batches for a rank: a training stream that can start at any sample, and one pass for evaluation."""

import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from common.errors import UserError
from data.batches import Batch, batch_from_rows, blank_rows
from data.masking import MaskingPolicy, mask_rows
from data.mixture import Mixture
from data.plan import Plan
from data.schema import Rows, concatenate_rows
from data.shards import PretrainingDataset

_WINDOWS_HELD = 2  # a batch can lie on the border of two


class StepBatches(NamedTuple):
    """What one rank feeds to one optimizer step."""

    micro_batches: tuple[Batch, ...]
    next_sample: int  # the global sample index the next step begins with: all that a checkpoint must hold
    epoch: int  # of the step's first sample
    rows: tuple[int, ...]  # numbers of this rank's rows, for `PretrainingDataset.describe_row`


class TrainingStream:
    """The endless sequence of a rank's steps.

    The cursor is one integer, the global sample index. A step takes the next `world_size * micro_batch_size *
    gradient_accumulation_steps` samples, whatever epoch they lie in: a batch that reaches an epoch's end is completed
    with the first rows of the next, and every rank has the same number of batches. A rank takes a contiguous slice.
    """

    def __init__(
        self,
        dataset: PretrainingDataset,
        *,
        seed: int,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        masking: MaskingPolicy | None = None,
        prefetch_steps: int = 2,
    ) -> None:
        if masking is None and not dataset.is_masked:
            raise UserError(
                f"{dataset.files[0].parent}: these shards were prepared without masks; switch dynamic masking on, "
                "or prepare them with --dupe_factor 1 or more"
            )
        self.dataset = dataset
        self.seed = seed
        self.rank = rank
        self.micro_batch_size = micro_batch_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.masking = masking
        self.prefetch_steps = prefetch_steps
        self.rows_per_rank = micro_batch_size * gradient_accumulation_steps
        self.rows_per_step = world_size * self.rows_per_rank
        self._mixture = Mixture.of(dataset, seed)
        self._windows: OrderedDict[tuple[int, int, int], Rows] = OrderedDict()

    def steps(self, first_sample: int) -> Iterator[StepBatches]:
        """Steps from `first_sample` on, made ahead in a thread. Closing the iterator ends the thread."""
        ready: queue.Queue[StepBatches | BaseException] = queue.Queue(maxsize=max(1, self.prefetch_steps))
        stop = threading.Event()
        worker = threading.Thread(target=self._produce, args=(first_sample, ready, stop), name="prefetch", daemon=True)
        worker.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            worker.join()
            self._windows.clear()

    def _produce(self, sample: int, ready: "queue.Queue[StepBatches | BaseException]", stop: threading.Event) -> None:
        while not stop.is_set():
            item: StepBatches | BaseException
            try:
                item = self._step(sample)
                sample = item.next_sample
            except BaseException as error:  # handed over whole: it is raised as itself where the step is asked for
                item = error
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def _step(self, first_sample: int) -> StepBatches:
        start = first_sample + self.rank * self.rows_per_rank
        rows, numbers = self.rows_at(start, start + self.rows_per_rank)
        micro = self.micro_batch_size
        batches = tuple(batch_from_rows(rows.take(slice(i, i + micro))) for i in range(0, len(rows), micro))
        epoch = first_sample // self.dataset.num_rows
        return StepBatches(batches, first_sample + self.rows_per_step, epoch, tuple(numbers.tolist()))

    def rows_at(self, start: int, stop: int) -> tuple[Rows, np.ndarray]:
        """The rows of the global samples [start, stop), masked, and their numbers."""
        parts: list[Rows] = []
        numbers: list[np.ndarray] = []
        where: list[np.ndarray] = []
        for run in self._mixture.runs(start, stop):
            for piece in run.plan.pieces(run.epoch, run.start, run.stop):
                parts.append(self._rows_of(run.part, run.plan, run.epoch, piece, start // self.rows_per_step))
            numbers.append(self.dataset.row_numbers(run.globally(run.plan.locate(run.epoch, run.start, run.stop))))
            where.append(run.samples)
        order = np.argsort(np.concatenate(where), kind="stable")
        return concatenate_rows(parts).take(order), np.concatenate(numbers)[order]

    def _rows_of(self, part: int, plan: Plan, epoch: int, piece: tuple[int, int, int], step: int) -> Rows:
        index, start, stop = piece
        chosen = plan.window(epoch, index).order[start:stop]
        rows = self._window(part, plan, epoch, index).take(chosen)
        if self.masking is None:
            return rows
        located = self._mixture.globally(part, plan.locate_in_window(epoch, index, start, stop))
        numbers = self.dataset.row_numbers(located)
        return mask_rows(
            rows.with_originals(), self.masking, seed=self.seed, epoch=epoch, row_numbers=numbers, step=step
        )

    def _window(self, part: int, plan: Plan, epoch: int, index: int) -> Rows:
        key = (part, epoch, index)
        if key in self._windows:
            self._windows.move_to_end(key)
            return self._windows[key]
        window = plan.window(epoch, index)
        rows = self.dataset.read_blocks(self._mixture.shards_of(part, window.shards), window.starts, window.stops)
        self._windows[key] = rows
        while len(self._windows) > _WINDOWS_HELD * self._mixture.num_parts:
            self._windows.popitem(last=False)
        return rows


def evaluation_batches(
    dataset: PretrainingDataset, *, rank: int, world_size: int, micro_batch_size: int, max_rows: int | None = None
) -> Iterator[Batch]:
    """One pass in file order with the shards' own masks: every row once over all ranks, as many batches on each rank.

    Where rows run out, blank rows without labels fill the batch, so shapes are constant.
    """
    if not dataset.is_masked:
        raise UserError(f"{dataset.files[0].parent}: validation needs masked shards; prepare them with --dupe_factor 1")
    total = dataset.num_rows if max_rows is None else min(max_rows, dataset.num_rows)
    rows_per_round = world_size * micro_batch_size
    for first in range(0, total, rows_per_round):
        start = min(total, first + rank * micro_batch_size)
        stop = min(total, start + micro_batch_size)
        rows = read_range(dataset, start, stop)
        missing = micro_batch_size - len(rows)
        yield batch_from_rows(concatenate_rows([rows, blank_rows(missing, rows)]) if missing else rows)


def read_range(dataset: PretrainingDataset, start: int, stop: int) -> Rows:
    """Rows [start, stop) of the dataset's own numbering; an empty range gives rows of the right shape."""
    parts: list[Rows] = []
    first = 0
    for shard, info in enumerate(dataset.shards):
        low, high = max(start, first), min(stop, first + info.num_rows)
        if low < high:
            parts.append(dataset.read(shard, low - first, high - first))
        first += info.num_rows
    return concatenate_rows(parts) if parts else dataset.read(0, 0, 1).take(slice(0, 0))
