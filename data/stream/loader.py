"""The batches of a rank: a training stream that can start at any sample, and one pass for evaluation."""

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from data.masking import MaskingPolicy
from data.shards.dataset import PretrainingDataset
from data.shards.schema import concatenate_rows
from data.stream.batches import Batch, batch_from_rows, blank_rows
from data.stream.row_source import RowSource

PREFETCHED_STEPS = 2  # beyond the step in training


class StepBatches(NamedTuple):
    """The data of one rank for one optimizer step."""

    micro_batches: tuple[Batch, ...]
    next_sample: int  # global index of the first sample of the next step: the whole state of the stream
    rows: tuple[int, ...]  # numbers of this rank's rows in the dataset, for `PretrainingDataset.describe_row`


class TrainingStream:
    """The infinite sequence of steps of one rank.

    The position is one integer, the global sample index. A step takes the next `world_size * micro_batch_size *
    gradient_accumulation_steps` samples. A batch that reaches the end of an epoch is filled with the first rows of the
    next one, so every rank has the same number of batches. A rank takes a contiguous slice of each global batch.
    `stream_start` is the global index of the stream's first sample; it is not 0 if other data was read before.
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
        stream_start: int = 0,
    ) -> None:
        assert masking is not None or dataset.is_masked  # check_masked() reports it to the user
        if masking is not None and dataset.vocab_size is None:
            dataset.vocab_size = masking.vocab_size
        self.dataset = dataset
        self.seed = seed
        self.rank = rank
        self.micro_batch_size = micro_batch_size
        self.masking = masking
        self.stream_start = stream_start
        self.failure: BaseException | None = None  # of the prefetch thread; set before `steps` raises it
        self._ready: queue.Queue[StepBatches | BaseException] | None = None
        self.rows_per_rank = micro_batch_size * gradient_accumulation_steps
        self.rows_per_step = world_size * self.rows_per_rank

    @property
    def has_next(self) -> bool:
        """Whether the next step can be taken without waiting or failing."""
        is_ready = self._ready is not None and not self._ready.empty()
        return is_ready and self.failure is None  # in this order: `failure` is set before the error is queued

    def steps(self, first_sample: int) -> Iterator[StepBatches]:
        """Yield the steps from `first_sample` on; a thread prefetches them. Closing the iterator ends the thread."""
        ready: queue.Queue[StepBatches | BaseException] = queue.Queue(maxsize=PREFETCHED_STEPS)
        self._ready = ready
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

    def _produce(self, sample: int, ready: "queue.Queue[StepBatches | BaseException]", stop: threading.Event) -> None:
        source: RowSource | None = None
        try:
            source = RowSource(self.dataset, self.seed, self.masking)
            while not stop.is_set():
                step = self._make_step(source, sample)
                sample = step.next_sample
                _put(ready, step, stop)
        except BaseException as error:  # re-raised unchanged by `steps`
            self.failure = error
            _put(ready, error, stop)
        finally:
            if source is not None:
                source.close()

    def _make_step(self, source: RowSource, first_sample: int) -> StepBatches:
        own_sample = first_sample - self.stream_start
        start = own_sample + self.rank * self.rows_per_rank
        step = own_sample // self.rows_per_step
        rows, numbers = source.read(start, start + self.rows_per_rank, step=step)
        # Read the next window while this one is in use.
        later = start + max(1, source.window_rows // self.rows_per_step) * self.rows_per_step
        source.read_ahead(later, later + self.rows_per_rank)
        micro = self.micro_batch_size
        batches = tuple(batch_from_rows(rows.take(slice(i, i + micro))) for i in range(0, len(rows), micro))
        return StepBatches(batches, first_sample + self.rows_per_step, tuple(numbers.tolist()))


def _put(
    ready: "queue.Queue[StepBatches | BaseException]", item: StepBatches | BaseException, stop: threading.Event
) -> None:
    """Put `item` into the queue, waiting for space until `stop` is set."""
    while not stop.is_set():
        with suppress(queue.Full):
            ready.put(item, timeout=0.1)
            return


def evaluation_batches(
    dataset: PretrainingDataset, *, rank: int, world_size: int, micro_batch_size: int
) -> Iterator[Batch]:
    """One pass in file order with the stored masks: every row once over all ranks, equally many batches per rank.

    Blank rows without labels fill the last batches, so shapes are constant.
    """
    assert dataset.is_masked  # check_masked() reports it to the user
    total = dataset.num_rows
    rows_per_round = world_size * micro_batch_size
    for first in range(0, total, rows_per_round):
        start = min(total, first + rank * micro_batch_size)
        stop = min(total, start + micro_batch_size)
        rows = dataset.read_range(start, stop)
        missing = micro_batch_size - len(rows)
        yield batch_from_rows(concatenate_rows([rows, blank_rows(missing, rows)]) if missing else rows)
