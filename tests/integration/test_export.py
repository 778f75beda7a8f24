"""Train, export, and load with stock transformers: the same logits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from data.shards.dataset import open_dataset
from data.stream.loader import evaluation_batches
from nvidia.config import BertConfig
from nvidia.modelingpreln import BertForPreTrainingPreLN
from scripts import export_hf
from tests.rank_server import RankServer
from tests.support import write_project
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import read_state
from training.export.hugging_face import read_weights


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_exported_logits_are_ours(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimization={"stage": stage})
    outcome = rank_server.run([*words, "--max_steps", "3"], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    checkpoints = CheckpointFolder(tmp_path / "out" / "saved_models" / "tiny")
    words = ["--checkpoint", str(checkpoints.folder), "--output", str(tmp_path / "hf")]
    assert export_hf.main(words) == 0

    checkpoint = checkpoints.folder / checkpoints.choose(None)
    config = BertConfig.from_dict(read_state(checkpoint).model_config)
    ours = BertForPreTrainingPreLN(config).eval()
    ours.load_state_dict(read_weights(checkpoint))
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    assert type(theirs).__name__ == "RobertaPreLayerNormForMaskedLM"

    dataset = open_dataset([tmp_path / "data"], split="validation", max_seq_length=24, max_predictions_per_seq=4)
    batch = next(iter(evaluation_batches(dataset, rank=0, world_size=1, micro_batch_size=11)))
    with torch.no_grad():
        mine = ours.masked_lm_logits(batch.input_ids, batch.input_mask, batch.segment_ids)
        stock = theirs(batch.input_ids, batch.input_mask, batch.segment_ids).logits
    real = batch.input_mask.bool()
    assert (mine[real][:, : config.num_tokens] - stock[real]).abs().max() <= 1e-5
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| 3 |" in card, "figures come from the run's own metrics.jsonl"
