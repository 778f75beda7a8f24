"""Learning per second: each shipped recipe against stock transformers' BertForMaskedLM with AdamW at three rates.

All learn from the same shards, tokenizer and cores for the same time, and take turns, so that what else the machine
does falls on all. A model of two layers of 128 by default, as on a laptop. Time spent on validation and on building a
model does not count, but making word embeddings from the data does; on a shared machine, BENCHMARK_CLOCK=cpu with
OMP_NUM_THREADS=1 counts processor time. After every turn: loss in nats and accuracy on the masks of the validation
shards; with --blimp, accuracy on BLiMP's pairs after every fifth. The last line is JSON: `ours_loss` and `ours_blimp`
of the best recipe, `transformers_loss` and `transformers_blimp` of the best rate, and `speedup`, the whole time over
that in which the best recipe reached the final loss of transformers. --save writes each model to a Hugging Face folder,
which evaluation.run fine-tunes and scores.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.timing import clock
from common.console import console
from common.errors import UserError, run_command
from common.memory import keep_freed_memory
from data.masking import MaskingPolicy, mask_rows
from data.shards.dataset import open_dataset
from data.shards.folder import find_shards
from data.shards.reader import ShardFile
from data.shards.schema import NO_LABEL, Rows
from data.shards.statistics import log_frequencies, word_vectors
from data.stream.batches import Batch, batch_from_rows
from data.tokenizer import BertTokenizer, load_tokenizer
from evaluation.pseudo_likelihood.likelihood import Scorer, StockScorer
from evaluation.pseudo_likelihood.minimal_pairs import score_pairs
from evaluation.pseudo_likelihood.native import PackedScorer
from nvidia.config import BertConfig
from nvidia.cpu.startup import configure_onednn
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from training.export.hugging_face import write_model
from training.optimizers.build import build_optimizer, set_learning_rate
from training.plan.learning_rate import Schedule

PROJECT = Path(__file__).resolve().parents[1]
TURNS = 20
BLIMP_EVERY = 5  # turns, and at the end
MAX_ROWS = 300_000  # of training, held in memory
VALIDATION_ROWS = 1024
BASELINE_RATES = (3e-4, 1e-3, 3e-3)
BASELINE_ROWS, BASELINE_WARMUP, BASELINE_MASKING = 32, 0.03, 0.15
CLIP = 1.0


class Recipe(NamedTuple):
    """A model JSON and a DeepSpeed JSON below configs/, and the masking rate at the start and at the end."""

    model: str
    engine: str
    masking: tuple[float, float]


RECIPES = {
    "laptop": Recipe("laptop.json", "ds_laptop.json", (0.30, 0.15)),
    "quickstart": Recipe("quickstart.json", "ds_quickstart.json", (0.30, 0.15)),
}


class Data(NamedTuple):
    """Rows in memory; `frequencies` are the logarithms of the tokens' shares, `vectors` makes those of a given size."""

    training: Rows
    validation: list[Batch]
    tokenizer: BertTokenizer
    length: int
    frequencies: np.ndarray
    vectors: Callable[[int], np.ndarray]


class Point(NamedTuple):
    seconds: float
    loss: float
    accuracy: float
    blimp: float | None


@dataclass
class Learner:
    """A model in training. `rate` and `masking` are functions of the share of the time that has passed."""

    name: str
    model: torch.nn.Module
    loss_of: Callable[[Batch], Tensor]
    logits_of: Callable[[Batch], Tensor]  # of the masked tokens of a batch, [M, tokens]
    scorer: Scorer
    optimizer: torch.optim.Optimizer
    rate: Callable[[float], float]
    masking: Callable[[float], float]
    rows: int  # per step
    save: Callable[[Path], object]  # to a Hugging Face folder
    seconds: float = 0.0
    steps: int = 0
    points: list[Point] = field(default_factory=list)

    def learn(self, data: Data, until: float, total: float) -> None:
        """Take steps until `until` seconds of `total` have been used."""
        self.model.train()
        start = clock() - self.seconds
        while (spent := clock() - start) < until:
            batch = draw_batch(data, self.rows, self.steps, self.masking(spent / total))
            self.loss_of(batch).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            set_learning_rate(self.optimizer, self.rate(spent / total))
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
        self.seconds = spent

    @torch.no_grad()
    def validate(self, data: Data, pairs: list[tuple[str, str]]) -> None:
        self.model.eval()
        loss, correct, count = 0.0, 0, 0
        for batch in data.validation:
            labels = batch.masked_lm_labels[batch.masked_lm_labels != NO_LABEL]
            logits = self.logits_of(batch)
            loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
            correct += int((logits.argmax(-1) == labels).sum())
            count += len(labels)
        blimp = None
        if pairs:
            blimp = score_pairs(self.scorer, data.tokenizer, pairs, max_positions=data.length).accuracy
        self.points.append(Point(self.seconds, loss / count, correct / count, blimp))

    @property
    def last(self) -> Point:
        return self.points[-1]


@lru_cache(maxsize=2)
def row_order(num_rows: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([7, epoch]).permutation(num_rows)


def draw_batch(data: Data, rows: int, step: int, masking: float) -> Batch:
    """Rows in a random order that is the same for all, with new masks in every pass."""
    tokenizer, num_rows = data.tokenizer, len(data.training)
    numbers = np.arange(step * rows, (step + 1) * rows)
    epoch = int(numbers[0] // num_rows)
    chosen = row_order(num_rows, epoch)[numbers % num_rows]
    policy = MaskingPolicy(
        mask_id=tokenizer.mask_id,
        special_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
        max_predictions_per_seq=data.length // 2,
        rate=masking,
    )
    masked = mask_rows(data.training.take(chosen), policy, seed=1, epoch=epoch, row_numbers=chosen)
    return batch_from_rows(masked)


def ours(
    name: str, data: Data, overrides: dict[str, Any], model_class: type[PreTrainingModel] = BertForPreTrainingPreLN
) -> Learner:
    """A shipped recipe, for the vocabulary and the row length of the data and without a sentence head."""
    recipe = RECIPES[name]
    described = json.loads((PROJECT / "configs" / recipe.model).read_text())
    engine = json.loads((PROJECT / "configs" / recipe.engine).read_text())
    section = next(iter(described["mixed_seq_training"].values()))
    sizes = described["bert_model_config"]
    sizes |= {
        "vocab_size": data.tokenizer.vocab_size,
        "max_position_embeddings": max(sizes["max_position_embeddings"], data.length),
        "sentence_head": "none",
    }
    model = model_class(BertConfig.from_dict(sizes | overrides).with_padded_vocab())
    if model.config.decoder_bias_init == "unigram":
        model.set_decoder_bias(torch.from_numpy(data.frequencies))
    began = clock()
    if model.config.embedding_init == "cooccurrence":
        model.set_word_embeddings(torch.from_numpy(data.vectors(model.config.hidden_size)))
    seconds = clock() - began
    optimizer, _ = build_optimizer(
        model, engine["optimizer"], learning_rate=section["learning_rate"],
        weight_decay=section.get("weight_decay", 0.01), zero={},
    )  # fmt: skip
    assert optimizer is not None
    schedule = Schedule(
        "wsd", section["learning_rate"], total_steps=1, warmup_proportion=section["warmup_proportion"],
        decay_proportion=section.get("decay_proportion", 0.1),
    )  # fmt: skip
    first, last = recipe.masking

    def known_segments(batch: Batch) -> Tensor:
        return batch.segment_ids.clamp(max=max(1, model.config.type_vocab_size) - 1)

    def loss_of(batch: Batch) -> Tensor:
        loss: Tensor = model(batch._replace(segment_ids=known_segments(batch)))
        return loss

    def logits_of(batch: Batch) -> Tensor:
        logits = model.masked_lm_logits(batch.input_ids, batch.input_mask, known_segments(batch))
        return logits[batch.masked_lm_labels != NO_LABEL]

    return Learner(
        name, model, loss_of, logits_of, PackedScorer(model), optimizer, schedule.rate,
        lambda share: first + (last - first) * share, engine["train_micro_batch_size_per_gpu"],
        lambda folder: write_model(model.state_dict(), model.config, data.tokenizer, folder), seconds,
    )  # fmt: skip


def stock(rate: float, data: Data, overrides: dict[str, Any]) -> Learner:
    """transformers' own model and defaults, AdamW with a linear decay, as its examples train it."""
    import transformers

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    shape = {"vocab_size": data.tokenizer.vocab_size, "max_position_embeddings": data.length}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**(sizes | shape | overrides)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    schedule = Schedule("linear", rate, total_steps=1, warmup_proportion=BASELINE_WARMUP)

    def logits(batch: Batch) -> Any:
        return model(
            input_ids=batch.input_ids, attention_mask=batch.input_mask, token_type_ids=batch.segment_ids
        ).logits

    def loss_of(batch: Batch) -> Tensor:
        labels = batch.masked_lm_labels
        return functional.cross_entropy(logits(batch).flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        data.tokenizer.save(folder, data.length)

    return Learner(
        f"transformers {rate:g}", model, loss_of, lambda batch: logits(batch)[batch.masked_lm_labels != NO_LABEL],
        StockScorer(model, data.tokenizer.pad_id), optimizer, schedule.rate, lambda _: BASELINE_MASKING, BASELINE_ROWS,
        save,
    )  # fmt: skip


def read_data(folder: Path, tokenizer: Path) -> Data:
    if not folder.is_dir():
        raise UserError(f"--data {folder}: no such folder. Run scripts/quickstart.sh first, or give prepared shards")
    shard = ShardFile(find_shards(folder, "validation")[0])
    length, predictions = shard.layout.max_seq_length, shard.layout.max_predictions_per_seq
    shard.close()
    loaded = load_tokenizer(tokenizer)
    shape: dict[str, Any] = {"max_seq_length": length, "max_predictions_per_seq": predictions}
    training = open_dataset([folder], split="training", **shape)
    validation = open_dataset([folder], split="validation", **shape)
    checked = validation.read_range(0, min(VALIDATION_ROWS, validation.num_rows))
    return Data(
        training.read_range(0, min(MAX_ROWS, training.num_rows)).with_originals(),
        [
            batch_from_rows(checked.take(part))
            for part in np.array_split(np.arange(len(checked)), -(-len(checked) // 64))
        ],
        loaded,
        length,
        log_frequencies(training, loaded.vocab_size),
        partial(word_vectors, training, loaded.vocab_size),
    )


def read_pairs(folder: Path, per_file: int) -> list[tuple[str, str]]:
    """The first pairs of each of BLiMP's files."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()[:per_file]]
    if not lines:
        raise UserError(f"--blimp {folder}: has no .jsonl files; give the folder with BLiMP's")
    return [(row["sentence_good"], row["sentence_bad"]) for row in map(json.loads, lines)]


def take_turns(
    learners: Sequence[Learner], data: Data, seconds: float, pairs: list[tuple[str, str]], turns: int = TURNS
) -> None:
    console.say(f"{'seconds':>8}  {'':<20} {'steps':>6} {'loss':>7} {'right':>6} {'BLiMP':>6}")
    for turn in range(1, turns + 1):
        scored = pairs if turn % BLIMP_EVERY == 0 or turn == turns else []
        for learner in learners:
            learner.learn(data, seconds * turn / turns, seconds)
            learner.validate(data, scored)
            at = learner.last
            blimp = "" if at.blimp is None else f"{at.blimp:6.1%}"
            console.say(
                f"{at.seconds:8.1f}  {learner.name:<20} {learner.steps:6} {at.loss:7.3f} {at.accuracy:6.1%} {blimp}"
            )


def summarize(recipes: Sequence[Learner], baselines: Sequence[Learner], seconds: float) -> dict[str, Any]:
    """Figures of a group that has no learners are None."""
    best = {
        name: min(group, key=lambda learner: learner.last.loss, default=None)
        for name, group in (("ours", recipes), ("transformers", baselines))
    }
    ours, theirs = best["ours"], best["transformers"]
    reached = None
    if ours is not None and theirs is not None:
        reached = next((point.seconds for point in ours.points if point.loss <= theirs.last.loss), None)
    figures: dict[str, Any] = {"seconds": seconds, "ours": None if ours is None else ours.name}
    for figure in ("loss", "accuracy", "blimp"):
        for name, learner in best.items():
            value = None if learner is None else getattr(learner.last, figure)
            figures[f"{name}_{figure}"] = None if value is None else round(value, 4)
    return figures | {
        "speedup": None if reached is None else round(seconds / reached, 2),
        "losses": {learner.name: round(learner.last.loss, 4) for learner in (*recipes, *baselines)},
        "steps": {learner.name: learner.steps for learner in (*recipes, *baselines)},
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900.0, help="of training, for each (default: 900)")
    parser.add_argument(
        "--turns", type=int, default=TURNS, help=f"that the seconds are divided into (default: {TURNS})"
    )
    parser.add_argument(
        "--data", type=Path, default=PROJECT / "data" / "hdf5" / "64", metavar="SHARDS",
        help="folder of prepared training and validation shards (default: the quickstart's)",
    )  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="default: the folder `tokenizer` beside SHARDS")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument(
        "--rates", type=float, nargs="*", default=list(BASELINE_RATES), help="of AdamW for transformers"
    )
    parser.add_argument("--layers", type=int, help="of all models (default: the recipe's, and 2)")
    parser.add_argument("--blimp", type=Path, metavar="DIR", help="folder with BLiMP's .jsonl files")
    parser.add_argument("--blimp_pairs", type=int, default=20, metavar="N", help="of each file (default: 20)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the models to folders below DIR at the end")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    configure_onednn()
    keep_freed_memory()
    torch.manual_seed(0)
    if arguments.save is not None:
        arguments.save.mkdir(parents=True, exist_ok=True)  # before the time is spent
    data = read_data(arguments.data, arguments.tokenizer or arguments.data.parent / "tokenizer")
    pairs = [] if arguments.blimp is None else read_pairs(arguments.blimp, arguments.blimp_pairs)
    overrides = {} if arguments.layers is None else {"num_hidden_layers": arguments.layers}
    recipes = [ours(name, data, overrides) for name in arguments.recipes]
    baselines = [stock(rate, data, overrides) for rate in arguments.rates]
    take_turns([*recipes, *baselines], data, arguments.seconds, pairs, arguments.turns)
    for learner in [*recipes, *baselines] if arguments.save is not None else []:
        learner.save(arguments.save / learner.name.replace(" ", "_"))
    console.say(json.dumps(summarize(recipes, baselines, arguments.seconds)))
    return 0


if __name__ == "__main__":
    run_command(main)
