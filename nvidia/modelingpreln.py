"""The pre-LN BERT: layer norm before each branch, and one after the last block."""

from nvidia.bert import BertModelBase, BertOutput
from nvidia.config import BertConfig
from nvidia.pretraining import PreTrainingDetails, PreTrainingModel

__all__ = ["BertConfig", "BertForPreTrainingPreLN", "BertModel", "BertOutput", "PreTrainingDetails"]


class BertModel(BertModelBase):
    """The pre-LN encoder on its own."""

    pre_ln = True


class BertForPreTrainingPreLN(PreTrainingModel):
    """The pre-LN encoder with the masked-token and next-sentence heads."""

    encoder_class = BertModel
