"""What a model is: every number and choice that its weights or its outputs depend on, validated on construction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, replace
from functools import wraps
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from common.errors import Problems, UserError, nearest, shortened
from nvidia.attention.registry import AUTO, BACKENDS
from nvidia.attention.sparsity import SparseAttention

VOCAB_MULTIPLE = 8  # tensor cores want matrix sizes in multiples of 8
OLD_VOCAB_KEY = "vocab_size_or_config_json_file"
MAX_SIZE = 2**31 - 1  # the largest size of a tensor on every device

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "swish", "silu", "tanh", "geglu", "swiglu")
POSITION_TYPES = ("absolute", "relative_key", "relative_key_query")
SENTENCE_HEADS = ("nsp", "sop", "none")
ATTENTION_BACKENDS = (AUTO, *BACKENDS)

# A description completes the sentence "expected …" of an error message.
Size = Annotated[int, Field(ge=1, le=MAX_SIZE, description="a whole number from 1 up")]
SizeOrZero = Annotated[int, Field(ge=0, le=MAX_SIZE, description="a whole number from 0 up")]
Probability = Annotated[float, Field(ge=0, lt=1, description="a number from 0 to below 1")]
Fraction = Annotated[float, Field(gt=0, lt=1, description="a number between 0 and 1")]
Flag = Annotated[bool, Field(description="true or false")]


def padded_vocab_size(size: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """The smallest multiple of `multiple` that holds `size` tokens: 30522 → 30528."""
    return -(-size // multiple) * multiple


def _one_of(choices: Sequence[str]) -> PlainValidator:
    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}{nearest(str(value), choices)}")
        return value

    return PlainValidator(check)


def _read_pruned_heads(value: Any) -> dict[int, tuple[int, ...]]:
    """JSON has no integer keys: {"3": [0, 5]} → {3: (0, 5)}."""
    try:
        return {int(layer): tuple(sorted(int(head) for head in heads)) for layer, heads in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError('lists of heads by layer, as in {"3": [0, 5]}') from None


def _read_sparse_attention(value: Any) -> Any:
    return SparseAttention.from_dict(value) if isinstance(value, Mapping) else value


T = TypeVar("T")


def _raises_user_errors(cls: type[T]) -> type[T]:
    """Class decorator: invalid values raise one UserError that lists all problems instead of a ValidationError."""
    construct: Callable[..., None] = cls.__init__

    @wraps(construct)
    def __init__(self: T, /, *args: Any, **values: Any) -> None:
        try:
            construct(self, *args, **values)
        except ValidationError as error:
            problems = Problems()
            for detail in error.errors():
                for message in _describe(detail, cls.__pydantic_fields__):  # type: ignore[attr-defined]
                    problems.add(message)
            problems.raise_if_any()

    cls.__init__ = __init__  # type: ignore[assignment,method-assign]
    return cls


def _describe(detail: Any, known: Mapping[str, Any]) -> Sequence[str]:
    """One of pydantic's errors as messages for people."""
    key, cause = str(detail["loc"][0]) if detail["loc"] else "", detail.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return cause.parts
    if detail["type"] == "unexpected_keyword_argument":
        hint = nearest(key, known, otherwise="; expected one of those in docs/configuration.md; remove it")
        return [f"bert_model_config: unknown key {key!r}{hint}"]
    if detail["type"] == "missing":  # only vocab_size has no default
        return [f"bert_model_config: {key} is missing; give the number of tokens of the tokenizer"]
    expected = known[key].description if cause is None else cause
    return [f"bert_model_config: {key} is {shortened(detail['input'])}, expected {expected}"]


@_raises_user_errors
@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class BertConfig:
    """The model's shape and options. The defaults are BERT-base; keys are those of the model JSON.

    `vocab_size` is the number of rows of the embedding table. If the table was padded, `unpadded_vocab_size` is the
    number of tokens: rows past it are never predicted and are left out of an export.
    """

    vocab_size: Size
    hidden_size: Size = 768
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    intermediate_size: Size = 3072
    hidden_act: Annotated[str, _one_of(ACTIVATIONS)] = "gelu"
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    initializer_range: Fraction = 0.02
    unpadded_vocab_size: Size | None = None
    layer_norm_eps: Fraction = 1e-12
    pad_token_id: SizeOrZero = 0
    position_embedding_type: Annotated[str, _one_of(POSITION_TYPES)] = "absolute"
    chunk_size_feed_forward: SizeOrZero = 0  # rows at a time; 0 = all at once
    use_bias: Flag = True  # biases of the linear layers inside the encoder
    tie_word_embeddings: Flag = True
    sentence_head: Annotated[str, _one_of(SENTENCE_HEADS)] = "nsp"
    attention_backend: Annotated[str, _one_of(ATTENTION_BACKENDS)] = AUTO
    pruned_heads: Annotated[Mapping[int, tuple[int, ...]], PlainValidator(_read_pruned_heads)] = field(
        default_factory=dict
    )
    sparse_attention: Annotated[
        SparseAttention | None, BeforeValidator(_read_sparse_attention), Field(description="a mapping with a mode")
    ] = None

    @model_validator(mode="after")
    def _check_relations(self) -> "BertConfig":
        """Values that are each valid but do not fit together."""
        problems = Problems()
        if self.hidden_size % self.num_attention_heads:
            problems.add(
                f"bert_model_config: hidden_size is {self.hidden_size}, which is not divisible by "
                f"{self.num_attention_heads} attention heads; choose num_attention_heads among its divisors"
            )
        if self.pad_token_id >= self.vocab_size:
            problems.add(f"bert_model_config: pad_token_id {self.pad_token_id} is past vocab_size {self.vocab_size}")
        if self.num_tokens > self.vocab_size:
            problems.add(
                f"bert_model_config: unpadded_vocab_size is {self.num_tokens}, expected 1 to vocab_size "
                f"({self.vocab_size})"
            )
        for layer, heads in self.pruned_heads.items():
            self._check_pruned_heads(layer, heads, problems)
        problems.raise_if_any()
        return self

    def _check_pruned_heads(self, layer: int, heads: tuple[int, ...], problems: Problems) -> None:
        last_layer, last_head = self.num_hidden_layers - 1, self.num_attention_heads - 1
        if not 0 <= layer <= last_layer:
            problems.add(f"bert_model_config: pruned_heads names layer {layer}, expected 0 to {last_layer}")
        if any(not 0 <= head <= last_head for head in heads) or len(set(heads)) != len(heads):
            problems.add(
                f"bert_model_config: pruned_heads of layer {layer} are {list(heads)}, expected different heads from 0 "
                f"to {last_head}"
            )
        elif len(heads) > last_head:
            problems.add(f"bert_model_config: pruned_heads leaves layer {layer} with no head; keep at least one")

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> "BertConfig":
        """Build from a model JSON's `bert_model_config`; the old name of `vocab_size` is accepted."""
        if not isinstance(mapping, Mapping):
            raise UserError(f"bert_model_config: found {mapping!r}, expected an object {{…}} with the model's sizes")
        values = dict(mapping)
        problems = Problems()
        if OLD_VOCAB_KEY in values:
            old = values.pop(OLD_VOCAB_KEY)
            if values.setdefault("vocab_size", old) != old:
                problems.add(
                    f"bert_model_config has both vocab_size ({values['vocab_size']}) and its old name "
                    f"{OLD_VOCAB_KEY} ({old}), and they differ; keep one"
                )
        config = problems.attempt(lambda: cls(**values))
        problems.raise_if_any()
        assert config is not None
        return config

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
