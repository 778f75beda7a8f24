"""Flags and both JSON files brought together and checked: all problems at once, before anything is built."""

import json
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import Problems, UserError
from data.tokenizer import BertTokenizer
from nvidia.config import BertConfig
from nvidia.interop.hugging_face import export_obstacles
from training.checkpoints.folder import CheckpointFolder
from training.engine.kernel import check_kernel
from training.inputs.datasets import DataRequest, open_data
from training.plan.learning_rate import Schedule
from training.plan.length_schedule import Length
from training.plan.time_budget import parse_duration
from training.plan.token_schedule import TokenSchedule
from training.runtime.ranks import RankInfo
from training.settings.deepspeed_file import DeepSpeedFile, load_deepspeed_file
from training.settings.engine_checks import check_engine
from training.settings.file_kinds import check_kinds
from training.settings.flag_checks import check_flags, check_places, check_prefixes
from training.settings.model_file import ModelFile, TrainingSection, load_model_file
from training.settings.model_parts import ModelParts, find_parts


@dataclass(frozen=True)
class Settings:
    """Everything a run is determined by."""

    flags: Namespace
    job_name: str
    model_config: BertConfig
    training: TrainingSection
    tokenizer: BertTokenizer | None
    deepspeed: DeepSpeedFile
    precision: str
    lengths: tuple[Length, ...]  # of rows, in the order of the run; the last is --max_seq_length
    validation_folder: Path | None
    first_weights: Path | None  # --use_pretrain's Hugging Face folder
    sources: dict[str, str | bytes]  # the user's files, verbatim, to lie beside each checkpoint

    @property
    def batch_schedule(self) -> TokenSchedule | None:
        text = self.flags.batch_schedule
        return None if text is None else TokenSchedule.parse(text, "--batch_schedule")

    @property
    def time_budget(self) -> float | None:
        return None if self.flags.time_budget is None else parse_duration(self.flags.time_budget)

    @property
    def data(self) -> DataRequest:
        return request_data(self.flags, self.lengths, self.model_config, self.tokenizer, self.validation_folder)

    @property
    def saved_models(self) -> Path:
        return self.flags.output_dir / "saved_models" / self.job_name

    @property
    def runs(self) -> Path:
        return self.flags.output_dir / "runs" / self.job_name

    def recipe(self) -> dict[str, Any]:
        """What a resumed run may change, but should be told of."""
        return {
            **self.training.model_dump(),
            "lr_schedule": self.flags.lr_schedule,
            "lr_offset": self.flags.lr_offset,
            "batch": self.deepspeed.batch.total,
            "batch_schedule": self.flags.batch_schedule,
            "length_schedule": self.flags.length_schedule,
            "masking_rate": self.flags.masking_rate if self.flags.dynamic_masking else None,
            "masking_unit": self.flags.masking_unit if self.flags.dynamic_masking else None,
            "rewarmup": self.flags.rewarmup,
            "time_budget": self.flags.time_budget,
            "optimizer": self.deepspeed.content.get("optimizer"),
            "gradient_clipping": self.deepspeed.content.get("gradient_clipping"),
        }

    def schedule(self, origin: int) -> Schedule:
        return Schedule(
            shape=self.flags.lr_schedule,
            peak=self.training.learning_rate,
            total_steps=self.training.total_training_steps,
            warmup_proportion=self.training.warmup_proportion,
            decay_rate=self.training.decay_rate,
            decay_step=self.training.decay_step,
            decay_power=self.training.decay_power,
            decay_proportion=self.training.decay_proportion,
            final_share=self.training.final_share,
            offset=self.flags.lr_offset,
            origin=origin,
        )


def resolve_settings(flags: Namespace, rank_info: RankInfo, problems: Problems | None = None) -> Settings:
    """`problems`: those of the command line. They are told with all that are found here.

    A flag that was given wrongly is Unsure: what follows from it is not judged, and all else is.
    """
    problems = problems or Problems()
    model_file, deepspeed = _load_files(flags, rank_info, problems)
    check_flags(flags, None if deepspeed is None else deepspeed.batch.micro * rank_info.world_size, problems)
    has_prefixes = check_prefixes(flags, problems)
    precision = None if deepspeed is None else check_engine(flags, deepspeed, problems)
    parts = None if model_file is None else find_parts(model_file, flags, deepspeed, has_prefixes, problems)
    config = None if parts is None else parts.model_config
    problems.attempt(lambda: check_kernel(flags, config, precision, problems))
    if config is not None:
        problems.attempt(lambda: _check_exportable(flags, config))
    job_name = problems.attempt(lambda: flags.job_name or (None if model_file is None else model_file.name))
    if job_name is not None:
        problems.attempt(lambda: check_places(flags.output_dir, job_name, problems))
    if problems.messages:
        problems.attempt(lambda: _check_what_comes_later(flags, parts, has_prefixes, rank_info, problems))
    problems.raise_if_any()
    assert deepspeed is not None
    assert job_name is not None
    assert precision is not None
    assert parts is not None
    assert parts.training is not None
    assert parts.lengths is not None
    assert parts.model_config is not None
    return Settings(
        flags=flags,
        job_name=job_name,
        model_config=parts.model_config,
        training=parts.training,
        tokenizer=parts.tokenizer,
        deepspeed=deepspeed,
        precision=precision,
        lengths=parts.lengths,
        validation_folder=parts.validation_folder,
        first_weights=parts.first_weights,
        sources={
            "model.json": flags.config_file.read_bytes(),
            "deepspeed.json": deepspeed.path.read_bytes(),
            "resolved.json": json.dumps(
                {"flags": vars(flags), "deepspeed": deepspeed.for_engine(precision)}, indent=2, default=str
            ),
        },
    )


def _check_exportable(flags: Namespace, config: BertConfig) -> None:
    """Now, not when the run has ended."""
    obstacles = [] if flags.export_dir is None else export_obstacles(config, flags.preln)
    if obstacles:
        raise UserError(
            f"--export_dir {flags.export_dir}: this model cannot be exported to transformers ({'; '.join(obstacles)}); "
            f"change the model JSON, or leave --export_dir out"
        )


def _load_files(
    flags: Namespace, rank_info: RankInfo, problems: Problems
) -> tuple[ModelFile | None, DeepSpeedFile | None]:
    """Both JSON files. Where one is in the other's place, that is the one mistake."""

    def engine_path() -> Path:
        return flags.deepspeed_config or Path("ds_config.json")

    before = len(problems.messages)
    problems.attempt(lambda: check_kinds(flags.config_file, engine_path()))
    if len(problems.messages) > before:
        return None, None
    return (
        problems.attempt(lambda: load_model_file(flags.config_file)),
        problems.attempt(lambda: load_deepspeed_file(engine_path(), rank_info.world_size)),
    )


def _check_what_comes_later(
    flags: Namespace, parts: ModelParts | None, has_prefixes: bool, rank_info: RankInfo, problems: Problems
) -> None:
    """What is opened once all else is good, other runs' checkpoints and the data: of a run with mistakes, now."""
    problems.attempt(lambda: _check_other_run(flags.load_training_checkpoint))
    if parts is None or parts.lengths is None or parts.model_config is None or not has_prefixes:
        return
    request = request_data(flags, parts.lengths, parts.model_config, parts.tokenizer, parts.validation_folder)
    known = request.vocab_size if parts.tokenizer is not None else None  # what the JSON says may be the mistake
    problems.attempt(lambda: open_data(replace(request, vocab_size=known, verify=False), rank_info))


def _check_other_run(folder: Path | None) -> None:
    """A run that has checkpoints of its own does not need the folder any more, so this is no mistake by itself."""
    if folder is not None:
        CheckpointFolder(folder).check_exists()


def request_data(
    flags: Namespace,
    lengths: tuple[Length, ...],
    model_config: BertConfig,
    tokenizer: BertTokenizer | None,
    validation_folder: Path | None,
) -> DataRequest:
    return DataRequest(
        lengths=lengths,
        validation_folder=validation_folder,
        model_config=model_config,
        max_predictions=flags.max_predictions_per_seq,
        vocab_size=model_config.num_tokens,
        tokenizer_digest=None if tokenizer is None else tokenizer.digest,
        draws_masks=flags.dynamic_masking,
        verify=flags.verify_data,
    )


def describe(job_name: str, facts: dict[str, Any]) -> str:
    """The table shown at the start of a run."""
    width = max(len(name) for name in facts)
    rows = "\n".join(f"  {name:<{width}}  {value}" for name, value in facts.items())
    return f"{job_name}\n{rows}"
