"""Checkpoint → Hugging Face folder, and the way back: weights, config, tokenizer and a model card."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from common.console import console
from common.errors import Problems, UserError, describe_system_error
from common.files import check_folder_to_write, give_usual_mode, write_atomically
from data.tokenizer import TOKENIZER_FILES, BertTokenizer, load_tokenizer
from nvidia.config import BertConfig
from nvidia.interop.hugging_face import from_hugging_face, to_hugging_face
from nvidia.interop.pretrained import start_from
from nvidia.padded_layers import with_block_names
from nvidia.pretraining import PreTrainingModel
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.reshard import ZeroCheckpoint
from training.checkpoints.state import TrainingState, read_state
from training.engine.checkpoint_files import read_file
from training.inputs.data_fit import PAIRS
from training.metrics.reader import last_validation

WEIGHTS = "model.safetensors"
# The pooler and the next-sentence head, which the stock pre-LN class has no place for.
EXTRA_WEIGHTS = "next_sentence.safetensors"
MARK = {"written_by": "export_hf"}  # among the weights' metadata: this file and those beside it may be written anew
CARD_HEADING = "## Measured on the validation shards"
WRITE_AGAIN = (
    "expected a model in Hugging Face's layout; copy the folder again from where it came, or write it with "
    "scripts/export_hf.py"
)


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


def export_checkpoint(
    checkpoint: Path, output: Path, tokenizer: BertTokenizer | None, metrics: Path | None, flag: str = "--output"
) -> TrainingState:
    """Write the Hugging Face folder `output`, which `flag` named, from one checkpoint.

    Everything is checked before the first file.
    """
    state = read_state(checkpoint)
    config = BertConfig.from_dict(state.model_config)
    problems = Problems()
    check_export_folder(output, flag, problems)
    problems.raise_if_any()
    if tokenizer is not None:
        check_tokenizer(tokenizer, state, "bert_token_file")
        # What the folder pads with: a pre-LN model's positions are numbered from there on.
        config = replace(config, pad_token_id=tokenizer.pad_id)
    validation = last_validation(metrics)
    tensors, hf_config, extra = to_hugging_face(read_weights(checkpoint), config)
    output.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, output / WEIGHTS)
    # An earlier export may have left what belongs to other weights.
    stale = ([] if extra else [EXTRA_WEIGHTS]) + ([] if tokenizer is not None else list(TOKENIZER_FILES))
    for name in stale:
        (output / name).unlink(missing_ok=True)
    if extra:
        save_tensors(extra, output / EXTRA_WEIGHTS)
    if tokenizer is not None:
        tokenizer.save(output, config.max_position_embeddings)
        hf_config.update(bos_token_id=tokenizer.cls_id, eos_token_id=tokenizer.sep_id)
    write_atomically(output / "config.json", json.dumps(hf_config, indent=2) + "\n")
    write_atomically(output / "README.md", model_card(state, hf_config, validation))
    return state


def check_export_folder(folder: Path, flag: str, problems: Problems) -> None:
    """Note why an export cannot go to `folder`, which `flag` named: its files would replace others of their names."""
    before = len(problems.messages)
    check_folder_to_write(folder, flag, problems)
    if len(problems.messages) > before or not folder.is_dir():
        return
    # What an export leaves that was killed before its first file was whole.
    found = sorted(path.name for path in folder.iterdir() if path.suffix != ".tmp")
    if found and not is_export(folder):
        listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        problems.add(
            f"{flag} {folder}: is not empty and holds no export of ours (found: {listed}); expected a new folder "
            f"or an empty one; give a new folder, or empty this one"
        )


def is_export(folder: Path) -> bool:
    """Whether the weights there are marked as ours, or the model card is."""
    with suppress(OSError, SafetensorError), safe_open(folder / WEIGHTS, "pt") as weights:
        if MARK.items() <= (weights.metadata() or {}).items():
            return True
    with suppress(OSError, UnicodeDecodeError):
        return CARD_HEADING in (folder / "README.md").read_text()
    return False


def check_tokenizer(tokenizer: BertTokenizer, state: TrainingState, where: str) -> None:
    """`where`: how the user named the tokenizer."""
    num_tokens = BertConfig.from_dict(state.model_config).num_tokens
    if tokenizer.vocab_size != num_tokens:
        raise UserError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, but the checkpoint's model has {num_tokens}; "
            f"pass the tokenizer that the data was prepared with"
        )
    if state.tokenizer_digest not in (None, tokenizer.digest):
        raise UserError(
            f"{where}: is another tokenizer (digest {tokenizer.digest[:12]}) than the checkpoint was trained with "
            f"({state.tokenizer_digest[:12]}), so its ids would mean other tokens; pass the tokenizer that the data "
            f"was prepared with"
        )


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata={"format": "pt", **MARK}
    )
    give_usual_mode(temporary)
    temporary.replace(path)


def load_hugging_face_weights(model: PreTrainingModel, folder: Path, tokenizer: BertTokenizer | None) -> None:
    """Give `model`, whose tokens are `tokenizer`'s, the weights of a Hugging Face folder of the same shape."""
    tensors = read_tensors(folder / WEIGHTS)
    extra = read_tensors(folder / EXTRA_WEIGHTS) if (folder / EXTRA_WEIGHTS).is_file() else None
    try:
        hf_config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{folder / 'config.json'}: cannot be read as a model's configuration ({error}); {WRITE_AGAIN}"
        ) from None
    if not isinstance(hf_config, dict):
        raise UserError(f"{folder / 'config.json'}: holds a {type(hf_config).__name__}, not an object; {WRITE_AGAIN}")
    try:
        notes = start_from(model, *from_hugging_face(tensors, hf_config, extra))
    except UserError as error:
        raise UserError(f"--use_pretrain {folder}: {error}") from None
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # other shapes, or words where numbers belong
        reason = " ".join(str(error).split())
        raise UserError(
            f"--use_pretrain {folder}: weights and config.json do not fit ({reason}); {WRITE_AGAIN}"
        ) from None
    for note in [*notes, *compare_tokens(folder, tokenizer)]:
        console.say(f"{folder}: {note}")


def compare_tokens(folder: Path, tokenizer: BertTokenizer | None) -> list[str]:
    """Refuse a folder whose tokenizer has other tokens at the ids that both have; a note where that cannot be told."""
    unknown = "so nothing tells whether its ids mean the same tokens as here"
    if tokenizer is None:
        return [f"the model JSON names no tokenizer (bert_token_file), {unknown}"]
    try:
        theirs = {number: token for token, number in load_tokenizer(folder).vocabulary.items()}
    except UserError:
        return [f"holds no tokenizer that can be read, {unknown}"]
    ours = {number: token for token, number in tokenizer.vocabulary.items()}
    shared = sorted(number for number in ours.keys() & theirs.keys() if not theirs[number].startswith("[unused"))
    differing = [number for number in shared if ours[number] != theirs[number]]
    if differing:
        first = differing[0]
        raise UserError(
            f"--use_pretrain {folder}: its tokenizer has other tokens than the model JSON's bert_token_file at "
            f"{len(differing)} of {len(shared)} ids that both have (id {first}: {theirs[first]!r} there, "
            f"{ours[first]!r} here); expected the same, for token i keeps row i of the embeddings; prepare the data "
            f"with the folder's own tokenizer, or begin without --use_pretrain"
        )
    return []


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with path.open("rb"):  # safetensors calls every refusal "no such file"
            pass
        return load_file(path)
    except (OSError, SafetensorError) as error:
        described = describe_system_error(error) if isinstance(error, OSError) else None
        raise UserError(described or f"{path}: cannot be read as safetensors ({error}); {WRITE_AGAIN}") from None


def sentence_head_text(state: TrainingState, config: BertConfig) -> str:
    """Where the head is that tells whether one text follows another; "" where there is none."""
    if not config.has_sentence_head:
        return ""
    classes = f'class 0 is "B follows A", class 1 "{PAIRS[config.sentence_head]}"'
    if not state.is_preln:
        return f"Its sentence head is where `BertForPreTraining` has it; {classes}.\n"
    return f"""The pooler and the sentence head, which that class has no place for, are in `{EXTRA_WEIGHTS}`: the scores
are `cls.seq_relationship` of tanh of `bert.pooler.dense_act` of the final state of `[CLS]`; {classes}.
"""


OBJECTIVES = {
    "nsp": "masked tokens and next sentence (nsp)",
    "sop": "masked tokens and sentence order (sop)",
    "none": "masked tokens alone",
}


def model_card(state: TrainingState, hf_config: dict[str, Any], validation: dict[str, Any] | None) -> str:
    config = BertConfig.from_dict(state.model_config)
    architecture = hf_config["architectures"][0]
    measured = "Not known here: no metrics.jsonl with a validation was given to the export."
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

{sentence_head_text(state, config)}
## Training
Objective: {OBJECTIVES[config.sentence_head]}.
{state.step:,} optimizer steps, {state.samples:,} rows and {state.tokens:,} real tokens, seed {state.seed}.
Vocabulary of {config.num_tokens:,} tokens, {config.max_position_embeddings} positions.

{CARD_HEADING}
{measured}
"""
