"""The model JSON (--cf): its keys and their types."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from common.errors import Problems, UserError, shortened
from common.validation import validate
from nvidia.config import BertConfig
from training.settings.overrides import Override, load_with_overrides


def _check_path(text: str) -> str:
    """Refuse what cannot be a path on any system; whether the path exists is checked later."""
    try:
        parts = [os.fsencode(part) for part in Path(text).parts]
    except UnicodeEncodeError:
        raise ValueError(f"found {shortened(text)}, expected characters that a file name can have") from None
    if "\0" in text or len(text) > 4000 or any(len(part) > 255 for part in parts):
        raise ValueError(f"found {shortened(text)}, expected a path without NUL that is not too long")
    return text


PathText = Annotated[str, AfterValidator(_check_path)]


class Section(BaseModel):
    """A JSON object in which unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Weight = Annotated[float, Field(gt=0.0, le=1e6)]
MAX_COUNT = 10**15  # steps or epochs: far beyond any run, and within what a float counts exactly


class DataSection(Section):
    flags: dict[str, Any] = Field(default_factory=dict)  # read by bing_bert only
    mixed_seq_datasets: dict[str, dict[str, PathText]]
    mixed_seq_weights: dict[str, dict[str, Weight]] = Field(default_factory=dict)


class TrainingSection(Section):
    """How to train at one sequence length."""

    num_epochs: int = Field(ge=1, le=MAX_COUNT)
    warmup_proportion: float = Field(ge=0.0, lt=1.0)
    learning_rate: float = Field(gt=0.0, le=1e6)
    total_training_steps: int = Field(ge=1, le=MAX_COUNT)
    num_workers: int = Field(default=0, ge=0, le=MAX_COUNT)
    async_worker: bool = True
    decay_rate: float = Field(default=0.99, gt=0.0, le=1.0)
    decay_step: int = Field(default=1000, ge=1, le=MAX_COUNT)
    decay_power: float = Field(default=1.0, gt=0.0, le=1000.0)
    decay_proportion: float = Field(default=0.1, gt=0.0, le=1.0)
    final_share: float = Field(default=0.0, ge=0.0, le=1.0)
    weight_decay: float = Field(default=0.01, ge=0.0, le=1e6)


class ValidationSection(Section):
    path: PathText


class ModelFile(Section):
    """The whole model JSON."""

    name: PathText = Field(min_length=1)
    bert_token_file: PathText | None = None
    bert_model_file: PathText | None = None
    bert_model_config: dict[str, Any] | None = None  # None: as the config.json of the first weights says
    data: DataSection
    mixed_seq_training: dict[str, TrainingSection]
    validation: ValidationSection | None = None

    def bert_config(self) -> BertConfig:
        if self.bert_model_config is None:
            raise UserError(
                "the model JSON has no bert_model_config; describe the model there, or pass --use_pretrain with a "
                "Hugging Face folder, whose config.json describes it"
            )
        return BertConfig.from_dict(self.bert_model_config)


def load_model_file(path: Path, overrides: Sequence[Override] = ()) -> ModelFile:
    """The checked model JSON at `path` with values set by --set; all its problems are reported at once."""
    content, where = load_with_overrides(path, "a model JSON (--cf)", overrides)
    problems = Problems()
    model_file = validate(ModelFile, content, where, problems)
    described = content.get("bert_model_config")
    if isinstance(described, dict):  # anything else has been reported above, or is not needed
        try:
            BertConfig.from_dict(described)
        except UserError as error:
            for part in error.parts:
                problems.add(f"{where}: {part}")
    problems.raise_if_any()
    assert model_file is not None
    return model_file


def section_for_length(sections: dict[str, Any], length: int, key: str, path: Path) -> Any:
    """The entry of `sections` (the JSON's `key`) for rows of `length` tokens."""
    if str(length) not in sections:
        found = ", ".join(sorted(sections)) or "none"
        raise UserError(
            f"{path}: {key} has no entry for rows of {length} tokens (found: {found}). "
            f'Add "{length}" there, or pass a length that it has (--max_seq_length)'
        )
    return sections[str(length)]
