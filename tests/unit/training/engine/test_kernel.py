"""--deepspeed_transformer_kernel without a GPU: refusals, the layer's settings and weights, a run with a stand-in."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed.ops.transformer.transformer as deepspeed_layer
import pytest
import torch
from transformers import AutoModelForMaskedLM

from common.errors import UserError
from nvidia.interop.padded_layers import with_block_names
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.support import read_metrics, write_project
from tests.unit.nvidia.helpers import spread_weights, tiny_config
from tests.unit.nvidia.written_out import WrittenOut
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.engine import kernel
from training.export.hugging_face import export_checkpoint, read_weights
from training.optimizers.build import parameter_groups

FLAG = "--deepspeed_transformer_kernel"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[WrittenOut]:
    """A machine where the layer can be built, and builds to the written-out one; those that were built."""
    built: list[WrittenOut] = []

    def make_layer() -> WrittenOut:
        built.append(WrittenOut(True, 32, 48, 2))
        return built[-1]

    monkeypatch.setattr(kernel, "missing_parts", list)
    monkeypatch.setattr("training.build.layer_factory", lambda *_, **__: make_layer)
    return built


def project(folder: Path, **deepspeed: Any) -> list[str]:
    """A run without dropout, of which the stand-in has none."""
    words = write_project(folder, **deepspeed)
    model = json.loads((folder / "model.json").read_text())
    model["bert_model_config"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "model.json").write_text(json.dumps(model))
    return [*words, "--max_steps", "4"]


def newest(folder: Path) -> Path:
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    return checkpoints.folder / checkpoints.choose(None)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_run_with_the_layer_trains_resumes_and_exports(
    stage: int, stand_in: list[WrittenOut], tmp_path: Path
) -> None:
    zero = {"stage": stage}
    run_here(project(tmp_path / "plain", zero_optimization=zero))
    assert not stand_in
    words = [*project(tmp_path / "kernel", zero_optimization=zero), FLAG]
    run_here([*words, "--max_steps", "2"])
    run_here(words)
    assert len(stand_in) == 4  # two blocks, built for each of the two processes
    losses = [[row["loss"] for row in read_metrics(tmp_path / name, "train")] for name in ("plain", "kernel")]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)

    expected, weights = read_weights(newest(tmp_path / "plain")), read_weights(newest(tmp_path / "kernel"))
    assert weights.keys() == expected.keys()
    assert all((weights[name] - tensor).abs().max() < 1e-3 for name, tensor in expected.items())
    ids = torch.arange(5, 20)[None]
    logits = []
    for name in ("plain", "kernel"):
        export_checkpoint(newest(tmp_path / name), tmp_path / name / "hf", None, None)
        logits.append(AutoModelForMaskedLM.from_pretrained(tmp_path / name / "hf").eval()(ids).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-2
    with pytest.raises(UserError, match="was saved with --deepspeed_transformer_kernel"):
        run_here([word for word in words if word != FLAG])


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--precision", "bf16"], "fp16 or fp32, but this run is in bf16"),
        (["--progressive_layer_drop"], "cannot scale its branches"),
        (["--gradient_checkpointing"], "draws its own dropout"),
    ],
)
def test_what_the_layer_has_not_is_refused(flags: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        run_here([*project(tmp_path), FLAG, *flags])


def test_the_reason_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"finds no CUDA device\. Drop the flag"):
        run_here([*project(tmp_path), FLAG])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.setattr(kernel, "find_spec", lambda name: None)
    reasons = " ".join(kernel.missing_parts())
    assert "no CUDA toolkit" in reasons
    assert "ninja" in reasons


class FakeModule:
    """Stands for the compiled CUDA code: notes how layers are created."""

    def __init__(self) -> None:
        self.created: list[tuple[Any, ...]] = []

    def create_transformer_layer_fp16(self, *arguments: Any) -> None:
        self.created.append(arguments)


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_deepspeeds_own_layer_gets_our_settings_and_weights(
    kind: type[PreTrainingModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = FakeModule()
    monkeypatch.setattr(deepspeed_layer, "TransformerBuilder", lambda: SimpleNamespace(load=lambda: compiled))
    monkeypatch.setattr(deepspeed_layer, "transformer_cuda_module", None)
    model = kind(tiny_config(attention_probs_dropout_prob=0.25, hidden_dropout_prob=0.5))
    spread_weights(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    num_groups = [len(group["params"]) for group in parameter_groups(model, 0.01)]
    options = {"pre_layer_norm": model.bert.pre_ln, "gelu_checkpoint": True}
    kernel.use_kernel(model, kernel.layer_factory(model.config, micro_batch=5, is_fp16=True, seed=7, **options))

    assert len(compiled.created) == 3
    _, micro, hidden, heads, wide, attention, dropout, eps, seed, pre_ln, _, *recomputed = compiled.created[0]
    assert (micro, hidden, heads, wide, attention, dropout) == (5, 24, 3, 41, 0.25, 0.5)
    assert (eps, seed, pre_ln, recomputed) == (1e-12, 7, model.bert.pre_ln, [False, False, True, False])
    after = with_block_names(model.state_dict())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    decayed, plain = parameter_groups(model, 0.01)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in plain["params"]} == {1}
    # query, key and value are one in the layer: four parameters fewer a block, half of them matrices
    assert [len(decayed["params"]), len(plain["params"])] == [number - 2 * 3 for number in num_groups]


def test_a_build_that_fails_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("nvcc ended with 1")

    monkeypatch.setattr(deepspeed_layer, "TransformerBuilder", lambda: SimpleNamespace(load=fail))
    monkeypatch.setattr(deepspeed_layer, "transformer_cuda_module", None)
    model = BertForPreTrainingPreLN(tiny_config())
    make_layer = kernel.layer_factory(model.config, micro_batch=5, is_fp16=True, seed=7, pre_layer_norm=True)
    with pytest.raises(UserError, match=r"could not be built \(nvcc ended with 1\)"):
        kernel.use_kernel(model, make_layer)
