"""Twenty steps under a fixed seed give a recorded loss curve: a refactoring must not change it.

When a change is meant to alter the numbers (init, masks, order of random draws), run this file as a module and copy its
output below: python -m tests.numerics.test_golden_curve
"""

import pytest
import torch

from common.console import console
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.unit.nvidia.helpers import make_batch, tiny_config

TOLERANCE = 2e-4  # rounding differs between CPUs and accumulates over 20 steps of Adam
GOLDEN: dict[str, list[float]] = {
    "BertForPreTrainingPreLN": [
        5.25318,
        5.28238,
        5.32228,
        5.23408,
        4.90028,
        4.75931,
        4.95158,
        4.82139,
        4.55716,
        4.29328,
        4.55717,
        4.38643,
        4.06737,
        3.93989,
        4.05721,
        3.89989,
        3.66404,
        3.57579,
        3.6033,
        3.51068,
    ],
    "BertForPreTraining": [
        5.25317,
        5.2812,
        5.32229,
        5.22974,
        4.9161,
        4.75314,
        4.95485,
        4.81831,
        4.56598,
        4.29299,
        4.55445,
        4.38758,
        4.06994,
        3.94445,
        4.0415,
        3.89902,
        3.6549,
        3.5723,
        3.608,
        3.51488,
    ],
}


def curve(kind: type[PreTrainingModel]) -> list[float]:
    torch.manual_seed(1234)
    model = kind(tiny_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1).with_padded_vocab())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    losses = []
    for step in range(20):
        loss = model(make_batch(seed=step % 4))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()), 5))
    return losses


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_loss_curve(kind: type[PreTrainingModel]) -> None:
    assert curve(kind) == pytest.approx(GOLDEN[kind.__name__], abs=TOLERANCE)


if __name__ == "__main__":
    for model in (BertForPreTrainingPreLN, BertForPreTraining):
        console.say(f"    {model.__name__!r}: {curve(model)},")
