"""The engine with our groups equals a plain torch.optim.AdamW loop: decay groups, clipping, accumulation, lr."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.shards.dataset import open_dataset
from data.stream.batches import Batch
from data.stream.loader import TrainingStream
from nvidia.config import BertConfig
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.support import read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import read_state
from training.export.hugging_face import read_weights

STEPS, MICRO, ACCUMULATION = 6, 2, 4
WARMUP, TOTAL = 3, 60
PEAK, DECAY, CLIP = 0.01, 0.1, 0.5
BETAS, EPS = (0.9, 0.98), 1e-6
# fp32 sums in another order.
TOLERANCE = 2e-6


def train_with_engine(folder: Path, stage: int) -> dict[str, Tensor]:
    params = {"betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
    words = write_project(
        folder,
        train_batch_size=MICRO * ACCUMULATION,
        train_micro_batch_size_per_gpu=MICRO,
        gradient_clipping=CLIP,
        optimizer={"type": "AdamW", "params": params},
        zero_optimization={"stage": stage},
    )
    content = json.loads((folder / "model.json").read_text())
    content["bert_model_config"].update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    content["mixed_seq_training"]["24"].update(
        learning_rate=PEAK, warmup_proportion=WARMUP / TOTAL, total_training_steps=TOTAL
    )
    (folder / "model.json").write_text(json.dumps(content))
    run_here([*words, "--max_steps", str(STEPS), "--lr_schedule", "linear"])
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    return read_weights(checkpoints.folder / checkpoints.choose(None))


def train_plainly(folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """The same steps without training/: the weights, and the gradient norm of each step before clipping."""
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    config = BertConfig.from_dict(read_state(checkpoints.folder / checkpoints.choose(None)).model_config)
    torch.manual_seed(42)
    model = BertForPreTrainingPreLN(config)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, eps=EPS, foreach=False)
    norms = []
    for step, batches in enumerate(read_batches(folder)):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(step / WARMUP, (TOTAL - step) / (TOTAL - WARMUP))
        optimizer.zero_grad()
        whole_batch_loss(model, batches).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return dict(model.state_dict()), norms


def read_batches(folder: Path) -> list[tuple[Batch, ...]]:
    data = open_dataset([folder / "data"], split="training", max_seq_length=24, max_predictions_per_seq=4)
    sizes = {"rank": 0, "world_size": 1, "micro_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATION}
    steps: Any = TrainingStream(data, seed=42, **sizes).steps(0)
    found = [next(steps).micro_batches for _ in range(STEPS)]
    steps.close()
    return found


def whole_batch_loss(model: BertForPreTrainingPreLN, batches: tuple[Batch, ...]) -> Tensor:
    """Mean over all masked tokens of the step, and over all its pairs: one forward of all its rows."""
    kind, *fields = zip(*batches, strict=True)
    return model(Batch(kind[0], *(torch.cat(parts) for parts in fields)))


@pytest.mark.parametrize("stage", [0, 1])
def test_engine_and_plain_loop_end_with_the_same_weights(stage: int, tmp_path: Path) -> None:
    ours = train_with_engine(tmp_path, stage)
    theirs, norms = train_plainly(tmp_path)
    reported = [row["grad_norm"] for row in read_metrics(tmp_path, "train")]
    assert reported == pytest.approx(norms, rel=1e-4)
    assert min(norms) > CLIP  # every step was clipped
    for name, weight in theirs.items():
        assert float((ours[name] - weight).detach().abs().max()) < TOLERANCE, name
