"""Sparse layouts: what each mode sees, what is rejected, and that attention follows them."""

from typing import Any

import pytest
import torch

from common.errors import UserError
from nvidia.attention import flex, plain
from nvidia.attention.backend import AttentionInputs
from nvidia.attention.sparsity import SparseAttention, SparseHeads, make_layout
from nvidia.modelingpreln import BertForPreTrainingPreLN, BertModel
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
    expected[:, 6] = True  # the last window is shorter: its last block is the global one
    assert torch.equal(layout[0], expected)


def test_fixed_with_a_pattern_per_head_and_horizontal_global_attention() -> None:
    layout = layout_of(4, heads=2, mode="fixed", num_local_blocks=2, different_layout_per_head=True,
                       num_different_global_patterns=2, horizontal_global_attention=True)  # fmt: skip
    assert torch.equal(layout[0], picture("##.# #### .### ####"))
    assert torch.equal(layout[1], picture("#### ###. #### #.##"))


def test_fixed_causal() -> None:
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
    assert int(counts.max()) == 4  # itself and three random ones
    assert torch.equal(layout, layout_of(64, mode="bigbird", num_random_blocks=3, num_global_blocks=0,
                                         num_sliding_window_blocks=1))  # fmt: skip


def test_random_blocks_of_a_causal_layout() -> None:
    layout = layout_of(20, mode="bigbird", num_random_blocks=2, attention="unidirectional")
    assert not layout[0].triu(1).any()
    assert layout[0].diagonal().all()


@pytest.mark.parametrize("mode", ["fixed", "variable", "bigbird", "bslongformer"])
def test_every_block_sees_itself(mode: str) -> None:
    for length in (1, 2, 5, 13):
        assert layout_of(length, mode=mode)[0].diagonal().all()


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        ("bidirectional", "###.. ###.. ###.. ##### #####"),
        ("unidirectional", "#.... ##... ###.. ####. #####"),  # a token sees itself and those before it
    ],
)
def test_blocks_become_tokens(attention: str, expected: str) -> None:
    values = {"mode": "variable", "block": 3, "local_window_blocks": [1], "attention": attention}
    heads = SparseHeads(SparseAttention.from_dict(values), num_heads=1, kept=(0,))
    assert torch.equal(heads.blocks(5)[0], picture("#. ##"))
    assert torch.equal(heads.visible_keys(5)[0], picture(expected))


# The example of DeepSpeed's documentation (its None written as JSON's null), where each mode reads its own keys.
DOCUMENTED = {
    "mode": "fixed",
    "block": 16,
    "different_layout_per_head": True,
    "num_local_blocks": 4,
    "num_global_blocks": 1,
    "attention": "bidirectional",
    "horizontal_global_attention": False,
    "num_different_global_patterns": 4,
    "num_random_blocks": 0,
    "local_window_blocks": [4],
    "global_block_indices": [0],
    "global_block_end_indices": None,
    "num_sliding_window_blocks": 3,
}


@pytest.mark.parametrize("mode", ["dense", "fixed", "variable", "bigbird", "bslongformer"])
def test_a_block_may_have_the_keys_of_all_modes(mode: str) -> None:
    block = DOCUMENTED | {"mode": mode}
    sparse = SparseAttention.from_dict(block)
    own = {key: value for key, value in block.items() if key in sparse.parameters}
    assert SparseAttention.from_dict({"mode": mode, **own}) == sparse
    assert {*sparse.ignored_keys(block), *own, "mode"} == block.keys()
    assert ("num_sliding_window_blocks" in sparse.ignored_keys(block)) == (mode in ("dense", "fixed", "variable"))
    assert make_layout(sparse, 4, 130).shape == (4, 9, 9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "bigbrid"}, "did you mean 'bigbird'"),
        ({"mode": "fixed", "num_random_block": 1}, "unknown key .*which no mode has; did you mean 'num_random_blocks'"),
        ({"mode": "fixed", "qqqq": 1}, "unknown key 'qqqq', which no mode has; expected one of those in docs"),
        ({"mode": "fixed", "num_random_blocks": -1}, "num_random_blocks is -1"),  # a key of other modes, invalid in all
        ({"mode": "fixed", "num_local_blocks": 3, "num_global_blocks": 2}, "must divide"),
        ({"mode": "fixed", "num_different_global_patterns": 2}, "needs different_layout_per_head"),
        ({"mode": "fixed", "num_different_global_patterns": 9, "different_layout_per_head": True}, "is greater than"),
        ({"mode": "fixed", "attention": "unidirectional", "horizontal_global_attention": True}, "needs attention"),
        ({"mode": "variable", "global_block_indices": [0], "global_block_end_indices": [0]}, "a greater index"),
        ({"mode": "variable", "global_block_indices": [0, 1], "global_block_end_indices": [2]}, "a greater index"),
        ({"mode": "bigbird", "block": 0}, "block is 0"),
        ({"mode": "variable", "local_window_blocks": 4}, "expected a list"),
    ],
)
def test_invalid_blocks_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SparseAttention.from_dict(values)


SPARSE = SparseAttention.from_dict({"mode": "bslongformer", "block": 2, "num_sliding_window_blocks": 1})


def test_a_sparse_model_sees_what_its_layout_allows() -> None:
    model = BertModel(tiny_config(sparse_attention=SPARSE))
    spread_weights(model)
    _, ids, mask, segments, *_ = make_batch()
    attentions = model.eval()(ids, segments, mask, output_attentions=True).attentions
    visible = SparseHeads(SPARSE, num_heads=3, kept=(0, 1, 2)).visible_keys(11)
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
@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
def test_flex_equals_plain_attention(per_head: bool, attention: str) -> None:
    """The mask of the CUDA path on packed tokens, computed on the CPU, equals the layout on padded rows."""
    sparse = SparseAttention.from_dict(
        {
            "mode": "bigbird",
            "block": 2,
            "num_sliding_window_blocks": 1,
            "different_layout_per_head": per_head,
            "attention": attention,
        }
    )
    packing = plan_packing(make_batch()[2].bool())
    inputs = AttentionInputs(packing, sparse=SparseHeads(sparse, num_heads=3, kept=(0, 1, 2)))
    qkv = torch.randn(packing.num_tokens, 3, 3, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert largest_difference(flex.attend(qkv, inputs)[0], plain.attend(qkv, inputs)[0]) <= 1e-5


@pytest.mark.parametrize("backend", ["plain", "flex"])
def test_a_causal_model_never_sees_later_tokens(backend: str) -> None:
    sparse = SparseAttention.from_dict({"mode": "fixed", "block": 4, "attention": "unidirectional"})
    model = BertModel(tiny_config(sparse_attention=sparse, attention_backend=backend, num_attention_heads=1))
    spread_weights(model)
    ids = torch.arange(1, 12)[None]
    changed = torch.where(torch.arange(11) >= 6, ids + 20, ids)
    with torch.no_grad():
        before, after = (model.eval()(rows).last_hidden_state[0] for rows in (ids, changed))
    assert largest_difference(before[:6], after[:6]) <= 1e-6
    assert (before[6:] - after[6:]).abs().amax(-1).min() > 0.01


def written_out_loss(model: BertModel, batch: tuple[Any, ...], weights: torch.Tensor) -> torch.Tensor:
    """The sum of states times `weights`, one row, head and query at a time."""
    sparse, config = model.config.sparse_attention, model.config
    assert sparse is not None
    _, ids, mask, segments, *_ = batch
    layout = make_layout(sparse, 3, ids.shape[1])
    total = torch.zeros(())
    for row, length in enumerate(mask.sum(1).tolist()):
        places = torch.arange(length)
        table = model.embeddings
        x = table.word_embeddings(ids[row, :length]) + table.token_type_embeddings(segments[row, :length])
        x = table.LayerNorm(x + table.position_embeddings(places))
        for index, block in enumerate(model.encoder.layer):
            part, normed = block.attention.self, block.PreAttentionLayerNorm(x)
            kept = [head for head in range(3) if head not in config.pruned_heads.get(index, ())]
            contexts = []
            for place, head in enumerate(kept):
                own = slice(8 * place, 8 * place + 8)
                q, k, v = (one(normed)[:, own] for one in (part.query, part.key, part.value))
                rows = []
                for query in range(length):
                    seen = [key for key in range(length)
                            if layout[head if len(layout) > 1 else 0, query // sparse["block"], key // sparse["block"]]
                            and (key <= query or not sparse.is_causal)]  # fmt: skip
                    rows.append((q[query] @ k[seen].T / 8**0.5).softmax(-1) @ v[seen])
                contexts.append(torch.stack(rows))
            x = x + block.attention.output.dense(torch.cat(contexts, -1))
            wide = block.intermediate.dense_act(block.PostAttentionLayerNorm(x))
            x = x + block.output.dense(wide)
        total = total + (model.encoder.FinalLayerNorm(x) * weights[row, :length]).sum()
    return total


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("pruned", [{}, {0: [1], 1: [0, 2]}], ids=["whole", "pruned"])
def test_states_and_gradients_equal_the_formula(pruned: dict[int, list[int]], attention: str) -> None:
    """A different layout for each head, pruned heads, and rows (of 11) that are not a multiple of the block (of 4)."""
    sparse = SparseAttention.from_dict(
        {"mode": "variable", "block": 4, "local_window_blocks": [1], "num_random_blocks": 1,
         "different_layout_per_head": True, "attention": attention}
    )  # fmt: skip
    assert len({str(layout) for layout in make_layout(sparse, 3, 11).tolist()}) > 1
    model = BertModel(tiny_config(sparse_attention=sparse, num_hidden_layers=2), add_pooling_layer=False)
    model.prune_heads(pruned)
    spread_weights(model)
    batch = make_batch()
    weights = torch.randn(5, 11, 24, generator=torch.Generator().manual_seed(2))
    loss = (model(batch[1], batch[3], batch[2]).last_hidden_state * weights).sum()
    expected = written_out_loss(model, batch, weights)
    assert largest_difference(loss, expected) <= 1e-4
    named = list(model.named_parameters())
    ours, theirs = (torch.autograd.grad(value, [parameter for _, parameter in named]) for value in (loss, expected))
    for (name, _), left, right in zip(named, ours, theirs, strict=True):
        assert largest_difference(left, right) <= 1e-4 * max(1.0, float(right.abs().max())), name


@pytest.mark.parametrize("backend", ["plain", "flex"])
def test_layers_with_the_same_heads_share_the_mask_of_a_batch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = {"plain": (SparseHeads, "visible_keys"), "flex": (flex, "make_block_mask")}[backend]
    made: list[Any] = []
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: made.append(arguments) or original(*arguments))
    model = BertModel(tiny_config(sparse_attention=SPARSE, attention_backend=backend, num_hidden_layers=4))
    model.prune_heads({3: [0]})
    _, ids, mask, segments, *_ = make_batch()
    with torch.no_grad():
        model.eval()(ids, segments, mask)
        assert len(made) == 2  # one for the three unpruned layers, one for the pruned one
        model(ids, segments, mask)
    assert len(made) == 4
