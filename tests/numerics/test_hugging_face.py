"""Our models equal those of transformers: logits, losses and gradients, and conversion both ways."""

from typing import Any

import pytest
import torch
import transformers

from common.errors import UserError
from nvidia.config import BertConfig
from nvidia.interop.families import family_of, stock_names
from nvidia.interop.hugging_face import from_hugging_face, to_hugging_face
from nvidia.interop.pretrained import start_from
from nvidia.interop.stock_config import from_stock_config
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config

BOUND = 1e-5  # fp32, odd sizes
MODELS = [BertForPreTrainingPreLN, BertForPreTraining]


def make_model(kind: type[PreTrainingModel], config: BertConfig) -> PreTrainingModel:
    model = kind(config)
    spread_weights(model)
    return model


def stock_twin(model: PreTrainingModel) -> Any:
    """The stock class with our weights, loaded as `from_pretrained` does."""
    tensors, config_dict, _ = to_hugging_face(model.state_dict(), model.config)
    kind = getattr(transformers, config_dict["architectures"][0])
    config = kind.config_class.from_dict(config_dict, attn_implementation="eager")
    twin, info = kind.from_pretrained(None, config=config, state_dict=tensors, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return twin


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"pad_token_id": 3}], ids=str)
def test_logits_losses_and_gradients(kind: type[PreTrainingModel], changes: dict[str, Any]) -> None:
    model = make_model(kind, tiny_config(**changes).with_padded_vocab())
    twin = stock_twin(model)
    _, ids, mask, segments, sentence, labels = make_batch()
    pad = model.config.pad_token_id
    ids = torch.where(mask.bool(), torch.where(ids == pad, pad + 1, ids), pad)
    batch = (2, ids, mask, segments, sentence, labels)
    ours = model.masked_lm_logits(ids, mask, segments)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}
    ignored = torch.where(labels == -1, -100, labels)
    if kind is BertForPreTraining:
        stock = twin(**inputs, labels=ignored, next_sentence_label=torch.where(sentence == -1, -100, sentence))
        assert largest_difference(model.sentence_logits(ids, mask, segments), stock.seq_relationship_logits) <= BOUND
        stock_logits = stock.prediction_logits
        loss = model(batch)
    else:
        stock = twin(**inputs, labels=ignored)
        stock_logits = stock.logits
        loss = model((*batch[:4], torch.full_like(sentence, -1), labels))
    real = mask.bool()
    assert float(stock_logits[real].detach().abs().max()) > 0.5  # logits of zero would show nothing
    assert largest_difference(ours[real], stock_logits[real]) <= BOUND
    assert largest_difference(loss, stock.loss) <= BOUND

    loss.backward()
    stock.loss.backward()
    stock_gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    tokens, shift = model.config.num_tokens, pad + 1 if kind is BertForPreTrainingPreLN else 0
    for name, stock_name in stock_names(model.config, family_of(model.config, model.bert.pre_ln)).items():
        if name == "cls.predictions.bias" and not model.config.tie_word_embeddings:
            stock_name = stock_name.replace("bias", "decoder.bias")  # the one that an untied stock head adds
        gradient, stock_gradient = model.get_parameter(name).grad, stock_gradients[stock_name]
        assert gradient is not None
        if name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.weight"):
            gradient = gradient[:tokens]
        if name == "bert.embeddings.position_embeddings.weight":
            stock_gradient = stock_gradient[shift:]
        assert largest_difference(gradient, stock_gradient) <= BOUND, name


@pytest.mark.parametrize("kind", MODELS)
def test_padding_may_be_anywhere(kind: type[PreTrainingModel]) -> None:
    """At the start, in the middle and at the end padding hides keys and has no other effect."""
    model = make_model(kind, tiny_config().with_padded_vocab()).eval()
    twin = stock_twin(model).eval()
    _, ids, _, segments, *_ = make_batch()
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, 3:6] = mask[2, 8:] = mask[3, :10] = 0
    first = 0 if kind is BertForPreTraining else model.config.pad_token_id + 1
    places = (torch.arange(ids.shape[1]) + first).expand(ids.shape)
    stock = twin(input_ids=ids, attention_mask=mask, token_type_ids=segments, position_ids=places)
    logits = stock.prediction_logits if kind is BertForPreTraining else stock.logits
    real = mask.bool()
    assert largest_difference(model.masked_lm_logits(ids, mask, segments)[real], logits[real]) <= BOUND


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tied", [True, False])
def test_conversion_both_ways(kind: type[PreTrainingModel], tied: bool) -> None:
    model = make_model(kind, tiny_config(tie_word_embeddings=tied, pad_token_id=2).with_padded_vocab())
    state, config = from_hugging_face(*to_hugging_face(model.state_dict(), model.config))
    assert config == model.config
    fresh = kind(config)
    fresh.load_state_dict(state)
    assert all(tensor.shape == model.state_dict()[name].shape for name, tensor in state.items())
    _, ids, mask, segments, *_ = make_batch()
    assert torch.equal(fresh.masked_lm_logits(ids, mask, segments), model.masked_lm_logits(ids, mask, segments))
    assert torch.equal(fresh.sentence_logits(ids, mask, segments), model.sentence_logits(ids, mask, segments))


def test_a_stock_checkpoint_becomes_ours() -> None:
    twin = transformers.BertForPreTraining(
        transformers.BertConfig(vocab_size=77, hidden_size=20, num_hidden_layers=2, num_attention_heads=2,
                                intermediate_size=30, max_position_embeddings=16)
    ).eval()  # fmt: skip
    state, config = from_hugging_face(twin.state_dict(), twin.config.to_dict())
    model = BertForPreTraining(config).eval()
    model.load_state_dict(state)
    ids = torch.randint(1, 77, (3, 7), generator=torch.Generator().manual_seed(0))
    output = twin(ids)
    ones, zeros = torch.ones_like(ids), torch.zeros_like(ids)
    assert config.vocab_size == 80
    assert largest_difference(model.masked_lm_logits(ids, ones, zeros), output.prediction_logits) <= BOUND
    assert largest_difference(model.sentence_logits(ids, ones, zeros), output.seq_relationship_logits) <= BOUND


def make_stock(kind: str, **changes: Any) -> Any:
    """A small stock model with noise in every parameter, like a trained one."""
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(
        model_class.config_class(vocab_size=77, hidden_size=20, num_hidden_layers=2, num_attention_heads=2,
                                 intermediate_size=30, max_position_embeddings=16, **changes)
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.2
    return model


def imported(twin: Any) -> PreTrainingModel:
    """Our model with the weights of a stock one; heads that the stock class does not have are newly initialized."""
    config_dict = twin.config.to_dict()
    state, config = from_hugging_face(twin.state_dict(), config_dict)
    model = (BertForPreTraining if config_dict["model_type"] == "bert" else BertForPreTrainingPreLN)(config).eval()
    start_from(model, state, config)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["BertForPreTraining", "RobertaPreLayerNormForMaskedLM"])
def test_a_stock_model_with_noise_in_every_parameter_becomes_ours(kind: str, tied: bool) -> None:
    """In an untied stock head both biases are separate parameters, and only that of the decoder is added."""
    twin = make_stock(kind, tie_word_embeddings=tied)
    names = dict(twin.named_parameters())
    assert tied != any(name.endswith("decoder.bias") for name in names)
    model = imported(twin)
    ids = torch.randint(2, 77, (3, 7), generator=torch.Generator().manual_seed(0))
    output, ones, zeros = twin(ids), torch.ones_like(ids), torch.zeros_like(ids)
    expected = output.prediction_logits if kind == "BertForPreTraining" else output.logits
    assert largest_difference(model.masked_lm_logits(ids, ones, zeros), expected) <= BOUND
    again, _, _ = to_hugging_face(model.state_dict(), model.config)
    for name, tensor in again.items():
        if tied or not name.endswith(("lm_head.bias", "predictions.bias")):
            stock = twin.state_dict()[name]
            assert torch.equal(tensor[2:] if "position" in name else tensor, stock[2:] if "position" in name else stock)


@pytest.mark.parametrize("act", ["gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "swish", "silu", "relu"])
def test_stock_activations_are_ours(act: str) -> None:
    twin = make_stock("BertForPreTraining", hidden_act=act)
    model = imported(twin)
    ids = torch.randint(1, 77, (3, 7), generator=torch.Generator().manual_seed(0))
    logits = model.masked_lm_logits(ids, torch.ones_like(ids), torch.zeros_like(ids))
    assert largest_difference(logits, twin(ids).prediction_logits) <= BOUND


def test_a_pre_ln_checkpoint_with_another_activation_than_its_head_is_rejected() -> None:
    """The masked-token head of the stock class always computes gelu; ours uses hidden_act."""
    twin = make_stock("RobertaPreLayerNormForMaskedLM", hidden_act="relu")
    with pytest.raises(UserError, match=r"hidden_act is 'relu', but the masked-token head .* always computes gelu"):
        imported(twin)


def test_a_post_ln_config_may_omit_the_padding_token() -> None:
    twin = make_stock("BertForPreTraining", pad_token_id=None)
    assert twin.config.to_dict()["pad_token_id"] is None
    assert imported(twin).config.pad_token_id == 0
    config_dict = make_stock("RobertaPreLayerNormForMaskedLM").config.to_dict()
    with pytest.raises(UserError, match=r"pad_token_id is null, but positions .* pad_token_id \+ 1"):
        from_stock_config(config_dict | {"pad_token_id": None})


def test_old_names_and_an_encoder_without_heads_are_accepted() -> None:
    model = make_model(BertForPreTraining, tiny_config())
    tensors, config_dict, _ = to_hugging_face(model.state_dict(), model.config)
    bare = {
        name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma"): tensor
        for name, tensor in tensors.items()
        if name.startswith("bert.")
    }
    bare["embeddings.position_ids"] = torch.arange(19)
    state, _ = from_hugging_face(bare, config_dict)
    expected = {name for name in model.state_dict() if name.startswith("bert.")} | {"cls.predictions.decoder.weight"}
    assert set(state) == expected


@pytest.mark.parametrize("kind", MODELS)
def test_names_that_do_not_match_are_listed(kind: type[PreTrainingModel]) -> None:
    model = make_model(kind, tiny_config())
    state = model.state_dict()
    state["bert.surprise"] = torch.zeros(1)
    del state["bert.embeddings.LayerNorm.bias"]
    with pytest.raises(
        UserError, match=r"(?s)1 missing, 1 unknown.*missing: bert.embeddings.LayerNorm.bias.*bert.surprise"
    ):
        to_hugging_face(state, model.config)
    tensors, config_dict, extra = to_hugging_face(model.state_dict(), model.config)
    name = next(name for name in tensors if name.endswith("0.attention.self.key.bias"))
    del tensors[name]
    with pytest.raises(UserError, match=f"missing: {name}"):
        from_hugging_face(tensors, config_dict, extra)


def test_a_tied_copy_that_differs_is_rejected() -> None:
    model = make_model(BertForPreTraining, tiny_config())
    tensors, config_dict, _ = to_hugging_face(model.state_dict(), model.config)
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
    with pytest.raises(UserError, match="says that they are tied"):
        from_hugging_face(tensors, config_dict)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (BertForPreTrainingPreLN, {"hidden_act": "relu"}, "hidden_act 'relu'"),
        (BertForPreTraining, {"hidden_act": "geglu"}, "hidden_act 'geglu'"),
        (BertForPreTraining, {"use_bias": False}, "use_bias"),
        (BertForPreTraining, {"position_embedding_type": "relative_key"}, "relative_key"),
        (BertForPreTraining, {"export_as": "modernbert"}, "is pre-LN, but the model is post-LN"),
        (BertForPreTraining, {"export_as": "roberta", "hidden_act": "relu"}, "RobertaForMaskedLM, which has gelu"),
        (BertForPreTrainingPreLN, {"position_embedding_type": "rotary"}, "type_vocab_size 2 .* ModernBertForMaskedLM"),
        (BertForPreTrainingPreLN, {"pruned_heads": {0: (1,)}}, "pruned_heads"),
    ],
)
def test_models_that_no_stock_class_computes_are_rejected(
    kind: type[PreTrainingModel], changes: dict[str, Any], reason: str
) -> None:
    model = kind(tiny_config(**changes))
    with pytest.raises(UserError, match=reason):
        to_hugging_face(model.state_dict(), model.config)
