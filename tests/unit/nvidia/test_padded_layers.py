"""The seam for DeepSpeed's CUDA layer, held with a layer of the same interface written out in torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import UserError
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.padded_layers import block_weights, use_padded_layers
from nvidia.pretraining import PreTrainingModel
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config


class WrittenOut(nn.Module):
    """Parameters and call of DeepSpeedTransformerLayer, for either order of layer norms."""

    def __init__(self, pre_ln: bool, hidden: int = 24, wide: int = 41, heads: int = 3) -> None:
        super().__init__()
        shapes = {"attn_qkv": (3 * hidden, hidden), "attn_o": (hidden, hidden), "attn_n": (hidden,),
                  "inter_": (wide, hidden), "output_": (hidden, wide), "norm_": (hidden,)}  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(f"{name}w", nn.Parameter(torch.empty(shape)))
            self.register_parameter(f"{name}b", nn.Parameter(torch.empty(shape[0])))
        self.pre_ln, self.heads = pre_ln, heads

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.get_parameter(f"{name}w"), self.get_parameter(f"{name}b"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.get_parameter(f"{name}w"), self.get_parameter(f"{name}b")
        return functional.layer_norm(x, weight.shape, weight, bias, 1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = self.norm(x, "norm_") if self.pre_ln else x
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.linear(first, "attn_qkv").chunk(3, -1)
        )
        probabilities = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask).softmax(-1)
        a = x + self.linear((probabilities @ v).transpose(1, 2).flatten(2), "attn_o")
        normed = self.norm(a, "attn_n")
        y = (a if self.pre_ln else normed) + self.linear(functional.gelu(self.linear(normed, "inter_")), "output_")
        return y if self.pre_ln else self.norm(y, "norm_")


@pytest.mark.parametrize("kind", [BertForPreTrainingPreLN, BertForPreTraining])
def test_a_padded_layer_takes_the_place_of_a_block(kind: type[PreTrainingModel]) -> None:
    model, replaced = kind(tiny_config()), kind(tiny_config())
    spread_weights(model)
    replaced.load_state_dict(model.state_dict())
    use_padded_layers(replaced, lambda: WrittenOut(model.bert.pre_ln))
    loss, expected = replaced(make_batch()), model(make_batch())
    assert largest_difference(loss, expected) <= 1e-5
    loss.backward()
    assert all(parameter.grad is not None for parameter in replaced.parameters())
    for index, block in enumerate(model.bert.encoder.layer):
        back = block_weights(replaced.bert.encoder.layer[index].layer, model.bert.pre_ln)
        assert back.keys() == block.state_dict().keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in block.state_dict().items())


def test_what_the_kernel_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="another hidden_act"):
        use_padded_layers(BertForPreTrainingPreLN(tiny_config(hidden_act="relu")), lambda: WrittenOut(True))
    model = BertForPreTrainingPreLN(tiny_config())
    use_padded_layers(model, lambda: WrittenOut(True))
    model.bert.encoder.branch_scales = (1.5, 1.0, 1.0)
    with pytest.raises(UserError, match="progressive layer drop"):
        model(make_batch())
