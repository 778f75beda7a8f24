"""The pre-LN BERT: layer norm before each branch, and one after the last block."""

from torch import Tensor

from nvidia.bert import BertModelBase, BertOutput
from nvidia.block import BertBlock
from nvidia.config import BertConfig
from nvidia.layers import LayerNorm
from nvidia.pretraining import PreTrainingDetails, PreTrainingModel
from nvidia.self_attention import AttentionCall

__all__ = ["BertConfig", "BertForPreTrainingPreLN", "BertModel", "BertOutput", "PreTrainingDetails"]


class PreLNBlock(BertBlock):
    """a = x + dropout(attention(LN(x))), y = a + dropout(feed_forward(LN(a)))"""

    is_post_ln = False

    def __init__(self, config: BertConfig, layer: int) -> None:
        super().__init__(config, layer)
        has_norm = layer > 0 or config.first_attention_norm  # without it, the norm of the embeddings is the last one
        self.PreAttentionLayerNorm = LayerNorm(config) if has_norm else None
        self.PostAttentionLayerNorm = LayerNorm(config)

    def add_attention(self, x: Tensor, call: AttentionCall, scale: float) -> Tensor:
        return self.add(call.select(x), self.attend(x, call, norm=self.PreAttentionLayerNorm), scale)

    def add_feed_forward(self, a: Tensor, scale: float) -> Tensor:
        return self.add(a, self.feed_forward(a, norm=self.PostAttentionLayerNorm), scale)


class BertModel(BertModelBase):
    """The pre-LN encoder without heads."""

    block_class = PreLNBlock


class BertForPreTrainingPreLN(PreTrainingModel):
    """The pre-LN encoder with the masked-token and next-sentence heads."""

    encoder_class = BertModel
