"""RoBERTa, XLM-RoBERTa, CamemBERT and ModernBERT both ways: states, logits, losses and gradients of stock classes."""

import copy
from typing import Any

import pytest
import torch
import transformers

from common.errors import UserError
from nvidia.interop.families import POSITIONS, family_of, stock_names
from nvidia.interop.hugging_face import from_hugging_face, is_pre_ln, to_hugging_face
from nvidia.interop.pretrained import start_from
from nvidia.interop.stock_config import from_stock_config
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.unit.nvidia.helpers import largest_difference

BOUND = 1e-5  # fp32, odd sizes
PAD = 3
SIZES = {"vocab_size": 77, "hidden_size": 28, "num_attention_heads": 2, "intermediate_size": 37, "pad_token_id": PAD}
ROBERTA = {**SIZES, "num_hidden_layers": 3, "type_vocab_size": 1, "max_position_embeddings": 23,
           "layer_norm_eps": 1e-5}  # fmt: skip
MODERN = {**SIZES, "num_hidden_layers": 5, "max_position_embeddings": 64, "local_attention": 7, "bos_token_id": 0,
          "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}  # fmt: skip
BIASES = {f"{part}_bias": True for part in ("norm", "attention", "mlp", "classifier")} | {"decoder_bias": False}
MODELS = {
    "roberta": ("RobertaForMaskedLM", ROBERTA),
    "xlm-roberta": ("XLMRobertaForMaskedLM", ROBERTA),
    "camembert untied": ("CamembertForMaskedLM", {**ROBERTA, "tie_word_embeddings": False}),
    "bert without pooler": ("BertForMaskedLM", {**ROBERTA, "type_vocab_size": 2}),
    "modernbert": ("ModernBertForMaskedLM", MODERN),
    "modernbert with biases": ("ModernBertForMaskedLM", {**MODERN, **BIASES, "global_attn_every_n_layers": 2}),
    "modernbert without windows": (
        "ModernBertForMaskedLM",
        {**MODERN, "layer_types": ["full_attention"] * 5, "hidden_activation": "silu", "classifier_activation": "silu",
         "tie_word_embeddings": False},
    ),
}  # fmt: skip


def make_stock(name: str) -> Any:
    """A small stock model with noise in every parameter, like a trained one, and without dropout."""
    class_name, sizes = MODELS[name]
    kind = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.2
    return model


def to_ours(stock: Any, **changes: Any) -> PreTrainingModel:
    tensors, config_dict = stock.state_dict(), stock.config.to_dict()
    state, config = from_hugging_face(tensors, config_dict)
    pre_ln = is_pre_ln(state)
    config = type(config).from_dict(config.to_dict() | {"sentence_head": "none"} | changes)
    model = (BertForPreTrainingPreLN if pre_ln else BertForPreTraining)(config).eval()
    assert start_from(model, state, config) == []
    return model


def to_stock(model: PreTrainingModel) -> Any:
    tensors, config_dict, extra = to_hugging_face(model.state_dict(), model.config)
    assert not extra
    kind = getattr(transformers, config_dict["architectures"][0])
    config = kind.config_class.from_dict(config_dict, attn_implementation="eager")
    stock, info = kind.from_pretrained(None, config=config, state_dict=tensors, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return stock.eval()


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and labels; rows of different lengths with padding at the end."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(PAD + 1, 77, (4, 17), generator=draw)
    mask = (torch.arange(17) < torch.tensor([17, 11, 5, 16])[:, None]).long()
    labels = torch.where((torch.rand(4, 17, generator=draw) < 0.4) & (mask == 1), ids, -1)
    return torch.where(mask == 1, ids, PAD), mask, labels


def check_equal(model: PreTrainingModel, stock: Any) -> None:
    ids, mask, _ = make_inputs()
    real = mask.bool()
    output = stock(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    ours = model.bert(ids, attention_mask=mask, output_hidden_states=True)
    assert len(ours.hidden_states) == len(output.hidden_states) == model.config.num_hidden_layers + 1
    for mine, theirs in zip(ours.hidden_states[:-1], output.hidden_states[:-1], strict=True):
        assert largest_difference(mine[real], theirs[real]) <= BOUND
    logits = model.masked_lm_logits(ids, mask, torch.zeros_like(ids))
    assert float(output.logits[real].detach().abs().max()) > 0.5  # logits of zero would show nothing
    assert largest_difference(logits[real], output.logits[real]) <= BOUND


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_the_same_model_here_and_after_training_and_export(name: str) -> None:
    stock = make_stock(name)
    model = to_ours(stock)
    check_equal(model, stock)
    ids, mask, labels = make_inputs()
    theirs = stock(input_ids=ids, attention_mask=mask, labels=torch.where(labels == -1, -100, labels))
    loss = model((2, ids, mask, torch.zeros_like(ids), torch.full((4,), -1), labels))
    assert largest_difference(loss, theirs.loss) <= BOUND
    loss.backward()
    theirs.loss.backward()
    check_gradients(model, stock)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:  # the pooler has none
                parameter -= 0.1 * parameter.grad
    exported = to_stock(model)
    assert type(exported) is type(stock)
    check_equal(model, exported)
    again = to_ours(exported)
    assert again.config == model.config
    for key, tensor in again.state_dict().items():
        rows = 77 if len(tensor) == 80 else len(tensor)  # without the padding of the vocabulary
        assert torch.equal(tensor[:rows], model.state_dict()[key][:rows]), key


def check_gradients(model: PreTrainingModel, stock: Any) -> None:
    family = family_of(model.config, model.bert.pre_ln)
    ours = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    theirs = {key: parameter.grad for key, parameter in stock.named_parameters(remove_duplicate=False)}
    if family.is_modern:
        for layer in range(model.config.num_hidden_layers):
            prefix = f"bert.encoder.layer.{layer}.attention.self."
            for kind in ("weight", "bias") if model.config.has_attention_bias else ("weight",):
                parts = [ours.pop(f"{prefix}{part}.{kind}") for part in ("query", "key", "value")]
                ours[f"{prefix}qkv.{kind}"] = torch.cat(parts)
    for key, stock_key in stock_names(model.config, family).items():
        gradient, expected = ours.pop(key), theirs.get(stock_key)
        if expected is None:  # the bias that an untied stock head adds is that of its decoder
            expected = theirs[str(family.decoder_bias)]
        if key == POSITIONS and family.shifts_positions:
            expected = expected[PAD + 1 :]
        if len(gradient) != len(expected):
            gradient = gradient[: model.config.num_tokens]
        assert largest_difference(gradient, expected) <= BOUND, key
    assert not ours


@pytest.mark.parametrize("name", ["roberta", "modernbert"])
@pytest.mark.parametrize("tokens", [90, 50])
def test_another_vocabulary_keeps_the_shared_rows(name: str, tokens: int) -> None:
    stock = make_stock(name)
    state, config = from_hugging_face(stock.state_dict(), stock.config.to_dict())
    sizes = {"vocab_size": tokens, "unpadded_vocab_size": None, "sentence_head": "none"}
    own = type(config).from_dict(config.to_dict() | sizes).with_padded_vocab()
    model = (BertForPreTrainingPreLN if is_pre_ln(state) else BertForPreTraining)(own)
    (note,) = start_from(model, state, config)
    assert "newly initialized" in note if tokens == 90 else "dropped" in note
    shared = min(tokens, 77)
    table = model.bert.embeddings.word_embeddings.weight
    assert torch.equal(table[:shared], stock.get_input_embeddings().weight[:shared])


def test_rows_in_front_of_the_position_table() -> None:
    """A model with `position_offset` loads and exports the same positions."""
    stock = make_stock("roberta")
    model = to_ours(stock, position_offset=2)
    check_equal(model, stock)
    check_equal(model, to_stock(model))


def test_published_configs_of_transformers_4_are_understood() -> None:
    old = {
        "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768, "num_hidden_layers": 22,
        "num_attention_heads": 12, "intermediate_size": 1152, "global_attn_every_n_layers": 3, "local_attention": 128,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "norm_eps": 1e-05, "pad_token_id": 50283,
        "position_embedding_type": "absolute", "hidden_activation": "gelu", "classifier_pooling": "mean",
    }  # fmt: skip
    config = from_stock_config(old)
    assert (config.attention_window, config.global_attention_every, config.is_rotary) == (128, 3, True)
    assert (config.rope_theta, config.local_rope_theta, config.max_position_embeddings) == (160000.0, 10000.0, 8192)
    assert (config.hidden_act, config.norm_bias, config.decoder_bias) == ("geglu", False, True)
    assert from_stock_config(transformers.ModernBertConfig().to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deberta-v2"}, "model_type is 'deberta-v2', expected one of bert, .* give a checkpoint"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu', expected one of gelu, silu"),
        ({"classifier_activation": "silu"}, "one activation for the blocks and the masked-token head"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}, "layer_types is sFsFF"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rotary positions are scaled"),
    ],
)  # fmt: skip
def test_configs_that_ours_cannot_compute_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_stock_config({"model_type": "modernbert", **copy.deepcopy(MODERN), **changes})


def test_absolute_positions_do_not_start_a_rotary_model() -> None:
    stock = make_stock("roberta")
    state, config = from_hugging_face(stock.state_dict(), stock.config.to_dict())
    rotary = type(config).from_dict(config.to_dict() | {"position_embedding_type": "rotary"})
    with pytest.raises(UserError, match="position_embedding_type is 'absolute', but the model JSON says 'rotary'"):
        start_from(BertForPreTraining(rotary), state, config)
