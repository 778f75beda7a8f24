"""What the model JSON gives a run: its section, lengths, tokenizer, model, first weights and validation folder."""

import os
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.console import console
from common.errors import Problems, UserError
from data.shards.folder import list_shards, split_of
from data.tokenizer import BertTokenizer, load_tokenizer
from nvidia.attention.sparsity import SparseAttention
from nvidia.config import BertConfig
from training.plan.length_schedule import Length, parse_lengths, resolve_lengths
from training.settings.deepspeed_file import DeepSpeedFile
from training.settings.model_file import ModelFile, TrainingSection, section_for_length

# Published sizes, for JSON files that name a tokenizer of the Hugging Face hub instead of a file.
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
    """None where there is none, or where a problem was found, which has been noted."""

    training: TrainingSection | None
    lengths: tuple[Length, ...] | None
    tokenizer: BertTokenizer | None
    model_config: BertConfig | None
    first_weights: Path | None
    validation_folder: Path | None


def find_parts(
    model_file: ModelFile, flags: Namespace, deepspeed: DeepSpeedFile | None, has_prefixes: bool, problems: Problems
) -> ModelParts:
    training = problems.attempt(
        lambda: section_for_length(
            model_file.mixed_seq_training, flags.max_seq_length, "mixed_seq_training", flags.config_file
        )
    )
    # Below a folder that is not there no tokenizer is either: that is one mistake.
    tokenizer = problems.attempt(lambda: find_tokenizer(model_file, flags)) if has_prefixes else None
    return ModelParts(
        training=training,
        lengths=problems.attempt(lambda: find_lengths(model_file, flags, deepspeed)),
        tokenizer=tokenizer,
        model_config=problems.attempt(lambda: resolve_model_config(model_file, tokenizer, flags, deepspeed, problems)),
        first_weights=problems.attempt(lambda: find_first_weights(model_file, flags)),
        validation_folder=problems.attempt(lambda: find_validation_folder(model_file, flags)) if has_prefixes else None,
    )


def find_lengths(model_file: ModelFile, flags: Namespace, deepspeed: DeepSpeedFile | None) -> tuple[Length, ...] | None:
    """--max_seq_length, or the lengths that --length_schedule goes through on the way to it.

    None where lengths must divide a micro-step that is not known.
    """
    points = parse_lengths(flags.length_schedule, flags.max_seq_length)
    if deepspeed is None and len(points) > 1:
        return None
    return resolve_lengths(
        points,
        micro=1 if deepspeed is None else deepspeed.batch.micro,
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
    model_file: ModelFile,
    tokenizer: BertTokenizer | None,
    flags: Namespace,
    deepspeed: DeepSpeedFile | None,
    problems: Problems,
) -> BertConfig:
    """The JSON's model with the tokenizer's vocabulary, padded, and with what flags switch on."""
    config = model_file.bert_config()
    if tokenizer is not None:
        config = replace(config, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id)
    elif model_file.bert_token_file in HUB_VOCAB_SIZES:
        config = replace(config, vocab_size=HUB_VOCAB_SIZES[model_file.bert_token_file])
    problems.attempt(lambda: _check_positions(config, flags.max_seq_length, flags.config_file))
    problems.attempt(lambda: _check_memory(config, flags.config_file))
    sparse = problems.attempt(lambda: _find_sparse_attention(model_file, config, flags, deepspeed))
    return replace(config, sparse_attention=sparse).with_padded_vocab()


def _find_sparse_attention(
    model_file: ModelFile, config: BertConfig, flags: Namespace, deepspeed: DeepSpeedFile | None
) -> SparseAttention | None:
    """Of the DeepSpeed JSON where a flag asks for it, else of the model JSON."""
    if deepspeed is not None and flags.deepspeed_sparse_attention and "sparse_attention" in deepspeed.content:
        block, path = deepspeed.content["sparse_attention"], deepspeed.path
        try:
            sparse = SparseAttention.from_dict(block)
        except UserError as error:
            raise UserError(str(error), [f"{path}: {part}" for part in error.parts]) from None
        _warn_of_other_modes(sparse, block, path)
        return sparse
    if config.sparse_attention is not None:
        block = model_file.bert_model_config["sparse_attention"]
        _warn_of_other_modes(config.sparse_attention, block, flags.config_file)
    return config.sparse_attention


def _check_positions(config: BertConfig, length: int, path: Path) -> None:
    if length > config.max_position_embeddings:
        raise UserError(
            f"{path}: max_position_embeddings is {config.max_position_embeddings}, but --max_seq_length is {length}; "
            f"raise the one or lower the other"
        )


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
