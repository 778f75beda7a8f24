"""Masked-token and next-sentence training on top of an encoder, in one forward pass.

B sequences, S padded length, T real tokens, M masked tokens, H hidden size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from common.errors import UserError
from nvidia.bert import BertModelBase
from nvidia.checkpointing import Checkpointing, default_chunk
from nvidia.config import BertConfig
from nvidia.cpu.cross_entropy import cross_entropy_sum
from nvidia.heads import PreTrainingHeads
from nvidia.layer_drop import branch_scales
from nvidia.layers import initialize_weights
from nvidia.self_attention import AttentionCall
from nvidia.unpadding import KnownTokens, Packing, plan_known, plan_packing, plan_with_rows, real_tokens

# In masked_lm_labels and next_sentence_label. data.stream.batches has the same constant: the model and the data do not
# import each other, and the batch format is what they agree on.
NO_LABEL = -1


class PreTrainingDetails(NamedTuple):
    """What a forward pass measured: sums and counts, additive over micro-batches and ranks. 0-dim and detached."""

    masked_lm_loss_sum: Tensor
    masked_lm_correct: Tensor
    masked_lm_count: Tensor
    next_sentence_loss_sum: Tensor
    next_sentence_correct: Tensor
    next_sentence_count: Tensor
    num_tokens: Tensor  # without padding


class PreTrainingModel(nn.Module):
    """An encoder with both heads. `forward` returns the total loss; `details` has what the last forward measured."""

    encoder_class: type[BertModelBase]

    def __init__(self, config: BertConfig, args: Any = None) -> None:
        """`args` is accepted for callers of the old signature and ignored."""
        super().__init__()
        self.bert = self.encoder_class(config, add_pooling_layer=config.has_sentence_head)
        self.cls = PreTrainingHeads(config, self.bert.embeddings.word_embeddings)
        self.details: PreTrainingDetails | None = None
        self.reset_parameters()

    @property
    def config(self) -> BertConfig:
        """The config of the encoder, which pruning changes."""
        return self.bert.config

    def reset_parameters(self) -> None:
        initialize_weights(self, self.config)

    @torch.no_grad()
    def set_decoder_bias(self, values: Tensor) -> None:
        """Set the decoder's bias to `values` [tokens], such as log frequencies: then training need not learn them."""
        bias = self.cls.predictions.bias
        assert bias is not None
        bias[: values.shape[0]] = values.to(bias)

    @torch.no_grad()
    def set_word_embeddings(self, vectors: Tensor) -> None:
        """Set the word embeddings to `vectors` [tokens, H] times initializer_range, except where a vector is zero."""
        weight = self.bert.embeddings.word_embeddings.weight
        known = torch.nonzero(vectors.any(dim=1)).squeeze(1)
        weight[known] = vectors[known].to(weight) * self.config.initializer_range

    def forward(
        self,
        batch: Sequence[Any],
        log: bool = True,
        masked_lm_total: Tensor | None = None,
        next_sentence_total: Tensor | None = None,
        tokens: KnownTokens | None = None,
    ) -> Tensor:
        """Total loss of a batch (DESIGN's six fields): mean cross entropy of masked tokens + that of labelled pairs.

        Each total replaces the number of labels of that kind in this batch as the divisor, so that the gradient of a
        global batch does not depend on how it is split into micro-batches and ranks. `tokens`: the real and the masked
        tokens, as `find_tokens` found them on the host; without them, the pass waits for the device to count both.
        `log` is accepted for old callers and ignored.
        """
        _, input_ids, input_mask, segment_ids, next_sentence_label, masked_lm_labels = batch
        mask = real_tokens(input_mask)
        packing, masked = (  # masked: [M]
            plan_with_rows(mask, masked_lm_labels != NO_LABEL) if tokens is None else plan_known(mask, tokens)
        )
        masked_labels = packing.pack(masked_lm_labels).index_select(0, masked)
        states = self.encode_rows(input_ids, segment_ids, packing, torch.cat([packing.first, masked]))
        first, predicted = states.split([packing.num_rows, masked.shape[0]])

        scores = self.cls.predictions(predicted, with_padding=True).float()  # [M, V]
        count = scores.new_full((), masked.shape[0])
        masked_loss, correct = cross_entropy_sum(scores, masked_labels, self.config.num_tokens)
        loss = masked_loss / _divisor(count, masked_lm_total)

        zero = torch.zeros_like(count)
        sentence_loss = sentence_correct = sentence_count = zero
        if self.bert.pooler is not None and self.cls.seq_relationship is not None:
            sentence_scores = self.cls.seq_relationship(self.bert.pooler(first)).float()  # [B, 2]
            sentence_labels = next_sentence_label.view(-1)
            sentence_loss = functional.cross_entropy(
                sentence_scores, sentence_labels, reduction="sum", ignore_index=NO_LABEL
            )
            sentence_count = (sentence_labels != NO_LABEL).sum().to(count)
            sentence_correct = (sentence_scores.detach().argmax(-1) == sentence_labels).sum().to(count)
            loss = loss + sentence_loss / _divisor(sentence_count, next_sentence_total)
        self.details = PreTrainingDetails(
            masked_lm_loss_sum=masked_loss.detach(),
            masked_lm_correct=correct.to(count),
            masked_lm_count=count,
            next_sentence_loss_sum=sentence_loss.detach(),
            next_sentence_correct=sentence_correct,
            next_sentence_count=sentence_count,
            num_tokens=count.new_full((), packing.num_tokens),
        )
        return loss

    def encode_rows(self, input_ids: Tensor, segment_ids: Tensor, packing: Packing, rows: Tensor | None) -> Tensor:
        """Final states [U, H] of the packed positions `rows`, or [T, H] of all."""
        embedded = self.bert.embed(packing.pack(input_ids), packing.pack(segment_ids), packing)
        return self.bert.encoder(embedded, AttentionCall(packing, rows)).last

    def masked_lm_logits(
        self, input_ids: Tensor, input_mask: Tensor, segment_ids: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Scores of all tokens of the vocabulary: [B, S, tokens] (zero on padding), or [B, P, tokens] at `positions`
        [B, P]."""
        packing = plan_packing(real_tokens(input_mask))
        states = packing.unpack(self.encode_rows(input_ids, segment_ids, packing, None))  # [B, S, H]
        if positions is not None:
            states = states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))
            return self.cls.predictions(states.flatten(0, 1)).unflatten(0, positions.shape)
        return packing.unpack(self.cls.predictions(packing.pack(states)))

    def sentence_logits(self, input_ids: Tensor, input_mask: Tensor, segment_ids: Tensor) -> Tensor:
        """[B, 2]: column 0 for "B follows A", column 1 for "B is random" (or swapped, with a SOP head)."""
        if self.bert.pooler is None or self.cls.seq_relationship is None:
            raise ValueError("this model has no sentence head (sentence_head is 'none')")
        packing = plan_packing(real_tokens(input_mask))
        first = self.encode_rows(input_ids, segment_ids, packing, packing.first)
        return self.cls.seq_relationship(self.bert.pooler(first))

    def gradient_checkpointing_enable(self, chunk_size: int | None = None) -> None:
        """Keep only the state of every `chunk_size`-th block and recompute the rest; ⌈√layers⌉ by default."""
        self.set_checkpointing(Checkpointing(layers=chunk_size or default_chunk(self.config.num_hidden_layers)))

    def gradient_checkpointing_disable(self) -> None:
        self.set_checkpointing(Checkpointing())

    def set_checkpointing(self, choice: Checkpointing) -> None:
        """Choose what the backward pass recomputes; `Checkpointing()` for nothing."""
        if choice.norm and not self.bert.pre_ln:
            raise UserError(
                "gradient checkpointing: recomputing layer norms saves nothing in a post-LN model, where their outputs "
                "are the residual stream; use a pre-LN model, or recompute something else"
            )
        if self.config.attention_backend == "jagged" and (choice.layers or choice.attention):
            raise UserError(
                "gradient checkpointing: attention_backend 'jagged' cannot be recomputed in the backward pass, because "
                "torch does not compare nested tensors; use another attention_backend, or recompute neither blocks nor "
                "attention"
            )
        self.bert.encoder.set_checkpointing(choice)

    def set_layer_drop(self, theta: float, seed: int) -> None:
        """Set progressive layer drop for the forward passes until the next call; θ = 1 drops nothing.

        `theta` is `layer_drop.keep_theta` of the step. `seed` must depend only on the seed of the run and the optimizer
        step: then all ranks, and a resumed run, drop the same blocks.
        """
        self.bert.encoder.set_branch_scales(branch_scales(self.config.num_hidden_layers, theta, seed))


def _divisor(count: Tensor, total: Tensor | None) -> Tensor:
    """`total`, or `count` without one, in the type of `count`; 1 instead of 0, where the summed loss is 0."""
    divisor = count if total is None else total.to(count)
    return torch.where(divisor > 0, divisor, torch.ones_like(divisor))
