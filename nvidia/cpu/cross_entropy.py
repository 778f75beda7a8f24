"""The cross entropy of masked tokens, computed in the memory of their scores, which it overwrites.

M tokens, V scores each, of which the last may be padding. torch's own makes three more arrays of M·V elements and
passes over memory eight times.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nvidia.cpu.by_rows import has_loops, loops, run_by_rows


def cross_entropy_sum(scores: Tensor, labels: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The sum over [M, V] fp32 scores and their labels [M], and how many rows have their first maximum at the label.

    The first `num_tokens` scores of a row count. The caller must not use `scores` afterwards.
    """
    if has_loops(scores):
        return _CrossEntropySum.apply(scores, labels, num_tokens)
    scores = scores.narrow(1, 0, num_tokens)
    correct = (scores.detach().argmax(-1) == labels).sum()
    return functional.cross_entropy(scores, labels, reduction="sum"), correct


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        scores, labels = scores.contiguous(), labels.contiguous()
        numbers = labels.numpy()
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < num_tokens <= scores.shape[1]:
            raise IndexError(f"labels from {numbers.min()} to {numbers.max()}, expected 0 to {num_tokens - 1}")
        losses, correct = scores.new_empty(len(scores)), torch.empty_like(labels)
        ctx.mark_non_differentiable(correct_sum := correct.new_zeros(()))
        arrays = [tensor.detach().numpy() for tensor in (scores, labels, losses, correct)]
        run_by_rows(lambda blocks: loops().cross_entropy(*arrays, blocks, num_tokens), *scores.shape)
        if not scores.is_inference():
            torch.autograd.graph.increment_version(scores)  # for others that have saved them
        ctx.save_for_backward(scores)  # now the gradients of the losses
        return losses.sum(), correct_sum.copy_(correct.sum())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None]:
        """A second pass over the same graph is an error, which autograd reports."""
        (gradients,) = ctx.saved_tensors
        return gradients.mul_(gradient), None, None
