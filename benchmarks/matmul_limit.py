"""The speed of a training step that consists of its matrix products alone, measured on the model's shapes."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from benchmarks.batches import Batch
from benchmarks.timing import clock
from nvidia.config import BertConfig
from nvidia.cpu import openblas
from nvidia.cpu.libraries import Library
from nvidia.cpu.linear import PRODUCTS
from nvidia.unpadding import plan_packing, real_tokens

Shape = tuple[int, int, int, int]  # how many in one batched product, rows, inner size, columns


def step_products(config: BertConfig, batch: Batch) -> Counter[Shape]:
    """Products of one forward and backward pass over the real tokens, and how often each occurs.

    A linear layer [N, I] → [N, O] costs a product forward and two backward; attention two forward and four backward.
    Of the last layer only the used rows ([CLS] and masked tokens) are read, so its queries, scores and all that follows
    are counted on these; its keys and values on all.
    """
    packing = plan_packing(real_tokens(batch.input_mask))
    masked_of_row = (batch.masked_lm_labels != -1).sum(1).tolist()
    masked, rows, tokens, layers = sum(masked_of_row), packing.num_rows, packing.num_tokens, config.num_hidden_layers
    used = masked + rows
    hidden, wide, heads, size = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.head_size,
    )
    products: Counter[Shape] = Counter()

    def add_linear(count: int, inner: int, outer: int, times: int = 1) -> None:
        for shape in ((1, count, inner, outer), (1, count, outer, inner), (1, inner, count, outer)):
            products[shape] += times

    for count, times in ((tokens, layers - 1), (used, 1)):
        add_linear(count, hidden, hidden, times)
        add_linear(count, hidden, wide, times)
        add_linear(count, wide, hidden, times)
    add_linear(tokens, hidden, 3 * hidden, layers - 1)
    add_linear(tokens, hidden, 2 * hidden)
    add_linear(used, hidden, hidden)
    for count, length in packing.groups:
        products[(count * heads, length, size, length)] += 2 * (layers - 1)  # Q·Kᵀ and the like
        products[(count * heads, length, length, size)] += 4 * (layers - 1)  # P·V and the like
    for queries, length in zip([1 + count for count in masked_of_row], packing.key_mask().sum(1).tolist(), strict=True):
        products[(heads, queries, size, length)] += 2
        products[(heads, queries, length, size)] += 2
        products[(heads, length, queries, size)] += 2  # for the gradients of keys and values
    add_linear(masked, hidden, hidden)
    add_linear(masked, hidden, config.vocab_size)
    add_linear(rows, hidden, hidden)
    return +products  # without those that occur never


def limits() -> list[Library]:
    """The libraries that can compute the products."""
    there = {"torch": True, "onednn": torch.backends.mkldnn.is_available(), "openblas": openblas.kernels() is not None}
    return [library for library in get_args(Library) if there[library]]


def seconds(products: Iterable[tuple[Shape, int]], library: Library = "torch") -> float:
    """Time of all products, each as often as it occurs. Batched ones, which oneDNN does not have here, by torch.

    Every repeat counts, as every part of a contender's step does: the best of a few would be a moment of the machine
    that no whole step ever has.
    """
    total = 0.0
    for shape, times in products:
        multiply = _product(shape, library)
        multiply()  # the first call builds things
        start = clock()
        for _ in range(times):
            multiply()
        total += clock() - start
    return total


def _product(shape: Shape, library: Library) -> Callable[[], Tensor]:
    count, rows, inner, columns = shape
    left, right = torch.randn(count, rows, inner), torch.randn(count, inner, columns)
    if count > 1:
        out = torch.empty(count, rows, columns)
        is_torchs = library != "openblas"
        return partial(torch.bmm, left, right, out=out) if is_torchs else partial(openblas.multiply, left, right, out)
    if library == "openblas":
        return partial(openblas.multiply, left[0], right[0], torch.empty(rows, columns))
    if library == "onednn":
        return partial(PRODUCTS["input_gradient"]["onednn"], left[0], right[0], left[0])
    return partial(torch.mm, left[0], right[0], out=torch.empty(rows, columns))
