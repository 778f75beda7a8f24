"""Whether a run can resume from a checkpoint: what must be equal, and which permitted settings have changed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import Problems, UserError
from nvidia.config import BertConfig
from training.checkpoints.retention import Best
from training.checkpoints.state import TrainingState

# Keys of a model that may differ: one for its export, and those that only new weights depend on.
NOT_COMPARED = ("export_as", "decoder_bias_init", "embedding_init")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from; `is_own` if this run wrote it, as opposed to another run."""

    folder: Path
    tag: str
    is_own: bool
    is_only_weights: bool = False  # --finetune: without the optimizer's state and the step
    best: Best | None = None  # from best.json, which may be newer than the checkpoint

    @property
    def path(self) -> Path:
        return self.folder / self.tag


@dataclass(frozen=True)
class EngineKind:
    """What an engine must have in common with the one whose checkpoint it loads, beside the model."""

    zero_stage: int
    precision: str
    is_kernel: bool
    optimizer: str | None  # None: the checkpoint does not say

    @classmethod
    def of(
        cls, zero_stage: int, precision: str, is_kernel: bool, optimizer_block: dict[str, Any] | None
    ) -> "EngineKind":
        """`optimizer_block`: that of the DeepSpeed JSON. Adam and AdamW have the same state."""
        optimizer = str((optimizer_block or {}).get("type", "AdamW")).lower()
        return cls(zero_stage, precision, is_kernel, "adamw" if optimizer == "adam" else optimizer)

    @classmethod
    def of_state(cls, state: TrainingState) -> "EngineKind":
        values = (state.zero_stage, state.precision, state.is_kernel)
        recipe = state.recipe or {}
        return cls.of(*values, recipe["optimizer"]) if "optimizer" in recipe else cls(*values, None)


def find_mismatches(before: EngineKind, now: EngineKind) -> list[str]:
    """Why an engine of the kind `now` cannot load what one of the kind `before` saved, each with its remedy."""
    found = []
    if before.is_kernel != now.is_kernel:
        words = {True: "with", False: "without"}
        found.append(
            f"was saved {words[before.is_kernel]} --deepspeed_transformer_kernel, which names the weights differently, "
            f"but this run is {words[now.is_kernel]} it; use the flag as before"
        )
    if (before.zero_stage, before.precision) != (now.zero_stage, now.precision):
        found.append(
            f"was saved with ZeRO stage {before.zero_stage} in {before.precision}, but this run uses stage "
            f"{now.zero_stage} in {now.precision}; use the same DeepSpeed JSON and --precision"
        )
    if None not in (before.optimizer, now.optimizer) and before.optimizer != now.optimizer:
        found.append(
            f"was saved with the optimizer {before.optimizer}, but this run uses {now.optimizer}, which has "
            f"a different state; set the same optimizer.type in the DeepSpeed JSON"
        )
    return found


def check_model(saved: TrainingState, config: dict[str, Any], is_preln: bool, where: Path) -> None:
    there = BertConfig(vocab_size=1).to_dict() | saved.model_config  # keys newer than the checkpoint get their defaults
    for key in NOT_COMPARED:
        there[key] = config.get(key)
    if there == config and saved.is_preln == is_preln:
        return
    differing = [
        f"{key}: {there.get(key)!r} there, {config.get(key)!r} now"
        for key in sorted({*there, *config})
        if there.get(key) != config.get(key)
    ] or [f"preln: {saved.is_preln} there, {is_preln} now"]
    raise UserError(
        f"{where}: is of a different model ({'; '.join(differing)}). Use its settings, or start from new weights under "
        f"another --job_name"
    )


def check_match(saved: TrainingState, now: TrainingState, point: ResumePoint) -> None:
    """Raise all reasons at once why a run with the state `now` cannot resume from `point`, which contains `saved`."""
    where, problems = point.path, Problems()
    problems.attempt(lambda: check_model(saved, now.model_config, now.is_preln, where))
    for mismatch in find_mismatches(EngineKind.of_state(saved), EngineKind.of_state(now)):
        problems.add(
            f"{where}: {mismatch}, or start another --job_name from its weights with --load_training_checkpoint "
            f"{point.folder} --finetune"
        )
    if point.is_own and saved.seed != now.seed:
        problems.add(
            f"{where}: was started with --seed {saved.seed}, but this run has --seed {now.seed}, which orders the rows "
            f"differently. Pass --seed {saved.seed}, or another --job_name"
        )
    if point.is_own and saved.data_digest != now.data_digest:
        there, here = (f"{state.data_summary or 'data'} (digest {state.data_digest[:12]})" for state in (saved, now))
        problems.add(
            f"{where}: was trained on different data: {there} then, {here} now. Restore that data, or pass another "
            f"--job_name with --load_training_checkpoint {point.folder}"
        )
    digests = (saved.tokenizer_digest, now.tokenizer_digest)
    if digests[0] != digests[1] and (point.is_own or all(digests)):
        there, here = (f"digest {digest[:12]}" if digest else "none" for digest in digests)
        problems.add(
            f"{where}: was trained with a different tokenizer than the model JSON's bert_token_file: {there} then, "
            f"{here} now. Restore that file, or start from new weights under another --job_name"
        )
    problems.raise_if_any()


def find_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The settings that differ from those of the resumed run. The model, data and tokenizer cannot differ."""
    return [
        f"{key} was {before[key]!r}, is {now.get(key)!r}" for key in before if key in now and before[key] != now[key]
    ]
