"""The encoder without heads: padded batch in, states out, with the options that users of BERT know.

B sequences, S padded length, T real tokens, U used tokens, H hidden size, A heads.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.errors import UserError
from nvidia.block import BertBlock
from nvidia.config import BertConfig
from nvidia.encoder import BertEncoder
from nvidia.heads import BertPooler
from nvidia.layers import BertEmbeddings, initialize_weights
from nvidia.self_attention import AttentionCall
from nvidia.unpadding import Packing, plan_packing, real_tokens


class BertOutput(NamedTuple):
    """What the encoder returns. Padded positions of the states are zero."""

    last_hidden_state: Tensor  # [B, S, H]
    pooled: Tensor | None  # [B, H]
    hidden_states: tuple[Tensor, ...]  # each [B, S, H], the embeddings first; empty unless asked for
    attentions: tuple[Tensor, ...]  # each [B, A, S, S]; empty unless asked for


class BertModelBase(nn.Module):
    """Embeddings, encoder and pooler. The kind of block distinguishes the pre-LN from the post-LN model."""

    block_class: type[BertBlock]

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__()
        self.config = config
        if not config.first_attention_norm and not self.pre_ln:
            raise UserError(
                "bert_model_config: first_attention_norm is false, but a post-LN block has no norm before attention; "
                "remove it, or use the pre-LN model"
            )
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config, self.block_class, has_final_norm=self.pre_ln)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        initialize_weights(self, config)

    @property
    def pre_ln(self) -> bool:
        return not self.block_class.is_post_ln

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> BertOutput:
        """ids [B, S] or `inputs_embeds` [B, S, H]; `head_mask` [A] or [layers, A]; the rest [B, S]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected exactly one of input_ids and inputs_embeds")
        words = input_ids if inputs_embeds is None else inputs_embeds
        assert words is not None
        if attention_mask is None:
            attention_mask = torch.ones(words.shape[:2], dtype=torch.bool, device=words.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
        packing = plan_packing(real_tokens(attention_mask))
        if position_ids is not None:
            position_ids = packing.pack(position_ids.expand(words.shape[:2]))
        embedded = self.embed(packing.pack(words), packing.pack(token_type_ids), packing, position_ids)
        probabilities: list[Tensor] | None = [] if output_attentions else None
        if head_mask is not None:
            head_mask = head_mask.expand(self.config.num_hidden_layers, head_mask.shape[-1])  # [layers, A]
        call = AttentionCall(packing, None, head_mask, probabilities, position_ids)
        output = self.encoder(embedded, call, return_states=output_hidden_states)
        return BertOutput(
            packing.unpack(output.last),
            self.pooler(output.last.index_select(0, packing.first)) if self.pooler is not None else None,
            tuple(packing.unpack(state) for state in output.states),
            tuple(probabilities or ()),
        )

    def embed(self, words: Tensor, segments: Tensor, packing: Packing, position_ids: Tensor | None = None) -> Tensor:
        """[T] or [T, H] → [T, H]; raises UserError if rows are longer than the position table."""
        limit = self.config.max_position_embeddings
        if packing.row_length > limit and position_ids is None:
            raise UserError(
                f"a batch is {packing.row_length} tokens wide, but max_position_embeddings is {limit}; "
                "raise it in the model JSON or shorten the sequences"
            )
        return self.embeddings(words, segments, packing, position_ids)

    def prune_heads(self, heads_to_prune: dict[int, list[int]]) -> None:
        """Remove heads, numbered as in the unpruned model, and their weights; the config records which."""
        pruned = {layer: set(heads) for layer, heads in self.config.pruned_heads.items()}
        for layer, heads in heads_to_prune.items():
            pruned.setdefault(layer, set()).update(heads)
        config = replace(self.config, pruned_heads={layer: tuple(sorted(heads)) for layer, heads in pruned.items()})
        for layer in heads_to_prune:
            before = self.config.pruned_heads.get(layer, ())
            block = self.encoder.layer[layer]
            assert isinstance(block, BertBlock)
            block.attention.prune(before, config.pruned_heads[layer], config)
        self.config = config
