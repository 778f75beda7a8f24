"""Settings: the flags and both JSON files, checked together. All problems are reported at once."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import Problems, UserError
from data.masking import Unit
from data.shards.cache import ShardCache
from data.tokenizer import BertTokenizer
from nvidia.config import BertConfig
from nvidia.interop.stock_config import export_obstacles
from training.engine.json_blocks import checkpoint_layers
from training.engine.kernel import check_kernel
from training.plan.learning_rate import Schedule
from training.plan.token_schedule import TokenSchedule
from training.runtime.ranks import RankInfo
from training.settings.deepspeed_file import DeepSpeedFile, load_deepspeed_file
from training.settings.engine_checks import check_engine, warn_about_unused_rate
from training.settings.flag_checks import check_flags, check_places
from training.settings.flags import (
    CheckpointFlags,
    CommandLine,
    DataFlags,
    FaultFlags,
    ModelFlags,
    ProbeFlags,
    TrainingFlags,
)
from training.settings.json_keys import find_mistaken_kinds, split_overrides
from training.settings.lengths import Length
from training.settings.mirrors import with_mirrors
from training.settings.model_file import ModelFile, TrainingSection, load_model_file
from training.settings.model_parts import ModelParts, find_parts
from training.settings.prefixes import check_prefixes
from training.settings.saved_files import DEEPSPEED_JSON, MODEL_JSON, RESOLVED


@dataclass(frozen=True)
class DataRequest:
    """The data to open, and what it must fit."""

    lengths: tuple[Length, ...]
    validation_folder: Path | None
    model_config: BertConfig
    max_predictions: int
    vocab_size: int | None  # None: not known
    tokenizer_digest: str | None
    draws_masks: bool  # --dynamic_masking: the shards need no masks
    verify: bool


@dataclass(frozen=True)
class MaskingRequest:
    """How --dynamic_masking draws masks."""

    tokenizer: BertTokenizer
    rates: TokenSchedule
    unit: Unit
    max_predictions: tuple[int, ...]  # per row, for each of the lengths


@dataclass(frozen=True)
class Settings:
    """Everything that determines a run. Flags are grouped as in --help."""

    output_dir: Path
    job_name: str
    data_flags: DataFlags
    training_flags: TrainingFlags
    checkpoint_flags: CheckpointFlags
    probe_flags: ProbeFlags
    fault_flags: FaultFlags
    model_flags: ModelFlags
    model_config: BertConfig
    training: TrainingSection
    tokenizer: BertTokenizer | None
    deepspeed: DeepSpeedFile
    precision: str
    lengths: tuple[Length, ...]  # of rows, in the order of the run; the last is --max_seq_length
    validation_folder: Path | None
    first_weights: Path | None  # --use_pretrain's Hugging Face folder
    sources: dict[str, str | bytes]  # the user's files, unchanged, to be saved with each checkpoint

    @property
    def batch_schedule(self) -> TokenSchedule | None:
        return self.training_flags.batch_schedule

    @property
    def time_budget(self) -> float | None:
        """--time_budget in seconds; None: there is none."""
        budget = self.training_flags.time_budget
        return None if budget is None else budget.seconds

    @property
    def data(self) -> DataRequest:
        return request_data(self.data_flags, self.lengths, self.model_config, self.tokenizer, self.validation_folder)

    @property
    def masking(self) -> MaskingRequest | None:
        """None: the shards' own masks are used."""
        flags = self.data_flags
        if not flags.dynamic_masking:
            return None
        assert self.tokenizer is not None  # find_tokenizer() checks it
        max_predictions = tuple(length.max_predictions for length in self.lengths)
        return MaskingRequest(self.tokenizer, flags.masking_rate, flags.masking_unit, max_predictions)

    @property
    def recomputed_layers(self) -> int | None:
        """Layers that are recomputed together: 0 for the default number, None for no gradient checkpointing."""
        flags = self.model_flags
        if flags.gradient_checkpointing is not None or flags.deepspeed_transformer_kernel:
            return flags.gradient_checkpointing
        return checkpoint_layers(self.deepspeed.content, self.model_config.num_hidden_layers)

    @property
    def saved_models(self) -> Path:
        return self.output_dir / "saved_models" / self.job_name

    @property
    def runs(self) -> Path:
        return self.output_dir / "runs" / self.job_name

    def recipe(self) -> dict[str, Any]:
        """What a resumed run may change; changes are reported."""
        flags, masking = self.training_flags, self.data_flags
        return {
            **self.training.model_dump(),
            "lr_schedule": flags.lr_schedule,
            "lr_offset": flags.lr_offset,
            "batch": self.deepspeed.batch.total,
            "batch_schedule": _text(flags.batch_schedule),
            "length_schedule": _text(flags.length_schedule),
            "masking_rate": str(masking.masking_rate) if masking.dynamic_masking else None,
            "masking_unit": masking.masking_unit if masking.dynamic_masking else None,
            "rewarmup": flags.rewarmup,
            "time_budget": _text(flags.time_budget),
            "optimizer": self.deepspeed.content.get("optimizer"),
            "gradient_clipping": self.deepspeed.content.get("gradient_clipping"),
        }

    def schedule(self, origin: int) -> Schedule:
        """The learning rate's schedule, counted from step `origin`."""
        return Schedule(
            shape=self.training_flags.lr_schedule,
            peak=self.training.learning_rate,
            total_steps=self.training.total_training_steps,
            warmup_proportion=self.training.warmup_proportion,
            decay_rate=self.training.decay_rate,
            decay_step=self.training.decay_step,
            decay_power=self.training.decay_power,
            decay_proportion=self.training.decay_proportion,
            final_share=self.training.final_share,
            offset=self.training_flags.lr_offset,
            origin=origin,
        )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def resolve_settings(
    flags: CommandLine,
    rank_info: RankInfo,
    problems: Problems | None = None,
    check_inputs: Callable[[DataRequest | None], None] | None = None,
    cache: ShardCache | None = None,
) -> Settings:
    """The settings of a run; one UserError lists `problems`, which are those of the command line, and all others.

    If there are any, `check_inputs` is called too, to find those of the files that would be opened next. What depends
    on a wrongly given flag is not checked. `cache` has the data that is behind a URL.
    """
    problems = problems or Problems()
    model_file, deepspeed = _load_files(flags, rank_info.world_size, problems)
    check_flags(flags, None if deepspeed is None else deepspeed.batch.micro * rank_info.world_size, problems)
    flags, has_prefixes = with_mirrors(flags, model_file, cache, problems)
    has_prefixes = has_prefixes and check_prefixes(flags, model_file, problems)
    precision = None if deepspeed is None else check_engine(flags, deepspeed, problems)
    parts = None if model_file is None else find_parts(model_file, flags, deepspeed, has_prefixes, problems)
    config = None if parts is None else parts.model_config
    if problems.attempt(lambda: flags.model.deepspeed_transformer_kernel):
        problems.attempt(lambda: check_kernel(config, precision, problems))
    if config is not None:
        problems.attempt(lambda: _check_exportable(flags.checkpoints.export_dir, config, is_pre_ln(parts, flags)))
    if parts is not None and has_prefixes and parts.validation_folder is None:
        problems.attempt(lambda: _check_best(flags.checkpoints, flags.probes))
    if parts is not None and parts.tokenizer is None:
        problems.attempt(lambda: _check_tokenizer(flags.probes.probe))
    job_name = problems.attempt(lambda: flags.training.job_name or (None if model_file is None else model_file.name))
    if job_name is not None:
        problems.attempt(lambda: check_places(flags.required.output_dir, job_name, problems))
    if problems.messages and check_inputs is not None:
        request = problems.attempt(lambda: _request_parts(flags.data, parts)) if has_prefixes else None
        problems.attempt(lambda: check_inputs(request))
    problems.raise_if_any()
    assert model_file is not None
    assert deepspeed is not None
    assert job_name is not None
    assert precision is not None
    assert parts is not None
    sources: dict[str, str | bytes] = {
        MODEL_JSON: flags.required.config_file.read_bytes(),
        DEEPSPEED_JSON: deepspeed.path.read_bytes(),
        RESOLVED: _describe_values(flags, model_file, deepspeed.for_engine(precision)),
    }
    return _make_settings(flags, parts, deepspeed, job_name, precision, sources)


def _describe_values(flags: CommandLine, model_file: ModelFile, engine: dict[str, Any]) -> str:
    """JSON of all flags and of both files, with every default filled in."""
    values = {"flags": flags.values(), "model": model_file.model_dump(), "deepspeed": engine}
    return json.dumps(values, indent=2, default=str)


def _make_settings(
    flags: CommandLine,
    parts: ModelParts,
    deepspeed: DeepSpeedFile,
    job_name: str,
    precision: str,
    sources: dict[str, str | bytes],
) -> Settings:
    """The settings, from parts that were found without a problem."""
    assert parts.training is not None
    assert parts.lengths is not None
    assert parts.model_config is not None
    warn_about_unused_rate(deepspeed, parts.training.learning_rate)
    return Settings(
        output_dir=flags.required.output_dir,
        job_name=job_name,
        data_flags=flags.data,
        training_flags=flags.training,
        checkpoint_flags=flags.checkpoints,
        probe_flags=flags.probes,
        fault_flags=flags.faults,
        model_flags=flags.model.model_copy(update={"preln": is_pre_ln(parts, flags)}),
        model_config=parts.model_config,
        training=parts.training,
        tokenizer=parts.tokenizer,
        deepspeed=deepspeed,
        precision=precision,
        lengths=parts.lengths,
        validation_folder=parts.validation_folder,
        first_weights=None if parts.first_weights is None else parts.first_weights.folder,
        sources=sources,
    )


def is_pre_ln(parts: ModelParts | None, flags: CommandLine) -> bool:
    """Whether the model is pre-LN: as the folder of --use_pretrain describes it, else as --preln says."""
    return flags.model.preln if parts is None or parts.is_pre_ln is None else parts.is_pre_ln


def _load_files(
    flags: CommandLine, world_size: int, problems: Problems
) -> tuple[ModelFile | None, DeepSpeedFile | None]:
    """Both JSON files. If one is of the other's kind, that is the only problem reported."""
    model_path = problems.attempt(lambda: flags.required.config_file)
    engine_path = problems.attempt(lambda: flags.launcher.deepspeed_config or Path("ds_config.json"))
    if model_path is not None and engine_path is not None:
        mistake = find_mistaken_kinds(model_path, engine_path)
        if mistake is not None:
            problems.add(mistake)
            return None, None
    overrides = problems.attempt(lambda: flags.overrides(problems))
    for_model, for_engine = split_overrides(overrides or (), problems)
    return (
        None if model_path is None else problems.attempt(lambda: load_model_file(model_path, for_model)),
        None
        if engine_path is None
        else problems.attempt(lambda: load_deepspeed_file(engine_path, world_size, for_engine)),
    )


def _check_exportable(export_dir: Path | None, config: BertConfig, is_preln: bool) -> None:
    """Refuse now what the export could not write at the end of the run."""
    obstacles = [] if export_dir is None else export_obstacles(config, is_preln)
    if obstacles:
        raise UserError(
            f"--export_dir {export_dir}: this model cannot be exported to transformers ({'; '.join(obstacles)}); "
            f"change the model JSON, or drop --export_dir"
        )


def _check_tokenizer(probe: tuple[str, ...] | None) -> None:
    """Refuse what needs a tokenizer, where there is none."""
    if probe is not None:
        raise UserError(f"--probe {probe[0]}: needs a tokenizer; set the model JSON's bert_token_file")


def _check_best(flags: CheckpointFlags, probes: ProbeFlags) -> None:
    """Refuse what needs validation data, where there is none."""
    if flags.export == "best" and flags.keep_best_by is None:
        raise UserError(
            "--export best: without validation data there is no best checkpoint; expected a folder with validation "
            "shards in the model JSON's validation.path; set it, or pass --export last"
        )
    if probes.stop_after_no_gain is not None and probes.probe is None:
        raise UserError(
            f"--stop_after_no_gain {probes.stop_after_no_gain}: there is neither validation data nor a probe to "
            f"improve; set the model JSON's validation.path, or pass --probe"
        )


def _request_parts(flags: DataFlags, parts: ModelParts | None) -> DataRequest | None:
    if parts is None or parts.lengths is None or parts.model_config is None:
        return None
    return request_data(flags, parts.lengths, parts.model_config, parts.tokenizer, parts.validation_folder)


def request_data(
    flags: DataFlags,
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
