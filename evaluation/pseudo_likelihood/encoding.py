"""Sentences as token ids with what masking needs to know: special tokens, words and character offsets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import UserError


@dataclass(frozen=True)
class Encoded:
    """One sentence with its special tokens."""

    ids: tuple[int, ...]
    words: tuple[int | None, ...]  # number of the word that a token belongs to; None for special tokens
    offsets: tuple[tuple[int, int], ...]  # characters [start, end) of each token

    def shortened(self, limit: int) -> "Encoded":
        """At most `limit` tokens: the last ones before the closing special tokens are cut."""
        if len(self.ids) <= limit:
            return self
        _, closing = self.num_specials
        closing = min(closing, limit)
        return self._of([*range(limit - closing), *range(len(self.ids) - closing, len(self.ids))])

    @property
    def num_specials(self) -> tuple[int, int]:
        """Special tokens before the first other token and after the last one."""
        places = [place for place, word in enumerate(self.words) if word is not None]
        return (places[0], len(self.words) - 1 - places[-1]) if places else (0, len(self.words))

    def around(self, first: int, last: int, num_context: int) -> tuple["Encoded", int]:
        """Tokens [first, last), `num_context` more from both sides of them, and the special tokens at both ends.

        Also returns how many tokens were cut in front. The sides get equally many; what one lacks, the other gets.
        """
        opening, closing = self.num_specials
        before, after = first - opening, len(self.ids) - closing - last
        left = min(before, max(num_context // 2, num_context - after))
        right = min(after, num_context - left)
        inner = range(first - left, last + right)
        kept = [*range(opening), *inner, *range(len(self.ids) - closing, len(self.ids))]
        return self._of(kept), before - left

    def _of(self, kept: Sequence[int]) -> "Encoded":
        return Encoded(
            tuple(self.ids[i] for i in kept), tuple(self.words[i] for i in kept), tuple(self.offsets[i] for i in kept)
        )


def encode(tokenizer: Any, sentences: Sequence[str]) -> list[Encoded]:
    """Encode with a stock tokenizer, or with anything whose `backend` is a tokenizers.Tokenizer."""
    backend = getattr(tokenizer, "backend", None)
    if backend is not None and hasattr(backend, "encode_batch"):
        return [_of_backend(item) for item in backend.encode_batch(list(sentences))]
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer {type(tokenizer).__name__} has no tokenizer.json, which knows words and offsets. Save the "
            "model's folder with a fast one: AutoTokenizer.from_pretrained(DIR, use_fast=True).save_pretrained(DIR)."
        )
    batch = tokenizer(list(sentences), add_special_tokens=True, return_attention_mask=False, verbose=False)
    return [_of_backend(item) for item in batch.encodings]


def _of_backend(encoding: Any) -> Encoded:
    words = (None if special else word for word, special in zip(
        encoding.word_ids, encoding.special_tokens_mask, strict=True))  # fmt: skip
    return Encoded(tuple(encoding.ids), tuple(words), tuple(encoding.offsets))


def mask_id_of(tokenizer: Any) -> int:
    """The id of the mask token of a stock tokenizer or of ours."""
    found = getattr(tokenizer, "mask_token_id", None)
    if found is None:
        found = getattr(tokenizer, "mask_id", None)
    if found is None:
        raise UserError("the tokenizer has no mask token, which scoring with a masked language model needs.")
    return int(found)
