"""Settings: the flags and both JSON files, checked together; all problems are reported at once."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from math import gcd, isqrt
from pathlib import Path
from typing import Any

from common.errors import Problems
from data.shards.cache import ShardCache
from data.tokenizer import BertTokenizer
from nvidia.config import BertConfig
from training.engine.json_blocks import checkpoint_layers
from training.engine.kernel import check_kernel
from training.plan.learning_rate import Schedule
from training.runtime.ranks import RankInfo
from training.settings.checks import check_engine, check_flags, check_parts, check_places, warn_about_unused_rate
from training.settings.data_folders import Length, check_prefixes, with_mirrors
from training.settings.deepspeed_file import BATCH_KEYS, BatchSizes, DeepSpeedFile, load_deepspeed_file
from training.settings.flags import CommandLine, DataFlags
from training.settings.json_keys import find_mistaken_kinds, split_overrides
from training.settings.model_file import ModelFile, TrainingSection, load_model_file
from training.settings.model_parts import ModelParts, find_parts
from training.settings.saved_files import DEEPSPEED_JSON, MODEL_JSON, RESOLVED


@dataclass(frozen=True)
class DataRequest:
    """The data to open, and what it must fit."""

    flags: DataFlags
    lengths: tuple[Length, ...]
    model_config: BertConfig
    tokenizer: BertTokenizer | None
    validation_folder: Path | None


@dataclass(frozen=True)
class Settings:
    """Everything that determines a run."""

    output_dir: Path
    job_name: str
    flags: CommandLine
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
    def time_budget(self) -> float | None:
        """--time_budget in seconds; None: there is none."""
        budget = self.flags.training.time_budget
        return None if budget is None else budget.seconds

    @property
    def data(self) -> DataRequest:
        return DataRequest(self.flags.data, self.lengths, self.model_config, self.tokenizer, self.validation_folder)

    @property
    def masking(self) -> DataRequest | None:
        """What --dynamic_masking draws masks by; None: the shards' own masks are used."""
        return self.data if self.flags.data.dynamic_masking else None

    @property
    def recomputed_layers(self) -> int | None:
        """Layers that are recomputed together: 0 for the default number, None for no gradient checkpointing."""
        flags = self.flags.model
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
        flags, masking = self.flags.training, self.flags.data
        return {
            **self.training.model_dump(),
            "lr_schedule": flags.lr_schedule,
            "lr_offset": flags.lr_offset,
            "batch": self.deepspeed.batch.total,
            "batch_schedule": flags.batch_schedule and str(flags.batch_schedule),
            "length_schedule": flags.length_schedule and str(flags.length_schedule),
            "masking_rate": str(masking.masking_rate) if masking.dynamic_masking else None,
            "masking_unit": masking.masking_unit if masking.dynamic_masking else None,
            "rewarmup": flags.rewarmup,
            "time_budget": flags.time_budget and str(flags.time_budget),
            "optimizer": self.deepspeed.content.get("optimizer"),
            "gradient_clipping": self.deepspeed.content.get("gradient_clipping"),
        }

    def schedule(self, origin: int) -> Schedule:
        """The learning rate's schedule, counted from step `origin`."""
        return Schedule(
            shape=self.flags.training.lr_schedule,
            peak=self.training.learning_rate,
            total_steps=self.training.total_training_steps,
            offset=self.flags.training.lr_offset,
            origin=origin,
            **self.training.model_dump(include={field.name for field in fields(Schedule)}),
        )


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
    if parts is not None:
        check_parts(parts, has_prefixes, flags, problems)
    job_name = problems.attempt(lambda: flags.training.job_name or (None if model_file is None else model_file.name))
    if job_name is not None:
        problems.attempt(lambda: check_places(flags.required.output_dir, job_name, problems))
    if problems.messages and check_inputs is not None:
        request = None
        if parts is not None and parts.lengths is not None and config is not None and has_prefixes:
            request = DataRequest(flags.data, parts.lengths, config, parts.tokenizer, parts.validation_folder)
        problems.attempt(lambda: check_inputs(request))
    problems.raise_if_any()
    assert model_file is not None
    assert deepspeed is not None
    assert job_name is not None
    assert precision is not None
    assert parts is not None
    return _make_settings(flags, model_file, parts, deepspeed, job_name, precision)


def _make_settings(
    flags: CommandLine,
    model_file: ModelFile,
    parts: ModelParts,
    deepspeed: DeepSpeedFile,
    job_name: str,
    precision: str,
) -> Settings:
    """The settings, from parts that were found without a problem."""
    values = {
        "flags": flags.values(),
        "model": model_file.model_dump(),
        "deepspeed": deepspeed.for_engine(precision),
    }
    found = dict(vars(parts))
    is_pre_ln = found.pop("is_pre_ln")
    settings = Settings(
        output_dir=flags.required.output_dir,
        job_name=job_name,
        flags=replace(flags, model=flags.model.model_copy(update={"preln": is_pre_ln})),
        deepspeed=deepspeed,
        precision=precision,
        sources={
            MODEL_JSON: flags.required.config_file.read_bytes(),
            DEEPSPEED_JSON: deepspeed.path.read_bytes(),
            RESOLVED: json.dumps(values, indent=2, default=str),  # with every default filled in
        },
        **found,
    )
    warn_about_unused_rate(deepspeed, settings.training.learning_rate)
    return settings


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


def find_sizes(settings: Settings, world_size: int) -> list[int]:
    """Rows per micro-step and rank with which every step of the run is a whole number of micro-steps, ascending."""
    batches = settings.flags.training.batch_schedule
    totals = [settings.deepspeed.batch.total, *(int(rows) for _, rows in (batches.points if batches else ()))]
    rows = gcd(*totals) // world_size
    longest = settings.lengths[-1].length
    divisors = {size for low in range(1, isqrt(rows) + 1) if rows % low == 0 for size in (low, rows // low)}
    return sorted(size for size in divisors if all(size * longest % each.length == 0 for each in settings.lengths))


def with_micro_batch(settings: Settings, micro: int, world_size: int) -> Settings:
    """The same run with `micro` rows per micro-step and rank; accumulation keeps the rows per step."""
    total, longest = settings.deepspeed.batch.total, settings.lengths[-1].length
    batch = BatchSizes(micro, total // (micro * world_size), total)
    numbers = dict(zip(BATCH_KEYS, (batch.total, batch.micro, batch.accumulation), strict=True))
    resolved = json.loads(settings.sources[RESOLVED])
    resolved["deepspeed"].update(numbers)
    return replace(
        settings,
        deepspeed=replace(settings.deepspeed, batch=batch),
        lengths=tuple(replace(each, micro=micro * longest // each.length) for each in settings.lengths),
        sources={**settings.sources, RESOLVED: json.dumps(resolved, indent=2)},
    )


def read_found(checkpoints: Iterable[Path], sizes: Iterable[int], world_size: int) -> int | None:
    """The size that an earlier start of this run found, from the first of its checkpoints that can be read.

    None: there is none, the flag was not given, or the run had another number of ranks, each with other memory.
    """
    for checkpoint in checkpoints:
        try:
            content: Any = json.loads((checkpoint / RESOLVED).read_bytes())
            total, micro, accumulation = (content["deepspeed"][key] for key in BATCH_KEYS)
            was_found = content["flags"].get("find_micro_batch") is True
            is_same_world = total == micro * accumulation * world_size
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        return micro if was_found and is_same_world and micro in sizes else None
    return None
