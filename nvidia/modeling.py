"""The post-LN BERT, as first published: layer norm after each residual sum."""

from torch import Tensor

from nvidia.bert import BertModelBase, BertOutput
from nvidia.block import BertBlock
from nvidia.config import BertConfig
from nvidia.pretraining import PreTrainingDetails, PreTrainingModel
from nvidia.self_attention import AttentionCall

__all__ = ["BertConfig", "BertForPreTraining", "BertModel", "BertOutput", "PreTrainingDetails"]


class PostLNBlock(BertBlock):
    """a = LN(x + dropout(attention(x))), y = LN(a + dropout(feed_forward(a)))"""

    is_post_ln = True

    def add_attention(self, x: Tensor, call: AttentionCall, scale: float) -> Tensor:
        return self.attention.output.LayerNorm(self.add(call.select(x), self.attend(x, call), scale))

    def add_feed_forward(self, a: Tensor, scale: float) -> Tensor:
        return self.output.LayerNorm(self.add(a, self.feed_forward(a), scale))


class BertModel(BertModelBase):
    """The post-LN encoder without heads."""

    block_class = PostLNBlock


class BertForPreTraining(PreTrainingModel):
    """The post-LN encoder with the masked-token and next-sentence heads."""

    encoder_class = BertModel
