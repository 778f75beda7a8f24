"""The micro-batch of --find_micro_batch: which sizes keep the global batch, and the settings with one of them."""

import json
from collections.abc import Iterable
from dataclasses import replace
from math import gcd, isqrt
from pathlib import Path
from typing import Any

from training.settings.deepspeed_file import BATCH_KEYS, BatchSizes
from training.settings.resolve import Settings
from training.settings.saved_files import RESOLVED


def find_sizes(settings: Settings, world_size: int) -> list[int]:
    """Rows per micro-step and rank with which every step of the run is a whole number of micro-steps, ascending."""
    batches = settings.flags.training.batch_schedule
    totals = [settings.deepspeed.batch.total, *(int(rows) for _, rows in (batches.points if batches else ()))]
    rows = gcd(*totals) // world_size
    longest = settings.lengths[-1].length
    divisors = {size for low in range(1, isqrt(rows) + 1) if rows % low == 0 for size in (low, rows // low)}
    return sorted(size for size in divisors if all(size * longest % each.length == 0 for each in settings.lengths))


def with_micro_batch(settings: Settings, micro: int, world_size: int) -> Settings:
    """The same run with `micro` rows per micro-step and rank; accumulation keeps the rows per step."""
    total, longest = settings.deepspeed.batch.total, settings.lengths[-1].length
    batch = BatchSizes(micro, total // (micro * world_size), total)
    numbers = dict(zip(BATCH_KEYS, (batch.total, batch.micro, batch.accumulation), strict=True))
    resolved = json.loads(settings.sources[RESOLVED])
    resolved["deepspeed"].update(numbers)
    return replace(
        settings,
        deepspeed=replace(settings.deepspeed, batch=batch),
        lengths=tuple(replace(each, micro=micro * longest // each.length) for each in settings.lengths),
        sources={**settings.sources, RESOLVED: json.dumps(resolved, indent=2)},
    )


def read_found(checkpoints: Iterable[Path], sizes: Iterable[int], world_size: int) -> int | None:
    """The size that an earlier start of this run found, from the first of its checkpoints that can be read.

    None: there is none, the flag was not given, or the run had another number of ranks, each with other memory.
    """
    for checkpoint in checkpoints:
        try:
            content: Any = json.loads((checkpoint / RESOLVED).read_bytes())
            total, micro, accumulation = (content["deepspeed"][key] for key in BATCH_KEYS)
            was_found = content["flags"].get("find_micro_batch") is True
            is_same_world = total == micro * accumulation * world_size
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        return micro if was_found and is_same_world and micro in sizes else None
    return None
