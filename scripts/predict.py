"""Predict masked words, or how likely one text follows another, with stock transformers."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn import functional

from common.console import console
from common.errors import Problems, UserError, run_command
from common.help import Parser, positive_int
from common.weights import read_tensors
from data.special_tokens import MASK
from nvidia.interop.families import FAMILIES
from training.settings.first_weights import EXTRA_WEIGHTS

T = TypeVar("T")
# Heads of other models that evaluation.run --keep_models saves, and the stock pipelines for them.
PIPELINES = {"TokenClassification": "token-classification", "QuestionAnswering": "question-answering"}
USAGE = """examples:
  predict.py --model DIR "the [MASK] of the list"         the most likely words for the mask
  predict.py --model DIR --pair "She sat." "He stood."    how likely the second follows the first
  predict.py --model DIR "She sat." "He stood."           the same: two texts without a [MASK] are a pair
  predict.py --model OUTPUT/models/… "a fine film"        classes, by a model that evaluation.run --keep_models kept
"""


def build_parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="predict.py", description=__doc__, epilog=USAGE, formatter_class=layout)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face folder")
    add("--top", type=positive_int, default=5, metavar="N", help="guesses per mask (default: 5)")
    pair = "how likely SECOND follows FIRST; can be repeated"
    add("--pair", nargs=2, action="append", default=[], metavar=("FIRST", "SECOND"), help=pair)
    add("texts", nargs="*", metavar="TEXT", help="a text with [MASK], or two texts without")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    if not flags.texts and not flags.pair:
        raise UserError("TEXT: no text given. Pass one with [MASK] in it, or two with --pair")
    check_folder(flags.model)
    kind = head_of(flags.model)
    if kind in PIPELINES:
        raise UserError(
            f"{flags.model}: is a {kind} model; expected one that predicts masked words or classes of texts. Use "
            f'transformers.pipeline("{PIPELINES[kind]}", model="{flags.model}")'
        )
    tokenizer = load(flags.model, load_tokenizer)
    if kind == "SequenceClassification":
        model = load(flags.model, partial(load_model, "AutoModelForSequenceClassification"))
        return answer_classes(model, tokenizer, [*([text] for text in flags.texts), *flags.pair])
    # [MASK] is also accepted by models whose mask token has another name, such as <mask>.
    texts, pairs = [text.replace(MASK, tokenizer.mask_token) for text in flags.texts], flags.pair
    if len(texts) == 2 and not any(tokenizer.mask_token in text for text in texts):
        texts, pairs = [], [texts, *pairs]
    problems = Problems()
    if texts:
        model = load(flags.model, partial(load_model, "AutoModelForMaskedLM"))
        answer_texts(model, tokenizer, texts, flags.top, problems)
    if pairs:
        problems.attempt(lambda: answer_pairs(load(flags.model, load_judge), tokenizer, pairs, problems))
    problems.raise_if_any()  # after the answers: a text that cannot be predicted does not lose those for the others
    return 0


def check_folder(folder: Path) -> None:
    expected = "expected a folder written by scripts/export_hf.py"
    if not folder.is_dir():
        found = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder}: {found}; {expected}. Check --model")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: contains no config.json; {expected}")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: contains no tokenizer.json. Export again with --tokenizer")


def head_of(folder: Path) -> str:
    """What the class in config.json is for, such as SequenceClassification; "" where it does not say."""
    try:
        architectures = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    except (ValueError, AttributeError):
        return ""  # reported when the model is loaded
    return str(architectures[0]).rpartition("For")[2]


@torch.no_grad()
def answer_classes(model: Any, tokenizer: Any, inputs: Sequence[Sequence[str]]) -> int:
    """Print the classes of each text or pair of texts, or its score. Long ones are cut."""
    limit, names = positions_of(model), model.config.id2label
    for texts in inputs:
        encoded = tokenizer(*texts, return_tensors="pt", truncation=True, max_length=limit)
        scores = model(**usable_inputs(model, encoded)).logits[0]  # as in fine-tuning
        if len(scores) == 1:
            answer = f"score {float(scores[0]):.3f}"
        else:
            best = scores.softmax(-1).topk(min(5, len(scores)))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            answer = "  ".join(f"{names[number]} {share:.1%}" for number, share in pairs)
        console.say("\n".join((*texts, f"    {answer}")))
    return 0


def answer_texts(model: Any, tokenizer: Any, texts: Sequence[str], top: int, problems: Problems) -> None:
    """Print the guesses for each text, and note the problems of those whose masks cannot be filled."""
    if top > model.config.vocab_size:
        raise UserError(f"--top {top}: the model has {model.config.vocab_size} tokens. Pass at most that many")
    limit = positions_of(model)
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        if tokenizer.mask_token_id not in ids:
            problems.add(f"{text!r}: has no {tokenizer.mask_token}. Put one where a word should be predicted")
        if len(ids) > limit:
            problems.add(f"{text[:40]!r}…: has {len(ids)} tokens, but the model has {limit} positions. Shorten it")
        elif tokenizer.mask_token_id in ids:
            console.say(text)
            for guesses in fill_masks(model, tokenizer, text, top):
                console.say("    " + "  ".join(f"{word} {share:.1%}" for word, share in guesses))


def answer_pairs(judge: "Judge", tokenizer: Any, pairs: Sequence[Sequence[str]], problems: Problems) -> None:
    for first, second in pairs:
        share = problems.attempt(partial(judge.follows, tokenizer, first, second))
        if share is not None:
            console.say(f"{first}\n{second}\n    follows {share:.1%}")


def load(folder: Path, loader: Callable[[Path], T]) -> T:
    """The result of `loader` for the folder; any error of the library becomes a UserError."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return loader(folder)
    except UserError:
        raise
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{folder}: cannot be loaded by transformers ({reason}); expected a folder that scripts/export_hf.py "
            f"wrote. Copy it again, or export it again"
        ) from error


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.mask_token is None:
        raise UserError(f"{folder}: its tokenizer has no mask token; expected one. Export again with --tokenizer")
    return tokenizer


def load_model(auto_class: str, folder: Path) -> Any:
    import transformers

    return getattr(transformers, auto_class).from_pretrained(folder, local_files_only=True).eval()


def positions_of(model: Any) -> int:
    """The maximum number of tokens. RoBERTa and its relatives number positions from pad_token_id + 1."""
    config = model.config
    family = FAMILIES.get(config.model_type)
    shift = config.pad_token_id + 1 if family is not None and family.shifts_positions else 0
    return int(config.max_position_embeddings - shift)


def usable_inputs(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`inputs` without token types, if the model has none, or only one."""
    has_types = getattr(model.config, "type_vocab_size", 0) > 1
    return {name: tensor for name, tensor in inputs.items() if has_types or name != "token_type_ids"}


@torch.no_grad()
def fill_masks(model: Any, tokenizer: Any, text: str, top: int) -> list[list[tuple[str, float]]]:
    """For each [MASK] of `text`, the most likely tokens and their probabilities."""
    encoded = tokenizer(text, return_tensors="pt")
    masked = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().flatten()
    shares, tokens = model(**encoded).logits[0, masked].softmax(-1).topk(top)  # [masks, top]
    return [
        [(show_token(tokenizer, int(token)), float(share)) for token, share in zip(*row, strict=True)]
        for row in zip(tokens, shares, strict=True)
    ]


def show_token(tokenizer: Any, token_id: int) -> str:
    """A token without the mark of the space before it, and with characters instead of bytes."""
    return tokenizer.decode([token_id]).strip() or tokenizer.convert_ids_to_tokens(token_id)


class Judge:
    """Scores [1, 2] of a stock model: the second text follows the first, or does not."""

    def __init__(self, model: Any, head: dict[str, Tensor]) -> None:
        """`head`: pooler and next-sentence weights of an encoder whose class has none; else empty."""
        self.model, self.head = model, head

    @torch.no_grad()
    def follows(self, tokenizer: Any, first: str, second: str) -> float:
        """The probability that `second` follows `first`."""
        inputs = encode_pair(tokenizer, first, second)
        length, most = inputs["input_ids"].shape[1], positions_of(self.model)
        if length > most:
            raise UserError(
                f"{first!r} and {second!r}: {length} tokens with [CLS] and [SEP], but the model has {most} positions. "
                f"Shorten it"
            )
        return float(self.scores(inputs).softmax(-1)[0, 0])

    def scores(self, inputs: dict[str, Tensor]) -> Tensor:
        if not self.head:
            return self.model(**inputs).logits
        state = self.model(**usable_inputs(self.model, inputs)).last_hidden_state[:, 0]  # [1, hidden] of [CLS]
        pooled = self.linear(state, "bert.pooler.dense_act").tanh()
        return self.linear(pooled, "cls.seq_relationship")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.head[f"{name}.weight"], self.head[f"{name}.bias"])


def load_judge(folder: Path) -> Judge:
    """The encoder with its next-sentence head, which a pre-LN export has in a separate file."""
    from transformers import AutoConfig, AutoModelForNextSentencePrediction

    if (folder / EXTRA_WEIGHTS).is_file():
        return Judge(load_model("AutoModel", folder), read_tensors(folder / EXTRA_WEIGHTS))
    if AutoConfig.from_pretrained(folder, local_files_only=True).model_type == "bert":
        model, report = AutoModelForNextSentencePrediction.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
        if not report["missing_keys"]:
            return Judge(model.eval(), {})
    raise UserError(
        f"{folder}: contains no next-sentence head ({EXTRA_WEIGHTS} for a pre-LN model), which --pair needs. "
        f"Export a model that was trained with one"
    )


def encode_pair(tokenizer: Any, first: str, second: str) -> dict[str, Tensor]:
    """[CLS] first [SEP] second [SEP], as in training, whatever template the tokenizer's file has."""
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (first, second)]
    segment_a = [tokenizer.cls_token_id, *parts[0], tokenizer.sep_token_id]
    segment_b = [*parts[1], tokenizer.sep_token_id]
    ids = torch.tensor([segment_a + segment_b])
    segments = torch.tensor([[0] * len(segment_a) + [1] * len(segment_b)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": segments}


if __name__ == "__main__":
    run_command(main)
