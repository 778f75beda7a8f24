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
        5.25738,
        5.30222,
        5.32054,
        5.24532,
        4.91234,
        4.78833,
        4.92148,
        4.81818,
        4.56497,
        4.34485,
        4.54469,
        4.43157,
        4.07531,
        3.95265,
        4.04176,
        3.87952,
        3.59004,
        3.60936,
        3.55066,
        3.51109,
    ],
    "BertForPreTraining": [
        5.25737,
        5.29928,
        5.31632,
        5.24401,
        4.92912,
        4.77847,
        4.9231,
        4.81496,
        4.57774,
        4.34109,
        4.55185,
        4.43283,
        4.08844,
        3.95397,
        4.04648,
        3.88711,
        3.60338,
        3.60051,
        3.55217,
        3.52226,
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
