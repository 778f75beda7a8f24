"""The parts of a run that the model JSON names: lengths, tokenizer, model, initial weights, validation folder."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.console import console
from common.errors import Problems, UserError
from data.shards.folder import list_shards, split_of
from data.tokenizer import TOKENIZER_FILES, BertTokenizer, load_tokenizer
from nvidia.attention.sparsity import SparseAttention
from nvidia.config import BertConfig
from training.settings.data_folders import Length, resolve_lengths, schedule_points
from training.settings.deepspeed_file import DeepSpeedFile
from training.settings.first_weights import FirstWeights, find_first_weights
from training.settings.flags import CommandLine, DataFlags
from training.settings.model_file import ModelFile, TrainingSection, section_for_length

# Published sizes, for JSON files that name a tokenizer on the Hugging Face hub instead of a file.
HUB_VOCAB_SIZES = {
    "bert-base-uncased": 30522,
    "bert-large-uncased": 30522,
    "bert-base-cased": 28996,
    "bert-large-cased": 28996,
    "bert-base-multilingual-cased": 119547,
    "bert-base-multilingual-uncased": 105879,
}


@dataclass(frozen=True)
class ModelParts:
    """A part is None if there is none, or if it has a problem, which has been reported."""

    training: TrainingSection | None
    lengths: tuple[Length, ...] | None
    tokenizer: BertTokenizer | None
    model_config: BertConfig | None
    first_weights: Path | None  # --use_pretrain's Hugging Face folder
    validation_folder: Path | None
    is_pre_ln: bool | None


def find_parts(
    model_file: ModelFile, flags: CommandLine, deepspeed: DeepSpeedFile | None, has_prefixes: bool, problems: Problems
) -> ModelParts:
    path, sections = flags.required.config_file, model_file.mixed_seq_training
    training = problems.attempt(
        lambda: section_for_length(sections, flags.data.max_seq_length, "mixed_seq_training", path)
    )
    first_weights = problems.attempt(
        lambda: find_first_weights(flags.checkpoints.use_pretrain, model_file.bert_model_file, path)
    )
    # The model JSON need not describe a model that config.json describes.
    described = first_weights if model_file.bert_model_config is None else None
    # A prefix that does not exist is one problem, not one for each folder relative to it.
    tokenizer = problems.attempt(lambda: find_tokenizer(model_file, flags.data, described)) if has_prefixes else None
    is_known = described is not None or model_file.bert_model_config is not None or not flags.checkpoints.use_pretrain
    return ModelParts(
        training=training,
        lengths=problems.attempt(lambda: find_lengths(model_file, flags, deepspeed)),
        tokenizer=tokenizer,
        model_config=problems.attempt(
            lambda: resolve_model_config(model_file, first_weights, tokenizer, flags, deepspeed, problems)
        )
        if is_known  # else the folder is a problem that has been reported
        else None,
        first_weights=None if first_weights is None else first_weights.folder,
        validation_folder=(
            problems.attempt(lambda: find_validation_folder(model_file, flags.data)) if has_prefixes else None
        ),
        is_pre_ln=problems.attempt(lambda: flags.model.preln) if described is None else described.is_pre_ln,
    )


def find_lengths(
    model_file: ModelFile, flags: CommandLine, deepspeed: DeepSpeedFile | None
) -> tuple[Length, ...] | None:
    """--max_seq_length, or the lengths of --length_schedule; None if these depend on a DeepSpeed JSON with problems."""
    points = schedule_points(flags.training.length_schedule, flags.data.max_seq_length)
    if deepspeed is None and len(points) > 1:
        return None
    return resolve_lengths(
        points,
        1 if deepspeed is None else deepspeed.batch.micro,
        model_file.data,
        flags.data,
        flags.required.config_file,
    )


def find_tokenizer(
    model_file: ModelFile, flags: DataFlags, described: FirstWeights | None = None
) -> BertTokenizer | None:
    """The JSON's tokenizer, or that of the folder that describes the model.

    None for a name on the Hugging Face hub, whose vocabulary size is known.
    """
    name = model_file.bert_token_file
    if name is None and described is not None and any((described.folder / file).is_file() for file in TOKENIZER_FILES):
        name = str(described.folder.absolute())
    if name is None or (name in HUB_VOCAB_SIZES and not Path(name).exists()):
        if flags.dynamic_masking:
            raise UserError("--dynamic_masking needs the tokenizer's special tokens; set bert_token_file to a file")
        return None
    below_prefix = flags.data_folder / name
    tokenizer = load_tokenizer(below_prefix if below_prefix.exists() else Path(name))
    if flags.do_lower_case and not tokenizer.lower_case:
        raise UserError(
            f"--do_lower_case: the tokenizer {name} does not lower-case; drop the flag, or prepare data with a "
            f"lower-casing tokenizer"
        )
    return tokenizer


def resolve_model_config(
    model_file: ModelFile,
    first_weights: FirstWeights | None,
    tokenizer: BertTokenizer | None,
    flags: CommandLine,
    deepspeed: DeepSpeedFile | None,
    problems: Problems,
) -> BertConfig:
    """The JSON's model with the tokenizer's vocabulary, padded, and with the options that flags turn on.

    Without a model in the JSON, that of the folder of the first weights.
    """
    path = flags.required.config_file
    if first_weights is not None and model_file.bert_model_config is None:
        config, path = first_weights.config, first_weights.folder / "config.json"
    else:
        config = model_file.bert_config()
    if first_weights is not None and config.export_as is None:
        config = replace(config, export_as=first_weights.config.export_as)
    if tokenizer is not None:
        config = replace(config, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id)
    elif model_file.bert_token_file in HUB_VOCAB_SIZES:
        config = replace(config, vocab_size=HUB_VOCAB_SIZES[model_file.bert_token_file])
    problems.attempt(lambda: _check_positions(config, flags.data.max_seq_length, path))
    problems.attempt(lambda: _check_memory(config, path))
    block, source = (model_file.bert_model_config or {}).get("sparse_attention"), path
    if deepspeed is not None and flags.model.deepspeed_sparse_attention:
        block, source = deepspeed.content.get("sparse_attention", block), deepspeed.path
    sparse = None if block is None else problems.attempt(lambda: _read_sparse_attention(block, source))
    return replace(config, sparse_attention=sparse).with_padded_vocab()


def _read_sparse_attention(block: dict[str, Any], path: Path) -> SparseAttention:
    try:
        sparse = SparseAttention.from_dict(block)
    except UserError as error:
        raise UserError(str(error), [f"{path}: {part}" for part in error.parts]) from None
    ignored = sparse.ignored_keys(block)
    if ignored:
        console.warn(
            f"{path}: in the block 'sparse_attention', {', '.join(ignored)} belong to other modes than {sparse.mode!r} "
            f"and have no effect"
        )
    return sparse


def _check_positions(config: BertConfig, length: int, path: Path) -> None:
    if length > config.max_position_embeddings:
        raise UserError(
            f"{path}: max_position_embeddings is {config.max_position_embeddings}, but --max_seq_length is {length}; "
            f"raise the former or lower the latter"
        )


def _check_memory(config: BertConfig, path: Path) -> None:
    """Every rank builds the whole model in fp32 before the engine partitions it."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    tables = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    weights = hidden * tables + layers * (4 * hidden * hidden + 2 * hidden * config.intermediate_size)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * weights > memory:
        raise UserError(
            f"{path}: bert_model_config describes {weights:,} weights, {4 * weights / 2**30:,.0f} GiB, but this "
            f"machine has {memory / 2**30:,.0f} GiB of memory; use smaller sizes, or a larger machine"
        )


def find_validation_folder(model_file: ModelFile, flags: DataFlags) -> Path | None:
    """The JSON's validation folder, or its subfolder for this length; a missing one is a warning, not an error."""
    if model_file.validation is None:
        return None
    prefix = flags.validation_data_folder or flags.data_folder
    folder = prefix / model_file.validation.path
    for candidate in (folder / str(flags.max_seq_length), folder):
        if _has_validation_shards(candidate):
            return candidate
    others = [path for path in folder.glob("[0-9]*") if _has_validation_shards(path)]
    if others:
        found = ", ".join(sorted((path.name for path in others), key=lambda name: (len(name), name)))
        found = f"has shards for other lengths ({found}), not for {flags.max_seq_length} tokens"
    else:
        found = "has no shards with 'validation' or 'test' in their names"
    console.warn(f"{folder}: the model JSON's validation folder {found}; training without validation")
    return None


def _has_validation_shards(folder: Path) -> bool:
    return folder.is_dir() and any(split_of(path) != "training" for path in list_shards(folder))
