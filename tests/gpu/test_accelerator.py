"""What may be trusted on this GPU: attention backends, dropout, ZeRO stages, resume, export, torch.compile.

Runs by itself where CUDA is found; `scripts/doctor.py --accelerator` runs it and prints the outcome. With
TEST_ACCELERATOR=cpu the same tests run on a CPU, which tests the tests.
"""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nvidia.attention import plain
from nvidia.attention.backend import AttentionInputs, BackendContext
from nvidia.attention.registry import BACKENDS, cuda_capability
from nvidia.compiling import compile_blocks, find_compiler_problem
from nvidia.config import BertConfig
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.unpadding import Packing, plan_packing
from tests.distributed.runs import assert_same_weights, checkpoints, weights
from tests.support import read_metrics, run_plain, write_project
from tests.unit.nvidia.helpers import make_batch, spread_weights, tiny_config
from training.checkpoints.state import read_state
from training.export.hugging_face import export_checkpoint

DEVICE = torch.device(os.environ.get("TEST_ACCELERATOR", "cuda"))
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

HEADS, HEAD_SIZE = 3, 64
LENGTHS, WIDTH = (200, 37, 1, 131), 203
# The largest difference in relation to the largest value: of the type's own rounding, with a margin.
BOUNDS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))


def relative_difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def make_packing(lengths: tuple[int, ...] = LENGTHS, width: int = WIDTH) -> Packing:
    return plan_packing((torch.arange(width) < torch.tensor(lengths)[:, None]).to(DEVICE))


def random_qkv(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, 3, HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def skip_unless_it_can_run(name: str, dtype: torch.dtype, **needs: Any) -> None:
    context = BackendContext(DEVICE.type, dtype, HEAD_SIZE, capability=cuda_capability(DEVICE), **needs)
    if (reason := BACKENDS[name].reason_against(context)) is not None:
        pytest.skip(f"{name} {reason}")


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """fp32 means fp32, not TF32."""
    torch.set_float32_matmul_precision("highest")


@DTYPES
@pytest.mark.parametrize("window", [0, 16], ids=["whole rows", "window"])
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "plain"])
def test_attention_is_the_plain_formula(name: str, window: int, dtype: torch.dtype) -> None:
    """Context and gradients, against the formula in fp32."""
    skip_unless_it_can_run(name, dtype, has_window=window > 0)
    inputs = AttentionInputs(make_packing(), window=window)
    results = []
    for attend, kind in ((BACKENDS[name].attend, dtype), (plain.attend, torch.float32)):
        qkv = random_qkv(inputs.packing.num_tokens).to(dtype).to(kind).requires_grad_()
        context, _ = attend(qkv, inputs)
        context.backward(torch.sin(torch.arange(context.numel(), device=DEVICE)).view_as(context).to(kind))
        results.append((context, qkv.grad))
    for found, expected in zip(*results, strict=True):
        assert relative_difference(found, expected) <= BOUNDS[dtype]


@DTYPES
@pytest.mark.parametrize("name", BACKENDS)
def test_attention_drops_the_requested_share_and_scales_the_rest(name: str, dtype: torch.dtype) -> None:
    skip_unless_it_can_run(name, dtype, dropout_prob=0.25)
    packing = make_packing((HEAD_SIZE,) * 9, HEAD_SIZE)
    qkv = random_qkv(packing.num_tokens).to(dtype)
    # With these values the context is the probabilities.
    qkv[:, 2] = torch.eye(HEAD_SIZE, device=DEVICE, dtype=dtype).repeat(9, 1).unsqueeze(1)
    torch.manual_seed(0)
    dropped, _ = BACKENDS[name].attend(qkv, AttentionInputs(packing, dropout_prob=0.25))
    exact, _ = BACKENDS[name].attend(qkv, AttentionInputs(packing))
    kept = dropped != 0
    assert 1 - float(kept.float().mean()) == pytest.approx(0.25, abs=0.01)
    assert relative_difference(dropped[kept] * 0.75, exact[kept]) <= max(BOUNDS[dtype], 1e-4)
    again, _ = BACKENDS[name].attend(qkv, AttentionInputs(packing, dropout_prob=0.25))
    assert float(((again != 0) != kept).float().mean()) == pytest.approx(2 * 0.25 * 0.75, abs=0.01)


MODELS = {
    "classic": {},
    "modern": {"hidden_act": "geglu", "position_embedding_type": "rotary", "attention_window": 4, "use_bias": False,
               "global_attention_every": 2, "type_vocab_size": 0, "norm_bias": False, "sentence_head": "none"},
}  # fmt: skip


def to_device(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.to(DEVICE) if isinstance(part, Tensor) else part for part in batch)


def loss_and_gradients(model: BertForPreTrainingPreLN) -> list[Tensor]:
    """The loss, and all gradients in one vector."""
    model.zero_grad()
    loss = model(to_device(make_batch()))
    loss.backward()
    # Together, because some gradients are 0 but for rounding, such as those of the keys' biases.
    return [
        loss,
        torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]),
    ]


@DTYPES
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_has_the_loss_and_gradients_of_the_plain_formula(kind: str, dtype: torch.dtype) -> None:
    results = []
    for backend, used in (("auto", dtype), ("plain", torch.float32)):
        model = BertForPreTrainingPreLN(tiny_config(hidden_size=48, **MODELS[kind], attention_backend=backend))
        spread_weights(model)
        results.append(loss_and_gradients(model.to(dtype).to(used).to(DEVICE)))
    for found, expected in zip(*results, strict=True):
        assert relative_difference(found, expected) <= 10 * BOUNDS[dtype]  # rounding adds up over the blocks


@pytest.mark.parametrize("kind", MODELS)
def test_compiled_blocks_have_the_same_loss_and_gradients(kind: str) -> None:
    if (problem := find_compiler_problem(DEVICE.type)) is not None:
        pytest.skip(problem)
    model = BertForPreTrainingPreLN(tiny_config(hidden_size=48, **MODELS[kind])).to(DEVICE)
    spread_weights(model)
    compiled = copy.deepcopy(model)
    compile_blocks(compiled)
    for found, expected in zip(loss_and_gradients(compiled), loss_and_gradients(model), strict=True):
        assert relative_difference(found, expected) <= 10 * BOUNDS[torch.float32]
    torch.compiler.reset()


def train(folder: Path, steps: int, *flags: str, **deepspeed: Any) -> list[float]:
    """Train tests.support's project up to `steps`, or resume it; the losses of the steps."""
    words = [*write_project(folder, **deepspeed), "--max_steps", str(steps), *flags]
    outcome = run_plain(words)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    return [row["loss"] for row in read_metrics(folder, "train")]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, 4, zero_optimization={"stage": 1})


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_zero_stage_has_the_losses_of_stage_1(
    stage: int, tmp_path: Path, whole_run: tuple[Path, list[float]]
) -> None:
    losses = train(tmp_path, 2, zero_optimization={"stage": stage})
    assert losses == pytest.approx(whole_run[1][:2], rel=2e-3)


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, whole_run: tuple[Path, list[float]]
) -> None:
    stage = {"zero_optimization": {"stage": 1}}
    train(tmp_path, 2, **stage)
    train(tmp_path, 4, **stage)
    assert_same_weights(weights(tmp_path), weights(whole_run[0]))


def test_an_export_has_the_logits_of_the_checkpoint(tmp_path: Path, whole_run: tuple[Path, list[float]]) -> None:
    found = checkpoints(whole_run[0])
    path = found.folder / found.choose(None)
    export_checkpoint(path, tmp_path / "hf", tokenizer=None, metrics=None)
    config = BertConfig.from_dict(read_state(path).model_config)
    ours = BertForPreTrainingPreLN(config).to(DEVICE).eval()
    ours.load_state_dict(weights(whole_run[0]))
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").to(DEVICE).eval()
    _, ids, mask, segments, *_ = to_device(make_batch())
    ids = torch.where(mask.bool(), ids % (config.num_tokens - 5) + 5, ids)  # no special tokens, such as padding
    with torch.no_grad():
        logits = theirs(ids, mask, segments).logits
        assert relative_difference(ours.masked_lm_logits(ids, mask, segments)[mask.bool()], logits[mask.bool()]) <= 1e-4
