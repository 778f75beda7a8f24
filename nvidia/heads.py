"""The heads on the encoder's states: the pooler, the masked-token head and the sentence head.

N rows, H hidden size, V rows of the embedding table.
"""

from torch import Tensor, nn

from nvidia.activations import ungated
from nvidia.config import BertConfig
from nvidia.cpu.linear import linear
from nvidia.layers import LayerNorm, LinearActivation


class BertPooler(nn.Module):
    """tanh(W·h) of the first token of each sequence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense_act = LinearActivation(config.hidden_size, config.hidden_size, "tanh")

    def forward(self, first_tokens: Tensor) -> Tensor:
        return self.dense_act(first_tokens)


class PredictionTransform(nn.Module):
    """dense → activation → layer norm"""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense_act = LinearActivation(
            config.hidden_size, config.hidden_size, ungated(config.hidden_act), bias=config.head_bias
        )
        self.LayerNorm = LayerNorm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dense_act(x))


class Decoder(nn.Linear):
    """Scores against the word embeddings. The bias is a parameter of `PredictionHead`, where checkpoints have it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        return linear(x, self.weight, bias)


class PredictionHead(nn.Module):
    """Scores of all tokens for the given rows; padding rows of the embedding table get none."""

    def __init__(self, config: BertConfig, word_embeddings: nn.Embedding) -> None:
        super().__init__()
        self.transform = PredictionTransform(config)
        self.decoder = Decoder(config)
        if config.tie_word_embeddings:
            self.decoder.weight = word_embeddings.weight
        self.bias = nn.Parameter(word_embeddings.weight.new_zeros(config.vocab_size)) if config.decoder_bias else None
        self.num_tokens = config.num_tokens

    def forward(self, x: Tensor, with_padding: bool = False) -> Tensor:
        """[N, H] → [N, tokens], or [N, V]: the backward pass of a part of the scores would copy its gradient."""
        scores = self.decoder(self.transform(x), self.bias)
        return scores if with_padding else scores.narrow(1, 0, self.num_tokens)


class PreTrainingHeads(nn.Module):
    """Both heads, under the names that checkpoints use."""

    def __init__(self, config: BertConfig, word_embeddings: nn.Embedding) -> None:
        super().__init__()
        self.predictions = PredictionHead(config, word_embeddings)
        self.seq_relationship = nn.Linear(config.hidden_size, 2) if config.has_sentence_head else None
