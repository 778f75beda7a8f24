"""What a model is: every number and choice that its weights or its outputs depend on, validated on construction."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
POSITION_TYPES = ("absolute", "relative_key", "relative_key_query", "rotary")
SENTENCE_HEADS = ("nsp", "sop", "none")
# transformers' model_type of an export; RoBERTa, XLM-RoBERTa and CamemBERT are one architecture.
EXPORT_TYPES = ("bert", "roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "modernbert")
BIAS_INITS = ("zeros", "unigram")
EMBEDDING_INITS = ("normal", "cooccurrence")
ATTENTION_BACKENDS = (AUTO, *BACKENDS)

# A description completes the sentence "expected …" of an error message.
Size = Annotated[int, Field(ge=1, le=MAX_SIZE, description="a whole number from 1 up")]
SizeOrZero = Annotated[int, Field(ge=0, le=MAX_SIZE, description="a whole number from 0 up")]
Probability = Annotated[float, Field(ge=0, lt=1, description="a number from 0 to below 1")]
Fraction = Annotated[float, Field(gt=0, lt=1, description="a number between 0 and 1")]
RopeBase = Annotated[float, Field(gt=1, le=1e12, description="a number above 1, at most 1e12")]
Flag = Annotated[bool, Field(description="true or false")]


def padded_vocab_size(size: int) -> int:
    """The smallest multiple of VOCAB_MULTIPLE that holds `size` tokens: 30522 → 30528."""
    return -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _one_of(choices: Sequence[str | None]) -> PlainValidator:
    names = [choice for choice in choices if choice is not None]

    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"one of {', '.join(names)}{nearest(str(value), names)}")
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
    type_vocab_size: SizeOrZero = 2  # 0 = no embeddings of segments
    initializer_range: Fraction = 0.02
    decoder_bias_init: Annotated[str, _one_of(BIAS_INITS)] = "zeros"  # unigram: log frequencies, which training sets
    embedding_init: Annotated[str, _one_of(EMBEDDING_INITS)] = "normal"  # cooccurrence: vectors that training sets
    unpadded_vocab_size: Size | None = None
    layer_norm_eps: Fraction = 1e-12
    pad_token_id: SizeOrZero = 0
    position_embedding_type: Annotated[str, _one_of(POSITION_TYPES)] = "absolute"
    position_offset: SizeOrZero = 0  # unused rows in front of the position table; RoBERTa has pad_token_id + 1
    rope_theta: RopeBase = 10000.0  # base of rotary positions
    local_rope_theta: RopeBase | None = None  # the base in layers with a window; None = rope_theta
    attention_window: SizeOrZero = 0  # a token sees window // 2 tokens on each side; 0 = the whole sequence
    global_attention_every: SizeOrZero = 1  # layers 0, n, 2n … see the whole sequence despite a window; 0 = none does
    qk_norm: Flag = False  # RMS norm of each head's queries and keys
    first_attention_norm: Flag = True  # false: the first pre-LN block has no norm before attention
    chunk_size_feed_forward: SizeOrZero = 0  # rows at a time; 0 = all at once
    use_bias: Flag = True  # biases of the linear layers inside the encoder
    attention_bias: Flag | None = None  # those of attention; None = use_bias
    mlp_bias: Flag | None = None  # those of the feed-forward layers; None = use_bias
    norm_bias: Flag = True
    head_bias: Flag = True  # of the dense layer in the masked-token head
    decoder_bias: Flag = True
    tie_word_embeddings: Flag = True
    sentence_head: Annotated[str, _one_of(SENTENCE_HEADS)] = "nsp"
    export_as: Annotated[str | None, _one_of((*EXPORT_TYPES, None))] = None  # None: the usual type of the model's kind
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
        for is_wrong, message in (*self._contradictions(), *self._wrong_pruned_heads()):
            if is_wrong:
                problems.add(f"bert_model_config: {message}")
        problems.raise_if_any()
        return self

    def _contradictions(self) -> list[tuple[bool, str]]:
        window, every, positions = self.attention_window, self.global_attention_every, self.position_embedding_type
        return [
            (self.hidden_size % self.num_attention_heads != 0,
             f"hidden_size is {self.hidden_size}, which is not divisible by {self.num_attention_heads} attention "
             "heads; choose num_attention_heads among its divisors"),
            (self.pad_token_id >= self.vocab_size,
             f"pad_token_id {self.pad_token_id} is past vocab_size {self.vocab_size}"),
            (self.num_tokens > self.vocab_size,
             f"unpadded_vocab_size is {self.num_tokens}, expected 1 to vocab_size ({self.vocab_size})"),
            (self.decoder_bias_init == "unigram" and not self.decoder_bias,
             "decoder_bias_init is 'unigram', but decoder_bias is false; set that to true, or remove "
             "decoder_bias_init"),
            (self.is_rotary and self.head_size % 2 != 0,
             f"rotary positions need an even head size, but hidden_size / num_attention_heads is {self.head_size}; "
             "change one of them"),
            (self.local_rope_theta is not None and not self.is_rotary,
             f"local_rope_theta is {self.local_rope_theta}, but position_embedding_type is {positions!r}; set it to "
             "'rotary', or remove local_rope_theta"),
            (self.position_offset > 0 and positions != "absolute",
             f"position_offset is {self.position_offset}, but {positions!r} positions have no table; remove it"),
            (window == 1, "attention_window is 1, where a token sees only itself; expected 2 or more"),
            (window > self.max_position_embeddings,
             f"attention_window is {window}, wider than any row (max_position_embeddings is "
             f"{self.max_position_embeddings}); choose a smaller window, or 0 for none"),
            (window > 0 and every == 1,
             f"attention_window is {window}, but with global_attention_every 1 no layer has a window; set "
             "global_attention_every to 3 (every third layer sees all) or 0 (none does)"),
            (window == 0 and every != 1,
             f"global_attention_every is {every}, but there is no attention_window; set attention_window, or remove "
             "global_attention_every"),
            (window > 0 and self.is_sparse,
             "attention_window cannot be combined with sparse_attention; remove one"),
        ]  # fmt: skip

    def _wrong_pruned_heads(self) -> Iterator[tuple[bool, str]]:
        last_layer, last_head = self.num_hidden_layers - 1, self.num_attention_heads - 1
        for layer, heads in self.pruned_heads.items():
            yield not 0 <= layer <= last_layer, f"pruned_heads names layer {layer}, expected 0 to {last_layer}"
            are_heads = set(heads) <= set(range(last_head + 1)) and len(set(heads)) == len(heads)
            expected = f"expected different heads from 0 to {last_head}"
            yield not are_heads, f"pruned_heads of layer {layer} are {list(heads)}, {expected}"
            leaves_none = are_heads and len(heads) > last_head
            yield leaves_none, f"pruned_heads leaves layer {layer} with no head; keep at least one"

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

    def with_padded_vocab(self) -> "BertConfig":
        """The same model with its table padded to a multiple, remembering how many tokens are real."""
        return replace(self, vocab_size=padded_vocab_size(self.num_tokens), unpadded_vocab_size=self.num_tokens)

    @property
    def num_tokens(self) -> int:
        """How many tokens can be predicted."""
        return self.vocab_size if self.unpadded_vocab_size is None else self.unpadded_vocab_size

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def is_rotary(self) -> bool:
        return self.position_embedding_type == "rotary"

    @property
    def is_relative(self) -> bool:
        """Whether attention has embeddings of distances, which only the plain backend computes."""
        return self.position_embedding_type in ("relative_key", "relative_key_query")

    @property
    def has_attention_bias(self) -> bool:
        return self.use_bias if self.attention_bias is None else self.attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.use_bias if self.mlp_bias is None else self.mlp_bias

    @property
    def has_sentence_head(self) -> bool:
        return self.sentence_head != "none"

    @property
    def is_sparse(self) -> bool:
        """Whether a token sees less than its whole sequence."""
        return self.sparse_attention is not None and self.sparse_attention.mode != "dense"

    def window(self, layer: int) -> int:
        """`attention_window`, or 0 in a layer that sees the whole sequence."""
        every = self.global_attention_every
        return 0 if every and layer % every == 0 else self.attention_window

    def rope_base(self, layer: int) -> float:
        """The base of rotary positions in a layer."""
        local = self.local_rope_theta
        return self.rope_theta if local is None or not self.window(layer) else local

    def num_heads(self, layer: int) -> int:
        """Heads left in a layer after pruning."""
        return self.num_attention_heads - len(self.pruned_heads.get(layer, ()))
