"""Where a value is set: which of the two JSON files has a key, and which flag or key an unknown flag stands for."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from common.errors import Problems, UserError, nearest
from common.json_files import load_json
from nvidia.config import BertConfig
from training.settings.deepspeed_file import KNOWN_KEYS
from training.settings.model_file import ModelFile, TrainingSection
from training.settings.overrides import Override

TRAINING_BLOCK = "mixed_seq_training"
MODEL_BLOCK = "bert_model_config"
# Names that other programs have for a flag, and what to pass here.
OTHER_NAMES = {
    "batch_size bs global_batch_size": "--train_batch_size N, the rows per step",
    "micro_batch_size per_device_train_batch_size per_gpu_train_batch_size": "--set train_micro_batch_size_per_gpu=N, "
    "or --find_micro_batch",
    "auto_find_batch_size": "--find_micro_batch",
    "eval_batch_size": "--set train_micro_batch_size_per_gpu=N; validation uses it too",
    "lr peak_lr max_lr": "--learning_rate X",
    "num_train_steps num_steps steps train_steps max_train_steps train_iters": "--total_training_steps N for the "
    "length of the schedule, or --max_steps N to end earlier",
    "epochs num_train_epochs max_epochs": f"--set {TRAINING_BLOCK}.<max_seq_length>.num_epochs=N",
    "warmup warmup_steps num_warmup_steps warmup_ratio": f"--set {TRAINING_BLOCK}.<max_seq_length>.warmup_proportion="
    "0.01, a share of total_training_steps",
    "grad_accum accumulation_steps": "--set gradient_accumulation_steps=N",
    "max_grad_norm clip_grad grad_clip": "--set gradient_clipping=1.0",
    "fp16": "--precision fp16",
    "bf16": "--precision bf16",
    "zero_stage": "--set zero_optimization.stage=1",
    "optimizer": "--set optimizer.type=AdamW",
    "max_restarts": "nothing: this launcher does not restart itself. To restart a run that dies, start it with "
    "`torchrun --standalone --nproc_per_node N --max-restarts R deepspeed_train.py …`; see docs/clusters.md",
    "resume resume_from_checkpoint": "nothing: the same command, run again, resumes the run",
}


def find_hints() -> dict[str, str]:
    """What to pass instead of flags that do not exist. Every key of a JSON file can be set with --set."""
    keys = {
        **{name: name for name in KNOWN_KEYS | ModelFile.model_fields.keys()},
        **{field.name: f"{MODEL_BLOCK}.{field.name}" for field in fields(BertConfig)},
        **{name: f"{TRAINING_BLOCK}.<max_seq_length>.{name}" for name in TrainingSection.model_fields},
    }
    hints = {name: f"--set {key}=VALUE" for name, key in keys.items()}
    hints |= {name: hint for names, hint in OTHER_NAMES.items() for name in names.split()}
    return {f"--{name}": hint for name, hint in hints.items()}


def split_overrides(
    overrides: Sequence[Override], problems: Problems
) -> tuple[tuple[Override, ...], tuple[Override, ...]]:
    """Those of the model JSON and those of the DeepSpeed JSON; the two files share no key."""
    for override in overrides:
        problems.attempt(partial(_check_key, override))
    for_model = tuple(override for override in overrides if override.path[0] in ModelFile.model_fields)
    return for_model, tuple(override for override in overrides if override.path[0] in KNOWN_KEYS)


def _check_key(override: Override) -> None:
    first = override.path[0]
    known = [*ModelFile.model_fields, *sorted(KNOWN_KEYS)]
    if first in known:
        return
    hint = find_hints().get(f"--{override.key}")
    raise UserError(
        f"{override.source}: neither JSON file has a key {first!r}"
        + (f"; pass {hint}" if hint else nearest(first, known, otherwise="; expected one of docs/configuration.md"))
    )


def find_mistaken_kinds(model_path: Path, engine_path: Path) -> str | None:
    """One message for a file of the other kind, instead of one for each of its keys."""
    is_engine = _has_only(model_path, KNOWN_KEYS, ModelFile.model_fields)
    is_model = _has_only(engine_path, ModelFile.model_fields, KNOWN_KEYS)
    if is_engine and is_model:
        return (
            f"--cf {model_path} is a DeepSpeed JSON and --deepspeed_config {engine_path} is a model JSON; they seem to "
            f"be swapped; exchange them"
        )
    if is_engine:
        return f"--cf {model_path}: is a DeepSpeed JSON, expected a model JSON such as bert_base.json"
    if is_model:
        return f"--deepspeed_config {engine_path}: is a model JSON, expected a DeepSpeed JSON such as ds_config.json"
    return None


def _has_only(path: Path, keys: Iterable[str], others: Iterable[str]) -> bool:
    """Whether the file has some of `keys` and none of `others`; the two kinds of files share no key."""
    try:
        content = load_json(path, "a JSON file")
    except UserError:
        return False  # reported when the file is loaded
    return not content.keys().isdisjoint(keys) and content.keys().isdisjoint(others)
