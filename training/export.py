"""Checkpoint → Hugging Face folder, and the way back: weights, config, tokenizer and a model card."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common.console import console
from common.errors import UserError
from common.files import write_atomically
from data.tokenizer import BertTokenizer, load_tokenizer
from nvidia.config import BertConfig
from nvidia.hf_mapping import from_hugging_face, to_hugging_face
from nvidia.padded_layers import with_block_names
from nvidia.pretrained import start_from
from nvidia.pretraining import PreTrainingModel
from training.checkpoint import CheckpointFolder, TrainingState, read_state
from training.checkpoint_files import read_file
from training.zero_files import ZeroCheckpoint

WEIGHTS = "model.safetensors"
# The pooler and the next-sentence head, which the stock pre-LN class has no place for.
EXTRA_WEIGHTS = "next_sentence.safetensors"


def locate_checkpoint(path: Path) -> Path:
    """`path` itself when it is a checkpoint, or the newest sound one of the run's folder `path`."""
    if path.name in CheckpointFolder(path.parent).tags():
        return path.parent / CheckpointFolder(path.parent).choose(path.name)
    return path / CheckpointFolder(path).choose(None)


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights in fp32 under our names, from whatever ZeRO stage and layers wrote them."""
    if any(checkpoint.glob("*zero_pp_rank_*_optim_states.pt")):
        return with_block_names(ZeroCheckpoint.read(checkpoint).weights())
    saved = read_file(checkpoint / "mp_rank_00_model_states.pt")
    return with_block_names({name: tensor.float() for name, tensor in saved["module"].items()})


def export_checkpoint(checkpoint: Path, output: Path, tokenizer: Path | None, metrics: Path | None) -> TrainingState:
    """Write the Hugging Face folder `output` from one checkpoint."""
    state = read_state(checkpoint)
    config = BertConfig.from_dict(state.model_config)
    tensors, hf_config, extra = to_hugging_face(read_weights(checkpoint), config)
    output.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, output / WEIGHTS)
    if extra:
        save_tensors(extra, output / EXTRA_WEIGHTS)
    else:  # an earlier export may have left one, which belongs to other weights
        (output / EXTRA_WEIGHTS).unlink(missing_ok=True)
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        check_tokenizer(loaded, config, tokenizer)
        loaded.save(output)
        hf_config.update(bos_token_id=loaded.cls_id, eos_token_id=loaded.sep_id, pad_token_id=loaded.pad_id)
    write_atomically(output / "config.json", json.dumps(hf_config, indent=2) + "\n")
    write_atomically(output / "README.md", model_card(state, hf_config, last_validation(metrics)))
    return state


def check_tokenizer(tokenizer: BertTokenizer, config: BertConfig, path: Path) -> None:
    if tokenizer.vocab_size != config.num_tokens:
        raise UserError(
            f"{path}: has {tokenizer.vocab_size} tokens, but the checkpoint's model has {config.num_tokens}; "
            f"pass the tokenizer that the data was prepared with"
        )


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata={"format": "pt"})
    temporary.replace(path)


def load_hugging_face_weights(model: PreTrainingModel, folder: Path) -> None:
    """Begin from a Hugging Face folder's weights, and say what did not carry over; see `nvidia.pretrained`."""
    try:
        hf_config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: cannot be read as a model's configuration: {error}") from None
    tensors = read_tensors(folder / WEIGHTS)
    extra = read_tensors(folder / EXTRA_WEIGHTS) if (folder / EXTRA_WEIGHTS).is_file() else None
    try:
        notes = start_from(model, *from_hugging_face(tensors, hf_config, extra))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    for note in notes:
        console.say(f"{folder}: {note}")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from None


def last_validation(metrics: Path | None) -> dict[str, Any] | None:
    """The newest validation line of a run's metrics.jsonl."""
    if metrics is None or not metrics.is_file():
        return None
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return next((row for row in reversed(rows) if row["kind"] == "validation"), None)


def next_sentence_text(state: TrainingState, config: BertConfig) -> str:
    """Where the head is that tells whether one text follows another; "" where there is none."""
    if not config.has_sentence_head:
        return ""
    if not state.is_preln:
        return 'Its next-sentence head is where `BertForPreTraining` has it; class 0 is "B follows A".\n'
    return f"""The pooler and the next-sentence head, which that class has no place for, are in `{EXTRA_WEIGHTS}`:
the scores are `cls.seq_relationship` of tanh of `bert.pooler.dense_act` of the final state of `[CLS]`; class 0 is
"B follows A".
"""


def model_card(state: TrainingState, hf_config: dict[str, Any], validation: dict[str, Any] | None) -> str:
    config = BertConfig.from_dict(state.model_config)
    architecture = hf_config["architectures"][0]
    measured = "No validation was run."
    if validation is not None:
        measured = (
            "| step | masked-LM loss (nats) | perplexity | masked tokens right | next sentence right |\n"
            "|---|---|---|---|---|\n"
            f"| {validation['step']} | {validation['mlm_loss']:.3f} | {validation['perplexity']:.1f} | "
            f"{validation['mlm_accuracy']:.1%} | {validation['nsp_accuracy']:.1%} |"
        )
    return f"""---
library_name: transformers
pipeline_tag: fill-mask
---
# {"Pre-LN" if state.is_preln else "Post-LN"} BERT, {config.num_hidden_layers} layers of {config.hidden_size}

Loads with `{architecture}.from_pretrained` of stock transformers.

{next_sentence_text(state, config)}
## Training
{state.step:,} optimizer steps, {state.samples:,} rows and {state.tokens:,} real tokens, seed {state.seed}.
Vocabulary of {config.num_tokens:,} tokens, {config.max_position_embeddings} positions.

## Measured on the validation shards
{measured}
"""
