"""torch.compile does not change the results; a machine without a compiler gets a clear message."""

import copy
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from nvidia.checkpointing import Checkpointing
from nvidia.compiling import compile_blocks
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.support import read_metrics, run_plain, write_project
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config
from tests.unit.training.in_process import run_here


@pytest.mark.slow  # compiles for half a minute
@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        (BertForPreTrainingPreLN, Checkpointing()),
        (BertForPreTrainingPreLN, Checkpointing(layers=2, attention=True)),
        (BertForPreTraining, Checkpointing()),
    ],
)
def test_losses_and_gradients_are_equal(kind: type[PreTrainingModel], choice: Checkpointing) -> None:
    model = kind(tiny_config())
    spread_weights(model)
    model.set_checkpointing(choice)
    compiled = copy.deepcopy(model)
    compile_blocks(compiled)
    assert compiled.state_dict().keys() == model.state_dict().keys()
    for seed, lengths in enumerate([(11, 7, 11, 1, 4), (3, 2, 9), (11,) * 7]):
        for each in (model, compiled):
            each.set_layer_drop(theta=0.5, seed=seed)  # some blocks are dropped, the branches of the others are scaled
        expected, loss = model(make_batch(lengths, seed=seed)), compiled(make_batch(lengths, seed=seed))
        assert largest_difference(loss, expected) <= 1e-5
        expected.backward()
        loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), compiled.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert largest_difference(other.grad, parameter.grad) <= 1e-4, name
    torch.compiler.reset()


def test_only_the_feed_forward_halves_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that only counts calls, the compiled parts run instead of the plain ones."""
    runs = []

    def count(function: object, dynamic: bool) -> object:
        assert dynamic
        return lambda *arguments: runs.append(1) or function(*arguments)  # type: ignore[operator]

    model = BertForPreTrainingPreLN(tiny_config())
    expected = model(make_batch())
    monkeypatch.setattr(torch, "compile", count)
    compile_blocks(model)
    assert torch.equal(model(make_batch()), expected)
    assert len(runs) == 3


def test_a_machine_without_a_compiler_gets_a_message(tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--compile"]
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    outcome = run_plain(words, env={"CXX": "no-such-compiler", **inductor})
    assert outcome.returncode == 2
    assert "--compile: torch.compile does not work on this machine" in outcome.stderr
    assert "No working C++ compiler" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_options_that_conflict_with_compiling_are_rejected(tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimization={"stage": 3})
    with pytest.raises(UserError) as caught:
        run_here([*words, "--compile", "--gelu_checkpoint", "--normalize_invertible"])
    assert "ZeRO stage 3, which gathers parameters inside the compiled part" in str(caught.value)
    assert "--compile and --gelu_checkpoint" in str(caught.value)
    assert "--compile and --normalize_invertible" in str(caught.value)


@pytest.mark.slow  # compiles for half a minute
def test_a_compiled_run_has_the_losses_of_an_uncompiled_one(tmp_path: Path) -> None:
    found = []
    for name, flags in (("plain", []), ("compiled", ["--compile"])):
        words = write_project(tmp_path / name)
        path = tmp_path / name / "model.json"
        without = '"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "hidden_size"'
        path.write_text(path.read_text().replace('"hidden_size"', without))
        outcome = run_plain([*words, "--max_steps", "3", *flags], timeout=400)
        assert outcome.returncode == 0, outcome.stderr
        found.append([row["loss"] for row in read_metrics(tmp_path / name, "train")])
    assert len(found[0]) == 3
    assert found[1] == pytest.approx(found[0], abs=1e-5)
