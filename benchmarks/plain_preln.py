"""A pre-LN BERT in plain PyTorch: padded, one operation after the other, with the head on every position.

The tests hold the real model against it, and the benchmark shows what the plain way costs. Parameter names are the
contract's, so either model loads the other's weights.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nvidia.config import BertConfig


class Holder(nn.Module):
    """A container of modules, for the names in the state dict."""

    def __init__(self, /, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class PlainLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden, wide, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        projections = {name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")}
        self.attention = Holder(self=Holder(**projections), output=Holder(dense=nn.Linear(hidden, hidden)))
        self.PreAttentionLayerNorm = nn.LayerNorm(hidden, eps=eps)
        self.PostAttentionLayerNorm = nn.LayerNorm(hidden, eps=eps)
        self.intermediate = Holder(dense_act=nn.Linear(hidden, wide))
        self.output = Holder(dense=nn.Linear(wide, hidden))
        self.num_heads = config.num_attention_heads
        self.attention_dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, hidden_keys: Tensor) -> Tensor:
        x = x + self.dropout(self.attention.output.dense(self.attend(self.PreAttentionLayerNorm(x), hidden_keys)))
        wide = functional.gelu(self.intermediate.dense_act(self.PostAttentionLayerNorm(x)))
        return x + self.dropout(self.output.dense(wide))

    def attend(self, x: Tensor, hidden_keys: Tensor) -> Tensor:
        own = self.attention.self
        q, k, v = (
            part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (own.query, own.key, own.value)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        probabilities = scores.masked_fill(hidden_keys, float("-inf")).softmax(-1)
        return (self.attention_dropout(probabilities) @ v).transpose(1, 2).flatten(2)


class PlainPreLN(nn.Module):
    """`forward(batch)` returns the total loss; `logits` the scores of every position and of the sentence pair."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.layer_norm_eps
        tables = {
            "word_embeddings": nn.Embedding(config.vocab_size, hidden),
            "position_embeddings": nn.Embedding(config.max_position_embeddings, hidden),
            "token_type_embeddings": nn.Embedding(config.type_vocab_size, hidden),
        }
        self.bert = Holder(
            embeddings=Holder(**tables, LayerNorm=nn.LayerNorm(hidden, eps=eps)),
            encoder=Holder(
                layer=nn.ModuleList(PlainLayer(config) for _ in range(config.num_hidden_layers)),
                FinalLayerNorm=nn.LayerNorm(hidden, eps=eps),
            ),
            pooler=Holder(dense_act=nn.Linear(hidden, hidden)),
        )
        transform = Holder(dense_act=nn.Linear(hidden, hidden), LayerNorm=nn.LayerNorm(hidden, eps=eps))
        decoder = nn.Linear(hidden, config.vocab_size, bias=False)
        decoder.weight = tables["word_embeddings"].weight
        self.cls = Holder(
            predictions=Holder(transform=transform, decoder=decoder), seq_relationship=nn.Linear(hidden, 2)
        )
        self.cls.predictions.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def logits(self, input_ids: Tensor, input_mask: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
        tables = self.bert.embeddings
        x = tables.word_embeddings(input_ids) + tables.token_type_embeddings(segment_ids)
        x = x + tables.position_embeddings(torch.arange(input_ids.shape[1]))
        x = self.dropout(tables.LayerNorm(x))
        for layer in self.bert.encoder.layer:
            x = layer(x, ~input_mask.bool()[:, None, None, :])
        x = self.bert.encoder.FinalLayerNorm(x)
        head = self.cls.predictions
        scores = head.decoder(head.transform.LayerNorm(functional.gelu(head.transform.dense_act(x)))) + head.bias
        return scores, self.cls.seq_relationship(torch.tanh(self.bert.pooler.dense_act(x[:, 0])))

    def forward(self, batch: tuple[Any, ...]) -> Tensor:
        _, ids, mask, segments, sentence, labels = batch
        scores, relation = self.logits(ids, mask, segments)
        scores = scores[..., : self.config.num_tokens]
        masked = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-1)
        return masked + functional.cross_entropy(relation, sentence, ignore_index=-1)
