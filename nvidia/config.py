"""What a model is: every number and choice that its weights or its outputs depend on, checked when it is made."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from common.errors import Problems, UserError, nearest, shortened
from nvidia.attention.registry import AUTO, BACKENDS
from nvidia.attention.sparsity import SparseAttention

VOCAB_MULTIPLE = 8  # tensor cores want matrix sizes in multiples of 8
OLD_VOCAB_KEY = "vocab_size_or_config_json_file"

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "swish", "silu", "tanh", "geglu", "swiglu")
POSITION_TYPES = ("absolute", "relative_key", "relative_key_query")
SENTENCE_HEADS = ("nsp", "sop", "none")
ATTENTION_BACKENDS = (AUTO, *BACKENDS)


def padded_vocab_size(size: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """The smallest multiple of `multiple` that holds `size` tokens: 30522 → 30528."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class BertConfig:
    """The model's shape and options. The defaults are BERT-base; keys are those of the model JSON.

    `vocab_size` is the number of rows of the embedding table. Where the table was padded, `unpadded_vocab_size` is the
    number of tokens: rows past it are never predicted and are left out of an export.
    """

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    unpadded_vocab_size: int | None = None
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    position_embedding_type: str = "absolute"
    chunk_size_feed_forward: int = 0  # rows at a time; 0 = all at once
    use_bias: bool = True  # biases of the linear layers inside the encoder
    tie_word_embeddings: bool = True
    sentence_head: str = "nsp"
    attention_backend: str = "auto"
    pruned_heads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    sparse_attention: SparseAttention | None = None

    def __post_init__(self) -> None:
        check_config(self)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "BertConfig":
        """Build from a model JSON's `bert_model_config`; takes the old name of `vocab_size` too."""
        problems = Problems()
        if not isinstance(mapping, Mapping):
            raise UserError(f"bert_model_config: found {mapping!r}, expected an object {{…}} with the model's sizes")
        values = dict(mapping)
        if OLD_VOCAB_KEY in values:
            old = values.pop(OLD_VOCAB_KEY)
            if values.setdefault("vocab_size", old) != old:
                problems.add(
                    f"bert_model_config has both vocab_size ({values['vocab_size']}) and its old name "
                    f"{OLD_VOCAB_KEY} ({old}), and they differ; keep one"
                )
        known = [item.name for item in fields(cls)]
        for key in [key for key in values if key not in known]:
            hint = nearest(key, known, otherwise="; expected one of those in docs/configuration.md; remove it")
            problems.add(f"bert_model_config: unknown key {key!r}{hint}")
            del values[key]
        if "vocab_size" not in values:
            problems.add("bert_model_config: vocab_size is missing; give the number of tokens of the tokenizer")
        for key, read in (("pruned_heads", _read_pruned_heads), ("sparse_attention", SparseAttention.from_dict)):
            if isinstance(values.get(key), Mapping):
                values[key] = problems.attempt(partial(read, values[key]))
        if problems.messages:  # the other values are judged too, each by itself
            _check_values({"vocab_size": 1, **_DEFAULTS, **values}, problems)
        problems.raise_if_any()
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold and `from_dict` takes back."""
        values = asdict(self)
        values["pruned_heads"] = {str(layer): list(heads) for layer, heads in self.pruned_heads.items()}
        values["sparse_attention"] = self.sparse_attention.to_dict() if self.sparse_attention else None
        return values

    def with_padded_vocab(self, multiple: int = VOCAB_MULTIPLE) -> "BertConfig":
        """The same model with its table padded to a multiple, remembering how many tokens are real."""
        return replace(
            self, vocab_size=padded_vocab_size(self.num_tokens, multiple), unpadded_vocab_size=self.num_tokens
        )

    @property
    def num_tokens(self) -> int:
        """How many tokens can be predicted."""
        return self.vocab_size if self.unpadded_vocab_size is None else self.unpadded_vocab_size

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_sentence_head(self) -> bool:
        return self.sentence_head != "none"

    @property
    def is_sparse(self) -> bool:
        """Whether a token sees less than its whole sequence."""
        return self.sparse_attention is not None and self.sparse_attention.mode != "dense"

    def num_heads(self, layer: int) -> int:
        """Heads left in a layer after pruning."""
        return self.num_attention_heads - len(self.pruned_heads.get(layer, ()))


def _read_pruned_heads(mapping: Mapping[Any, Any]) -> dict[int, tuple[int, ...]]:
    """JSON has no integer keys: {"3": [0, 5]} → {3: (0, 5)}."""
    try:
        return {int(layer): tuple(sorted(int(head) for head in heads)) for layer, heads in mapping.items()}
    except (TypeError, ValueError):
        raise UserError(
            f'bert_model_config: pruned_heads is {mapping!r}, expected lists of heads by layer, as in {{"3": [0, 5]}}'
        ) from None


_WHOLE_NUMBERS = {  # key → the least value
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 1,
    "type_vocab_size": 1,
    "pad_token_id": 0,
    "chunk_size_feed_forward": 0,
}
_DEFAULTS = {item.name: item.default for item in fields(BertConfig) if item.default is not MISSING}
_LARGEST = 2**31 - 1  # what a tensor's size can be on every device
_CHOICES = {
    "hidden_act": ACTIVATIONS,
    "position_embedding_type": POSITION_TYPES,
    "sentence_head": SENTENCE_HEADS,
    "attention_backend": ATTENTION_BACKENDS,
}


def check_config(config: BertConfig) -> None:
    """Raise one UserError that lists everything wrong with `config`."""
    problems = Problems()
    _check_values(vars(config), problems)
    problems.raise_if_any()
    _check_relations(config, problems)
    problems.raise_if_any()


def _check_values(values: Mapping[str, Any], problems: Problems) -> None:
    """Each by itself."""
    for key, least in _WHOLE_NUMBERS.items():
        value = values[key]
        if type(value) is not int or not least <= value <= _LARGEST:
            problems.add(f"bert_model_config: {key} is {shortened(value)}, expected a whole number from {least} up")
    for key, choices in _CHOICES.items():
        value = values[key]
        if value not in choices:
            problems.add(
                f"bert_model_config: {key} is {value!r}, expected one of {', '.join(choices)}"
                f"{nearest(str(value), choices)}"
            )
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        value = values[key]
        if not _is_number(value) or not 0 <= value < 1:
            problems.add(f"bert_model_config: {key} is {value!r}, expected a number from 0 to below 1")
    for key in ("initializer_range", "layer_norm_eps"):
        value = values[key]
        if not _is_number(value) or not 0 < value < 1:
            problems.add(f"bert_model_config: {key} is {value!r}, expected a number between 0 and 1")
    for key in ("use_bias", "tie_word_embeddings"):
        if type(values[key]) is not bool:
            problems.add(f"bert_model_config: {key} is {values[key]!r}, expected true or false")


def _check_relations(config: BertConfig, problems: Problems) -> None:
    """Values that are each well-formed but do not fit together."""
    if config.hidden_size % config.num_attention_heads:
        problems.add(
            f"bert_model_config: hidden_size is {config.hidden_size}, which {config.num_attention_heads} attention "
            "heads do not divide; choose num_attention_heads among its divisors"
        )
    if config.pad_token_id >= config.vocab_size:
        problems.add(f"bert_model_config: pad_token_id {config.pad_token_id} is past vocab_size {config.vocab_size}")
    tokens = config.unpadded_vocab_size
    if tokens is not None and (type(tokens) is not int or not 1 <= tokens <= config.vocab_size):
        problems.add(
            f"bert_model_config: unpadded_vocab_size is {tokens!r}, expected 1 to vocab_size ({config.vocab_size})"
        )
    if config.sparse_attention is not None and not isinstance(config.sparse_attention, SparseAttention):
        problems.add(
            f"bert_model_config: sparse_attention is {config.sparse_attention!r}, expected a mapping with a mode"
        )
    if not isinstance(config.pruned_heads, Mapping):
        problems.add(
            f"bert_model_config: pruned_heads is {shortened(config.pruned_heads)}, expected lists of heads by layer, "
            f'as in {{"3": [0, 5]}}'
        )
        return
    for layer, heads in config.pruned_heads.items():
        if not 0 <= layer < config.num_hidden_layers:
            problems.add(f"bert_model_config: pruned_heads names layer {layer}, but layers are 0 … "
                         f"{config.num_hidden_layers - 1}")  # fmt: skip
        if any(not 0 <= head < config.num_attention_heads for head in heads) or len(set(heads)) != len(heads):
            problems.add(f"bert_model_config: pruned_heads of layer {layer} are {list(heads)}, expected different "
                         f"heads from 0 to {config.num_attention_heads - 1}")  # fmt: skip
        elif len(heads) >= config.num_attention_heads:
            problems.add(f"bert_model_config: pruned_heads leaves layer {layer} with no head; keep at least one")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
