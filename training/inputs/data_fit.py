"""Whether the data is what the model is made for: the meaning of its sentence labels, and its segments."""

from common.errors import Problems
from data.shards.dataset import PretrainingDataset
from nvidia.config import BertConfig

SAMPLED_ROWS = 64
# What a pair's label 1 means, by the objective that it was made for and by the head that learns it.
PAIRS = {"nsp": "B is random", "sop": "A and B are swapped"}


def check_fit(data: PretrainingDataset, config: BertConfig) -> None:
    """Refuse labels that the sentence head would misread, and segments that the model has no embedding for."""
    problems = Problems()
    _check_objective(data, config.sentence_head, problems)
    if config.type_vocab_size == 1:
        _check_segments(data, problems)
    problems.raise_if_any()


def _check_objective(data: PretrainingDataset, head: str, problems: Problems) -> None:
    """One message for each folder. Shards made elsewhere do not tell their objective."""
    told = set()
    for shard in data.shards:
        objective = (shard.attributes or {}).get("objective")
        if head in PAIRS and objective in tuple(PAIRS) and objective != head and shard.folder not in told:
            told.add(shard.folder)
            problems.add(
                f"{shard.path}: was prepared with --objective {objective}, where label 1 means {PAIRS[objective]!r}, "
                f"but the model JSON's sentence_head is {head!r}, which would learn it as {PAIRS[head]!r}; set "
                f"bert_model_config.sentence_head to {objective!r}, or prepare the data with --objective {head}"
            )


def _check_segments(data: PretrainingDataset, problems: Problems) -> None:
    """The first rows of each folder; pairs are in all of them or in none."""
    told = set()
    for index, shard in enumerate(data.shards):
        if shard.folder not in told:
            told.add(shard.folder)
            if data.read(index, 0, min(SAMPLED_ROWS, shard.num_rows)).segment_ids.any():
                problems.add(
                    f"{shard.path}: has rows of two segments, but the model JSON's type_vocab_size is 1; set "
                    f"bert_model_config.type_vocab_size to 2, or prepare data of one segment with --objective mlm"
                )
