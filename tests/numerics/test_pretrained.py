"""Starting from a stock checkpoint: what is loaded exactly, what is noted, and what is rejected."""

from typing import Any

import pytest
import torch
import transformers

from common.errors import UserError
from nvidia.interop.hugging_face import from_hugging_face, to_hugging_face
from nvidia.interop.pretrained import start_from
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.unit.nvidia.helpers import largest_difference, spread_weights, tiny_config

STOCK = {"vocab_size": 77, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 41,
         "max_position_embeddings": 19}  # fmt: skip


def stock(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, name)(transformers.BertConfig(**STOCK, **changes)).eval()


def loaded(twin: Any, model: BertForPreTraining) -> list[str]:
    return start_from(model, *from_hugging_face(twin.state_dict(), twin.config.to_dict()))


def make_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 77, (3, 7), generator=torch.Generator().manual_seed(1))
    return ids, torch.ones_like(ids), torch.zeros_like(ids)


@pytest.mark.parametrize("tied", [True, False])
def test_a_complete_checkpoint(tied: bool) -> None:
    twin = stock("BertForPreTraining", tie_word_embeddings=tied)
    model = BertForPreTraining(tiny_config(vocab_size=77, tie_word_embeddings=tied).with_padded_vocab()).eval()
    assert loaded(twin, model) == []
    output = twin(make_inputs()[0])
    assert largest_difference(model.masked_lm_logits(*make_inputs()), output.prediction_logits) <= 1e-5
    assert largest_difference(model.sentence_logits(*make_inputs()), output.seq_relationship_logits) <= 1e-5


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("BertForMaskedLM", ["pooler", "sentence head"]),
        ("BertModel", ["sentence head", "masked-token head"]),
        ("BertForNextSentencePrediction", ["masked-token head"]),
    ],
)
def test_missing_heads_are_newly_initialized(name: str, missing: list[str]) -> None:
    twin = stock(name)
    model = BertForPreTraining(tiny_config(vocab_size=77).with_padded_vocab()).eval()
    fresh = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert loaded(twin, model) == [f"the checkpoint has no {head}; it is newly initialized" for head in missing]
    encoder = twin if name == "BertModel" else twin.bert
    states = model.bert(make_inputs()[0]).last_hidden_state
    assert largest_difference(states, encoder(make_inputs()[0]).last_hidden_state) <= 1e-5
    head = (
        "cls.predictions.transform.dense_act.weight"
        if "masked-token head" in missing
        else "cls.seq_relationship.weight"
    )
    assert torch.equal(model.state_dict()[head], fresh[head])


def test_an_untied_decoder_is_newly_initialized_with_its_head() -> None:
    model = BertForPreTraining(tiny_config(vocab_size=77, tie_word_embeddings=False).with_padded_vocab())
    fresh = model.cls.predictions.decoder.weight.detach().clone()
    loaded(stock("BertModel", tie_word_embeddings=False), model)
    assert torch.equal(model.cls.predictions.decoder.weight, fresh)
    assert not torch.equal(model.bert.embeddings.word_embeddings.weight, fresh)


@pytest.mark.parametrize(("tokens", "note"), [(90, r"77 … 89 are newly initialized"), (50, r"50 … 76 are dropped")])
def test_other_vocabulary_sizes(tokens: int, note: str) -> None:
    twin = stock("BertForPreTraining")
    model = BertForPreTraining(tiny_config(vocab_size=tokens).with_padded_vocab()).eval()
    fresh = model.bert.embeddings.word_embeddings.weight.detach().clone()
    notes = loaded(twin, model)
    assert len(notes) == 1
    assert note in notes[0]
    shared = min(tokens, 77)
    table = model.bert.embeddings.word_embeddings.weight
    assert torch.equal(table[:shared], twin.bert.embeddings.word_embeddings.weight[:shared])
    assert torch.equal(table[shared:], fresh[shared:])
    assert model.cls.predictions.decoder.weight is table
    ids, mask, segments = make_inputs()
    ids = ids % shared
    ours = model.masked_lm_logits(ids, mask, segments)[..., :shared]
    assert largest_difference(ours, twin(ids).prediction_logits[..., :shared]) <= 1e-5


def test_two_names_of_one_activation_match() -> None:
    twin = stock("BertForPreTraining", hidden_act="silu")
    assert loaded(twin, BertForPreTraining(tiny_config(vocab_size=77, hidden_act="swish").with_padded_vocab())) == []
    with pytest.raises(UserError, match="hidden_act is 'silu', but the model JSON says 'gelu'"):
        loaded(twin, BertForPreTraining(tiny_config(vocab_size=77).with_padded_vocab()))


def test_all_mismatches_are_listed_at_once() -> None:
    twin = stock("BertForPreTraining")
    with pytest.raises(UserError) as caught:
        loaded(twin, BertForPreTraining(tiny_config(num_hidden_layers=2, intermediate_size=40)))
    assert "num_hidden_layers is 3" in str(caught.value)
    assert "intermediate_size is 41" in str(caught.value)
    with pytest.raises(UserError, match="is post-LN, but the model is pre-LN"):
        loaded(twin, BertForPreTrainingPreLN(tiny_config()))


def test_pre_ln_with_and_without_its_extra_file() -> None:
    source = BertForPreTrainingPreLN(tiny_config().with_padded_vocab())
    spread_weights(source)
    tensors, config_dict, extra = to_hugging_face(source.state_dict(), source.config)
    model = BertForPreTrainingPreLN(source.config)
    assert start_from(model, *from_hugging_face(tensors, config_dict, extra)) == []
    assert all(
        torch.equal(model.state_dict()[name][:101], tensor[:101]) for name, tensor in source.state_dict().items()
    )
    notes = start_from(BertForPreTrainingPreLN(source.config), *from_hugging_face(tensors, config_dict))
    assert notes == [
        "the checkpoint has no pooler; it is newly initialized",
        "the checkpoint has no sentence head; it is newly initialized",
    ]


def test_a_head_that_the_model_does_not_have_is_ignored_with_a_note() -> None:
    twin = stock("BertForPreTraining")
    notes = loaded(twin, BertForPreTraining(tiny_config(vocab_size=77, sentence_head="none").with_padded_vocab()))
    assert len(notes) == 1
    assert "cls.seq_relationship.weight" in notes[0]


def test_an_unknown_weight_is_an_error() -> None:
    twin = stock("BertForPreTraining")
    state, config = from_hugging_face(twin.state_dict(), twin.config.to_dict())
    state["bert.encoder.layer.0.surprise"] = torch.zeros(1)
    del state["bert.embeddings.LayerNorm.bias"]
    with pytest.raises(UserError, match=r"(?s)missing: bert.embeddings.LayerNorm.bias.*unknown: .*surprise"):
        start_from(BertForPreTraining(tiny_config(vocab_size=77).with_padded_vocab()), state, config)
