"""The recommended configuration fits, is the fastest, and its JSON is one that the launcher accepts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from nvidia.config import BertConfig
from training.planning.accelerators import Cluster, read_table
from training.planning.inputs import EngineInput, describe_lengths, read_engine
from training.planning.memory import ZeroSettings
from training.planning.recommendation import (
    WORTH_IT,
    Planner,
    allowed_stages,
    candidates,
    check_precision,
    deepspeed_json,
    explain_no_fit,
    recommend,
)
from training.planning.workload import PlannedModel
from training.settings.deepspeed_file import load_deepspeed_file

TABLE = read_table()
BASE = BertConfig(vocab_size=30528)
BF16: dict[str, Any] = {"train_batch_size": 4096, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def planner(config: BertConfig = BASE, content: dict[str, Any] | None = None, width: int = 128) -> Planner:
    content = content or BF16
    engine = EngineInput(content, "bf16", content["train_batch_size"], None)
    return Planner(PlannedModel(config, describe_lengths(width, None, None).lengths), engine, "bf16")


def test_it_is_the_fastest_that_fits() -> None:
    cluster = Cluster(TABLE["A100-40"], 8, 2)
    found = recommend(planner(), cluster)
    assert found is not None
    assert found.fits
    assert found.rows_per_step == 4096
    fastest = max(one.tokens_per_second for one in candidates(planner(), cluster) if one.fits)
    assert found.tokens_per_second >= (1 - WORTH_IT) * fastest


def test_a_model_too_large_for_stage_0_gets_a_partition() -> None:
    large = BertConfig(
        vocab_size=30528, hidden_size=4096, num_hidden_layers=24, num_attention_heads=32, intermediate_size=16384
    )
    found = recommend(planner(large), Cluster(TABLE["A100-80"], 8))
    assert found is not None
    assert found.configuration.zero.stage >= 1


def test_recomputation_is_chosen_only_where_it_must_be() -> None:
    found = recommend(planner(), Cluster(TABLE["H100"], 8))
    assert found is not None
    assert found.configuration.recomputation == "none"


def test_a_model_that_fits_nowhere_is_explained() -> None:
    huge = BertConfig(
        vocab_size=30528, hidden_size=8192, num_hidden_layers=48, num_attention_heads=64, intermediate_size=32768
    )
    small = Cluster(TABLE["V100-16"], 8)
    fp16 = replace(planner(huge), precision="fp16")
    assert recommend(fp16, small) is None
    text = explain_no_fit(fp16, small, TABLE)
    assert "does not fit on 8 × V100-16" in text
    assert "would fit on" in text
    assert "B200" in text
    assert "offload" in text
    single = Cluster(TABLE["RTX-4090"], 1)
    assert "fits on no accelerator" in explain_no_fit(replace(planner(huge), precision="bf16"), single, TABLE)


@pytest.mark.parametrize(("optimizer", "stages"), [("AdamW", (0, 1, 2, 3)), ("Lamb", (0,)), ("Muon", (0, 1, 2))])
def test_stages_that_the_optimizer_allows(optimizer: str, stages: tuple[int, ...]) -> None:
    assert allowed_stages({"optimizer": {"type": optimizer}}) == stages


def test_offloading_needs_a_partition() -> None:
    content = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert allowed_stages(content) == (1, 2, 3)


def test_precisions() -> None:
    check_precision("bf16", TABLE["H100"])
    with pytest.raises(UserError, match="V100-16 does not compute in bf16"):
        check_precision("bf16", TABLE["V100-16"])


@pytest.mark.parametrize("nodes", [1, 16])
def test_the_json_loads_with_the_launchers_own_loader(nodes: int, tmp_path: Path) -> None:
    cluster = Cluster(TABLE["A100-40"], 8, nodes)
    content = {**BF16, "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"eps": 1e-6}}}
    found = recommend(planner(content=content), cluster)
    assert found is not None
    path = tmp_path / "made.json"
    path.write_text(json.dumps(deepspeed_json(found, content)))
    loaded = load_deepspeed_file(path, cluster.world_size)
    assert (loaded.batch.total, loaded.batch.micro) == (4096, found.configuration.micro)
    assert (loaded.zero_stage, loaded.wanted_precision) == (found.configuration.zero.stage, "bf16")
    assert loaded.content["gradient_clipping"] == 0.5
    assert ZeroSettings.of(loaded.content) == found.configuration.zero


def test_the_batch_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"

    def read(ranks: int, **content: Any) -> EngineInput:
        path.write_text(json.dumps(content))
        return read_engine(path, ranks)

    assert read(8, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2).total_rows == 64
    found = read(8, train_batch_size=64, train_micro_batch_size_per_gpu=4)
    assert (found.total_rows, found.micro) == (64, 4)
    assert read(8, train_batch_size=64, train_micro_batch_size_per_gpu=64).micro is None  # more than a rank's share
    with pytest.raises(UserError, match=r"cannot be divided among 3 ranks.*63 or 66"):
        read(3, train_batch_size=64)
    with pytest.raises(UserError, match="neither train_batch_size"):
        read(8)
    with pytest.raises(UserError) as raised:
        read(3, train_batch_size=64, train_batchsize=3, zero_optimization={"stage": 7})
    assert len(raised.value.parts) == 3
    assert all(part.startswith(str(path)) for part in raised.value.parts)
