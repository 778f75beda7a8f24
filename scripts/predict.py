"""Fill the [MASK]s of a text with an exported model, loaded by stock transformers."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from common.console import console
from common.errors import Problems, UserError, run_command
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
    check(model, tokenizer, flags.texts, flags.top)
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
    try:
        model = AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged folder makes the library raise whatever it likes
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{folder}: cannot be loaded by transformers ({reason}); copy it again from where it came, or export it "
            f"again with scripts/export_hf.py"
        ) from error


def check(model: torch.nn.Module, tokenizer: object, texts: Sequence[str], top: int) -> None:
    """All that is wrong with the texts, before the first is answered."""
    problems = Problems()
    config, mask = model.config, tokenizer.mask_token  # type: ignore[attr-defined]
    if top > config.vocab_size:  # type: ignore[union-attr]
        problems.add(f"--top {top}: the model knows {config.vocab_size} tokens; give at most that many")  # type: ignore[union-attr]
    # Pre-LN models number their positions from pad_token_id + 1 on.
    shift = config.pad_token_id + 1 if config.model_type == "roberta-prelayernorm" else 0  # type: ignore[union-attr,operator]
    most = config.max_position_embeddings - shift  # type: ignore[union-attr,operator]
    for text in texts:
        ids = tokenizer(text)["input_ids"]  # type: ignore[operator]
        if tokenizer.mask_token_id not in ids:  # type: ignore[attr-defined]
            problems.add(f"{text!r}: has no {mask}; put one where a word is to be guessed")
        if len(ids) > most:
            problems.add(f"{text[:40]!r}…: has {len(ids)} tokens, but the model takes {most}; shorten it")
    problems.raise_if_any()


@torch.no_grad()
def fill_masks(model: torch.nn.Module, tokenizer: object, text: str, top: int) -> list[list[tuple[str, float]]]:
    """For each [MASK] of `text`, the likeliest tokens and their probabilities."""
    encoded = tokenizer(text, return_tensors="pt")  # type: ignore[operator]
    masked = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()  # type: ignore[attr-defined]
    probabilities = model(**encoded).logits[0, masked].softmax(-1)  # [masks, tokens]
    shares, tokens = probabilities.topk(top)
    return [
        [(tokenizer.convert_ids_to_tokens(int(token)), float(share)) for token, share in zip(*row, strict=True)]  # type: ignore[attr-defined]
        for row in zip(tokens, shares, strict=True)
    ]


if __name__ == "__main__":
    run_command(main)
