"""Small models and batches of odd sizes for the model's tests."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvidia.config import BertConfig
from nvidia.unpadding import Packing, plan_packing

TINY = BertConfig(
    vocab_size=101,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    intermediate_size=41,
    max_position_embeddings=19,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def tiny_config(**changes: Any) -> BertConfig:
    return replace(TINY, **changes)


def make_batch(lengths: tuple[int, ...] = (11, 7, 11, 1, 4), width: int = 11, seed: int = 0) -> tuple[Any, ...]:
    """DESIGN's six fields: two segments, padding, about a third of the tokens masked, one sentence label missing."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, TINY.vocab_size, (rows, width), generator=generator) * mask
    segments = (torch.arange(width) >= width // 2).long().expand(rows, width) * mask
    chosen = (torch.rand(rows, width, generator=generator) < 0.35) & mask.bool()
    chosen[:, 0] = False
    labels = torch.where(chosen, torch.randint(1, TINY.vocab_size, (rows, width), generator=generator), -1)
    sentence = torch.randint(0, 2, (rows,), generator=generator)
    sentence[-1] = -1
    return 2, ids, mask, segments, sentence, labels


def kept_elements(seed: int, num_rows: int, num_columns: int, probability: float) -> Tensor:
    """1 for the elements [rows, columns] that dropout keeps, by the definition of its random bits: SplitMix64 of a
    number for each row, and of a number from there on for every four elements."""
    golden = np.uint64(0x9E3779B97F4A7C15)

    def mix(z: np.ndarray) -> np.ndarray:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        return z ^ (z >> np.uint64(31))

    starts = mix(np.uint64(seed) + np.arange(num_rows, dtype=np.uint64))
    words = mix(starts[:, None] + np.arange(-(-num_columns // 4), dtype=np.uint64) * golden)
    bits = torch.from_numpy(words.view(np.uint16).astype(np.int32))[:, :num_columns]
    return (bits >= round(probability * 65536)).float()


def packing_of(*lengths: int) -> Packing:
    return plan_packing(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def spread_weights(model: torch.nn.Module, seed: int = 3) -> None:
    """Set weights large enough that an error anywhere changes the outputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.25
            parameter.copy_(1 + noise if "LayerNorm.weight" in name else noise)


def largest_difference(left: Tensor, right: Tensor) -> float:
    return float((left.detach().float() - right.detach().float()).abs().max()) if left.numel() else 0.0
