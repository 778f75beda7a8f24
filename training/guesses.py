"""The model's guesses for masked words in a few sentences, shown in TensorBoard as it learns."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.console import console
from common.errors import UserError, shortened
from common.words import counted, markdown_table
from data.randomness import seed_of
from data.shards.dataset import PretrainingDataset
from data.shards.schema import Rows
from data.special_tokens import MASK
from data.tokenizer import BertTokenizer
from evaluation.pseudo_likelihood.likelihood import evaluating
from training.metrics.sinks import Sinks

MASK_WORD = MASK  # in files and tables, whatever the tokenizer calls it
NUM_SENTENCES = 8  # taken from the data
NUM_GUESSES = 5
CONTEXT_TOKENS = 14  # on each side of the mask, from the data
FILE_FORMAT = f"one sentence per line in UTF-8, each with one {MASK_WORD}, and the answer after a tab where it is known"


class Sentence(NamedTuple):
    """A sentence with one mask."""

    text: str  # as it is shown, with MASK_WORD
    ids: list[int]  # [CLS] … [MASK] … [SEP]
    answer: str  # "" where it is not known


@torch.no_grad()
def guess_table(model: Any, tokenizer: BertTokenizer, sentences: Sequence[Sentence], device: torch.device) -> str:
    """A Markdown table of each sentence, its answer and the words that the model finds most likely."""
    with evaluating(model):
        rows = [(each.text, each.answer, ", ".join(_guess(model, tokenizer, each.ids, device))) for each in sentences]
    return "\n".join(markdown_table(["sentence", "answer", "guesses"], rows))


def _guess(model: Any, tokenizer: BertTokenizer, row: list[int], device: torch.device) -> list[str]:
    ids = torch.tensor([row], device=device)
    position = torch.tensor([[row.index(tokenizer.mask_id)]], device=device)
    scores = model.masked_lm_logits(ids, torch.ones_like(ids), torch.zeros_like(ids), positions=position)
    shares, tokens = scores[0, 0].float().softmax(-1).topk(min(NUM_GUESSES, scores.shape[-1]))
    words = [tokenizer.show(token) or str(token) for token in tokens.tolist()]
    return [f"{word} {share:.0%}" for word, share in zip(words, shares.tolist(), strict=True)]


def choose_sentences(
    tokenizer: BertTokenizer | None, dataset: PretrainingDataset, path: Path | None, max_length: int
) -> list[Sentence]:
    """The sentences of --sample_sentences, else of `dataset`; none without a tokenizer."""
    if tokenizer is None:
        if path is not None:
            console.warn(f"--sample_sentences {path}: no effect, because the model JSON has no bert_token_file")
        return []
    if path is not None:
        return encode_sentences(tokenizer, read_sentences(path), max_length)
    return sentences_of_data(tokenizer, dataset, max_length)


def sentences_of_data(tokenizer: BertTokenizer, dataset: PretrainingDataset, max_length: int) -> list[Sentence]:
    """A few parts of rows, from all of the dataset, decoded; the same ones whenever the data is the same."""
    numbers = np.linspace(0, dataset.num_rows - 1, min(NUM_SENTENCES, dataset.num_rows)).astype(int).tolist()
    found = (_mask_one_word(tokenizer, dataset.read_range(n, n + 1), n, max_length) for n in numbers)
    return [sentence for sentence in found if sentence is not None]


def _mask_one_word(tokenizer: BertTokenizer, rows: Rows, number: int, max_length: int) -> Sentence | None:
    """The surroundings of a word that is one token, which is masked; None: the row has no such word."""
    ids = rows.input_ids[0].astype(np.int64)
    masked = rows.masked_lm_positions[0] > 0
    ids[rows.masked_lm_positions[0][masked]] = rows.masked_lm_ids[0][masked]  # the text before it was masked
    is_special, is_continuation = np.isin(ids, tokenizer.special_ids), np.isin(ids, tokenizer.continuation_ids)
    is_split = np.append(is_continuation[1:], False)  # the next token continues this one
    has_letter = [any(map(str.isalpha, tokenizer.show(token) or "")) for token in ids.tolist()]
    (candidates,) = np.nonzero(~is_special & ~is_continuation & ~is_split & np.array(has_letter))
    if not len(candidates):
        return None
    position = int(np.random.default_rng(seed_of("sentence", number)).choice(candidates))
    (borders,) = np.nonzero(np.isin(ids, (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id)))
    context = max(0, min(CONTEXT_TOKENS, (max_length - 3) // 2))
    start = max([position - context, *(borders[borders < position] + 1)])
    stop = min([position + context + 1, len(ids), *borders[borders > position]])
    while is_continuation[start]:  # whole words only
        start += 1
    while stop < len(ids) and is_continuation[stop]:
        stop -= 1
    before, after = ids[start:position].tolist(), ids[position + 1 : stop].tolist()
    decode = tokenizer.backend.decode
    return Sentence(
        f"{decode(before)} {MASK_WORD} {decode(after)}".strip(),
        [tokenizer.cls_id, *before, tokenizer.mask_id, *after, tokenizer.sep_id],
        tokenizer.show(int(ids[position])) or "",
    )


def read_sentences(path: Path) -> list[tuple[str, str]]:
    """(sentence, answer) of each line of a --sample_sentences file; the answer is "" where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8"
        raise UserError(f"--sample_sentences {path}: cannot be read ({reason}); expected {FILE_FORMAT}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        text, _, answer = line.partition("\t")
        if text.strip() and text.count(MASK_WORD) != 1:
            raise UserError(
                f"--sample_sentences {path}: line {number}: found {MASK_WORD} {text.count(MASK_WORD)} times in "
                f"{shortened(text)}; expected {FILE_FORMAT}. Correct the line"
            )
        if text.strip():
            found.append((text.strip(), answer.strip()))
    if not found:
        raise UserError(f"--sample_sentences {path}: has no sentences; expected {FILE_FORMAT}. Add some")
    return found


def encode_sentences(tokenizer: BertTokenizer, sentences: Sequence[tuple[str, str]], max_length: int) -> list[Sentence]:
    """The sentences that fit into `max_length` tokens."""
    encoded = [Sentence(text, encode(tokenizer, text), answer) for text, answer in sentences]
    fitting = [sentence for sentence in encoded if len(sentence.ids) <= max_length]
    if len(fitting) < len(encoded):
        skipped = counted(len(encoded) - len(fitting), "sentence")
        console.warn(f"--sample_sentences: {skipped} skipped, longer than the {max_length} tokens of --max_seq_length")
    return fitting


def encode(tokenizer: BertTokenizer, sentence: str) -> list[int]:
    """The ids of `[CLS] … [MASK] … [SEP]`."""
    text = sentence.replace(MASK_WORD, tokenizer.special_tokens[MASK])
    return [tokenizer.cls_id, *tokenizer.backend.encode(text, add_special_tokens=False).ids, tokenizer.sep_id]


@dataclass(frozen=True)
class ModelPreview:
    """What TensorBoard shows of the model itself: guesses, and histograms of its weights on request."""

    tokenizer: BertTokenizer | None
    sentences: Sequence[Sentence]
    engine: Any
    sinks: Sinks
    device: torch.device
    is_main: bool
    is_partitioned: bool  # ZeRO stage 3
    with_histograms: bool  # --log_histograms

    def all_ranks_write(self, step: int) -> None:
        """At ZeRO stage 3 all ranks compute the guesses, because each layer's weights are gathered from all of them.

        There are no complete weights for histograms then.
        """
        if not (self.is_main or self.is_partitioned):
            return
        if self.tokenizer is not None and self.sentences:
            table = guess_table(self.engine.module, self.tokenizer, self.sentences, self.device)
            self.sinks.text("guesses", table, step)
        if self.with_histograms and not self.is_partitioned:
            self.sinks.histograms(self.engine.module, step)
