"""Packing: every real token once, adjacent to its sequence, and unpacked to its position."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvidia.unpadding import make_packing, plan_in_order, plan_packing, plan_with_rows, read_counts, real_tokens


def masks() -> st.SearchStrategy[list[list[int]]]:
    width = st.integers(1, 9)
    return width.flatmap(
        lambda size: st.lists(st.lists(st.integers(0, 1), min_size=size, max_size=size), min_size=1, max_size=7)
    )


@settings(max_examples=60)
@given(masks())
def test_packing_keeps_every_real_token_and_its_position(rows: list[list[int]]) -> None:
    mask = real_tokens(torch.tensor(rows))
    content = torch.arange(1, mask.numel() + 1).view(mask.shape)
    for packing in (plan_packing(mask), make_packing(mask, torch.nonzero(mask.flatten()).squeeze(1))):
        packed = packing.pack(content)
        assert torch.equal(packing.unpack(packed), content * mask)
        assert torch.equal(packing.key_mask(), mask)
        assert torch.equal(packed[packing.first], content[range(len(mask)), mask.int().argmax(dim=1)])
        assert torch.equal(packing.position_of, (packed - 1) % mask.shape[1])
        assert torch.equal(packing.sequence_of, (packed - 1) // mask.shape[1])
        starts = packing.boundaries.tolist()
        assert starts[-1] == packing.num_tokens == int(mask.sum())
        for start, stop in pairwise(starts):
            assert len(set(packing.sequence_of[start:stop].tolist())) == 1


@settings(max_examples=40)
@given(masks())
def test_wanted_tokens_are_found_the_same_in_both_orders(rows: list[list[int]]) -> None:
    mask = real_tokens(torch.tensor(rows))
    content = torch.arange(mask.numel()).view(mask.shape)
    wanted = content % 3 == 0
    packing, places = plan_with_rows(mask, wanted)
    assert set(packing.pack(content)[places].tolist()) == set(content[wanted & mask].tolist())
    wanted = wanted & mask
    in_order, places = plan_in_order(mask, wanted, *read_counts(mask, wanted))  # as on a device
    assert torch.equal(in_order.indices, torch.nonzero(mask.flatten()).squeeze(1))
    assert torch.equal(in_order.pack(content)[places], content[wanted])


def test_sequences_of_one_length_are_adjacent() -> None:
    mask = torch.arange(6) < torch.tensor([3, 6, 3, 1, 6])[:, None]
    assert plan_packing(mask).groups == ((2, 6), (2, 3), (1, 1))


def test_a_fully_masked_row_is_one_token() -> None:
    assert real_tokens(torch.zeros(2, 5, dtype=torch.int64)).sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.float32])
def test_masks_of_any_type_are_accepted(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 0]]).to(dtype)
    assert real_tokens(mask).tolist() == [[True, True, False]]


def test_counting_several_masks_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [torch.tensor([True, False, True]), torch.tensor([[False, True]])]
    waits: list[str] = []
    for name in ("tolist", "item", "__int__", "__bool__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda tensor, name=name, plain=plain: waits.append(name) or plain(tensor)
        )
    assert read_counts(*masks) == [2, 1]
    assert waits == ["tolist"]
