"""Everything that decides the bytes of prepared shards, in one frozen object."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import Problems
from data.masking import UNITS, Unit
from data.preparation.instances import OBJECTIVES, Objective
from data.shards.schema import MAX_ROW_LENGTH

SMALLEST_USEFUL_VOCABULARY = 100  # below it even English words would be unknown for their letters
BERT_PREDICTIONS = {128: 20, 512: 80}  # the paper's two phases


def default_predictions(length: int) -> int:
    """Room for 15 % of the tokens."""
    return BERT_PREDICTIONS.get(length, length * 15 // 100 + 1)


@dataclass(frozen=True)
class Settings:
    """One preparation. Two with equal settings and equal input give equal bytes, however they are run."""

    max_seq_lengths: tuple[int, ...]
    max_predictions: tuple[int, ...]  # one for each length
    objective: Objective = "nsp"
    dupe_factor: int = 5  # static copies of the training split; 0 = one copy without masks
    masking_unit: Unit = "token"
    masking_rate: float = 0.15
    short_seq_prob: float = 0.1
    validation_share: float = 0.01
    test_share: float = 0.0
    seed: int = 42
    shard_rows: int = 32768
    deflate_level: int | None = 1
    lower_case: bool | None = None
    vocab_size: int | None = None  # train a tokenizer of this size; None: one is given
    tokenizer_sample_mb: int = 50
    layout: str = "auto"
    language: str = "en"
    text_field: str = "text"
    near_duplicates: float | None = None  # the Jaccard similarity from which documents count as the same; None = keep
    min_document_words: int = 3

    def check(self) -> None:
        """Refuse what cannot work, all of it at once."""
        problems = Problems()
        if len(self.max_predictions) != len(self.max_seq_lengths):
            problems.add(
                f"--max_predictions_per_seq has {len(self.max_predictions)} values for {len(self.max_seq_lengths)} of "
                "--max_seq_length; give one for each, such as 20 for 128 and 80 for 512"
            )
        for length in self.max_seq_lengths:
            if not 8 <= length <= MAX_ROW_LENGTH:
                problems.add(
                    f"--max_seq_length {length} is out of range; expected 8 to {MAX_ROW_LENGTH}, usually 128 or 512"
                )
        repeated = sorted({length for length in self.max_seq_lengths if self.max_seq_lengths.count(length) > 1})
        if repeated:
            problems.add(
                f"--max_seq_length: {', '.join(map(str, repeated))} stands there more than once; each length is one "
                f"output folder, so give each once"
            )
        # Of different numbers, which was told above, those that have a partner are still looked at.
        for length, predictions in zip(self.max_seq_lengths, self.max_predictions, strict=False):
            if not 1 <= predictions <= length:
                problems.add(
                    f"--max_predictions_per_seq {predictions} does not suit rows of {length} tokens; "
                    f"try {default_predictions(length)}"
                )
        if self.objective not in OBJECTIVES:
            problems.add(f"--objective {self.objective!r} is unknown; expected one of {', '.join(OBJECTIVES)}")
        if self.masking_unit not in UNITS:
            problems.add(f"--masking_unit {self.masking_unit!r} is unknown; expected one of {', '.join(UNITS)}")
        for flag, share in (("--validation_share", self.validation_share), ("--test_share", self.test_share)):
            if not 0.0 <= share < 1.0:
                problems.add(f"{flag} {share} is out of range; expected a share of documents from 0 to below 1")
        if self.validation_share + self.test_share >= 1.0:
            problems.add(
                "--validation_share and --test_share leave nothing to train on; expected less than 1 together; make "
                "them smaller"
            )
        if not 0.0 < self.masking_rate < 1.0:
            problems.add(f"--masking_rate {self.masking_rate} is out of range; expected 0 to 1, usually 0.15")
        if not 0.0 <= self.short_seq_prob <= 1.0:
            problems.add(f"--short_seq_prob {self.short_seq_prob} is out of range; expected 0 to 1, usually 0.1")
        if self.vocab_size is not None and self.vocab_size < SMALLEST_USEFUL_VOCABULARY:
            problems.add(
                f"--vocab_size {self.vocab_size} is too small for an alphabet: letters, which stand in it twice (at a "
                f"word's beginning and inside it), digits and signs make about {SMALLEST_USEFUL_VOCABULARY}; BERT uses "
                f"30522, a small corpus 8192"
            )
        if self.dupe_factor < 0:
            problems.add(f"--dupe_factor {self.dupe_factor} is negative; expected 0 (no masks) or a number of copies")
        if self.shard_rows < 1:
            problems.add(f"--shard_rows {self.shard_rows} is too small; expected 1 or more")
        if self.near_duplicates is not None and not 0.0 < self.near_duplicates <= 1.0:
            problems.add(f"--near_duplicates {self.near_duplicates} is out of range; expected a similarity such as 0.8")
        problems.raise_if_any()

    def copies(self, split: str) -> int:
        """Validation and test are written once, with masks of their own, so that every run is measured alike."""
        return max(1, self.dupe_factor) if split == "training" else 1

    def is_masked(self, split: str) -> bool:
        return self.dupe_factor > 0 or split != "training"

    def fingerprint(self, inputs: list[Any], tokenizer_digest: str | None) -> str:
        """The identity of a preparation: settings, the input files as found, and the given tokenizer."""
        described = json.dumps([asdict(self), inputs, tokenizer_digest], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()
