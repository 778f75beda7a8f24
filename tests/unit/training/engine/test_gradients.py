"""The gradient norm and clipping where the engine does not compute it, and parameters without gradient."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

from training.engine.gradients import GradientNorm, GradientWatch


class PlainEngine:
    """The interface of an engine at ZeRO stage 0 in fp32."""

    def __init__(self, clipping: float) -> None:
        torch.manual_seed(1)
        self.module = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
        self.optimizer: Any = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.clipping = clipping
        self.clip_fp32_gradients: Any = None

    def gradient_clipping(self) -> float:
        return self.clipping

    def fp16_enabled(self) -> bool:
        return False

    bfloat16_enabled = zero_optimization = fp16_enabled

    def backward(self) -> None:
        self.module(torch.randn(11, 7, generator=torch.Generator().manual_seed(2))).square().sum().backward()


def gradients(engine: PlainEngine) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in engine.module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("clipping", [0.05, 1e6])
def test_clips_as_torch_does_and_keeps_the_norm(clipping: float) -> None:
    ours, theirs = PlainEngine(clipping), PlainEngine(clipping)
    norm = GradientNorm(ours)
    ours.backward()
    theirs.backward()
    expected = torch.nn.utils.clip_grad_norm_(theirs.module.parameters(), clipping)
    ours.clip_fp32_gradients()
    assert norm.value() == pytest.approx(float(expected), rel=1e-6)
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(mine, other)


def test_measures_without_clipping() -> None:
    engine = PlainEngine(clipping=0.0)
    norm = GradientNorm(engine)
    engine.backward()
    before = gradients(engine)
    engine.optimizer.step()
    assert norm.value() == pytest.approx(float(torch.cat([g.flatten() for g in before]).norm()), rel=1e-6)
    for mine, other in zip(gradients(engine), before, strict=True):
        assert torch.equal(mine, other)


class HalfPrecisionEngine(PlainEngine):
    """fp16 at stage 0: the wrapper keeps the norm of the scaled gradient."""

    def __init__(self) -> None:
        super().__init__(clipping=1.0)
        self.optimizer = object.__new__(FP16_UnfusedOptimizer)  # DeepSpeed's own way to the scale, without its groups
        self.optimizer.loss_scale_config = SimpleNamespace(cur_scale=1024.0)
        self.optimizer.custom_loss_scaler = False

    def fp16_enabled(self) -> bool:
        return True

    def get_global_grad_norm(self) -> float:
        return 2048.0


def test_the_scale_of_fp16_is_taken_out() -> None:
    engine = HalfPrecisionEngine()
    norm = GradientNorm(engine)
    norm.note_scale()
    engine.optimizer.loss_scale_config.cur_scale *= 2
    assert norm.value() == 2.0  # by the scale that the step had, not by the one it left
    assert engine.clip_fp32_gradients is None


def test_watch_names_what_got_no_gradient() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2), "zeroed": nn.Linear(3, 2)})
    watch = GradientWatch(model, num_steps=2)
    x = torch.ones(4, 3)
    for expected in ([], ["unused.weight", "unused.bias", "zeroed.weight", "zeroed.bias"], []):
        (model["used"](x).sum() + 0.0 * model["zeroed"](x).sum()).backward()
        assert watch.end_step() == expected
    assert not any(parameter._backward_hooks for parameter in model.parameters())
