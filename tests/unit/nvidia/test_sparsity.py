"""Sparse layouts: what each mode sees, what is refused, and that attention obeys."""

from typing import Any

import pytest
import torch

from common.errors import UserError
from nvidia.attention_backends import flex_attention, plain_attention
from nvidia.modelingpreln import BertForPreTrainingPreLN, BertModel
from nvidia.sparsity import SparseAttention, draw_layout, make_layout, visible_keys
from nvidia.unpadding import plan_packing
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config


def layout_of(length: int, heads: int = 1, **values: Any) -> torch.Tensor:
    return make_layout(SparseAttention.from_dict({"block": 1, **values}), heads, length)


def picture(text: str) -> torch.Tensor:
    return torch.tensor([[mark == "#" for mark in line] for line in text.split()])


def test_dense() -> None:
    assert layout_of(5, mode="dense").all()


def test_fixed() -> None:
    layout = layout_of(7, mode="fixed", num_local_blocks=3, num_global_blocks=1)
    expected = picture("###..#. ###..#. ###..#. ..####. ..####. ..####. ..#..##")
    expected[:, 6] = True  # the last window is cut short: its last block is the one that all see
    assert torch.equal(layout[0], expected)


def test_fixed_with_a_pattern_a_head_and_rows_that_see_all() -> None:
    layout = layout_of(4, heads=2, mode="fixed", num_local_blocks=2, different_layout_per_head=True,
                       num_different_global_patterns=2, horizontal_global_attention=True)  # fmt: skip
    assert torch.equal(layout[0], picture("##.# #### .### ####"))
    assert torch.equal(layout[1], picture("#### ###. #### #.##"))


def test_fixed_looking_back_only() -> None:
    layout = layout_of(4, mode="fixed", num_local_blocks=2, attention="unidirectional")
    assert torch.equal(layout[0], picture("#... ##.. .##. .###"))


def test_variable() -> None:
    layout = layout_of(6, mode="variable", local_window_blocks=[1, 2], global_block_indices=[4])
    assert torch.equal(layout[0], picture("#...#. .##.#. .##.#. ...##. ...##. ....##"))


def test_variable_with_ranges() -> None:
    layout = layout_of(5, mode="variable", local_window_blocks=[1], global_block_indices=[1, 9],
                       global_block_end_indices=[3, 10], horizontal_global_attention=True)  # fmt: skip
    assert torch.equal(layout[0], picture("###.. ##### ##### .###. .##.#"))


def test_bslongformer() -> None:
    layout = layout_of(5, mode="bslongformer", num_sliding_window_blocks=3, global_block_indices=[0])
    assert torch.equal(layout[0], picture("##### ###.. ####. #.### #..##"))


def test_bigbird() -> None:
    bare = layout_of(9, mode="bigbird", num_random_blocks=0, num_global_blocks=2, num_sliding_window_blocks=1)
    expected = torch.eye(9, dtype=torch.bool)
    expected[:2] = expected[:, :2] = True
    assert torch.equal(bare[0], expected)
    layout = layout_of(64, mode="bigbird", num_random_blocks=3, num_global_blocks=0, num_sliding_window_blocks=1)
    counts = layout[0].sum(1)
    assert int(counts.max()) == 4  # its own and three drawn
    assert torch.equal(layout, layout_of(64, mode="bigbird", num_random_blocks=3, num_global_blocks=0,
                                         num_sliding_window_blocks=1))  # fmt: skip


def test_random_blocks_looking_back_only() -> None:
    layout = layout_of(20, mode="bigbird", num_random_blocks=2, attention="unidirectional")
    assert not layout[0].triu(1).any()
    assert layout[0].diagonal().all()


@pytest.mark.parametrize("mode", ["fixed", "variable", "bigbird", "bslongformer"])
def test_every_block_sees_itself(mode: str) -> None:
    for length in (1, 2, 5, 13):
        assert layout_of(length, mode=mode)[0].diagonal().all()


def test_layouts_are_drawn() -> None:
    assert draw_layout(picture("#. ##")) == "██··\n████"


def test_blocks_become_tokens() -> None:
    visible = visible_keys(picture("#. ##")[None], block=3, length=5)
    assert torch.equal(visible[0], picture("###.. ###.. ###.. ##### #####"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "bigbrid"}, "did you mean 'bigbird'"),
        ({"mode": "fixed", "num_random_blocks": 1}, "unknown key 'num_random_blocks' for mode 'fixed'"),
        ({"mode": "fixed", "num_local_blocks": 3, "num_global_blocks": 2}, "must divide"),
        ({"mode": "fixed", "num_different_global_patterns": 2}, "needs different_layout_per_head"),
        ({"mode": "fixed", "num_different_global_patterns": 9, "different_layout_per_head": True}, "is past"),
        ({"mode": "fixed", "attention": "unidirectional", "horizontal_global_attention": True}, "needs attention"),
        ({"mode": "variable", "global_block_indices": [0], "global_block_end_indices": [0]}, "a block past it"),
        ({"mode": "variable", "global_block_indices": [0, 1], "global_block_end_indices": [2]}, "a block past it"),
        ({"mode": "bigbird", "block": 0}, "block is 0"),
        ({"mode": "variable", "local_window_blocks": 4}, "expected a list"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SparseAttention.from_dict(values)


SPARSE = SparseAttention.from_dict({"mode": "bslongformer", "block": 2, "num_sliding_window_blocks": 1})


def test_a_sparse_model_sees_what_its_layout_allows() -> None:
    model = BertModel(tiny_config(sparse_attention=SPARSE))
    spread_weights(model)
    _, ids, mask, segments, *_ = make_batch()
    attentions = model.eval()(ids, segments, mask, output_attentions=True).attentions
    visible = visible_keys(make_layout(SPARSE, 3, 11), 2, 11)
    allowed = visible[None] & mask.bool()[:, None, None, :]
    real_queries = mask.bool()[:, None, :, None].expand(5, 3, 11, 11)
    for probabilities in attentions:
        assert probabilities[real_queries & ~allowed].eq(0).all()
        assert probabilities[real_queries & allowed].gt(0).all()


def test_a_sparse_model_trains_and_a_dense_layout_changes_nothing() -> None:
    sparse = BertForPreTrainingPreLN(tiny_config(sparse_attention=SPARSE))
    loss = sparse(make_batch())
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in sparse.parameters())
    dense = BertForPreTrainingPreLN(tiny_config())
    dense.load_state_dict(sparse.state_dict())
    named = BertForPreTrainingPreLN(tiny_config(sparse_attention=SparseAttention.from_dict({"mode": "dense"})))
    named.load_state_dict(sparse.state_dict())
    assert torch.equal(dense(make_batch()), named(make_batch()))
    assert not torch.equal(dense(make_batch()), loss)


@pytest.mark.parametrize("per_head", [False, True])
def test_flex_attention_means_the_same(per_head: bool) -> None:
    """The CUDA path's mask on packed tokens, run on the CPU: what the layout on padded rows gives."""
    sparse = SparseAttention.from_dict(
        {"mode": "bigbird", "block": 2, "num_sliding_window_blocks": 1, "different_layout_per_head": per_head}
    )
    layout = make_layout(sparse, 3, 11)
    packing = plan_packing(make_batch()[2].bool())
    qkv = torch.randn(packing.num_tokens, 3, 3, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        flexed = flex_attention(qkv, packing, layout, 2)
        plain, _ = plain_attention(qkv, packing, visible=visible_keys(layout, 2, 11))
    assert largest_difference(flexed, plain) <= 1e-5
