"""A layer with the interface of DeepSpeed's CUDA layer, written in torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class WrittenOut(nn.Module):
    """The parameters and the call of DeepSpeedTransformerLayer, pre-LN or post-LN."""

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
