"""Whether a run can go on from a checkpoint: what must be equal, and what has changed though it may."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import Problems, UserError
from training.checkpoints.folder import TrainingState
from training.settings.resolve import Settings


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run goes on from; `is_own` when it is this run's, not another's."""

    folder: Path
    tag: str
    is_own: bool
    is_only_weights: bool = False  # --finetune: neither the optimizer's state nor the step
    best_loss: float | None = None  # of best.json, which may be marked after its checkpoint was saved

    @property
    def path(self) -> Path:
        return self.folder / self.tag


@dataclass(frozen=True)
class EngineKind:
    """What an engine must have in common with the one whose checkpoint it loads, beside the model."""

    zero_stage: int
    precision: str
    is_kernel: bool
    optimizer: str | None  # None: the checkpoint does not tell

    @classmethod
    def of_settings(cls, settings: Settings) -> "EngineKind":
        return cls(
            zero_stage=settings.deepspeed.zero_stage,
            precision=settings.precision,
            is_kernel=settings.model_flags.deepspeed_transformer_kernel,
            optimizer=_optimizer_kind(settings.deepspeed.content.get("optimizer")),
        )

    @classmethod
    def of_state(cls, state: TrainingState) -> "EngineKind":
        recipe = state.recipe or {}
        return cls(
            zero_stage=state.zero_stage,
            precision=state.precision,
            is_kernel=state.is_kernel,
            optimizer=_optimizer_kind(recipe["optimizer"]) if "optimizer" in recipe else None,
        )


def _optimizer_kind(block: dict[str, Any] | None) -> str:
    """Its name, in one spelling. Adam and AdamW have the same state."""
    kind = str((block or {}).get("type", "AdamW")).lower()
    return "adamw" if kind == "adam" else kind


def find_mismatches(before: EngineKind, now: EngineKind) -> list[str]:
    """Why an engine of the kind `now` cannot load what one of the kind `before` saved, each with its remedy."""
    found = []
    if before.is_kernel != now.is_kernel:
        words = {True: "with", False: "without"}
        found.append(
            f"was saved {words[before.is_kernel]} --deepspeed_transformer_kernel, whose weights have names of their "
            f"own, but this run is {words[now.is_kernel]} it; do as before"
        )
    if (before.zero_stage, before.precision) != (now.zero_stage, now.precision):
        found.append(
            f"was saved with ZeRO stage {before.zero_stage} in {before.precision}, but this run uses stage "
            f"{now.zero_stage} in {now.precision}; use the same DeepSpeed JSON and --precision"
        )
    if None not in (before.optimizer, now.optimizer) and before.optimizer != now.optimizer:
        found.append(
            f"was saved with the optimizer {before.optimizer}, but this run uses {now.optimizer}, whose state is "
            f"another; name the same optimizer.type in the DeepSpeed JSON"
        )
    return found


def check_model(saved: TrainingState, config: dict[str, Any], is_preln: bool, where: Path) -> None:
    if saved.model_config == config and saved.is_preln == is_preln:
        return
    differing = [
        f"{key}: {saved.model_config.get(key)!r} there, {config.get(key)!r} now"
        for key in sorted({*saved.model_config, *config})
        if saved.model_config.get(key) != config.get(key)
    ] or [f"preln: {saved.is_preln} there, {is_preln} now"]
    raise UserError(
        f"{where}: holds another model ({'; '.join(differing)}); use its settings, or begin from new weights under "
        f"another --job_name"
    )


def check_match(saved: TrainingState, now: TrainingState, origin: ResumePoint) -> None:
    """All reasons at once why a run with the state `now` cannot go on from `origin`, which holds `saved`."""
    where, problems = origin.path, Problems()
    problems.attempt(lambda: check_model(saved, now.model_config, now.is_preln, where))
    for mismatch in find_mismatches(EngineKind.of_state(saved), EngineKind.of_state(now)):
        problems.add(
            f"{where}: {mismatch}, or begin another --job_name from its weights with --load_training_checkpoint "
            f"{origin.folder} --finetune"
        )
    if origin.is_own and saved.seed != now.seed:
        problems.add(
            f"{where}: was begun with --seed {saved.seed}, but this run has --seed {now.seed}, which gives the rows "
            f"another order; pass --seed {saved.seed}, or another --job_name"
        )
    if origin.is_own and saved.data_digest != now.data_digest:
        there, here = (f"{state.data_summary or 'data'} (digest {state.data_digest[:12]})" for state in (saved, now))
        problems.add(
            f"{where}: was trained on other data than is there now: {there} then, {here} now; restore that data, or "
            f"pass another --job_name with --load_training_checkpoint {origin.folder}"
        )
    digests = (saved.tokenizer_digest, now.tokenizer_digest)
    if digests[0] != digests[1] and (origin.is_own or all(digests)):
        there, here = (f"digest {digest[:12]}" if digest else "none" for digest in digests)
        problems.add(
            f"{where}: was trained with another tokenizer than the model JSON's bert_token_file: {there} then, {here} "
            f"now; restore that file, or pass another --job_name and begin from new weights"
        )
    problems.raise_if_any()


def find_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What a resumed run does otherwise than it did, in words. The model, data and tokenizer cannot differ."""
    return [
        f"{key} was {before[key]!r}, is {now.get(key)!r}" for key in before if key in now and before[key] != now[key]
    ]
