"""Flags and both JSON files brought together and checked: all problems at once, before anything is built."""

import json
import math
import os
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from common.console import console
from common.errors import Problems, UserError
from common.files import check_folder_to_write
from data.shards import find_shards, list_shards, split_of
from data.tokenizer import BertTokenizer, load_tokenizer
from nvidia.compiling import check_compiler
from nvidia.config import BertConfig
from nvidia.sparsity import SparseAttention
from training.budget import parse_duration
from training.config import ModelFile, TrainingSection, load_model_file, section_for_length
from training.deepspeed_config import DeepSpeedFile, load_deepspeed_file
from training.environment import Place
from training.kernel import check_kernel
from training.length_schedule import Length, parse_lengths, resolve_lengths
from training.precision import choose_precision, find_abilities
from training.schedule import Schedule
from training.step_plan import check_batches
from training.token_schedule import TokenSchedule

# Published sizes, for JSON files that name a tokenizer of the Hugging Face hub instead of a file.
HUB_VOCAB_SIZES = {
    "bert-base-uncased": 30522,
    "bert-large-uncased": 30522,
    "bert-base-cased": 28996,
    "bert-large-cased": 28996,
    "bert-base-multilingual-cased": 119547,
    "bert-base-multilingual-uncased": 105879,
}
# As DeepSpeed's data_types spells them.
PRECISION_NAMES = {
    "fp32": ("fp32", "float32", "torch.float32", "float"),
    "fp16": ("fp16", "float16", "torch.float16", "half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}
LONGEST_JOB_NAME = 200  # bytes; file systems take 255, and some tools add to it


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


def resolve_settings(flags: Namespace, place: Place, problems: Problems | None = None) -> Settings:
    """`problems`: those of the command line. They are told with those of the files, and with all others found here."""
    problems = problems or Problems()
    if problems.messages:
        _check_files_alone(flags, place, problems)
        problems.raise_if_any()
    _check_flags(flags, problems)
    config_path = flags.deepspeed_config or Path("ds_config.json")
    deepspeed = problems.attempt(lambda: load_deepspeed_file(config_path, place.world_size))
    model_file = problems.attempt(lambda: load_model_file(flags.config_file))
    has_prefixes = _check_prefixes(flags, problems)
    precision = None if deepspeed is None else _check_engine(flags, deepspeed, place, problems)
    parts = None if model_file is None else _find_parts(model_file, flags, deepspeed, has_prefixes, problems)
    if flags.deepspeed_transformer_kernel:
        check_kernel(flags, None if parts is None else parts.model_config, precision, problems)
    job_name = flags.job_name or (None if model_file is None else model_file.name)
    if job_name is not None:
        _check_places(flags.output_dir, job_name, problems)
    if problems.messages and parts is not None and parts.lengths is not None and has_prefixes:
        for folder in {folder for length in parts.lengths for folder in length.folders}:
            problems.attempt(partial(find_shards, folder, "training"))  # else open_data() tells it, when this is mended
    problems.raise_if_any()
    assert deepspeed is not None
    assert model_file is not None
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
        validation_folder=find_validation_folder(model_file, flags),
        first_weights=parts.first_weights,
        sources={
            "model.json": flags.config_file.read_bytes(),
            "deepspeed.json": deepspeed.path.read_bytes(),
            "resolved.json": json.dumps(
                {"flags": vars(flags), "deepspeed": deepspeed.for_engine(precision)}, indent=2, default=str
            ),
        },
    )


def _check_files_alone(flags: Namespace, place: Place, problems: Problems) -> None:
    """Of a command line with mistakes only the files that it names can be judged, each by itself."""
    if flags.config_file is not None:
        problems.attempt(lambda: load_model_file(flags.config_file))
    if flags.deepspeed_config is not None:
        problems.attempt(lambda: load_deepspeed_file(flags.deepspeed_config, place.world_size))


def _check_prefixes(flags: Namespace, problems: Problems) -> bool:
    """Whether the folders that the model JSON's own are below are there."""
    names = ("data_path_prefix", "validation_data_path_prefix")
    missing = [name for name in names if getattr(flags, name) is not None and not getattr(flags, name).is_dir()]
    for name in missing:
        problems.add(
            f"--{name} {getattr(flags, name)}: there is no such folder; give the one that the folders in the model "
            f"JSON are below"
        )
    return not missing


@dataclass(frozen=True)
class _Parts:
    """What the model JSON gives; None where a problem was found."""

    training: TrainingSection | None
    lengths: tuple[Length, ...] | None
    tokenizer: BertTokenizer | None
    model_config: BertConfig | None
    first_weights: Path | None


def _find_parts(
    model_file: ModelFile, flags: Namespace, deepspeed: DeepSpeedFile | None, has_prefixes: bool, problems: Problems
) -> _Parts:
    training = problems.attempt(
        lambda: section_for_length(
            model_file.mixed_seq_training, flags.max_seq_length, "mixed_seq_training", flags.config_file
        )
    )
    lengths = None
    if deepspeed is not None or flags.length_schedule is None:  # lengths that change must divide a micro-step
        micro = 1 if deepspeed is None else deepspeed.batch.micro
        lengths = problems.attempt(lambda: find_lengths(model_file, flags, micro))
    # Below a folder that is not there no tokenizer is either: that is one mistake.
    tokenizer = problems.attempt(lambda: find_tokenizer(model_file, flags)) if has_prefixes else None
    return _Parts(
        training=training,
        lengths=lengths,
        tokenizer=tokenizer,
        model_config=problems.attempt(lambda: resolve_model_config(model_file, tokenizer, flags, deepspeed)),
        first_weights=problems.attempt(lambda: find_first_weights(model_file, flags)),
    )


def _check_engine(flags: Namespace, deepspeed: DeepSpeedFile, place: Place, problems: Problems) -> str | None:
    """What the DeepSpeed JSON and the flags ask of the engine together; the precision that comes of it."""
    precision = problems.attempt(
        lambda: choose_precision(flags.precision, deepspeed.wanted_precision, find_abilities(), deepspeed.path)
    )
    _check_model_blocks(flags, deepspeed, problems)
    _check_accumulation(deepspeed, precision, problems)
    if flags.compile:
        _check_compile(flags, deepspeed, problems)
    _check_monitors(deepspeed, problems)
    _check_schedules(flags, deepspeed.batch.micro * place.world_size, problems)
    return precision


def find_lengths(model_file: ModelFile, flags: Namespace, micro: int) -> tuple[Length, ...]:
    """--max_seq_length, or the lengths that --length_schedule goes through on the way to it."""
    return resolve_lengths(
        parse_lengths(flags.length_schedule, flags.max_seq_length),
        micro=micro,
        max_predictions=flags.max_predictions_per_seq,
        datasets=model_file.data.mixed_seq_datasets,
        weights=model_file.data.mixed_seq_weights,
        prefix=flags.data_path_prefix,
        config_file=flags.config_file,
    )


def find_tokenizer(model_file: ModelFile, flags: Namespace) -> BertTokenizer | None:
    """The JSON's tokenizer. A name of the hub that is no file here counts as none: its size is known."""
    name = model_file.bert_token_file
    if name is None or (name in HUB_VOCAB_SIZES and not Path(name).exists()):
        if flags.dynamic_masking:
            raise UserError("--dynamic_masking needs the tokenizer's special tokens; give bert_token_file a file")
        return None
    below_prefix = flags.data_path_prefix / name
    tokenizer = load_tokenizer(below_prefix if below_prefix.exists() else Path(name))
    if flags.do_lower_case and not tokenizer.lower_case:
        raise UserError(
            f"--do_lower_case: the tokenizer {name} does not lower-case; drop the flag, or prepare data with a "
            f"lower-casing tokenizer"
        )
    return tokenizer


def resolve_model_config(
    model_file: ModelFile, tokenizer: BertTokenizer | None, flags: Namespace, deepspeed: DeepSpeedFile | None
) -> BertConfig:
    """The JSON's model with the tokenizer's vocabulary, padded, and with what flags switch on."""
    config = model_file.bert_config()
    if tokenizer is not None:
        config = replace(config, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id)
    elif model_file.bert_token_file in HUB_VOCAB_SIZES:
        config = replace(config, vocab_size=HUB_VOCAB_SIZES[model_file.bert_token_file])
    if flags.max_seq_length > config.max_position_embeddings:
        raise UserError(
            f"{flags.config_file}: max_position_embeddings is {config.max_position_embeddings}, but --max_seq_length "
            f"is {flags.max_seq_length}; raise the one or lower the other"
        )
    _check_memory(config, flags.config_file)
    if deepspeed is not None and flags.deepspeed_sparse_attention and "sparse_attention" in deepspeed.content:
        try:
            sparse = SparseAttention.from_dict(deepspeed.content["sparse_attention"])
        except UserError as error:
            raise UserError(f"{deepspeed.path}: {error}") from None
        config = replace(config, sparse_attention=sparse)
        _warn_of_other_modes(sparse, deepspeed.content["sparse_attention"], deepspeed.path)
    elif config.sparse_attention is not None:
        block = model_file.bert_model_config["sparse_attention"]
        _warn_of_other_modes(config.sparse_attention, block, flags.config_file)
    return config.with_padded_vocab()


def _warn_of_other_modes(sparse: SparseAttention, block: dict[str, Any], path: Path) -> None:
    ignored = sparse.ignored_keys(block)
    if ignored:
        console.warn(
            f"{path}: of the block 'sparse_attention', {', '.join(ignored)} belong to other modes than "
            f"{sparse.mode!r} and do nothing"
        )


def _check_memory(config: BertConfig, path: Path) -> None:
    """Every rank builds the whole model in fp32 before the engine cuts it up."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    tables = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    weights = hidden * tables + layers * (4 * hidden * hidden + 2 * hidden * config.intermediate_size)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * weights > memory:
        raise UserError(
            f"{path}: bert_model_config describes {weights:,} weights, {4 * weights / 2**30:,.0f} GiB, but this "
            f"machine has {memory / 2**30:,.0f} GiB of memory; choose smaller sizes, or a larger machine"
        )


def find_first_weights(model_file: ModelFile, flags: Namespace) -> Path | None:
    """--use_pretrain's folder, or the model JSON's bert_model_file where the flag names none."""
    if flags.use_pretrain is None:
        return None
    name = flags.use_pretrain or model_file.bert_model_file
    if name is None:
        raise UserError(
            f"--use_pretrain: names no folder; expected one with a model in Hugging Face's layout; give it behind the "
            f"flag, or in {flags.config_file} as bert_model_file"
        )
    if not Path(name).is_dir():
        raise UserError(
            f"--use_pretrain: {name} is no folder here; expected a Hugging Face folder with model.safetensors "
            f"(download one first: nothing is fetched during training)"
        )
    return Path(name)


def find_validation_folder(model_file: ModelFile, flags: Namespace) -> Path | None:
    """The JSON's validation folder, or the one for this length below it; a missing one is said, not fatal."""
    if model_file.validation is None:
        return None
    prefix = flags.validation_data_path_prefix or flags.data_path_prefix
    folder = prefix / model_file.validation.path
    for candidate in (folder / str(flags.max_seq_length), folder):
        if candidate.is_dir() and any(split_of(path) != "training" for path in list_shards(candidate)):
            return candidate
    console.warn(
        f"{folder}: the model JSON's validation folder holds no shards with 'validation' or 'test' in their names; "
        f"training goes without validation"
    )
    return None


def _check_flags(flags: Namespace, problems: Problems) -> None:
    if flags.refresh_bucket_size != 1:
        problems.add(
            f"--refresh_bucket_size {flags.refresh_bucket_size}: datasets are mixed row by row, so there is no bucket "
            f"to repeat; expected 1, the default; drop the flag"
        )
    if flags.stochastic_mode and not flags.deepspeed_transformer_kernel:
        problems.add("--stochastic_mode is a mode of --deepspeed_transformer_kernel; pass both or neither")
    if flags.load_checkpoint_id is not None and flags.load_training_checkpoint is None:
        problems.add("--load_checkpoint_id needs --load_training_checkpoint, the folder to look in")
    if flags.finetune and flags.load_training_checkpoint is None and flags.use_pretrain is None:
        problems.add("--finetune loads weights only; say from where with --load_training_checkpoint or --use_pretrain")
    if flags.use_pretrain is not None and flags.load_training_checkpoint is not None:
        problems.add(
            "--use_pretrain and --load_training_checkpoint both give the first weights; expected one; drop the other"
        )
    if flags.normalize_invertible and not flags.preln:
        problems.add("--normalize_invertible saves nothing with --no-preln, where LayerNorms write the residual stream")
    _check_masking(flags, problems)
    if flags.time_budget is not None:
        problems.attempt(lambda: parse_duration(flags.time_budget))
    if flags.log_histograms and flags.dry_run:
        problems.add("--log_histograms and --dry_run: a dry run writes nothing; drop one")
    if not 0 <= flags.lr_offset < math.inf:
        problems.add(f"--lr_offset {flags.lr_offset}: expected a finite number that is not negative, such as 0.0")
    if flags.export_dir is not None:
        check_folder_to_write(flags.export_dir, "--export_dir", problems)


def _check_masking(flags: Namespace, problems: Problems) -> None:
    rates = problems.attempt(lambda: TokenSchedule.parse(flags.masking_rate, "--masking_rate"))
    if rates is not None and not all(0.0 < rate < 1.0 for _, rate in rates.points):
        problems.add(f"--masking_rate {flags.masking_rate}: rates must lie between 0 and 1; BERT uses 0.15")
    if not flags.dynamic_masking and (flags.masking_rate != "0.15" or flags.masking_unit != "token"):
        problems.add("--masking_rate and --masking_unit are about masks drawn anew; add --dynamic_masking")


def _check_schedules(flags: Namespace, micro_rows: int, problems: Problems) -> None:
    if flags.batch_schedule is not None:
        problems.attempt(
            lambda: check_batches(TokenSchedule.parse(flags.batch_schedule, "--batch_schedule"), micro_rows)
        )
    for name in ("batch_schedule", "length_schedule"):
        if getattr(flags, name) is not None and flags.max_steps_per_epoch is not None:
            problems.add(f"--{name} and --max_steps_per_epoch do not go together: an epoch has no one batch size")


def _check_model_blocks(flags: Namespace, deepspeed: DeepSpeedFile, problems: Problems) -> None:
    """Flags that need a block of the DeepSpeed JSON, and blocks that need a flag."""
    content, path = deepspeed.content, deepspeed.path
    if flags.deepspeed_sparse_attention and "sparse_attention" not in content:
        problems.add(
            f"--deepspeed_sparse_attention needs a block 'sparse_attention' in {path}; add it or drop the flag"
        )
    if flags.progressive_layer_drop and content.get("progressive_layer_drop", {}).get("enabled") is False:
        problems.add(f"--progressive_layer_drop: {path} says enabled: false in its block of that name; change either")
    if "sparse_attention" in content and not flags.deepspeed_sparse_attention:
        console.warn(f"{path}: the block 'sparse_attention' does nothing without --deepspeed_sparse_attention")
    if content.get("progressive_layer_drop", {}).get("enabled") and not flags.progressive_layer_drop:
        console.warn(f"{path}: the block 'progressive_layer_drop' does nothing without --progressive_layer_drop")


def _check_accumulation(deepspeed: DeepSpeedFile, precision: str | None, problems: Problems) -> None:
    """The type in which gradients of micro-steps are summed up, where DeepSpeed has only one."""
    wanted = deepspeed.content.get("data_types", {}).get("grad_accum_dtype")
    if precision is None or deepspeed.zero_stage > 0 or wanted is None or wanted in PRECISION_NAMES[precision]:
        return
    problems.add(
        f"{deepspeed.path}: data_types.grad_accum_dtype is {wanted!r}, but in {precision} at ZeRO stage 0 DeepSpeed "
        f"sums gradients up in {precision} only; set zero_optimization.stage to 1, or remove the key"
    )


def _check_compile(flags: Namespace, deepspeed: DeepSpeedFile, problems: Problems) -> None:
    if deepspeed.zero_stage == 3:
        problems.add(
            f"--compile: {deepspeed.path} asks for ZeRO stage 3, which gathers parameters inside the compiled part; "
            f"use stage 0, 1 or 2, or drop the flag"
        )
    for name in ("gelu_checkpoint", "normalize_invertible"):
        if getattr(flags, name):
            problems.add(
                f"--compile and --{name}: what a compiled part recomputes is the compiler's choice; drop one, or use "
                f"--gradient_checkpointing"
            )
    problems.attempt(lambda: check_compiler("cuda" if torch.cuda.is_available() else "cpu"))


def _check_monitors(deepspeed: DeepSpeedFile, problems: Problems) -> None:
    """DeepSpeed's monitors that need a package of their own."""
    for block, package in (("wandb", "wandb"), ("comet", "comet_ml")):
        if deepspeed.content.get(block, {}).get("enabled") and find_spec(package) is None:
            problems.add(f"{deepspeed.path}: {block} is enabled, but the package is missing; pip install {package}")


def _check_places(output_dir: Path, job_name: str, problems: Problems) -> None:
    """The job's name and the folders that a run writes to."""
    if Path(job_name).name != job_name or job_name in (".", "..") or not job_name.isprintable():
        problems.add(
            f"job name {job_name!r}: names a folder, so it must be a single plain name; pass another --job_name"
        )
    elif len(os.fsencode(job_name)) > LONGEST_JOB_NAME:
        problems.add(
            f"job name {job_name!r}: is too long for a folder; expected at most {LONGEST_JOB_NAME} bytes; pass a "
            f"shorter --job_name"
        )
    else:
        before = len(problems.messages)
        for part in ("saved_models", "runs"):
            check_folder_to_write(output_dir / part / job_name, "--output_dir", problems)
            if len(problems.messages) > before:
                break  # both lie below the same folder: one message is enough


def describe(job_name: str, facts: dict[str, Any]) -> str:
    """The table shown at the start of a run."""
    width = max(len(name) for name in facts)
    rows = "\n".join(f"  {name:<{width}}  {value}" for name, value in facts.items())
    return f"{job_name}\n{rows}"
