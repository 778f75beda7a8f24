"""Fine-tuning of one model on one task with one seed, by the stock Trainer."""

import copy
import logging
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from common.errors import UserError
from common.words import counted
from evaluation.finetuning.features import Features, collate, make_features, mean_loss, read_outputs
from evaluation.finetuning.models import ModelFolder, load_model
from evaluation.tasks.task_data import TaskData

Progress = Callable[[float], None]  # called with the finished share of a cell
EVALUATION_BATCH_FACTOR = 4  # rows of a forward pass without gradients, per row of a training batch
TRAINING_SHARE = 0.9  # of a cell's time, for its progress


@dataclass(frozen=True)
class Setting:
    """What fine-tuning is done with. Batches are global: over all ranks and micro-steps."""

    learning_rate: float = 5e-5
    batch_size: int = 32
    epochs: float = 3.0
    warmup: float = 0.1  # share of the steps
    weight_decay: float = 0.01
    precision: str = "fp32"

    @property
    def label(self) -> str:
        return f"lr{self.learning_rate:g}_b{self.batch_size}_e{self.epochs:g}"


@dataclass(frozen=True)
class Machine:
    """How the work is spread; none of it changes what is computed beyond rounding."""

    num_ranks: int = 1
    micro_batch_size: int | None = None  # rows per rank and forward pass
    deepspeed: dict[str, Any] | None = None

    def spread(self, batch_size: int) -> tuple[int, int]:
        """(rows per device and forward pass, micro-steps)"""
        devices = self.num_ranks * (max(1, torch.cuda.device_count()) if self.num_ranks == 1 else 1)
        per_device, rest = divmod(batch_size, devices)
        if rest or not per_device:
            raise UserError(
                f"--batch_size {batch_size}: cannot be divided among {devices} devices. Give a multiple of it."
            )
        micro = min(self.micro_batch_size or per_device, per_device)
        if per_device % micro:
            raise UserError(
                f"--micro_batch_size {micro}: does not divide the rows of a device ({per_device}: --batch_size "
                f"{batch_size} over {counted(devices, 'device')}). Give a divisor."
            )
        return micro, per_device // micro


class _Watcher(TrainerCallback):
    """Reports progress, and stops a run whose loss is not finite."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress(TRAINING_SHARE * state.global_step / max(1, state.max_steps))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            control.should_training_stop = True


def quiet_libraries() -> None:
    """One progress line is enough: no load reports, bars and logs of the libraries."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("accelerate", "DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|accelerate|deepspeed)\.")


def all_ranks_fine_tune(
    model: ModelFolder,
    data: TaskData,
    setting: Setting,
    seed: int,
    machine: Machine,
    progress: Progress,
    *,
    untrained: bool = False,
    start: Path | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Train on data.train and predict every split of data.dev.

    `start`: a folder whose encoder takes the place of the model's. `keep`: where the fine-tuned model is saved.
    Of the result, `losses` are steps with the mean loss since the one before, `failure` is why training was stopped.
    """
    task = data.task
    with tempfile.TemporaryDirectory(prefix="evaluation_") as scratch:
        arguments = _arguments(setting, seed, machine, scratch, len(data.train))
        # Before the model is made: the seed decides its fresh weights, ZeRO-3 where they are put.
        transformers.set_seed(seed)
        network = load_model(
            model, task.kind, 1 if task.kind == "regress" else len(data.labels), untrained=untrained, start=start
        )
        _name_classes(network.config, data)
        train = make_features(task, model, data.train, data.labels, with_labels=True)
        trainer = Trainer(
            model=network,
            args=arguments,
            train_dataset=train.inputs,
            data_collator=partial(collate, model.tokenizer.pad_token_id),
            compute_loss_func=mean_loss,
            callbacks=[_Watcher(progress)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        result = trainer.train()
        losses = [(int(entry["step"]), float(entry["loss"])) for entry in trainer.state.log_history if "loss" in entry]
        wrong = next((f" at step {step}" for step, loss in losses if not math.isfinite(loss)), "")
        is_finite = not wrong and math.isfinite(result.training_loss)
        predictions, num_shortened = _predict_splits(trainer, model, data, progress)
        if keep is not None:
            trainer.save_model(str(keep))
            if trainer.is_world_process_zero():
                model.tokenizer.save_pretrained(keep)
        trainer.accelerator.free_memory()
    return {
        "predictions": predictions,
        "losses": losses,
        "steps": int(result.global_step),
        "num_shortened": {"train": train.num_shortened} | num_shortened,
        "failure": None if is_finite else f"the loss was not finite{wrong}",
    }


def _arguments(setting: Setting, seed: int, machine: Machine, scratch: str, num_rows: int) -> TrainingArguments:
    micro, accumulation = machine.spread(setting.batch_size)
    steps = max(1, math.ceil(num_rows / setting.batch_size) * setting.epochs)
    return TrainingArguments(
        output_dir=scratch,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=EVALUATION_BATCH_FACTOR * micro,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=setting.epochs,
        learning_rate=setting.learning_rate,
        warmup_steps=math.ceil(setting.warmup * steps),
        weight_decay=setting.weight_decay,
        seed=seed,
        bf16=setting.precision == "bf16",
        fp16=setting.precision == "fp16",
        train_sampling_strategy="group_by_length",
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        logging_steps=max(1, round(steps / 50)),
        logging_nan_inf_filter=False,  # a loss that is not finite must be seen
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        deepspeed=copy.deepcopy(machine.deepspeed),
    )


def _name_classes(config: Any, data: TaskData) -> None:
    """So that a pipeline on a kept model gives the task's own words."""
    if data.labels and data.task.kind in ("classify", "pair", "tokens"):
        config.id2label = dict(enumerate(data.labels))
        config.label2id = {label: number for number, label in enumerate(data.labels)}


def _predict_splits(
    trainer: Trainer, model: ModelFolder, data: TaskData, progress: Progress
) -> tuple[dict[str, list[Any]], dict[str, int]]:
    """The predictions for every split of data.dev, and how many of its rows were shortened."""
    task, predictions, num_shortened = data.task, {}, {}
    has_no_answer = task.kind == "span" and any(not row["answers"] for row in data.train)
    for number, (split, rows) in enumerate(data.dev.items(), 1):
        features = make_features(task, model, rows, data.labels, with_labels=False)
        outputs = _predict(trainer, features)
        predictions[split] = read_outputs(task, rows, features, outputs, data.labels, has_no_answer)
        num_shortened[split] = features.num_shortened
        progress(TRAINING_SHARE + (1 - TRAINING_SHARE) * number / len(data.dev))
    return predictions, num_shortened


def _predict(trainer: Trainer, features: Features) -> Any:
    """Outputs in the order of the inputs; the longest are computed first, so that batches have little padding."""
    order = sorted(range(len(features.inputs)), key=lambda i: -len(features.inputs[i]["input_ids"]))
    trainer.args.train_sampling_strategy = "sequential"  # grouping by length would reorder the predictions too
    outputs = trainer.predict([features.inputs[i] for i in order]).predictions  # type: ignore[arg-type]
    back = np.argsort(order)
    if isinstance(outputs, tuple):
        return tuple(part[back] for part in outputs[:2])
    return np.asarray(outputs)[back]


def deepspeed_settings(content: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed JSON for the stock Trainer. Sizes, rates and precision come from the protocol."""
    adapted = copy.deepcopy(content)
    adapted |= dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "auto",
    )
    for key in ("optimizer", "scheduler"):  # the Trainer's own follow the protocol
        adapted.pop(key, None)
    for key in ("fp16", "bf16"):
        if key in adapted:
            adapted[key] = {**adapted[key], "enabled": "auto"}
    adapted.setdefault("zero_allow_untested_optimizer", True)
    return adapted
