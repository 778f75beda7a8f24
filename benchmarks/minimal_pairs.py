"""Pseudo-log-likelihood of minimal pairs: our model on packed tokens against stock transformers on padded batches.

Both score the same pairs with the same weights, the pre-LN model by default and the post-LN one with --post_ln. Words
of the pairs are drawn at random, in sentences as long as BLiMP's; with --data, a folder of BLiMP's files is read. One
thread, so that the ratio is that of one core; on a shared machine, BENCHMARK_CLOCK=cpu counts processor time. The last
line is JSON: `ratio` of the times, stock to ours, and `largest_difference` of the sums of log-probabilities, in nats.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from benchmarks.timing import clock
from common.console import console
from common.errors import run_command
from evaluation.pseudo_likelihood.likelihood import StockScorer
from evaluation.pseudo_likelihood.minimal_pairs import PairScores, score_pairs
from evaluation.pseudo_likelihood.native import PackedScorer, prepare_process, to_native, use_fastest_products

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Shares of sentences by their number of tokens, without the two special ones, as in BLiMP under BERT's vocabulary.
LENGTHS = {6: 0.15, 7: 0.15, 8: 0.15, 9: 0.15, 10: 0.12, 11: 0.1, 12: 0.08, 14: 0.06, 17: 0.03, 22: 0.01}


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Words w0, w1, …; what is not among them is unknown."""
    names = [*SPECIALS, *(f"w{i}" for i in range(vocab_size - len(SPECIALS)))]
    numbers = {token: number for number, token in enumerate(names)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]")


def make_pairs(num_pairs: int, vocab_size: int) -> list[tuple[str, str]]:
    """Pairs that differ in one word."""
    generator = np.random.default_rng(0)
    pairs = []
    for length in generator.choice(list(LENGTHS), num_pairs, p=list(LENGTHS.values())):
        numbers = generator.integers(0, vocab_size - len(SPECIALS), int(length) + 1)
        good = [f"w{number}" for number in numbers[:-1]]
        bad = list(good)
        bad[int(generator.integers(0, length))] = f"w{numbers[-1]}"
        pairs.append((" ".join(good), " ".join(bad)))
    return pairs


def read_pairs(folder: Path, num_pairs: int) -> list[tuple[str, str]]:
    """The first pairs of each of BLiMP's files."""
    files = sorted(folder.glob("*.jsonl"))
    lines = [line for file in files for line in file.read_text().split("\n")[: max(1, num_pairs // len(files))] if line]
    return [(row["sentence_good"], row["sentence_bad"]) for row in map(json.loads, lines)]


def make_model(arguments: argparse.Namespace, vocab_size: int) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": max(1, arguments.hidden // 64),
        "intermediate_size": 4 * arguments.hidden,
        "pad_token_id": 0,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }
    if arguments.post_ln:
        config: Any = transformers.BertConfig(**sizes, max_position_embeddings=512)
    else:
        config = transformers.RobertaPreLayerNormConfig(**sizes, max_position_embeddings=513)
    return transformers.AutoModelForMaskedLM.from_config(config).eval()


def timed(scorer: Any, tokenizer: Any, pairs: list[tuple[str, str]], repeats: int) -> tuple[PairScores, float]:
    """Scores and the fastest of some passes, in seconds."""
    score_pairs(scorer, tokenizer, pairs[:20])  # first-call costs
    best = float("inf")
    for _ in range(repeats):
        start = clock()
        scores = score_pairs(scorer, tokenizer, pairs)
        best = min(best, clock() - start)
    return scores, best


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=30522)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=2, help="passes of each; the fastest counts")
    parser.add_argument("--stock_batch", type=int, default=64, help="rows of a padded batch")
    parser.add_argument("--post_ln", action="store_true", help="the post-LN model instead of the pre-LN one")
    parser.add_argument("--data", type=Path, help="a folder of BLiMP's .jsonl files; needs --tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="a Hugging Face folder with a tokenizer")
    arguments = parser.parse_args(argv)
    prepare_process()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.data is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.tokenizer)
        pairs = read_pairs(arguments.data, arguments.pairs)
    else:
        tokenizer = make_tokenizer(arguments.vocab_size)
        pairs = make_pairs(arguments.pairs, arguments.vocab_size)
    stock = make_model(arguments, len(tokenizer))
    ours = to_native(stock.state_dict(), stock.config.to_dict(), "stock model")
    expected, stock_seconds = timed(StockScorer(stock, 0, arguments.stock_batch), tokenizer, pairs, arguments.repeats)
    use_fastest_products(ours)
    found, our_seconds = timed(PackedScorer(ours), tokenizer, pairs, arguments.repeats)
    sums = [np.concatenate([scores.good, scores.bad]) for scores in (expected, found)]
    for name, seconds in (("stock, padded", stock_seconds), ("ours, packed", our_seconds)):
        console.say(f"{name:14s} {seconds:8.2f} s  {2 * len(pairs) / seconds:8.1f} sentences/s")
    result = {
        "hidden": arguments.hidden,
        "layers": arguments.layers,
        "vocab_size": len(tokenizer),
        "pairs": len(pairs),
        "stock_seconds": round(stock_seconds, 3),
        "our_seconds": round(our_seconds, 3),
        "ratio": round(stock_seconds / our_seconds, 2),
        "largest_difference": float(np.abs(sums[0] - sums[1]).max()),
    }
    console.say(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_command(main)
