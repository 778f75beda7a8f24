"""The batches of a rank: a training stream that can start at any sample, and one pass for evaluation."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from typing import NamedTuple

from data.masking import MaskingPolicy
from data.shards.dataset import PretrainingDataset
from data.shards.schema import concatenate_rows
from data.stream.batches import Batch, batch_from_rows, blank_rows
from data.stream.row_source import RowSource

POLL_SECONDS = 1.0
PREFETCHED_STEPS = 3  # beyond the step in training


class StepBatches(NamedTuple):
    """The data of one rank for one optimizer step."""

    micro_batches: tuple[Batch, ...]
    next_sample: int  # global index of the first sample of the next step: the whole state of the stream
    rows: tuple[int, ...]  # numbers of this rank's rows in the dataset, for `PretrainingDataset.describe_row`


class TrainingStream:
    """The infinite sequence of steps of one rank.

    The position is one integer, the global sample index. A step takes the next `world_size * micro_batch_size *
    gradient_accumulation_steps` samples. A batch that reaches the end of an epoch is filled with the first rows of the
    next one, so every rank has the same number of batches. A rank takes an equal share of each global batch, rows that
    are neighbours on disk (`data/stream/row_source.py`).
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
        self.dataset = dataset
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self.micro_batch_size = micro_batch_size
        self.masking = masking
        self.stream_start = stream_start
        self._pending: deque[Future[StepBatches]] = deque()
        self.rows_per_rank = micro_batch_size * gradient_accumulation_steps
        self.rows_per_step = world_size * self.rows_per_rank

    @property
    def failure(self) -> BaseException | None:
        """The error of a prefetched step, known before `steps` raises it."""
        finished = [future for future in self._pending if future.done() and not future.cancelled()]
        return next((error for future in finished if (error := future.exception()) is not None), None)

    @property
    def has_next(self) -> bool:
        """Whether the next step can be taken without waiting or failing."""
        return len(self._pending) > 0 and self._pending[0].done() and self.failure is None

    def steps(self, first_sample: int) -> Iterator[StepBatches]:
        """Yield the steps from `first_sample` on; a thread prefetches them. Closing the iterator ends the thread."""
        source = RowSource(self.dataset, self.seed, self.masking, rank=self.rank, world_size=self.world_size)
        worker = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        samples = count(first_sample, self.rows_per_step)
        self._pending = deque()
        try:
            while True:
                while len(self._pending) < 1 + PREFETCHED_STEPS:
                    self._pending.append(worker.submit(self._make_step, source, next(samples)))
                while not wait(list(self._pending)[:1], POLL_SECONDS).done:
                    pass  # Python handles signals here: one that comes just before a wait does not end it
                step = self._pending[0].result()  # a failed step stays, for `failure`
                self._pending.popleft()
                yield step
        finally:
            worker.shutdown(cancel_futures=True)
            source.close()

    def _make_step(self, source: RowSource, first_sample: int) -> StepBatches:
        start = first_sample - self.stream_start
        source.fetch_ahead(start)
        rows, numbers = source.read(start, start + self.rows_per_step, step=start // self.rows_per_step)
        # Read the next window while this one is in use.
        later = start + max(1, source.window_rows // self.rows_per_step) * self.rows_per_step
        source.read_ahead(later, later + self.rows_per_step)
        micro = self.micro_batch_size
        batches = tuple(batch_from_rows(rows.take(slice(i, i + micro))) for i in range(0, len(rows), micro))
        return StepBatches(batches, first_sample + self.rows_per_step, tuple(numbers.tolist()))


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
