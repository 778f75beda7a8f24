"""The post-LN BERT, as first published: layer norm after each residual sum."""

from nvidia.bert import BertModelBase, BertOutput
from nvidia.config import BertConfig
from nvidia.pretraining import PreTrainingDetails, PreTrainingModel

__all__ = ["BertConfig", "BertForPreTraining", "BertModel", "BertOutput", "PreTrainingDetails"]


class BertModel(BertModelBase):
    """The post-LN encoder on its own."""

    pre_ln = False


class BertForPreTraining(PreTrainingModel):
    """The post-LN encoder with the masked-token and next-sentence heads."""

    encoder_class = BertModel
