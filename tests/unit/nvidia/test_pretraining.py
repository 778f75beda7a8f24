"""The pretraining models: names, sizes, init, loss, and what they report."""

from typing import Any

import pytest
import torch

from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertConfig, BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.unit.nvidia.helpers import make_batch, spread_weights, tiny_config

MODELS = [BertForPreTrainingPreLN, BertForPreTraining]
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@pytest.mark.parametrize(("shape", "expected"), [({}, 110_112_578), (LARGE, 336_234_306)])
def test_parameter_counts(shape: dict[str, int], expected: int) -> None:
    with torch.device("meta"):
        model = BertForPreTrainingPreLN(BertConfig(vocab_size=30528, **shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_state_dict_names() -> None:
    names = set(BertForPreTrainingPreLN(tiny_config(num_hidden_layers=1)).state_dict())
    layer = "bert.encoder.layer.0"
    modules = [
        "bert.embeddings.LayerNorm",
        *(f"{layer}.attention.self.{part}" for part in ("query", "key", "value")),
        f"{layer}.attention.output.dense",
        f"{layer}.PreAttentionLayerNorm",
        f"{layer}.PostAttentionLayerNorm",
        f"{layer}.intermediate.dense_act",
        f"{layer}.output.dense",
        "bert.encoder.FinalLayerNorm",
        "bert.pooler.dense_act",
        "cls.predictions.transform.dense_act",
        "cls.predictions.transform.LayerNorm",
        "cls.seq_relationship",
    ]
    expected = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    expected |= {f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")}
    expected |= {"cls.predictions.bias", "cls.predictions.decoder.weight"}
    assert names == expected


@pytest.mark.parametrize("kind", MODELS)
def test_every_weight_gets_its_init(kind: type[PreTrainingModel]) -> None:
    with torch.device("meta"):
        model = kind(tiny_config(hidden_size=96, intermediate_size=200, initializer_range=0.05))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)  # parameters that init does not reach keep 7
    model.reset_parameters()
    for name, parameter in model.named_parameters():
        if "LayerNorm.weight" in name:
            assert parameter.eq(1).all(), name
        elif parameter.dim() == 1:
            assert parameter.eq(0).all(), name
        else:
            writes_residual = name.endswith(("attention.output.dense.weight", "output.dense.weight"))
            expected = 0.05 / 6**0.5 if writes_residual else 0.05
            tolerance = 4 * expected / (2 * parameter.numel()) ** 0.5  # four standard errors of a standard deviation
            assert abs(float(parameter.detach().std()) - expected) < tolerance, name


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("head", ["nsp", "sop", "none"])
def test_every_parameter_gets_a_gradient(kind: type[PreTrainingModel], head: str) -> None:
    model = kind(tiny_config(sentence_head=head))
    model(make_batch()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.endswith("key.bias"):
            continue  # shifting all keys shifts all scores of a query equally: the gradient is 0 in exact arithmetic
        assert parameter.grad.abs().sum() > 0, name


def test_the_decoder_is_the_embedding_table() -> None:
    model = BertForPreTrainingPreLN(tiny_config())
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    untied = BertForPreTrainingPreLN(tiny_config(tie_word_embeddings=False))
    assert untied.cls.predictions.decoder.weight is not untied.bert.embeddings.word_embeddings.weight


def test_old_callers_may_pass_their_arguments() -> None:
    assert BertForPreTrainingPreLN(tiny_config(), args=object()).config == tiny_config()


@pytest.mark.parametrize("kind", MODELS)
def test_details_add_up_to_the_loss(kind: type[PreTrainingModel]) -> None:
    model = kind(tiny_config())
    spread_weights(model)
    batch = make_batch()
    loss = model(batch)
    details = model.details
    assert details is not None
    assert all(value.dim() == 0 and not value.requires_grad for value in details)
    assert int(details.masked_lm_count) == int((batch[5] != -1).sum())
    assert int(details.next_sentence_count) == int((batch[4] != -1).sum())
    assert int(details.num_tokens) == int(batch[2].sum())
    expected = details.masked_lm_loss_sum / details.masked_lm_count
    expected = expected + details.next_sentence_loss_sum / details.next_sentence_count
    torch.testing.assert_close(loss.detach(), expected)


def test_details_count_correct_predictions() -> None:
    model = BertForPreTrainingPreLN(tiny_config())
    spread_weights(model)
    kind, ids, mask, segments, sentence, labels = make_batch()
    with torch.no_grad():
        guesses = model.masked_lm_logits(ids, mask, segments).argmax(-1)
        relation = model.sentence_logits(ids, mask, segments).argmax(-1)
    half = torch.where((labels != -1) & (torch.arange(11) % 2 == 0), guesses, labels)
    model((kind, ids, mask, segments, torch.where(sentence == -1, -1, relation), half))
    assert model.details is not None
    assert int(model.details.masked_lm_correct) == int(((guesses == half) & (half != -1)).sum()) > 0
    assert int(model.details.next_sentence_correct) == 4


@pytest.mark.parametrize("head", ["none", "nsp"])
@pytest.mark.parametrize("splits", [[4], [1, 3], [2, 2], [1, 1, 2], [1, 1, 1, 1]], ids=str)
def test_gradients_do_not_depend_on_how_a_batch_is_split(splits: list[int], head: str) -> None:
    """Rows have different numbers of masked tokens, and two of the four have no sentence label."""
    model = BertForPreTrainingPreLN(tiny_config(sentence_head=head))
    spread_weights(model)
    batch = make_batch((11, 7, 9, 3))
    batch[4][1] = -1
    assert (batch[4] != -1).tolist() == [True, False, True, False]
    model(batch).backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    # Labels of the global batch / number of micro-steps, whose gradients are averaged.
    totals = [(labels != -1).sum() / len(splits) for labels in (batch[5], batch[4])]
    for fields in zip(*(field.split(splits) for field in batch[1:]), strict=True):
        (model((2, *fields), True, *totals) / len(splits)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-4, atol=1e-6, msg=name)


def test_totals_that_equal_the_counts_change_no_bit() -> None:
    model = BertForPreTrainingPreLN(tiny_config())
    batch = make_batch()
    totals = [(labels != -1).sum().double() for labels in (batch[5], batch[4])]
    assert torch.equal(model(batch), model(batch, True, *totals))


def no_labels(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*batch[:4], torch.full_like(batch[4], -1), torch.full_like(batch[5], -1))


def no_tokens(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    mask = batch[2].clone()
    mask[1] = 0
    return (*batch[:2], mask, *batch[3:])


def one_token(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    return (2, *(part[:, :1] if part.dim() == 2 else part for part in batch[1:]))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("backend", "dropout", "dtype"),
    [
        ("auto", 0.0, torch.float32),
        ("plain", 0.0, torch.float32),
        ("sdpa", 0.0, torch.float32),
        ("grouped", 0.2, torch.float32),
        ("plain", 0.2, torch.float32),
        ("grouped", 0.2, torch.bfloat16),
        ("sdpa", 0.0, torch.bfloat16),
        ("plain", 0.0, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("change", [no_labels, no_tokens, one_token])
def test_degenerate_batches_stay_finite(
    kind: type[PreTrainingModel], backend: str, dropout: float, dtype: torch.dtype, change: Any
) -> None:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = kind(tiny_config(attention_backend=backend, **rates)).to(dtype)
    total = torch.tensor(0.0) if change is no_labels else None
    loss = model(change(make_batch()), masked_lm_total=total, next_sentence_total=total)
    loss.backward()
    assert loss.isfinite()
    assert (loss == 0) == (change is no_labels)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_a_batch_wider_than_the_position_table_is_rejected() -> None:
    model = BertForPreTrainingPreLN(tiny_config(max_position_embeddings=8))
    with pytest.raises(ValueError, match="11 tokens wide, but max_position_embeddings is 8"):
        model(make_batch())


def test_padding_rows_of_the_vocabulary_are_never_predicted() -> None:
    model = BertForPreTrainingPreLN(tiny_config().with_padded_vocab())
    model(make_batch()).backward()
    logits = model.masked_lm_logits(*make_batch()[1:4])
    assert logits.shape[-1] == 101
    gradient = model.bert.embeddings.word_embeddings.weight.grad
    assert gradient is not None
    assert gradient.shape[0] == 104
    assert gradient[101:].eq(0).all()


def test_logits_at_positions_equal_those_of_all_positions() -> None:
    model = BertForPreTrainingPreLN(tiny_config()).eval()
    _, ids, mask, segments, *_ = make_batch()
    positions = torch.tensor([[0, 5], [6, 2], [10, 10], [0, 0], [3, 1]])
    whole = model.masked_lm_logits(ids, mask, segments)
    at = model.masked_lm_logits(ids, mask, segments, positions)
    torch.testing.assert_close(at, whole[torch.arange(5)[:, None], positions])
