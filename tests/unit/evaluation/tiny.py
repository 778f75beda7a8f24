"""Tiny stock models with a tokenizer of their own, and labelled files that they can learn."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
)

NOUNS = "cat dog bird house river stone table window garden teacher".split()
VERBS = "sees finds likes moves holds paints washes follows".split()
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
POSITIONS = 64
IN_PIECES = {"teacher": ("teach", "##er"), "garden": ("gard", "##en"), "follows": ("follow", "##s")}


def sentence(generator: np.random.Generator) -> str:
    first, second = generator.choice(NOUNS, 2)
    return f"the {first} {generator.choice(VERBS)} the {second} ."


def make_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece in which some words have several pieces. Its vocabulary is fixed: training orders ties at random."""
    words = [word for word in [*NOUNS, *VERBS] if word not in IN_PIECES]
    pieces = [piece for parts in IN_PIECES.values() for piece in parts]
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = [*SPECIALS, *words, *pieces, "the", "good", "bad", *'.,"?', *letters, *(f"##{c}" for c in letters)]
    numbers = {token: number for number, token in enumerate(dict.fromkeys(vocabulary))}
    backend = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = backend.token_to_id("[CLS]"), backend.token_to_id("[SEP]")
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    )


def make_model(tokenizer: Any, pre_ln: bool = True, seed: int = 0, spread: float = 0.2) -> Any:
    """A masked language model; with a wide `spread` of its weights, scores of tokens differ clearly."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "initializer_range": spread, "pad_token_id": 0, "type_vocab_size": 2,
    }  # fmt: skip
    if pre_ln:
        return RobertaPreLayerNormForMaskedLM(
            RobertaPreLayerNormConfig(**sizes, max_position_embeddings=POSITIONS + 1, layer_norm_eps=1e-12)
        ).eval()
    return BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=POSITIONS)).eval()


def save_model(folder: Path, pre_ln: bool = True, seed: int = 0) -> Path:
    tokenizer = make_tokenizer()
    make_model(tokenizer, pre_ln, seed, spread=0.05).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_reviews(path: Path, num_rows: int = 120, seed: int = 0) -> Path:
    """A CSV whose label follows from one word."""
    generator = np.random.default_rng(seed)
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "stars"])
        for row in range(num_rows):
            word = ("bad", "good")[row % 2]
            writer.writerow([f'{word}, "{generator.choice(NOUNS)}" {sentence(generator)}', (1, 5)[row % 2]])
    return path


def write_pairs(path: Path, num_rows: int = 20, seed: int = 0) -> Path:
    """Minimal pairs in BLiMP's format: the bad sentence has its words in another order."""
    generator = np.random.default_rng(seed)
    with path.open("w") as stream:
        for row in range(num_rows):
            good = sentence(generator)
            words = good.split()
            bad = " ".join([words[1], words[0], *words[2:]])
            stream.write(json.dumps({"sentence_good": good, "sentence_bad": bad, "UID": f"group{row % 2}"}) + "\n")
    return path
