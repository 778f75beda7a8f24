"""Checkpoint → Hugging Face folder with weights, config, tokenizer and model card; and weights from such a folder."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from common.console import console
from common.errors import Problems, UserError
from common.files import write_atomically
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
from training.export.card_facts import CardRequest, read_card_facts
from training.export.folder import check_export_folder, save_tensors
from training.export.model_card import model_card
from training.metrics.reader import first_and_last_probe, last_validation, shared_probes
from training.runtime import collectives
from training.settings.first_weights import EXTRA_WEIGHTS, read_stock_config

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
        return _export(checkpoint, output, tokenizer, metrics, flag, request, evaluation)


def _export(
    checkpoint: Path,
    output: Path,
    tokenizer: BertTokenizer | None,
    metrics: Path | None,
    flag: str,
    request: CardRequest,
    evaluation: Path | None,
) -> TrainingState:
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
    results = find_card_section(find_reports(checkpoint, output) if evaluation is None else [evaluation], output)
    if evaluation is not None and results is None:
        console.warn(
            f"--evaluation {evaluation}: has no results of this model, which are found by the digest of its files; the "
            f"model card is written without them. Evaluate {output}, then export again"
        )
    write_atomically(output / "README.md", model_card(state, hf_config, facts, request, tokenizer is not None, results))
    return state


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


def find_reports(checkpoint: Path, output: Path) -> list[Path]:
    """Where evaluation.run may have written results of this model: near the export, or in the run's --output_dir."""
    folders = (output, output.absolute().parent, checkpoint.absolute().parent.parent.parent)
    return [folder / name / REPORT for folder in folders for name in ("evaluation", "evaluated")]


def describe_checkpoint(checkpoint: Path, state: TrainingState, metrics: Path | None) -> str:
    """The checkpoint for people: step, validation loss, and whether it is the best of its run."""
    best = CheckpointFolder(checkpoint.parent).best()
    is_best = best is not None and best.tag == checkpoint.name
    found = last_validation(metrics, state.step)
    has_loss = found is not None and found["step"] == state.step
    loss = found["mlm_loss"] if found and has_loss else None
    loss = best.mlm_loss if best is not None and is_best and best.mlm_loss is not None else loss
    by = f" by {best.probe} ({best.value:.4g})" if best is not None and best.probe is not None else ""
    probes = first_and_last_probe(metrics, state.step)
    scores = (
        ""
        if probes is None
        else "".join(
            f", {name} {probes[1][name]:.1%} ({probes[0][name]:.1%} at step {probes[0]['step']})"
            for name in shared_probes(probes)
        )
    )
    return (
        f"step {state.step}{f', the best checkpoint{by}' if is_best else ''}, "
        + ("no validation at this step" if loss is None else f"validation loss {loss:.4f}")
        + scores
    )


def all_ranks_export(
    folder: Path,
    which: str | None,
    output: Path,
    tokenizer: BertTokenizer | None,
    metrics: Path,
    request: CardRequest,
) -> None:
    """--export_dir: rank 0 exports the best or the last checkpoint in the run's `folder`. Collective.

    The weights come from the checkpoint's files, so every ZeRO stage is exported the same way, and a run that was
    killed before this exports when it is started again. Without readable `metrics` the model card has no figures.
    """

    def export() -> str:
        checkpoint, figures = locate_checkpoint(folder, which), _readable(metrics)
        state = export_checkpoint(checkpoint, output, tokenizer, figures, "--export_dir", request)
        return describe_checkpoint(checkpoint, state, figures)

    console.say(f"export: {output} ({collectives.all_ranks_from_main(export)})")


def _readable(metrics: Path) -> Path | None:
    """`metrics`, or None with a warning: figures that cannot be read must not prevent the export of a finished run."""
    try:
        last_validation(metrics)
    except (OSError, UserError) as error:
        console.warn(f"{error}. The model card is written without figures")
        return None
    return metrics


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
