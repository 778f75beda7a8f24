"""The adapter for DeepSpeed's CUDA layer, tested with a layer of the same interface written in torch."""

from typing import Any

import pytest
import torch

from common.errors import UserError
from nvidia.attention.sparsity import SparseAttention
from nvidia.interop.padded_layers import use_padded_layers, with_block_names
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.pretraining import PreTrainingModel
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config
from tests.unit.nvidia.written_out import WrittenOut


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_a_padded_layer_replaces_a_block(kind: type[PreTrainingModel]) -> None:
    model, replaced = kind(tiny_config()), kind(tiny_config())
    spread_weights(model)
    replaced.load_state_dict(model.state_dict())
    use_padded_layers(replaced, lambda: WrittenOut(model.bert.pre_ln))
    loss, expected = replaced(make_batch()), model(make_batch())
    assert largest_difference(loss, expected) <= 1e-5
    loss.backward()
    assert all(parameter.grad is not None for parameter in replaced.parameters())
    back = with_block_names(replaced.state_dict())
    assert replaced.state_dict().keys() != model.state_dict().keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())
    assert with_block_names(model.state_dict()).keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"use_bias": False}, "use_bias false"),
        ({"pruned_heads": {0: (1,)}}, "pruned_heads"),
        ({"sparse_attention": SparseAttention.from_dict({"mode": "fixed"})}, "sparse attention"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"chunk_size_feed_forward": 4}, "chunk_size_feed_forward 4"),
    ],
)
def test_models_that_the_kernel_does_not_compute_are_rejected(changes: dict[str, Any], words: str) -> None:
    model = BertForPreTrainingPreLN(tiny_config(**changes))
    with pytest.raises(UserError, match=f"does not compute {words}; expected .*; change the model"):
        use_padded_layers(model, lambda: WrittenOut(True))


def test_options_that_the_kernel_does_not_have_are_rejected() -> None:
    model = BertForPreTrainingPreLN(tiny_config())
    use_padded_layers(model, lambda: WrittenOut(True))
    model.bert.encoder.branch_scales = (1.5, 1.0, 1.0)
    with pytest.raises(UserError, match="progressive layer drop"):
        model(make_batch())
