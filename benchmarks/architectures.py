"""Architectures side by side: speed and loss of small models after the same time on the same data.

Every architecture has two layers of 128, the optimizer, the learning rates, the masking rate and the decoder bias of
`configs/laptop.json`, random word embeddings, and about as many parameters. They take turns, so that what else the
machine does falls on all. The last line is JSON: real tokens per second, loss in nats and accuracy on the masks of the
validation shards, by architecture. On a shared machine, BENCHMARK_CLOCK=cpu with OMP_NUM_THREADS=1 counts processor
time.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.learning import PROJECT, Data, Learner, ours, read_data
from common.console import console
from common.errors import run_command
from common.memory import keep_freed_memory
from nvidia.cpu.startup import configure_onednn
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel

BERT = {
    "hidden_act": "gelu",
    "intermediate_size": 512,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "first_attention_norm": True,
    "layer_norm_eps": 1e-12,
    "attention_window": 0,
    "global_attention_every": 1,
}
WITHOUT_BIASES = {"use_bias": False, "norm_bias": False, "head_bias": False}
WINDOW = {"attention_window": 32, "global_attention_every": 2}
ARCHITECTURES: dict[str, tuple[type[PreTrainingModel], dict[str, Any]]] = {  # changes of configs/laptop.json
    "BERT, pre-LN": (BertForPreTrainingPreLN, BERT),
    "BERT, post-LN": (BertForPreTraining, BERT),
    "RoBERTa": (BertForPreTraining, BERT | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "BERT, pre-LN, rotary": (BertForPreTrainingPreLN, BERT | {"position_embedding_type": "rotary"}),
    "ModernBERT with biases": (BertForPreTrainingPreLN, {}),
    "ModernBERT": (BertForPreTrainingPreLN, WITHOUT_BIASES | WINDOW),
}


def build(name: str, data: Data) -> Learner:
    """The architecture of that name, for the vocabulary and the row length of the data."""
    model_class, changes = ARCHITECTURES[name]
    torch.manual_seed(0)
    same = {"max_position_embeddings": data.length, "embedding_init": "normal"}
    learner = ours("laptop", data, changes | same, model_class)
    learner.name = name
    return learner


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of training, for each (default: 120)")
    parser.add_argument("--turns", type=int, default=4, help="parts of this time, in turns (default: 4)")
    parser.add_argument(
        "--data", type=Path, default=PROJECT / "data" / "hdf5" / "64", metavar="SHARDS",
        help="folder of prepared shards, the tokenizer beside it (default: the quickstart's)",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    configure_onednn()
    keep_freed_memory()
    data = read_data(arguments.data, arguments.data.parent / "tokenizer")
    tokens_per_row = float(data.training.input_mask.sum()) / len(data.training)
    learners = [build(name, data) for name in ARCHITECTURES]
    for turn in range(1, arguments.turns + 1):
        for learner in learners:
            learner.learn(data, arguments.seconds * turn / arguments.turns, arguments.seconds)
    console.say(f"{'':<24} {'parameters':>11} {'steps':>6} {'tokens/s':>9} {'loss':>7} {'right':>6}")
    result = {}
    for learner in learners:
        learner.validate(data, [])
        speed = learner.steps * learner.rows * tokens_per_row / learner.seconds
        size = sum(parameter.numel() for parameter in learner.model.parameters())
        result[learner.name] = {
            "tokens_per_s": round(speed),
            "loss": round(learner.last.loss, 4),
            "accuracy": round(learner.last.accuracy, 4),
        }
        console.say(
            f"{learner.name:<24} {size:>11,} {learner.steps:>6} {speed:>9,.0f} {learner.last.loss:>7.3f} "
            f"{learner.last.accuracy:>6.1%}"
        )
    console.say(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_command(main)
