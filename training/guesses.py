"""The model's guesses for masked words in a few fixed sentences, shown in TensorBoard as it learns."""

from dataclasses import dataclass
from typing import Any

import torch

from data.tokenizer import BertTokenizer
from training.metrics.sinks import Sinks

MASK_WORD = "[MASK]"
SENTENCES = (
    "the cat sat on the [MASK] .",
    "she opened the door and [MASK] outside .",
    "paris is the capital of [MASK] .",
    "one two three four [MASK] six",
    "he did not know what to [MASK] about it .",
    "this function returns the [MASK] of the list .",
)
NUM_GUESSES = 5


class Guesses:
    """The sentences that fit into `max_seq_length`, encoded once; none without a tokenizer."""

    def __init__(self, tokenizer: BertTokenizer | None, max_seq_length: int) -> None:
        self.tokenizer = tokenizer
        encoded = [(text, encode(tokenizer, text)) for text in SENTENCES] if tokenizer is not None else []
        self.rows = [(sentence, row) for sentence, row in encoded if len(row) <= max_seq_length]

    @torch.no_grad()
    def table(self, model: Any, device: torch.device) -> str | None:
        """A Markdown table of each sentence with the most likely words for its mask; None without sentences."""
        if not self.rows:
            return None
        was_training = model.training
        model.eval()
        lines = ["| sentence | guesses |", "|---|---|"]
        for sentence, row in self.rows:
            lines.append(f"| {sentence} | {', '.join(self.guess(model, row, device))} |")
        model.train(was_training)
        return "\n".join(lines)

    def guess(self, model: Any, row: list[int], device: torch.device) -> list[str]:
        assert self.tokenizer is not None
        ids = torch.tensor([row], device=device)
        position = torch.tensor([[row.index(self.tokenizer.mask_id)]], device=device)
        scores = model.masked_lm_logits(ids, torch.ones_like(ids), torch.zeros_like(ids), positions=position)
        shares, tokens = scores[0, 0].float().softmax(-1).topk(min(NUM_GUESSES, scores.shape[-1]))
        words = [self.tokenizer.backend.id_to_token(token) or str(token) for token in tokens.tolist()]
        return [f"{word} {share:.0%}" for word, share in zip(words, shares.tolist(), strict=True)]


def encode(tokenizer: BertTokenizer, sentence: str) -> list[int]:
    """The ids of `[CLS] … [MASK] … [SEP]`."""
    before, after = sentence.split(MASK_WORD)
    parts = [tokenizer.backend.encode(part.strip(), add_special_tokens=False).ids for part in (before, after)]
    return [tokenizer.cls_id, *parts[0], tokenizer.mask_id, *parts[1], tokenizer.sep_id]


@dataclass(frozen=True)
class ModelPreview:
    """What TensorBoard shows of the model itself: guesses, and histograms of its weights on request."""

    guesses: Guesses
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
        table = self.guesses.table(self.engine.module, self.device)
        if table is not None:
            self.sinks.text("guesses", table, step)
        if self.with_histograms and not self.is_partitioned:
            self.sinks.histograms(self.engine.module, step)
