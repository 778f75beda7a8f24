"""Everything that determines the bytes of prepared shards, in one frozen object."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import Problems
from common.words import counted
from data.instances.segments import Objective
from data.masking import Unit
from data.shards.schema import MAX_ROW_LENGTH
from data.tokenizer_training import MIN_VOCABULARIES, TokenizerType

MIN_USEFUL_VOCABULARY = 100  # with fewer, even English words would be unknown because of their letters
DEFAULT_VALIDATION_SHARE = 0.01  # at least
BERT_PREDICTIONS = {128: 20, 512: 80}  # the two phases of the paper


def default_predictions(length: int) -> int:
    """Return the predictions per row: enough for 15 % of the tokens."""
    return BERT_PREDICTIONS.get(length, length * 15 // 100 + 1)


@dataclass(frozen=True)
class Settings:
    """One preparation. Equal settings and equal input give equal bytes, however it is run."""

    max_seq_lengths: tuple[int, ...]
    max_predictions: tuple[int, ...]  # one for each length
    objective: Objective = "nsp"
    dupe_factor: int = 5  # static copies of the training split; 0 = one copy without masks
    masking_unit: Unit = "token"
    masking_rate: float = 0.15
    short_seq_prob: float = 0.1
    validation_share: float | None = DEFAULT_VALIDATION_SHARE  # None: chosen so that it gives enough rows
    test_share: float = 0.0
    seed: int = 42
    shard_rows: int = 32768
    deflate_level: int | None = 1
    lower_case: bool | None = None
    vocab_size: int | None = None  # of the tokenizer to train; None if one is given
    tokenizer_type: TokenizerType | None = None  # of the tokenizer to train; None: the default type
    tokenizer_sample_mb: int = 50
    layout: str = "auto"
    language: str = "en"
    text_field: str = "text"
    near_duplicates: float | None = None  # Jaccard similarity from which documents are dropped; None = keep them
    min_document_words: int = 3

    def check(self) -> None:
        """Raise UserError for values that cannot work, all at once."""
        problems = Problems()
        self._check_lengths(problems)
        near = self.near_duplicates
        validation_share = DEFAULT_VALIDATION_SHARE if self.validation_share is None else self.validation_share
        ranges = {
            "validation_share": (0.0 <= validation_share < 1.0, "a share of documents from 0 to below 1"),
            "test_share": (0.0 <= self.test_share < 1.0, "a share of documents from 0 to below 1"),
            "masking_rate": (0.0 < self.masking_rate < 1.0, "0 to 1, usually 0.15"),
            "short_seq_prob": (0.0 <= self.short_seq_prob <= 1.0, "0 to 1, usually 0.1"),
            "dupe_factor": (self.dupe_factor >= 0, "0 (no masks) or a number of copies"),
            "shard_rows": (self.shard_rows >= 1, "1 or more"),
            "near_duplicates": (near is None or 0.0 < near <= 1.0, "a similarity such as 0.8"),
        }
        for name, (is_valid, expected) in ranges.items():
            if not is_valid:
                problems.add(f"--{name} {getattr(self, name)} is out of range; expected {expected}")
        if validation_share + self.test_share >= 1.0:
            problems.add(
                "--validation_share and --test_share leave nothing to train on; expected less than 1 together; make "
                "them smaller"
            )
        self._check_tokenizer(problems)
        problems.raise_if_any()

    def _check_tokenizer(self, problems: Problems) -> None:
        if self.vocab_size is None:
            if self.tokenizer_type is not None:
                problems.add(
                    f"--tokenizer_type {self.tokenizer_type}: is the type of a tokenizer to train, but --vocab_file "
                    f"gives a trained one; drop one of the two, or pass --vocab_size N to train one"
                )
        elif self.tokenizer_type == "bpe" and self.vocab_size < MIN_VOCABULARIES["bpe"]:
            problems.add(
                f"--vocab_size {self.vocab_size} is too small for --tokenizer_type bpe, whose vocabulary contains the "
                f"256 bytes and the special tokens; expected {MIN_VOCABULARIES['bpe']} or more, such as 8192 for a "
                f"small corpus or 50368 as ModernBERT"
            )
        elif self.vocab_size < MIN_USEFUL_VOCABULARY:
            problems.add(
                f"--vocab_size {self.vocab_size} is too small for an alphabet: letters, which occur twice (at the "
                f"beginning of a word and inside it), digits and signs make about {MIN_USEFUL_VOCABULARY}; BERT uses "
                f"30522, a small corpus 8192"
            )

    def _check_lengths(self, problems: Problems) -> None:
        if len(self.max_predictions) != len(self.max_seq_lengths):
            problems.add(
                f"--max_predictions_per_seq has {counted(len(self.max_predictions), 'value')} for "
                f"{len(self.max_seq_lengths)} of --max_seq_length; give one for each, such as 20 for 128 and 80 for 512"
            )
        for length in self.max_seq_lengths:
            if not 8 <= length <= MAX_ROW_LENGTH:
                problems.add(
                    f"--max_seq_length {length} is out of range; expected 8 to {MAX_ROW_LENGTH}, usually 128 or 512"
                )
        repeated = sorted({length for length in self.max_seq_lengths if self.max_seq_lengths.count(length) > 1})
        if repeated:
            problems.add(
                f"--max_seq_length: {', '.join(map(str, repeated))} is given more than once; each length is one output "
                f"folder, so give each once"
            )
        for length, predictions in zip(self.max_seq_lengths, self.max_predictions, strict=False):
            if not 1 <= predictions <= length:
                problems.add(
                    f"--max_predictions_per_seq {predictions} does not suit rows of {length} tokens; "
                    f"try {default_predictions(length)}"
                )

    def copies(self, split: str) -> int:
        """Return the number of copies: one of validation and test, whose masks are static, so that runs compare."""
        return max(1, self.dupe_factor) if split == "training" else 1

    def is_masked(self, split: str) -> bool:
        return self.dupe_factor > 0 or split != "training"

    def fingerprint(self, inputs: list[Any], tokenizer_digest: str | None) -> str:
        """Identify a preparation by its settings, the description of its input, and the given tokenizer."""
        # Without the default type, so that output of versions that had no other one is still recognised.
        values = {key: value for key, value in asdict(self).items() if key != "tokenizer_type" or value is not None}
        described = json.dumps([values, inputs, tokenizer_digest], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()
