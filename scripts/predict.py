"""Fill the [MASK]s of a text with an exported model, loaded by stock transformers."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from common.console import console
from common.errors import UserError, run_command
from common.help import Parser, positive_int


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="predict.py", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face folder")
    parser.add_argument("--top", type=positive_int, default=5, metavar="N", help="guesses for each mask (default: 5)")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a text with [MASK] in it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    model, tokenizer = load(flags.model)
    for text in flags.texts:
        console.say(text)
        for guesses in fill_masks(model, tokenizer, text, flags.top):
            console.say("    " + "  ".join(f"{word} {share:.1%}" for word, share in guesses))
    return 0


def load(folder: Path) -> tuple[torch.nn.Module, object]:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: holds no config.json; expected a folder written by scripts/export_hf.py")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: holds no tokenizer.json; export again with --tokenizer")
    from transformers import AutoModelForMaskedLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def fill_masks(model: torch.nn.Module, tokenizer: object, text: str, top: int) -> list[list[tuple[str, float]]]:
    """For each [MASK] of `text`, the likeliest tokens and their probabilities."""
    encoded = tokenizer(text, return_tensors="pt")  # type: ignore[operator]
    masked = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()  # type: ignore[attr-defined]
    if len(masked) == 0:
        raise UserError(f"{text!r}: has no {tokenizer.mask_token}; put one where a word is to be guessed")  # type: ignore[attr-defined]
    probabilities = model(**encoded).logits[0, masked].softmax(-1)  # [masks, tokens]
    shares, tokens = probabilities.topk(top)
    return [
        [(tokenizer.convert_ids_to_tokens(int(token)), float(share)) for token, share in zip(*row, strict=True)]  # type: ignore[attr-defined]
        for row in zip(tokens, shares, strict=True)
    ]


if __name__ == "__main__":
    run_command(main)
