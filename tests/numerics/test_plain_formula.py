"""The fast model against the formula written out, and each option against its definition."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.plain_preln import PlainPreLN
from nvidia.activations import activation, is_gated
from nvidia.bert import BertModelBase
from nvidia.modeling import BertModel as PostLNModel
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.modelingpreln import BertModel as PreLNModel
from nvidia.self_attention import AttentionCall, BertSelfAttention
from nvidia.unpadding import plan_packing
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config

BOUND = 1e-5
ENCODERS = [PreLNModel, PostLNModel]


def make_encoder(kind: type[BertModelBase] = PreLNModel, **changes: Any) -> BertModelBase:
    model = kind(tiny_config(**changes))
    spread_weights(model)
    return model.eval()


def inputs() -> dict[str, torch.Tensor]:
    _, ids, mask, segments, *_ = make_batch()
    return {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}


@pytest.mark.parametrize("backend", ["auto", "grouped", "plain", "sdpa", "jagged"])
def test_loss_and_gradients_of_every_backend(backend: str) -> None:
    config = tiny_config(attention_backend=backend).with_padded_vocab()
    model, plain = BertForPreTrainingPreLN(config), PlainPreLN(config)
    spread_weights(model)
    plain.load_state_dict(model.state_dict())
    batch = make_batch()
    ours, expected = model(batch), plain(batch)
    assert largest_difference(ours, expected) <= BOUND
    ours.backward()
    expected.backward()
    for name, parameter in plain.named_parameters():
        assert largest_difference(model.get_parameter(name).grad, parameter.grad) <= BOUND, name


@pytest.mark.parametrize(("backend", "num_draws"), [("grouped", 3000), ("sdpa", 3000), ("jagged", 300)])
def test_dropout_of_attention_keeps_the_mean(backend: str, num_draws: int) -> None:
    """Over many draws the mean of the context is the context without dropout."""
    model = make_encoder(num_hidden_layers=1, attention_probs_dropout_prob=0.3, attention_backend=backend).train()
    attention = model.encoder.layer[0].attention.self
    call = AttentionCall(plan_packing(torch.ones(1, 9, dtype=torch.bool)))
    qkv = torch.randn(9, 3, 3, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    draws = torch.stack([attention.attend(qkv, call)[0] for _ in range(num_draws)])
    exact = attention.eval().attend(qkv, call)[0]
    error = (draws.mean(0) - exact).abs()
    assert (error <= 5 * draws.std(0) / num_draws**0.5 + 1e-6).all()
    assert draws.std(0).min() > 0


def written_out(model: BertModelBase) -> tuple[list[torch.Tensor], ...]:
    """States after the embeddings and after every block, and probabilities, on padded rows."""
    _, ids, mask, segments, *_ = make_batch()
    tables = model.embeddings
    x = tables.word_embeddings(ids) + tables.token_type_embeddings(segments)
    if tables.position_embeddings is not None:
        x = x + tables.position_embeddings(torch.arange(11))
    x = tables.LayerNorm(x)
    states, attentions = [x], []
    for block in model.encoder.layer:
        first = block.PreAttentionLayerNorm(x) if model.pre_ln else x
        probabilities, context = written_out_attention(block.attention.self, first, mask.bool())
        a = x + block.attention.output.dense(context)
        a = a if model.pre_ln else block.attention.output.LayerNorm(a)
        wide = block.PostAttentionLayerNorm(a) if model.pre_ln else a
        wide = functional.gelu(wide @ block.intermediate.dense_act.weight.T + block.intermediate.dense_act.bias)
        x = a + block.output.dense(wide)
        x = x if model.pre_ln else block.output.LayerNorm(x)
        states.append(x)
        attentions.append(probabilities)
    if model.encoder.FinalLayerNorm is not None:
        states[-1] = model.encoder.FinalLayerNorm(x)
    return states, attentions


def written_out_attention(part: BertSelfAttention, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, k, v = (linear(x).unflatten(-1, (3, 8)).transpose(1, 2) for linear in (part.query, part.key, part.value))
    scores = q @ k.transpose(-1, -2)
    if part.distance_embedding is not None:
        added = torch.zeros(5, 3, 11, 11)
        for distance in range(-10, 11):
            vector = part.distance_embedding.weight[distance + 18]  # 19 positions: distance 0 is in the middle
            here = torch.diag_embed(torch.ones(11 - abs(distance)), -distance)  # where query - key is `distance`
            added = added + (q @ vector).unsqueeze(-1) * here
            if part.position_type == "relative_key_query":
                added = added + (k @ vector).unsqueeze(-2) * here
        scores = scores + added
    probabilities = (scores / 8**0.5).masked_fill(~mask[:, None, None, :], float("-inf")).softmax(-1)
    return probabilities, (probabilities @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("positions", ["absolute", "relative_key", "relative_key_query"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_states_attentions_and_gradients_of_every_layer(kind: type[BertModelBase], positions: str) -> None:
    model = make_encoder(kind, position_embedding_type=positions)
    real = inputs()["attention_mask"].bool()
    output = model(**inputs(), output_attentions=True, output_hidden_states=True)
    states, attentions = written_out(model)
    assert len(output.hidden_states) == len(states) == 4
    for ours, plain in zip(output.hidden_states, states, strict=True):
        assert largest_difference(ours[real], plain[real]) <= BOUND
    for ours, plain in zip(output.attentions, attentions, strict=True):
        assert largest_difference(ours.transpose(1, 2)[real], plain.transpose(1, 2)[real]) <= BOUND
    weights = torch.randn(4, 5, 11, 24, generator=torch.Generator().manual_seed(2)) * real[..., None]
    named = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith("pooler")]
    totals = [sum((state * each).sum() for state, each in zip(found, weights, strict=True))
              for found in (output.hidden_states, states)]  # fmt: skip
    ours, theirs = (torch.autograd.grad(total, [parameter for _, parameter in named]) for total in totals)
    for (name, _), left, right in zip(named, ours, theirs, strict=True):
        assert largest_difference(left, right) <= BOUND * max(1.0, float(right.abs().max())), name


@pytest.mark.parametrize("kind", ENCODERS)
def test_hidden_states_and_attentions(kind: type[BertModelBase]) -> None:
    model = make_encoder(kind)
    plain = model(**inputs())
    full = model(**inputs(), output_attentions=True, output_hidden_states=True)
    assert largest_difference(plain.last_hidden_state, full.last_hidden_state) <= BOUND
    assert len(full.hidden_states) == 4
    assert len(full.attentions) == 3
    assert torch.equal(full.hidden_states[-1], full.last_hidden_state)
    mask = inputs()["attention_mask"].bool()
    for probabilities in full.attentions:
        assert probabilities.shape == (5, 3, 11, 11)
        assert largest_difference(probabilities.sum(-1), torch.ones(5, 3, 11)) <= BOUND
        assert probabilities.masked_select(~mask[:, None, None, :]).eq(0).all()
    assert full.last_hidden_state[~mask].eq(0).all()
    assert plain.pooled is not None
    first = functional.linear(plain.last_hidden_state[:, 0], model.pooler.dense_act.weight, model.pooler.dense_act.bias)
    assert largest_difference(plain.pooled, torch.tanh(first)) <= BOUND


def test_inputs_embeds_replace_ids() -> None:
    model = make_encoder()
    given = inputs()
    embeds = model.embeddings.word_embeddings(given.pop("input_ids"))
    assert torch.equal(model(inputs_embeds=embeds, **given).last_hidden_state, model(**inputs()).last_hidden_state)
    with pytest.raises(ValueError, match="exactly one"):
        model(inputs()["input_ids"], inputs_embeds=embeds)


def test_position_ids() -> None:
    model = make_encoder()
    default = model(**inputs()).last_hidden_state
    assert torch.equal(model(**inputs(), position_ids=torch.arange(11)[None]).last_hidden_state, default)
    shifted = torch.arange(11) + 5
    moved = model(**inputs(), position_ids=shifted[None]).last_hidden_state
    with torch.no_grad():
        model.embeddings.position_embeddings.weight[:11] = model.embeddings.position_embeddings.weight[shifted].clone()
    assert torch.equal(model(**inputs()).last_hidden_state, moved)


@pytest.mark.parametrize("kind", ENCODERS)
def test_pruned_heads_are_masked_heads(kind: type[BertModelBase]) -> None:
    model = make_encoder(kind)
    size = sum(parameter.numel() for parameter in model.parameters())
    head_mask = torch.ones(3, 3)
    head_mask[0, 1] = head_mask[2, 0] = head_mask[2, 2] = 0
    expected = model(**inputs(), head_mask=head_mask).last_hidden_state
    assert largest_difference(expected, model(**inputs()).last_hidden_state) > 0.01
    model.prune_heads({0: [1]})
    model.prune_heads({2: [2]})
    model.prune_heads({2: [0]})
    assert largest_difference(model(**inputs()).last_hidden_state, expected) <= BOUND
    # A head mask numbers heads as in the unpruned model.
    assert largest_difference(model(**inputs(), head_mask=head_mask).last_hidden_state, expected) <= BOUND
    head = 8 * 24 * 4 + 8 * 3  # weights of Q, K, V and the output's columns; biases of Q, K, V
    assert sum(parameter.numel() for parameter in model.parameters()) == size - 3 * head
    fresh = kind(model.config)  # the config describes the pruned model
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.eval()(**inputs()).last_hidden_state, model(**inputs()).last_hidden_state)


def test_frozen_parameters_stay_frozen_when_pruned() -> None:
    model = make_encoder().requires_grad_(False)
    model.prune_heads({0: [1]})
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_pruning_updates_the_config() -> None:
    model = BertForPreTrainingPreLN(tiny_config())
    model.bert.prune_heads({1: [0]})
    assert model.config.pruned_heads == {1: (0,)}
    BertForPreTrainingPreLN(model.config).load_state_dict(model.state_dict())


def test_head_mask_scales_a_head() -> None:
    model = make_encoder(num_hidden_layers=1)
    masked = model(**inputs(), head_mask=torch.tensor([1.0, 0.5, 1.0])).last_hidden_state
    with torch.no_grad():
        model.encoder.layer[0].attention.output.dense.weight[:, 8:16] *= 0.5
    assert largest_difference(model(**inputs()).last_hidden_state, masked) <= BOUND


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_relative_positions(kind: str) -> None:
    model = make_encoder(position_embedding_type=kind, num_hidden_layers=1)
    assert model.embeddings.position_embeddings is None
    output = model(**inputs(), output_attentions=True, output_hidden_states=True)
    attention = model.encoder.layer[0].attention.self
    x = model.encoder.layer[0].PreAttentionLayerNorm(output.hidden_states[0])
    q, k = (part(x).unflatten(-1, (3, 8)) for part in (attention.query, attention.key))
    table = attention.distance_embedding.weight
    mask = inputs()["attention_mask"].bool()
    for row, head, query in ((0, 0, 3), (1, 2, 6), (4, 1, 0)):
        scores = torch.full((11,), float("-inf"))
        for key in range(11):
            if mask[row, key]:
                distance = table[query - key + 19 - 1]
                score = q[row, query, head] @ k[row, key, head] + q[row, query, head] @ distance
                if kind == "relative_key_query":
                    score = score + k[row, key, head] @ distance
                scores[key] = (score / 8**0.5).detach()
        assert largest_difference(output.attentions[0][row, head, query], scores.softmax(0)) <= BOUND


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunked_feed_forward(chunk: int) -> None:
    chunked, whole = make_encoder(chunk_size_feed_forward=chunk), make_encoder()
    sizes: list[int] = []
    chunked.encoder.layer[0].output.register_forward_hook(lambda _, taken, __: sizes.append(len(taken[0])))
    num_tokens = int(inputs()["attention_mask"].sum())
    assert largest_difference(chunked(**inputs()).last_hidden_state, whole(**inputs()).last_hidden_state) <= BOUND
    assert sizes == [min(chunk, num_tokens - start) for start in range(0, num_tokens, chunk)]


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "relu", "swish", "silu", "tanh", "geglu", "swiglu"])
def test_activations(act: str) -> None:
    model = make_encoder(hidden_act=act, num_hidden_layers=1)
    dense = model.encoder.layer[0].intermediate.dense_act
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(0))
    before = x @ dense.weight.T + dense.bias
    assert before.shape[1] == (82 if is_gated(act) else 41)
    left, right = before[:, :41], before[:, 41:] if is_gated(act) else torch.ones(1)
    normal = 0.5 * (1 + torch.erf(left / 2**0.5))
    bent = 0.5 * left * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (left + 0.044715 * left**3)))
    expected = {
        "gelu": left * normal,
        "gelu_tanh": bent,
        "relu": left.clamp(min=0),
        "swish": left / (1 + torch.exp(-left)),
        "silu": left / (1 + torch.exp(-left)),
        "tanh": torch.tanh(left),
        "geglu": left * normal * right,
        "swiglu": left / (1 + torch.exp(-left)) * right,
    }[act]
    assert largest_difference(dense(x), expected) <= BOUND
    assert largest_difference(activation(act)(before), expected) <= BOUND


def test_encoders_without_biases() -> None:
    model = make_encoder(use_bias=False)
    names = [name for name, _ in model.encoder.named_parameters() if "LayerNorm" not in name]
    assert names
    assert all(name.endswith("weight") for name in names)
    biased = make_encoder()
    state = model.state_dict() | {
        name: torch.zeros_like(value)
        for name, value in biased.state_dict().items()
        if name.startswith("encoder.layer") and "LayerNorm" not in name and name.endswith("bias")
    }
    biased.load_state_dict(state)
    assert largest_difference(biased(**inputs()).last_hidden_state, model(**inputs()).last_hidden_state) <= BOUND
