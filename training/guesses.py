"""A few fixed sentences with a gap, and what the model would put there: so that one can watch it learn."""

from typing import Any

import torch

from data.tokenizer import BertTokenizer

MASK_WORD = "[MASK]"
SENTENCES = (
    "the cat sat on the [MASK] .",
    "she opened the door and [MASK] outside .",
    "paris is the capital of [MASK] .",
    "one two three four [MASK] six",
    "he did not know what to [MASK] about it .",
    "this function returns the [MASK] of the list .",
)
TOP = 5


class Samples:
    """The sentences that fit, with their ids, made once. None where there is no tokenizer."""

    def __init__(self, tokenizer: BertTokenizer | None, max_seq_length: int) -> None:
        self.tokenizer = tokenizer
        encoded = [(text, encode(tokenizer, text)) for text in SENTENCES] if tokenizer is not None else []
        self.rows = [(sentence, row) for sentence, row in encoded if len(row) <= max_seq_length]

    @torch.no_grad()
    def table(self, model: Any, device: torch.device) -> str | None:
        """Markdown: each sentence with the likeliest words for its gap."""
        if self.tokenizer is None or not self.rows:
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
        place = torch.tensor([[row.index(self.tokenizer.mask_id)]], device=device)
        scores = model.masked_lm_logits(ids, torch.ones_like(ids), torch.zeros_like(ids), positions=place)
        shares, tokens = scores[0, 0].float().softmax(-1).topk(min(TOP, scores.shape[-1]))
        words = [self.tokenizer.backend.id_to_token(token) or str(token) for token in tokens.tolist()]
        return [f"{word} {share:.0%}" for word, share in zip(words, shares.tolist(), strict=True)]


def encode(tokenizer: BertTokenizer, sentence: str) -> list[int]:
    """[CLS] … [MASK] … [SEP]"""
    before, after = sentence.split(MASK_WORD)
    parts = [tokenizer.backend.encode(part.strip(), add_special_tokens=False).ids for part in (before, after)]
    return [tokenizer.cls_id, *parts[0], tokenizer.mask_id, *parts[1], tokenizer.sep_id]
