"""Where tasks run: in this process, in processes of this machine, or on a Dask cluster."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from common.errors import UserError
from common.memory import keep_freed_memory
from data.text.tables import optional_import

EXECUTORS = ("processes", "dask")
_CONNECT_SECONDS = 20


@contextmanager
def open_executor(kind: str, workers: int, scheduler: str | None) -> Iterator[tuple[Executor | None, int]]:
    """Yield an executor and how many tasks it runs at once; None runs them one after the other in this process."""
    if kind == "dask":
        with _dask(scheduler) as found:
            yield found
    elif workers <= 1:
        keep_freed_memory()
        yield None, 1
    else:
        # Spawned, not forked: the threads of the tokenizers library do not survive a fork.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker) as pool:
            _start_workers(pool, workers)
            yield pool, workers


def _start_workers(pool: ProcessPoolExecutor, workers: int) -> None:
    """Start the workers with SIGINT blocked: Ctrl-C reaches all processes of a terminal, but only the parent acts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(workers):
            pool.submit(os.getpid)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for workers that are started later
    # The workers share the cores already; the tokenizers library would use all of them in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    keep_freed_memory()
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent is killed; otherwise a worker would wait for tasks forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _dask(scheduler: str | None) -> Iterator[tuple[Executor, int]]:
    if scheduler is None:
        raise UserError("--executor dask needs --scheduler ADDRESS, such as tcp://host:8786")
    distributed = optional_import("distributed", "--executor dask")
    try:
        client = distributed.Client(scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise UserError(
            f"--scheduler {scheduler}: no Dask scheduler responds ({error}); start one with `dask scheduler`"
        ) from error
    try:
        threads = sum(client.nthreads().values())
        if threads == 0:
            raise UserError(f"--scheduler {scheduler}: has no workers; start some with `dask worker {scheduler}`")
        with client.get_executor(pure=False, retries=2) as executor:
            yield executor, threads
    finally:
        client.close()
