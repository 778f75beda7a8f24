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
        5.25317,
        5.28193,
        5.32276,
        5.23211,
        4.89934,
        4.75743,
        4.95174,
        4.82009,
        4.55596,
        4.29079,
        4.55579,
        4.38385,
        4.06427,
        3.937,
        4.05155,
        3.89506,
        3.65675,
        3.5728,
        3.59699,
        3.50669,
    ],
    "BertForPreTraining": [
        5.25316,
        5.28118,
        5.32313,
        5.22838,
        4.91536,
        4.75407,
        4.95724,
        4.81876,
        4.56766,
        4.29429,
        4.56426,
        4.38999,
        4.07851,
        3.94772,
        4.05606,
        3.90551,
        3.66239,
        3.57645,
        3.60983,
        3.51226,
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
