"""Cuts documents into instances: which tokens make up segment A, and which segment B; and assembles rows of them.

An instance is six numbers, not tokens, so those of a corpus are small, and rows can be assembled in any order.
A row has S tokens, of which S - 3 are text if there are two segments, and S - 2 if there is one; N rows, P predictions.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import numpy as np

from data.shards.schema import Rows

Objective = Literal["nsp", "mlm", "sop"]
OBJECTIVES: tuple[Objective, ...] = ("nsp", "mlm", "sop")


class Documents(NamedTuple):
    """Tokenized documents, concatenated."""

    tokens: np.ndarray  # [T] uint16 or uint32
    word_starts: np.ndarray  # [T] bool
    sentence_ends: np.ndarray  # [sentences] int64, in tokens; no sentence is empty
    document_ends: np.ndarray  # [documents] int64, in sentences; no document is empty
    document_keys: np.ndarray  # [documents] uint64; equal for the parts of a document in different pieces


class Instances(NamedTuple):
    """[N] each. Segment B is in the documents of the instance, or in those of the donor if `b_is_donated`."""

    a_start: np.ndarray
    a_length: np.ndarray
    b_start: np.ndarray
    b_length: np.ndarray  # 0 = no segment B
    b_is_donated: np.ndarray
    label: np.ndarray  # 0 = B follows A, 1 = B is random, or A and B are swapped

    def take(self, rows: np.ndarray | slice) -> "Instances":
        return Instances(*(field[rows] for field in self))

    @property
    def num_rows(self) -> int:
        return len(self.a_start)


def make_instances(
    documents: Documents,
    donor: Documents,
    objective: Objective,
    max_seq_length: int,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> Instances:
    """Return all instances of `documents`; random segments B are from `donor`."""
    if len(documents.document_ends) == 0:
        return Instances(*(np.empty(0, dtype=np.int64) for _ in Instances._fields))
    if objective == "mlm":
        return _full_sentences(documents, max_seq_length - 2, short_seq_prob, rng)
    pairs = _Pairs(documents, donor, max_seq_length - 3, short_seq_prob, rng)
    return _truncated(pairs.build(is_sop=objective == "sop"), max_seq_length - 3, rng)


class _Pairs:
    """BERT's sentence pairs. The loop is a dozen list accesses per instance; work per token comes later."""

    def __init__(
        self, documents: Documents, donor: Documents, room: int, short: float, rng: np.random.Generator
    ) -> None:
        self.ends: list[int] = [0, *documents.sentence_ends.tolist()]  # ends[i] is where sentence i begins
        self.bounds: list[int] = [0, *documents.document_ends.tolist()]
        self.donor_ends: list[int] = [0, *donor.sentence_ends.tolist()]
        self.donor_bounds: list[int] = [0, *donor.document_ends.tolist()]
        self.keys: list[int] = documents.document_keys.tolist()
        self.donor_keys: list[int] = donor.document_keys.tolist()
        self.donates_itself = donor is documents
        self.room = room
        self.short = short
        self.rng = rng
        self.rows: list[tuple[int, int, int, int, int, int]] = []

    def build(self, *, is_sop: bool) -> np.ndarray:
        add = self._add_ordered if is_sop else self._add_next
        ends, room, short, draws = self.ends, self.room, self.short, self._draws()
        for document, (first, last) in enumerate(pairwise(self.bounds)):
            while first < last:
                drawn = next(draws)
                target = 2 + int(drawn[1] * (room - 1)) if drawn[0] < short else room
                # The sentences from `first` on that reach the target length, at most to the document's end.
                end = bisect_left(ends, ends[first] + target, first + 1, last)
                first = add(document, first, end, target, drawn)
        return np.fromiter(chain.from_iterable(self.rows), np.int64, 6 * len(self.rows)).reshape(-1, 6)

    def _draws(self) -> Iterator[list[float]]:
        """Yield six uniform random numbers for each instance, drawn in bulk."""
        while True:
            yield from reversed(self.rng.random((1024, 6)).tolist())

    def _add_next(self, document: int, first: int, end: int, target: int, drawn: list[float]) -> int:
        """Add an instance of next-sentence prediction; return the sentence at which the next one begins."""
        ends = self.ends
        count = end - first
        split = first + 1 + int(drawn[2] * (count - 1)) if count >= 2 else first + 1
        a_start, a_stop = ends[first], ends[split]
        if count == 1 or drawn[3] < 0.5:
            found = self._random_segment(document, target - (a_stop - a_start), drawn)
            if found is not None:
                self.rows.append((a_start, a_stop - a_start, *found, 1, 1))
                return split  # the sentences after A are used again
        b_stop = ends[end]
        if count == 1:  # no other document can donate: the two halves of the sentence, if it has two tokens
            a_stop = (a_start + b_stop) // 2
        if a_stop > a_start:
            self.rows.append((a_start, a_stop - a_start, a_stop, b_stop - a_stop, 0, 0))
        return end

    def _random_segment(self, document: int, target: int, drawn: list[float]) -> tuple[int, int] | None:
        """Return (start, length) of sentences of another document, from a random one on; None if there is no other."""
        bounds, ends = self.donor_bounds, self.donor_ends
        others = len(bounds) - 1 - int(self.donates_itself)
        if others < 1:
            return None
        other = int(drawn[4] * others)
        if self.donates_itself and other >= document:
            other += 1
        if self.donor_keys[other] == self.keys[document]:  # a part of the same document: take the next one, cyclically
            places = chain(range(other, len(self.donor_keys)), range(other))
            found = next((place for place in places if self.donor_keys[place] != self.keys[document]), None)
            if found is None:
                return None
            other = found
        low, high = bounds[other], bounds[other + 1]
        first = low + int(drawn[5] * (high - low))
        end = bisect_left(ends, ends[first] + max(1, target), first + 1, high)
        return ends[first], ends[end] - ends[first]

    def _add_ordered(self, document: int, first: int, end: int, target: int, drawn: list[float]) -> int:
        """Add an instance of sentence-order prediction: two neighbours, swapped half of the time."""
        ends = self.ends
        count = end - first
        if count == 1:
            middle = (ends[first] + ends[end]) // 2
            if middle == ends[first]:
                return end
        else:
            middle = ends[first + 1 + int(drawn[2] * (count - 1))]
        a = (ends[first], middle - ends[first])
        b = (middle, ends[end] - middle)
        swapped = drawn[3] < 0.5
        self.rows.append((*b, *a, 0, 1) if swapped else (*a, *b, 0, 0))
        return end


def _truncated(rows: np.ndarray, room: int, rng: np.random.Generator) -> Instances:
    """Shorten pairs to `room` tokens as BERT does: always the longer segment, at either end with equal probability."""
    a_start, a_length, b_start, b_length, donated, label = rows.T
    excess = np.maximum(0, a_length + b_length - room)
    difference = np.abs(a_length - b_length)
    # The longer segment is cut until both are equal, then they alternate, B first.
    alone = np.minimum(excess, difference)
    turns = excess - alone
    a_is_longer = a_length > b_length
    cut_a = np.where(a_is_longer, alone, 0) + turns // 2
    cut_b = np.where(a_is_longer, 0, alone) + (turns + 1) // 2
    front_a, front_b = rng.binomial(cut_a, 0.5), rng.binomial(cut_b, 0.5)
    return Instances(a_start + front_a, a_length - cut_a, b_start + front_b, b_length - cut_b, donated, label)


def _full_sentences(documents: Documents, room: int, short: float, rng: np.random.Generator) -> Instances:
    """Return single segments of whole sentences of up to `room` tokens, within a document; cut longer sentences."""
    ends: list[int] = documents.sentence_ends.tolist()
    starts: list[int] = []
    lengths: list[int] = []
    begin = 0
    for last in documents.document_ends.tolist():
        stop = ends[last - 1]
        while begin < stop:
            draw, size = rng.random(2).tolist()
            target = 2 + int(size * (room - 1)) if draw < short else room
            sentence = bisect_right(ends, begin + target)  # the first sentence that ends beyond the target
            end = ends[sentence - 1] if sentence and ends[sentence - 1] > begin else begin + target
            end = min(end, stop)
            starts.append(begin)
            lengths.append(end - begin)
            begin = end
    zeros = np.zeros(len(starts), dtype=np.int64)
    return Instances(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64), zeros, zeros, zeros, zeros)


class SpecialIds(NamedTuple):
    pad: int
    cls: int
    sep: int


class Text(NamedTuple):
    """The tokens of several pieces, concatenated."""

    tokens: np.ndarray  # [T] int32
    word_starts: np.ndarray  # [T] bool


def join_texts(texts: Sequence[Documents]) -> Text:
    """Return at least one piece's tokens, concatenated with those of the others."""
    tokens = np.concatenate([text.tokens for text in texts]).astype(np.int32, copy=False)
    return Text(tokens, np.concatenate([text.word_starts for text in texts]))


def assemble_rows(text: Text, instances: Instances, special: SpecialIds, max_seq_length: int, predictions: int) -> Rows:
    """Return unmasked rows; `a_start` and `b_start` are places in `text`. About ten passes over [N, S]."""
    a_length, b_length = (lengths.astype(np.int32)[:, None] for lengths in (instances.a_length, instances.b_length))
    column = np.arange(max_seq_length, dtype=np.int32)
    # [CLS] a … [SEP] b … [SEP]; the second [SEP] only where there is a segment B
    length = a_length + 2 + np.where(b_length > 0, b_length + 1, 0)
    after_a = column >= a_length + 2
    a_shift, b_shift = instances.a_start[:, None] - 1, instances.b_start[:, None] - (a_length + 2)
    source = np.where(after_a, b_shift, a_shift) + column
    input_mask = column < length
    input_ids = text.tokens.take(source, mode="clip")  # of any tokens where there is no text
    word_starts = text.word_starts.take(source, mode="clip")
    np.copyto(input_ids, special.pad, where=~input_mask)
    word_starts |= ~input_mask
    index = np.arange(instances.num_rows)
    for place, token in ((0, special.cls), (instances.a_length + 1, special.sep), (length[:, 0] - 1, special.sep)):
        input_ids[index, place] = token
        word_starts[index, place] = True
    return Rows(
        input_ids=input_ids,
        input_mask=input_mask.view(np.int8),
        segment_ids=(input_mask & after_a).view(np.int8),
        masked_lm_positions=np.zeros((instances.num_rows, predictions), dtype=np.int32),
        masked_lm_ids=np.zeros((instances.num_rows, predictions), dtype=np.int32),
        next_sentence_labels=instances.label.astype(np.int8),
        word_starts=np.packbits(word_starts, axis=1),
    )
