"""Keys of the DeepSpeed JSON: none that asks for something is ignored silently."""

from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from tests.support import write_project
from tests.unit.training.in_process import run_here
from training.build import build_model
from training.engine.json_blocks import KEYS_WITHOUT_EFFECT, REFUSED_KEYS, find_ignored
from training.runtime.ranks import RankInfo
from training.settings.flags import read_arguments
from training.settings.resolve import Settings, resolve_settings


def resolve(folder: Path, *words: str, **deepspeed: Any) -> Settings:
    flags, problems = read_arguments([*write_project(folder, **deepspeed), *words])
    return resolve_settings(flags, RankInfo(0, 0, 1, 1), problems)


@pytest.mark.parametrize("key", KEYS_WITHOUT_EFFECT)
def test_a_key_without_effect_gets_one_line(key: str) -> None:
    (line,) = find_ignored({key: {"enabled": True}})
    assert line == f"{key!r} has no effect here: {KEYS_WITHOUT_EFFECT[key]}"
    for nothing in ({}, {"enabled": False, "size": 3}, False, None, {"deepcompile": False}):
        assert find_ignored({key: nothing}) == []


def test_aio_has_an_effect_only_with_nvme() -> None:
    (line,) = find_ignored({"aio": {"block_size": 1}, "zero_optimization": {"offload_param": {"device": "cpu"}}})
    assert "offloading to the device 'nvme'" in line
    assert find_ignored({"aio": {"block_size": 1}, "zero_optimization": {"offload_param": {"device": "nvme"}}}) == []


def test_the_start_says_what_has_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 5e-5}}
    resolve(tmp_path, compile={"deepcompile": True}, autotuning={"enabled": True}, optimizer=optimizer)
    said = capsys.readouterr().err
    assert "deepspeed.json: 'compile' has no effect here: pass --compile" in said
    assert "deepspeed.json: 'autotuning' has no effect here" in said
    assert "optimizer.params.lr 5e-05 has no effect here: the peak is the model JSON's learning_rate 0.003" in said
    resolve(tmp_path, "--learning_rate", "5e-5", optimizer=optimizer)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_refused_key_may_be_off(key: str, tmp_path: Path) -> None:
    assert key not in resolve(tmp_path, **{key: {"enabled": False}}).deepspeed.content
    with pytest.raises(UserError, match=f"'{key}' cannot be used here: "):
        resolve(tmp_path, **{key: {"enabled": True}})


@pytest.mark.parametrize(
    ("block", "flags", "layers", "words"),
    [
        ({"number_checkpoints": 1}, [], 2, "is computed as --gradient_checkpointing\n"),
        ({"number_checkpoints": 100}, [], 1, "is computed as --gradient_checkpointing\n"),
        ({"cpu_checkpointing": True}, [], 2, "; cpu_checkpointing has no further effect"),
        ({"number_checkpoints": 1}, ["--gradient_checkpointing", "1"], 1, "no effect beside --gradient_checkpointing"),
        ({"partition_activations": False, "number_checkpoints": None}, [], 0, ""),
    ],
)
def test_activation_checkpointing_is_ours(
    block: dict[str, Any],
    flags: list[str],
    layers: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = resolve(tmp_path, *flags, activation_checkpointing=block)
    model = build_model(settings.model_config, settings.flags.model, settings.recomputed_layers)
    assert model.bert.encoder.checkpoint_chunk == layers
    said = capsys.readouterr().err
    assert words in said
    assert bool(said) == bool(words)


def test_a_misspelt_key_of_activation_checkpointing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'partition_activations'"):
        resolve(tmp_path, activation_checkpointing={"partitioned_activations": True})
    with pytest.raises(UserError, match=r"'tensor_parallel\.autotp_size' cannot be used here"):
        resolve(tmp_path, tensor_parallel={"autotp_size": 2})
    assert resolve(tmp_path, tensor_parallel={"autotp_size": 1}).deepspeed.for_engine("fp32")["tensor_parallel"] == {}


def test_the_banner_shows_what_is_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_project(tmp_path, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    run_here([*words, "--dry_run"])
    assert "engine       fp32 with bf16 autocast, ZeRO stage 0" in capsys.readouterr().out
