"""Run by test_zero3 in a separate process: losses of a few steps, at ZeRO stage 3 and in a plain loop."""

import json
import sys

import deepspeed
import torch

from common.console import console
from nvidia.attention import grouped
from nvidia.checkpointing import Checkpointing
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.unit.nvidia.helpers import make_batch, spread_weights, tiny_config
from training.runtime import collectives
from training.runtime.ranks import read_rank_info

CHOICES = [
    Checkpointing(),
    Checkpointing(layers=2),
    Checkpointing(activation=True, attention=True, norm=True),
    Checkpointing(layers=1, activation=True, attention=True, norm=True),
]
SETTINGS = {
    "train_micro_batch_size_per_gpu": 5,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def losses(choice: Checkpointing, in_engine: bool) -> list[float]:
    torch.manual_seed(0)
    config = tiny_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1).with_padded_vocab()
    model = BertForPreTrainingPreLN(config)
    spread_weights(model)
    model.set_checkpointing(choice)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = (
        deepspeed.initialize(model=model, optimizer=optimizer, config=SETTINGS, dist_init_required=False)[0]
        if in_engine
        else None
    )
    torch.manual_seed(1)
    found = []
    for step in range(5):
        model.set_layer_drop(theta=0.3, seed=step)
        loss = (engine or model)(make_batch(seed=step))
        if engine is None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            engine.backward(loss)
            engine.step()
        found.append(float(loss.detach()))
    return found


if __name__ == "__main__":
    grouped._MIN_SKIPPED = 0  # so that the last block skips queries that are not read
    collectives.start(torch.device("cpu"), read_rank_info(), stuck_seconds=600.0)
    results = [[losses(choice, in_engine=False), losses(choice, in_engine=True)] for choice in CHOICES]
    console.say(json.dumps(results))
    sys.stdout.flush()
