"""The stock classes that compute our models, and the names of their weights."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import UserError
from nvidia.config import BertConfig

WORDS = "bert.embeddings.word_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"
BIAS = "cls.predictions.bias"
QKV = "attention.self.qkv"  # where a stock class has one matrix for queries, keys and values
# The heads that a stock checkpoint may omit completely; anything else that is missing is an error.
HEADS = {"pooler": "bert.pooler.", "sentence head": "cls.seq_relationship.", "masked-token head": "cls.predictions."}

# Our modules of a block → those of the stock classes.
_ATTENTION_NORM = "PreAttentionLayerNorm"
_CLASSIC_LAYER = {
    **{name: name for name in ("attention.self.query", "attention.self.key", "attention.self.value")},
    **{name: name for name in ("attention.output.dense", "output.dense")},
    "intermediate.dense_act": "intermediate.dense",
}
_PRE_LN_LAYER = _CLASSIC_LAYER | {
    _ATTENTION_NORM: "attention.LayerNorm",
    "PostAttentionLayerNorm": "intermediate.LayerNorm",
}
_POST_LN_LAYER = _CLASSIC_LAYER | {name: name for name in ("attention.output.LayerNorm", "output.LayerNorm")}
_MODERN_LAYER = {
    QKV: "attn.Wqkv",
    "attention.output.dense": "attn.Wo",
    "intermediate.dense_act": "mlp.Wi",
    "output.dense": "mlp.Wo",
    _ATTENTION_NORM: "attn_norm",
    "PostAttentionLayerNorm": "mlp_norm",
}


@dataclass(frozen=True)
class Family:
    """One stock model type."""

    model_type: str
    architecture: str  # its class with a masked-token head
    root: str  # its name for the encoder
    is_pre_ln: bool
    shifts_positions: bool = False  # whether its position ids start at pad_token_id + 1
    head_is_gelu: bool = False  # whether its masked-token head computes gelu, whatever hidden_act is

    @property
    def is_modern(self) -> bool:
        return self.model_type == "modernbert"

    @property
    def has_sentence_head(self) -> bool:
        """Whether the class has parameters for the pooler and the sentence head; else they are extra tensors."""
        return self.model_type == "bert"

    @property
    def decoder_bias(self) -> str | None:
        """The decoder's name for the bias, where it is a tied copy of another parameter."""
        return None if self.is_modern else f"{self.head}.decoder.bias"

    @property
    def head(self) -> str:
        return {"bert": "cls.predictions", "modernbert": "head"}.get(self.model_type, "lm_head")

    @property
    def decoder(self) -> str:
        return "decoder.weight" if self.is_modern else f"{self.head}.decoder.weight"


def _roberta(model_type: str, architecture: str, root: str = "roberta", is_pre_ln: bool = False) -> Family:
    return Family(model_type, architecture, root, is_pre_ln, shifts_positions=True, head_is_gelu=True)


FAMILIES = {
    family.model_type: family
    for family in (
        Family("bert", "BertForPreTraining", "bert", is_pre_ln=False),
        _roberta("roberta", "RobertaForMaskedLM"),
        _roberta("xlm-roberta", "XLMRobertaForMaskedLM"),
        _roberta("camembert", "CamembertForMaskedLM"),
        _roberta("roberta-prelayernorm", "RobertaPreLayerNormForMaskedLM", "roberta_prelayernorm", is_pre_ln=True),
        Family("modernbert", "ModernBertForMaskedLM", "model", is_pre_ln=True),
    )
}


def family_of_type(model_type: object) -> Family:
    """The family of config.json's model_type."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        kinds = {is_pre_ln: [name for name, family in FAMILIES.items() if family.is_pre_ln == is_pre_ln]
                 for is_pre_ln in (False, True)}  # fmt: skip
        raise UserError(
            f"config.json: model_type is {model_type!r}, expected one of {', '.join(kinds[False])} (post-LN), "
            f"{', '.join(kinds[True])} (pre-LN); give a checkpoint of one of these architectures"
        )
    return FAMILIES[model_type]


def family_of(config: BertConfig, pre_ln: bool) -> Family:
    """The family that a model is exported to: `export_as`, or the usual one of its kind."""
    if config.export_as is not None:
        return FAMILIES[config.export_as]
    return FAMILIES[("modernbert" if config.is_rotary else "roberta-prelayernorm") if pre_ln else "bert"]


def stock_names(config: BertConfig, family: Family) -> dict[str, str]:
    """Our names → those of the stock class, for all weights that it has, without tied copies."""
    names = {WORDS: f"{family.root}.embeddings.{'tok' if family.is_modern else 'word'}_embeddings.weight"}
    if not family.is_modern:
        for kind in ("position", "token_type"):
            names[f"bert.embeddings.{kind}_embeddings.weight"] = f"{family.root}.embeddings.{kind}_embeddings.weight"
    for ours, theirs in _modules(config, family):
        names[f"{ours}.weight"] = f"{theirs}.weight"
        if _has_bias(ours, config):
            names[f"{ours}.bias"] = f"{theirs}.bias"
    if config.decoder_bias:
        names[BIAS] = "decoder.bias" if family.is_modern else f"{family.head}.bias"
    if not config.tie_word_embeddings:
        names[DECODER] = family.decoder
    return names


def _modules(config: BertConfig, family: Family) -> Iterator[tuple[str, str]]:
    """Our modules that have a weight, and the stock ones."""
    root, head, is_modern = family.root, family.head, family.is_modern
    yield "bert.embeddings.LayerNorm", f"{root}.embeddings.{'norm' if is_modern else 'LayerNorm'}"
    for index in range(config.num_hidden_layers):
        ours = f"bert.encoder.layer.{index}"
        if is_modern:
            names, theirs = _MODERN_LAYER, f"{root}.layers.{index}"
        else:
            names, theirs = _PRE_LN_LAYER if family.is_pre_ln else _POST_LN_LAYER, f"{root}.encoder.layer.{index}"
        for our_name, their_name in names.items():
            if not (is_modern and index == 0 and our_name == _ATTENTION_NORM):  # its first block has no such norm
                yield f"{ours}.{our_name}", f"{theirs}.{their_name}"
    if family.is_pre_ln:
        yield "bert.encoder.FinalLayerNorm", f"{root}.{'final_norm' if is_modern else 'LayerNorm'}"
    transform = f"{head}.transform" if family.has_sentence_head else head
    norm = "norm" if is_modern else "LayerNorm" if family.has_sentence_head else "layer_norm"
    yield "cls.predictions.transform.dense_act", f"{transform}.dense"
    yield "cls.predictions.transform.LayerNorm", f"{transform}.{norm}"
    if family.has_sentence_head and config.has_sentence_head:
        yield "bert.pooler.dense_act", f"{root}.pooler.dense"
        yield "cls.seq_relationship", "cls.seq_relationship"


def _has_bias(module: str, config: BertConfig) -> bool:
    if module.endswith("LayerNorm"):
        return config.norm_bias
    if module.startswith("bert.encoder."):
        return config.has_attention_bias if ".attention." in module else config.has_mlp_bias
    return config.head_bias if module.startswith("cls.predictions.") else True
