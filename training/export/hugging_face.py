"""Checkpoint → Hugging Face folder with weights, config, tokenizer and model card; and weights from such a folder."""

import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.console import console
from common.errors import Problems, UserError
from common.files import check_folder_to_write, give_usual_mode, write_atomically
from common.weights import EXPORT_AGAIN, WEIGHTS, read_folder_tensors, read_tensors
from data.tokenizer import TOKENIZER_FILES, BertTokenizer, load_tokenizer
from evaluation.results import REPORT, find_card_section
from nvidia.config import BertConfig
from nvidia.interop.hugging_face import from_hugging_face, to_hugging_face
from nvidia.interop.padded_layers import with_block_names
from nvidia.interop.pretrained import start_from
from nvidia.pretraining import PreTrainingModel
from training.checkpoints.folder import CheckpointFolder, read_lock
from training.checkpoints.loading import ZeroCheckpoint
from training.checkpoints.paths import MODEL_FILE, optimizer_files
from training.checkpoints.state import TrainingState, read_state
from training.engine.checkpoint_files import read_file
from training.export.model_card import HEADING, CardRequest, model_card, read_card_facts
from training.metrics.reader import find_probe_gain, last_validation
from training.runtime import collectives
from training.settings.first_weights import EXTRA_WEIGHTS, read_stock_config

MARK = {"written_by": "export_hf"}  # in the metadata of the weights: an export may replace this folder's files
NO_REQUEST = CardRequest()


def locate_checkpoint(path: Path, which: str | None = None) -> Path:
    """`path` itself if it is a checkpoint, else the best or last valid one of the run's folder `path`.

    `which` is "best" or "last"; None: the best if the run kept it, else the last.
    """
    if path.name in CheckpointFolder(path.parent).tags():
        if which is not None:
            raise UserError(
                f"--export {which}: chooses among a run's checkpoints, but {path} is one of them; drop the flag, or "
                f"pass the run's folder {path.parent}"
            )
        return path.parent / CheckpointFolder(path.parent).choose(path.name)
    folder = CheckpointFolder(path)
    best = None if which == "last" else folder.best()
    if which == "best" and best is None:
        folder.check_exists()
        raise UserError(
            f"--export best: {path} has no best checkpoint, which a run with --keep_best or --keep_best_by marks in "
            f"best.json; expected one; pass --export last"
        )
    return path / folder.choose(None if best is None else best.tag)


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All weights in fp32 under our names, from a checkpoint of any ZeRO stage, with or without fused layers."""
    if optimizer_files(checkpoint):
        return with_block_names(ZeroCheckpoint.read(checkpoint).weights())
    saved = read_file(checkpoint / MODEL_FILE)
    return with_block_names({name: tensor.float() for name, tensor in saved["module"].items()})


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    tokenizer: BertTokenizer | None,
    metrics: Path | None,
    flag: str = "--output",
    request: CardRequest = NO_REQUEST,
    evaluation: Path | None = None,
) -> TrainingState:
    """Write the Hugging Face folder `output`, which `flag` named, from one checkpoint, which is read-locked meanwhile.

    Checks everything before it writes the first file. `evaluation`: a report.json of evaluation.run, whose results are
    put on the model card if they are those of this model; None: folders near the run and the export are tried.
    """
    with ExitStack() as stack:
        if not read_lock(checkpoint, stack):
            raise UserError(
                f"{checkpoint}: was removed by its run while it was chosen. Export again, or raise the run's "
                f"--keep_last"
            )
        state = read_state(checkpoint)
        config = BertConfig.from_dict(state.model_config)
        problems = Problems()
        check_export_folder(output, flag, problems)
        problems.raise_if_any()
        if tokenizer is not None:
            check_tokenizer(tokenizer, state, "bert_token_file")
            # A pre-LN export numbers its positions from the tokenizer's padding id.
            config = replace(config, pad_token_id=tokenizer.pad_id)
        facts = read_card_facts(checkpoint, metrics, state.step)
        hf_config = write_model(read_weights(checkpoint), config, tokenizer, output)
    # evaluation.run may have written near the export, or in the run's --output_dir.
    folders = (output, output.absolute().parent, checkpoint.absolute().parent.parent.parent)
    near = [folder / name / REPORT for folder in folders for name in ("evaluation", "evaluated")]
    results = find_card_section(near if evaluation is None else [evaluation], output)
    if evaluation is not None and results is None:
        console.warn(
            f"--evaluation {evaluation}: has no results of this model, which are found by the digest of its files; the "
            f"model card is written without them. Evaluate {output}, then export again"
        )
    write_atomically(output / "README.md", model_card(state, hf_config, facts, request, tokenizer is not None, results))
    return state


def check_export_folder(folder: Path, flag: str, problems: Problems) -> None:
    """Note why an export cannot be written to `folder`, which `flag` named: it would replace unrelated files."""
    before = len(problems.messages)
    check_folder_to_write(folder, flag, problems)
    if len(problems.messages) > before or not folder.is_dir():
        return
    # An export that was killed during its first file leaves *.tmp.
    found = sorted(path.name for path in folder.iterdir() if path.suffix != ".tmp")
    if found and not is_export(folder):
        listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        problems.add(
            f"{flag} {folder}: is not empty and not an earlier export (found: {listed}); expected a new folder or an "
            f"empty one. Pass a new folder, or empty this one"
        )


def is_export(folder: Path) -> bool:
    """Whether the weights or the model card were written by an export of this project."""
    with suppress(OSError, SafetensorError), safe_open(folder / WEIGHTS, "pt") as weights:
        if MARK.items() <= (weights.metadata() or {}).items():
            return True
    with suppress(OSError, UnicodeDecodeError):
        return HEADING in (folder / "README.md").read_text()
    return False


def write_model(
    weights: Mapping[str, torch.Tensor], config: BertConfig, tokenizer: BertTokenizer | None, output: Path
) -> dict[str, Any]:
    """Write weights, configuration and tokenizer to the Hugging Face folder `output`. Returns config.json's content."""
    tensors, hf_config, extra = to_hugging_face(weights, config)
    output.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, output / WEIGHTS)
    # An earlier export may have left files that belong to other weights.
    stale = ([] if extra else [EXTRA_WEIGHTS]) + ([] if tokenizer is not None else list(TOKENIZER_FILES))
    for name in stale:
        (output / name).unlink(missing_ok=True)
    if extra:
        save_tensors(extra, output / EXTRA_WEIGHTS)
    if tokenizer is not None:
        tokenizer.save(output, config.max_position_embeddings, has_segments=config.type_vocab_size > 1)
        ids = {"bos": tokenizer.cls_id, "eos": tokenizer.sep_id, "cls": tokenizer.cls_id, "sep": tokenizer.sep_id}
        hf_config.update({key: ids[key[:3]] for key in hf_config if key.endswith("_token_id") and key[:3] in ids})
    write_atomically(output / "config.json", json.dumps(hf_config, indent=2) + "\n")
    return hf_config


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata={"format": "pt", **MARK}
    )
    sort_metadata(temporary)
    give_usual_mode(temporary)
    temporary.replace(path)


def sort_metadata(path: Path) -> None:
    """Give equal weights equal bytes: safetensors writes the entries of the metadata in a random order."""
    with path.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        stream.seek(8)
        stream.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def describe_checkpoint(checkpoint: Path, state: TrainingState, metrics: Path | None) -> str:
    """The checkpoint for people: step, validation loss, and whether it is the best of its run."""
    best, validation = CheckpointFolder(checkpoint.parent).best(), last_validation(metrics, state.step)
    loss = validation["mlm_loss"] if validation is not None and validation["step"] == state.step else None
    parts = [f"step {state.step}"]
    if best is not None and best.tag == checkpoint.name:
        by = "" if best.probe is None else f" by {best.probe} ({best.value:.4g})"
        parts.append(f"the best checkpoint{by}")
        loss = loss if best.mlm_loss is None else best.mlm_loss
    parts.append("no validation at this step" if loss is None else f"validation loss {loss:.4f}")
    gain = find_probe_gain(metrics, state.step)
    if gain is not None:
        parts += [
            f"{name} {last:.1%} ({first:.1%} at step {gain.steps[0]})" for name, (first, last) in gain.figures.items()
        ]
    return ", ".join(parts)


def all_ranks_export(
    folder: Path, which: str | None, output: Path, tokenizer: BertTokenizer | None, metrics: Path, request: CardRequest
) -> None:
    """--export_dir: rank 0 exports the best or the last checkpoint in the run's `folder`. Collective.

    The weights come from the checkpoint's files, so every ZeRO stage is exported the same way, and a run that was
    killed before this exports when it is started again. Without readable `metrics` the model card has no figures.
    """

    def export() -> str:
        checkpoint = locate_checkpoint(folder, which)
        figures: Path | None = metrics
        try:
            last_validation(metrics)
        except (OSError, UserError) as error:
            console.warn(f"{error}. The model card is written without figures")
            figures = None
        state = export_checkpoint(checkpoint, output, tokenizer, figures, "--export_dir", request)
        return describe_checkpoint(checkpoint, state, figures)

    console.say(f"export: {output} ({collectives.all_ranks_from_main(export)})")


def check_tokenizer(tokenizer: BertTokenizer, state: TrainingState, where: str) -> None:
    """Refuse a tokenizer other than the model's; `where` is the flag or key that named it."""
    num_tokens = BertConfig.from_dict(state.model_config).num_tokens
    if tokenizer.vocab_size != num_tokens:
        raise UserError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, but the checkpoint's model has {num_tokens}. "
            f"Pass the tokenizer that the data was prepared with"
        )
    if state.tokenizer_digest not in (None, tokenizer.digest):
        raise UserError(
            f"{where}: is a different tokenizer (digest {tokenizer.digest[:12]}) than the one the checkpoint was "
            f"trained with ({state.tokenizer_digest[:12]}), so its ids would mean other tokens. Pass the tokenizer "
            f"that the data was prepared with"
        )


def load_hugging_face_weights(model: PreTrainingModel, folder: Path, tokenizer: BertTokenizer | None) -> None:
    """Load the weights of a Hugging Face folder of the same shape into `model`, which `tokenizer` makes input for."""
    tensors = read_folder_tensors(folder)
    extra = read_tensors(folder / EXTRA_WEIGHTS) if (folder / EXTRA_WEIGHTS).is_file() else None
    hf_config = read_stock_config(folder)
    try:
        notes = start_from(model, *from_hugging_face(tensors, hf_config, extra))
    except UserError as error:
        raise UserError(f"--use_pretrain {folder}: {error}") from None
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # wrong shapes, or strings instead of numbers
        reason = " ".join(str(error).split())
        raise UserError(
            f"--use_pretrain {folder}: weights and config.json do not match ({reason}); {EXPORT_AGAIN}"
        ) from None
    for note in [*notes, *compare_tokens(folder, tokenizer)]:
        console.say(f"{folder}: {note}")


def compare_tokens(folder: Path, tokenizer: BertTokenizer | None) -> list[str]:
    """Refuse a folder whose tokenizer has different tokens at the shared ids; a note if that cannot be checked."""
    unknown = "so it cannot be checked whether its ids mean the same tokens as here"
    if tokenizer is None:
        return [f"the model JSON names no tokenizer (bert_token_file), {unknown}"]
    try:
        theirs = {number: token for token, number in load_tokenizer(folder).vocabulary.items()}
    except UserError:
        return [f"contains no readable tokenizer, {unknown}"]
    ours = {number: token for token, number in tokenizer.vocabulary.items()}
    shared = sorted(number for number in ours.keys() & theirs.keys() if not theirs[number].startswith("[unused"))
    differing = [number for number in shared if ours[number] != theirs[number]]
    if differing:
        first = differing[0]
        raise UserError(
            f"--use_pretrain {folder}: its tokenizer differs from the model JSON's bert_token_file at {len(differing)} "
            f"of {len(shared)} shared ids (id {first}: {theirs[first]!r} there, {ours[first]!r} here); expected the "
            f"same tokens, because token i keeps row i of the embeddings. Prepare the data with the folder's "
            f"tokenizer, or start without --use_pretrain"
        )
    return []
