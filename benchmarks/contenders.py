"""The contenders of train_step.py: each builds a model and gives a function that takes one optimizer step."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.batches import Batch
from benchmarks.plain_preln import PlainPreLN
from nvidia.config import BertConfig
from nvidia.interop.families import family_of
from nvidia.interop.stock_config import to_stock_config
from nvidia.modelingpreln import BertForPreTrainingPreLN

CLIP = 1.0
OPTIMIZER = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}
MODERN = Path(__file__).parents[1] / "configs" / "modernbert_base.json"

Step = Callable[[list[Batch]], float]  # runs one optimizer step and gives the last micro-batch's loss


def plain_loop(model: torch.nn.Module, loss_of: Callable[[Batch], torch.Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)

    def step(batches: list[Batch]) -> float:
        for batch in batches:
            loss = loss_of(batch) / len(batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()) * len(batches)

    return step


def ours(config: BertConfig, accumulation: int) -> Step:
    model = BertForPreTrainingPreLN(config)
    return plain_loop(model, model)


def modern(config: BertConfig, accumulation: int) -> Step:
    return ours(modern_config(config), accumulation)


def reference(config: BertConfig, accumulation: int) -> Step:
    model = PlainPreLN(config)
    model.load_state_dict(BertForPreTrainingPreLN(config).state_dict())
    return plain_loop(model, model)


def transformers_bert(config: BertConfig, accumulation: int, is_compiled: bool = False) -> Step:
    from transformers import BertConfig as StockConfig
    from transformers import BertForPreTraining

    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
            "max_position_embeddings", "hidden_dropout_prob", "attention_probs_dropout_prob")  # fmt: skip
    model = BertForPreTraining(StockConfig(**{key: getattr(config, key) for key in keys}, attn_implementation="sdpa"))
    return plain_loop(model.train(), stock_loss(torch.compile(model) if is_compiled else model))


def compiled_bert(config: BertConfig, accumulation: int) -> Step:
    return transformers_bert(config, accumulation, is_compiled=True)


def stock_modern(config: BertConfig, accumulation: int) -> Step:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = modern_config(config)
    stock = ModernBertConfig(**to_stock_config(config, family_of(config, pre_ln=True)), attn_implementation="sdpa")
    model = ModernBertForMaskedLM(stock).train()
    return plain_loop(model, stock_loss(model, has_sentences=False))


def modern_config(config: BertConfig) -> BertConfig:
    """ModernBERT with the width, depth and vocabulary of `config`."""
    base = BertConfig.from_dict(json.loads(MODERN.read_text())["bert_model_config"])
    return replace(
        base,
        vocab_size=config.vocab_size,
        unpadded_vocab_size=config.unpadded_vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=base.intermediate_size * config.hidden_size // base.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
    )


def stock_loss(model: Callable[..., Any], has_sentences: bool = True) -> Callable[[Batch], torch.Tensor]:
    """The loss of a stock model on the fields that it takes."""

    def loss_of(batch: Batch) -> torch.Tensor:
        fields = {
            "input_ids": batch.input_ids,
            "attention_mask": batch.input_mask,
            "labels": batch.masked_lm_labels.masked_fill(batch.masked_lm_labels == -1, -100),
        }
        if has_sentences:
            fields |= {"token_type_ids": batch.segment_ids, "next_sentence_label": batch.next_sentence_label}
        return model(**fields).loss

    return loss_of


def engine(config: BertConfig, accumulation: int, stage: int = 0) -> Step:
    """Ours in the engine, with the settings that make it cheap on one process (docs/performance.md)."""
    for key, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("MASTER_PORT", str(29500 + os.getpid() % 2000))
    import deepspeed

    model = BertForPreTrainingPreLN(config)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    runner, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(batches: list[Batch]) -> float:
        for batch in batches:
            loss = runner(batch)
            runner.backward(loss)
            runner.step()
        return float(loss.detach())

    return step


BUILDERS: dict[str, Callable[[BertConfig, int], Step]] = {
    "ours": ours,
    "engine": engine,
    "transformers": transformers_bert,
    "compiled": compiled_bert,
    "reference": reference,
    "modern": modern,
    "stock_modern": stock_modern,
}
STOCK = ("transformers", "compiled", "stock_modern")  # their users know nothing of our start-up
