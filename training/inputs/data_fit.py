"""Checks of the data against the model: the meaning of sentence labels, and segments."""

from common.errors import Problems
from data.shards.dataset import PretrainingDataset
from nvidia.config import BertConfig

SAMPLED_ROWS = 64
# What label 1 means, by the objective of the data and by the model's sentence head.
PAIRS = {"nsp": "B is random", "sop": "A and B are swapped"}


def check_fit(data: PretrainingDataset, config: BertConfig) -> None:
    """Refuse labels that mean something else to the sentence head, and segments without an embedding."""
    problems = Problems()
    _check_objective(data, config.sentence_head, problems)
    if config.type_vocab_size == 1:
        _check_segments(data, problems)
    problems.raise_if_any()


def _check_objective(data: PretrainingDataset, head: str, problems: Problems) -> None:
    """One message per folder. Shards of other tools do not record their objective."""
    reported = set()
    for shard in data.shards:
        objective = (shard.layout.attributes or {}).get("objective")
        if head in PAIRS and objective in tuple(PAIRS) and objective != head and shard.folder not in reported:
            reported.add(shard.folder)
            problems.add(
                f"{shard.path}: was prepared with --objective {objective}, where label 1 means {PAIRS[objective]!r}, "
                f"but the model JSON's sentence_head is {head!r}, which would learn it as {PAIRS[head]!r}; set "
                f"bert_model_config.sentence_head to {objective!r}, or prepare the data with --objective {head}"
            )


def _check_segments(data: PretrainingDataset, problems: Problems) -> None:
    """Checks the first rows of each folder: either all rows are pairs or none is."""
    checked = set()
    for index, shard in enumerate(data.shards):
        if shard.folder not in checked:
            checked.add(shard.folder)
            if data.read(index, 0, min(SAMPLED_ROWS, shard.layout.num_rows)).segment_ids.any():
                problems.add(
                    f"{shard.path}: has rows with two segments, but the model JSON's type_vocab_size is 1; set "
                    f"bert_model_config.type_vocab_size to 2, or prepare data with one segment (--objective mlm)"
                )
