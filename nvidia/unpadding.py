"""Packing: which tokens of a padded batch are real, and where each sequence is in the packed row.

B sequences, S padded length, T real tokens, L one sequence's length.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Packing:
    """The T real tokens of a [B, S] batch in one row, sequence after sequence.

    On a CPU the sequences are sorted by length, longest first, so that those of one length are adjacent and a group of
    them is a view; `groups` lists (number of sequences, their length). On a device the sequences are in batch order and
    `groups` is empty, because reading lengths on the host would wait for the device.
    """

    num_rows: int  # B
    row_length: int  # S
    indices: Tensor  # [T] index of each real token in the flattened [B·S] batch
    first: Tensor  # [B] packed position of the first real token ([CLS]) of each sequence, in batch order
    boundaries: Tensor  # [B + 1] int32, packed position of the start of each sequence, in packed order
    sequence_of: Tensor  # [T] the sequence, in batch order, that a packed token belongs to
    position_of: Tensor  # [T] its position in its padded row
    groups: tuple[tuple[int, int], ...]
    masks: dict[Hashable, Any] = field(default_factory=dict, compare=False)  # what `mask` has made

    @property
    def num_tokens(self) -> int:
        return self.indices.shape[0]

    def pack(self, padded: Tensor) -> Tensor:
        """[B, S, …] → [T, …]"""
        return padded.reshape(self.num_rows * self.row_length, *padded.shape[2:]).index_select(0, self.indices)

    def unpack(self, packed: Tensor) -> Tensor:
        """[T, …] → [B, S, …] with zeros on padding."""
        flat = packed.new_zeros(self.num_rows * self.row_length, *packed.shape[1:])
        return flat.index_copy(0, self.indices, packed).view(self.num_rows, self.row_length, *packed.shape[1:])

    def mask(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What attention needs of this batch under `key`, made on first use and shared by all layers with that key."""
        if key not in self.masks:
            self.masks[key] = make()
        return self.masks[key]

    def key_mask(self) -> Tensor:
        """[B, S] bool, true for real tokens."""
        flat = torch.zeros(self.num_rows * self.row_length, dtype=torch.bool, device=self.indices.device)
        return flat.index_fill(0, self.indices, True).view(self.num_rows, self.row_length)


def select_rows(rows: Tensor | None, packed: Tensor) -> Tensor:
    """[T, …] → [U, …], or all rows if `rows` is None."""
    return packed if rows is None else packed.index_select(0, rows)


def real_tokens(input_mask: Tensor) -> Tensor:
    """[B, S] bool. In a fully masked row position 0 counts as real, so that the row is a sequence of one token."""
    mask = input_mask.bool()
    is_empty = mask.sum(dim=1, keepdim=True) == 0
    return torch.cat([mask.narrow(1, 0, 1) | is_empty, mask.narrow(1, 1, mask.shape[1] - 1)], dim=1)


def plan_packing(mask: Tensor) -> Packing:
    """Plan the packing of a bool [B, S] mask with at least one real token per row; waits once for the device."""
    if mask.device.type == "cpu":
        return _plan_by_length(mask)
    return make_packing(mask, torch.nonzero(mask.flatten()).squeeze(1))


def plan_with_rows(mask: Tensor, wanted: Tensor) -> tuple[Packing, Tensor]:
    """Plan a packing; also return the packed positions of the `wanted` (bool [B, S]) real tokens. Waits once."""
    wanted = wanted & mask
    if mask.device.type == "cpu":
        packing = _plan_by_length(mask)
        return packing, torch.nonzero(packing.pack(wanted)).squeeze(1)
    return plan_in_order(mask, wanted, *read_counts(mask, wanted))


class KnownTokens(NamedTuple):
    """What the host knows about a batch that it sends to a device: then the device need not be waited for."""

    real: Tensor  # [T] indices of the real tokens in the flattened batch
    wanted: Tensor  # [M] indices of the wanted ones


def find_tokens(input_mask: Tensor, wanted: Tensor) -> KnownTokens:
    """The tokens of a batch on the host, from its mask [B, S] and from which of its tokens are wanted."""
    mask = real_tokens(input_mask).flatten()
    return KnownTokens(torch.nonzero(mask).squeeze(1), torch.nonzero(mask & wanted.flatten()).squeeze(1))


def plan_known(mask: Tensor, tokens: KnownTokens) -> tuple[Packing, Tensor]:
    """`plan_with_rows` on a device, given tokens that the host has found; never waits for the device."""
    return make_packing(mask, tokens.real), packed_positions(mask, tokens.wanted)


def read_counts(*masks: Tensor) -> list[int]:
    """The number of true elements of each mask; the only wait for the device."""
    return torch.stack([mask.sum() for mask in masks]).tolist()


def plan_in_order(mask: Tensor, wanted: Tensor, num_tokens: int, num_wanted: int) -> tuple[Packing, Tensor]:
    """The same in batch order, as on a device, given the counts; never waits for the device."""
    return make_packing(mask, _where(mask, num_tokens)), packed_positions(mask, _where(wanted, num_wanted))


def packed_positions(mask: Tensor, indices: Tensor) -> Tensor:
    """Packed positions, in batch order, of the real tokens at `indices` of the flattened batch."""
    return (mask.flatten().cumsum(0) - 1).index_select(0, indices)


def _where(mask: Tensor, count: int) -> Tensor:
    """The `count` indices of the flattened mask that are true."""
    return torch.nonzero_static(mask.flatten(), size=count).squeeze(1)


def make_packing(mask: Tensor, indices: Tensor) -> Packing:
    """The packing in batch order, given the indices of the real tokens; never waits for the device."""
    rows, length = mask.shape
    lengths = mask.sum(dim=1, dtype=torch.int32)
    boundaries = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return Packing(
        num_rows=rows,
        row_length=length,
        indices=indices,
        first=boundaries.narrow(0, 0, rows).long(),
        boundaries=boundaries,
        sequence_of=indices // length,
        position_of=indices % length,
        groups=(),
    )


def empty_packing(like: Tensor) -> Packing:
    """The packing of a batch without sequences, on the device of `like`."""
    return make_packing(like.new_empty(0, 1, dtype=torch.bool), like.new_empty(0, dtype=torch.long))


def _plan_by_length(mask: Tensor) -> Packing:
    rows, length = mask.shape
    lengths, order = mask.sum(dim=1).sort(descending=True, stable=True)
    within = torch.nonzero(mask.index_select(0, order).flatten()).squeeze(1)  # in the reordered batch
    sequence_of, position_of = order[within // length], within % length
    boundaries = functional.pad(lengths.cumsum(0), (1, 0))
    values, counts = torch.unique_consecutive(lengths, return_counts=True)
    return Packing(
        num_rows=rows,
        row_length=length,
        indices=sequence_of * length + position_of,
        first=torch.empty_like(order).index_copy(0, order, boundaries[:-1]),
        boundaries=boundaries.int(),
        sequence_of=sequence_of,
        position_of=position_of,
        groups=tuple(zip(counts.tolist(), values.tolist(), strict=True)),
    )
