"""A small model whose stored activations and executed FLOPs are measured."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nvidia import unpadding
from nvidia.attention import grouped
from nvidia.checkpointing import Checkpointing
from nvidia.config import BertConfig
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from training.planning.compute import forward_products, num_passes
from training.planning.workload import Batch, Execution, RowLengths

LENGTHS = (64, 56, 50, 50, 45, 45, 45, 45)
WIDTH, MASKED = 64, 9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def small_config(**changes: Any) -> BertConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 512,
    }
    return BertConfig(**{**sizes, **changes})


def small_batch(lengths: Sequence[int] = LENGTHS, width: int = WIDTH, masked: int = MASKED) -> Batch:
    return Batch(len(lengths), RowLengths.of(width, lengths, masked))


def build_model(
    config: BertConfig, precision: str = "fp32", device: str = "cpu", is_pre_ln: bool = True,
    choice: Checkpointing | None = None,
) -> PreTrainingModel:  # fmt: skip
    with torch.device(device):
        model = (BertForPreTrainingPreLN if is_pre_ln else BertForPreTraining)(config).to(DTYPES[precision])
    model.set_checkpointing(choice or Checkpointing())
    return model


def make_batch(
    lengths: Sequence[int] = LENGTHS, width: int = WIDTH, masked: int = MASKED, device: str = "cpu"
) -> tuple[Any, ...]:
    rows = len(lengths)
    ids = torch.zeros(rows, width, dtype=torch.long, device=device)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long().to(device)
    labels = torch.full((rows, width), -1, device=device)
    labels[:, 1 : 1 + masked] = 5
    return 2, ids, mask, ids, torch.zeros(rows, dtype=torch.long, device=device), labels


def stored_bytes(model: PreTrainingModel, batch: tuple[Any, ...]) -> int:
    """Of all tensors that a forward pass keeps for the backward pass, parameters not counted."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(batch)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in parameters)


@contextmanager
def counted_attention() -> Generator[list[float]]:
    """FLOPs of the products in compiled loops, of which torch knows nothing, from the work that they are given."""
    original, counted = grouped._compute, list[float]()

    def compute(name: str, arrays: Sequence[Any], sequences: grouped.Sequences, masks: Any) -> None:
        _, heads, size = arrays[0].shape
        pairs = heads * int((sequences.table[:, 1] * sequences.table[:, 3]).sum())
        counted.append(2 * size * pairs * {"attend": 2, "attend_backward": 5}[name])
        original(name, arrays, sequences, masks)

    grouped._compute = compute
    try:
        yield counted
    finally:
        grouped._compute = original


def executed_flops(config: BertConfig, batch: Batch, execution: Execution) -> float:
    """Predicted FLOPs of all products that a micro-step executes, forward and backward."""
    products = forward_products(config, batch, execution)
    return sum(product.flops * num_passes(product, execution) for product in products)


@contextmanager
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """For a batch of make_batch(): meta tensors take the model's path for devices, with the kernels of CUDA."""
    efficient: Callable[..., Any] = torch.ops.aten._scaled_dot_product_efficient_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0) -> Tensor:
        return efficient(q, k, v, None, True, dropout_p)[0]

    with monkeypatch.context() as patched:
        patched.setattr(unpadding, "read_counts", lambda *_: [sum(LENGTHS), MASKED * len(LENGTHS)])
        patched.setattr(functional, "dropout", lambda x, p, training: torch.native_dropout(x, p, True)[0])
        patched.setattr(functional, "scaled_dot_product_attention", attention)
        yield
