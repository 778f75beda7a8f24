"""Models to evaluate: Hugging Face folders, loaded by the stock Auto classes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers

from common.errors import Problems, UserError
from common.files import file_digest
from common.weights import IDENTITY, TOKENIZER_FILES, digest_of, folder_digest
from common.words import counted
from evaluation.tasks.task import ZERO_SHOT, Kind

HEADS: dict[Kind, str] = {
    **dict.fromkeys(("classify", "pair", "regress"), "AutoModelForSequenceClassification"),
    **dict.fromkeys(ZERO_SHOT, "AutoModelForMaskedLM"),
    "tokens": "AutoModelForTokenClassification",
    "span": "AutoModelForQuestionAnswering",
}
# Positions of these start after the padding token's id, so that many rows of their tables are never used.
_OFFSET_POSITIONS = frozenset(
    "roberta xlm-roberta xlm-roberta-xl camembert roberta-prelayernorm longformer mpnet data2vec-text".split()
)
_POOLER = "pooler"


@dataclass(frozen=True)
class ModelFolder:
    """One model under evaluation."""

    name: str
    path: Path

    @cached_property
    def config(self) -> Any:
        return transformers.AutoConfig.from_pretrained(self.path, local_files_only=True)

    @cached_property
    def tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self.path, local_files_only=True)

    def tokenize(self, *texts: Any, **options: Any) -> Any:
        """The tokenizer's output for these texts, without token types if the model has only one."""
        has_types = getattr(self.config, "type_vocab_size", 0) > 1
        return self.tokenizer(*texts, return_token_type_ids=None if has_types else False, verbose=False, **options)

    @cached_property
    def max_positions(self) -> int:
        """Longest row, special tokens included, that the model and its tokenizer take."""
        positions = getattr(self.config, "max_position_embeddings", None) or 512
        if self.config.model_type in _OFFSET_POSITIONS:
            positions -= (self.config.pad_token_id or 0) + 1
        return int(min(positions, self.tokenizer.model_max_length))

    @cached_property
    def num_parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in transformers.AutoModel.from_config(self.config).parameters())

    @cached_property
    def digest(self) -> str:
        """A digest of the weights, the configuration and the tokenizer."""
        return folder_digest(self.path)

    @cached_property
    def architecture_digest(self) -> str:
        """A digest of the configuration and the tokenizer: equal for models that differ only in weights."""
        files = [self.path / name for name in IDENTITY if (self.path / name).is_file()]
        config = {k: v for k, v in self.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
        tokenizer = [(path.name, file_digest(path)) for path in files if path.name != "config.json"]
        return digest_of([json.dumps(config, sort_keys=True, default=str), tokenizer])


class Unavailable(Exception):
    """A model cannot do a task at all, such as filling in masks without a head for it."""


def open_models(named_paths: Sequence[tuple[str | None, Path]]) -> list[ModelFolder]:
    """Check the folders; all mistakes are reported at once. A folder without a name is named by its last part."""
    problems = Problems()
    models = [ModelFolder(name or path.resolve().name, path) for name, path in named_paths]
    for model in models:
        problems.attempt(partial(_check, model))
    names = [model.name for model in models]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.add(f"--model: two models have the name {name!r}. Name them: --model first=DIR second=DIR.")
    for name in names:
        if name == "untrained" or "/" in name or name.startswith("."):
            problems.add(f"--model {name}=…: is not usable as a name. Give another, such as --model first=DIR.")
    problems.raise_if_any()
    return models


def _check(model: ModelFolder) -> None:
    path = model.path
    if not path.is_dir():
        raise UserError(
            f"--model {path}: is not a folder. Expected a Hugging Face folder; a model of the hub can be fetched with "
            f"`hf download NAME --local-dir DIR`."
        )
    if not (path / "config.json").is_file():
        raise UserError(
            f"--model {path}: has no config.json. Expected a Hugging Face folder; a checkpoint of this project becomes "
            "one with scripts/export_hf.py."
        )
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"--model {path}: has no tokenizer (expected one of {', '.join(TOKENIZER_FILES)}). Copy the tokenizer "
            "that the model was trained with into the folder."
        )
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise UserError(f"--model {path}: has no weights (expected model.safetensors). Export or download it again.")
    try:
        config, tokenizer = model.config, model.tokenizer
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"--model {path}: stock transformers cannot load its config or tokenizer ({reason}).") from None
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"--model {path}: the tokenizer has {len(tokenizer):,} tokens, but the model {config.vocab_size:,}. "
            "Put the tokenizer that the model was trained with into the folder."
        )
    if tokenizer.pad_token_id is None:
        raise UserError(f"--model {path}: the tokenizer has no padding token. Set pad_token in tokenizer_config.json.")


def load_model(model: ModelFolder, kind: Kind, num_labels: int, *, untrained: bool, start: Path | None = None) -> Any:
    """The stock model with a head for `kind`; a fresh head is drawn from torch's generator.

    `untrained`: all weights are drawn. `start`: take the encoder from this folder instead of the model's own.
    """
    auto = getattr(transformers, HEADS[kind])
    options: dict[str, Any] = {}
    if HEADS[kind].endswith(("SequenceClassification", "TokenClassification")):
        options["num_labels"] = num_labels
        options["problem_type"] = "regression" if kind == "regress" else "single_label_classification"
    folder = start or model.path
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        if untrained:
            return auto.from_config(config)
        loaded, info = auto.from_pretrained(
            folder, config=config, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"--model {folder}: stock transformers cannot load it as {HEADS[kind]} ({reason}).") from None
    _check_loaded(model, folder, loaded, info, needs_head=kind in ZERO_SHOT)
    return loaded.float()


def _check_loaded(model: ModelFolder, folder: Path, loaded: Any, info: dict[str, Any], needs_head: bool) -> None:
    """A fresh head is expected, unless it predicts masked tokens; fresh weights in the encoder would make every score
    meaningless."""
    prefix = f"{loaded.base_model_prefix}."
    fresh = set(info["missing_keys"]) | {key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]}
    in_encoder = sorted(name for name in fresh if name.startswith(prefix) and _POOLER not in name)
    if in_encoder:
        raise UserError(
            f"--model {folder}: {counted(len(in_encoder), 'weight')} of the encoder missing or of another shape (such "
            f"as {in_encoder[0]}). The weights do not belong to config.json; export or download the model again."
        )
    tied = set(getattr(loaded, "_tied_weights_keys", None) or {})
    if needs_head and any(not name.startswith(prefix) for name in fresh - tied):
        raise Unavailable(f"{model.name} has no head for masked tokens")
