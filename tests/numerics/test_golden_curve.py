"""Twenty steps under a fixed seed give the loss curve they always gave: a refactor must not move it.

When a change is meant to alter the numbers (init, masks, order of random draws), run this file as a module and put what
it says below: python -m tests.numerics.test_golden_curve
"""

import pytest
import torch

from common.console import console
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.unit.nvidia.helpers import make_batch, tiny_config

TOLERANCE = 2e-4  # rounding differs between CPUs and is carried on by 20 steps of Adam
GOLDEN: dict[str, list[float]] = {
    "BertForPreTrainingPreLN": [
        5.26176,
        5.27419,
        5.30821,
        5.2342,
        4.9179,
        4.7726,
        4.909,
        4.82799,
        4.55242,
        4.35645,
        4.54759,
        4.38842,
        4.15385,
        3.95949,
        4.04281,
        3.90711,
        3.68627,
        3.59672,
        3.56437,
        3.51984,
    ],
    "BertForPreTraining": [
        5.26176,
        5.27374,
        5.30666,
        5.23424,
        4.93791,
        4.77458,
        4.90769,
        4.83244,
        4.56849,
        4.35843,
        4.55246,
        4.39381,
        4.17186,
        3.96748,
        4.04805,
        3.91186,
        3.6983,
        3.60542,
        3.559,
        3.53114,
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
