"""The blocks of the DeepSpeed JSON that are checked key by key, against DeepSpeed's own descriptions of them."""

import copy
from typing import Any, get_args

from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, Field, ValidationError

from common.errors import Problems, nearest, shortened

UNKNOWN = "; expected one of those that DeepSpeed knows there; remove it"


class LayerDropBlock(BaseModel):
    """`progressive_layer_drop`: blocks are kept with a probability that falls from 1 towards `theta`."""

    model_config = {"extra": "forbid", "frozen": True}

    enabled: bool = False
    theta: float = Field(default=0.5, gt=0.0, le=1.0)
    gamma: float = Field(default=0.001, ge=0.0)


BLOCKS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "bfloat16": DeepSpeedBF16Config,
    "progressive_layer_drop": LayerDropBlock,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
}


def check_blocks(content: dict[str, Any], where: str, problems: Problems) -> None:
    """Note unknown keys and impossible values in the blocks of `content`, of which `where` names the file."""
    for name, kind in BLOCKS.items():
        block = content.get(name)
        if not isinstance(block, dict):
            continue
        try:
            kind(**block)
        except ValidationError as error:
            for detail in error.errors():
                problems.add(f"{where}: {_describe(name, kind, detail)}")


def find_refusal(config: dict[str, Any]) -> str | None:
    """Why DeepSpeed's own reading of the whole file would fail, or None; asked as for a world of one."""
    alone = copy.deepcopy(config)
    alone.pop("train_batch_size", None)
    try:
        DeepSpeedConfig(alone)
    except ValidationError as error:
        detail = error.errors()[0]
        return f"{'.'.join(map(str, detail['loc']))}: found {shortened(detail['input'])}, but {detail['msg']}"
    except Exception as error:  # asserts, KeyErrors, TypeErrors: whatever the value met first
        return f"{type(error).__name__}: {error}"
    return None


def key_names(kind: type[BaseModel]) -> list[str]:
    """The keys that a block takes, as a JSON file writes them."""
    return [str(field.alias or name) for name, field in kind.model_fields.items()]


def nested_blocks(kind: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The keys of a block that are blocks themselves, with what describes them."""
    found = {}
    for name, field in kind.model_fields.items():
        kinds = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
        blocks = [part for part in kinds if issubclass(part, BaseModel)]
        if blocks:
            found[str(field.alias or name)] = blocks[0]
    return found


def _describe(name: str, kind: type[BaseModel], detail: Any) -> str:
    path = ".".join([name, *(str(part) for part in detail["loc"])])
    if detail["type"] == "extra_forbidden":
        known = _known_keys(kind, [str(part) for part in detail["loc"][:-1]])
        return f"unknown key {path!r}{nearest(str(detail['loc'][-1]), known, otherwise=UNKNOWN)}"
    return f"{path}: found {shortened(detail['input'])}, but {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _known_keys(kind: type[BaseModel], path: list[str]) -> list[str]:
    """The keys of the block that `path` leads to from `kind`."""
    for key in path:
        blocks = nested_blocks(kind)
        if key not in blocks:
            return []
        kind = blocks[key]
    return key_names(kind)
