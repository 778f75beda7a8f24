"""docs/configuration.md lists exactly the flags and keys of the code, with their defaults."""

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from pydantic import BaseModel

from common.validation import key_names
from nvidia.config import BertConfig
from tests.support import PROJECT
from training.engine.json_blocks import BLOCKS, KEYS_WITHOUT_EFFECT, REFUSED_KEYS
from training.optimizers.build import OUR_KINDS, OptimizerBlock
from training.settings.deepspeed_file import KNOWN_KEYS
from training.settings.flags import build_parser
from training.settings.model_file import DataSection, ModelFile, TrainingSection, ValidationSection

OFFLOAD: dict[str, type[BaseModel]] = {
    "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "offload_param": DeepSpeedZeroOffloadParamConfig,
}
# Keys of the DeepSpeed JSON that our own code reads.
OUR_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer"),
    *("progressive_layer_drop", "sparse_attention", "activation_checkpointing"),
)
Row = tuple[list[str], str]  # names in the first column, the default


def read_page() -> tuple[dict[str, list[Row]], list[list[str]], dict[str, list[Row]]]:
    """Rows by heading, all rows' cells, and names with examples by heading."""
    tables: dict[str, list[Row]] = {}
    examples: dict[str, list[Row]] = {}
    cells_of_rows = []
    heading = ""
    for line in (PROJECT / "docs" / "configuration.md").read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ") if line.startswith("###") else f"{line.lstrip('# ')}:"
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            tables.setdefault(heading, []).append((re.findall(r"`([^`]+)`", cells[0]), cells[1]))
            examples.setdefault(heading, []).append((tables[heading][-1][0], cells[-1]))
            cells_of_rows.append(cells)
    return tables, cells_of_rows, examples


TABLES, ROWS, EXAMPLES = read_page()
# "Top level" occurs twice, first for the model JSON.
TOP_LEVEL = TABLES["Top level"]
MODEL_TOP, DEEPSPEED_TOP = TOP_LEVEL[: len(ModelFile.model_fields)], TOP_LEVEL[len(ModelFile.model_fields) :]


def names(rows: list[Row]) -> list[str]:
    return [name for row_names, _ in rows for name in row_names]


def flags() -> dict[str, argparse.Action]:
    return {
        option: action
        for action in build_parser()._actions
        for option in action.option_strings
        if action.dest != "help"
    }


def test_every_flag_and_no_other() -> None:
    documented = [name for rows in TABLES.values() for name in names(rows) if name.startswith("--")]
    assert sorted(documented) == sorted(flags())


def shown_default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return '""' if value == Path() else str(value)


def test_defaults_of_flags() -> None:
    for rows in TABLES.values():
        for row_names, default in rows:
            if row_names[0].startswith("--"):
                action = flags()[row_names[0]]
                assert default == ("required" if action.required else shown_default(action.default)), row_names


def test_help_shows_the_defaults() -> None:
    formatter = build_parser()._get_formatter()
    for action in flags().values():
        if action.default is not None and action.default is not False:
            assert "(default: " in formatter._expand_help(action), action.dest


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (MODEL_TOP, ModelFile),
        (TABLES["`data`"], DataSection),
        (TABLES["`mixed_seq_training`, for each length"], TrainingSection),
        (TABLES["`validation`"], ValidationSection),
        (TABLES["`zero_optimization`"], BLOCKS["zero_optimization"]),
        (TABLES["`fp16`"], BLOCKS["fp16"]),
        (TABLES["`bf16`"], BLOCKS["bf16"]),
        (TABLES["`progressive_layer_drop`"], BLOCKS["progressive_layer_drop"]),
        (TABLES["`zero_optimization.offload_optimizer`"], OFFLOAD["offload_optimizer"]),
        (TABLES["`zero_optimization.offload_param`"], OFFLOAD["offload_param"]),
        (TABLES["`tensorboard`"], BLOCKS["tensorboard"]),
        (TABLES["`csv_monitor`"], BLOCKS["csv_monitor"]),
        (TABLES["`wandb`"], BLOCKS["wandb"]),
        (TABLES["`comet`"], BLOCKS["comet"]),
    ],
)
def test_keys_and_defaults_of_sections(rows: list[Row], kind: type[BaseModel]) -> None:
    assert sorted(names(rows)) == sorted(key_names(kind))
    fields = {str(field.alias or name): field for name, field in kind.model_fields.items()}
    for (key,), default in rows:
        field = fields[key]
        if field.is_required():
            assert default == "required", key
        elif default != "see DeepSpeed":
            value = field.get_default(call_default_factory=True)
            value = getattr(value, "value", value)
            assert default in (json.dumps(value), "none" if value is None else None), key


def test_keys_and_defaults_of_the_model() -> None:
    rows = TABLES["`bert_model_config`"]
    fields = {field.name: field for field in dataclasses.fields(BertConfig)}
    assert sorted(names(rows)) == sorted(fields)
    for (key,), default in rows:
        field = fields[key]
        if field.default is not dataclasses.MISSING:
            value = field.default
            shown = (
                {None: "none", True: "true", False: "false"}.get(value) if not isinstance(value, str | float) else None
            )
            is_plain = type(value) in (int, float, str)
            assert default == (str(value) if is_plain else shown), key


def test_keys_of_the_deepspeed_json() -> None:
    assert sorted(names(DEEPSPEED_TOP)) == sorted(KNOWN_KEYS)
    refused = {name for row_names, default in DEEPSPEED_TOP for name in row_names if default == "refused"}
    assert refused == set(REFUSED_KEYS)
    assert names(TABLES["`optimizer`"]) == key_names(OptimizerBlock)
    assert set(names(TABLES["`optimizer.params`"])) == {key for kind in OUR_KINDS.values() for key in key_names(kind)}


def test_every_key_of_the_deepspeed_json_has_its_state() -> None:
    documented = {
        name: match[1]
        for cells in ROWS
        if (match := re.match(r"\*\*([\w ]+)\*\*: ", cells[2]))
        for name in re.findall(r"`([^`]+)`", cells[0])
    }
    expected = {
        **dict.fromkeys(KNOWN_KEYS, "DeepSpeed"),
        **dict.fromkeys(OUR_KEYS, "ours"),
        **dict.fromkeys(KEYS_WITHOUT_EFFECT, "no effect"),
        **dict.fromkeys(REFUSED_KEYS, "refused"),
    }
    assert documented == expected


def test_every_row_has_an_effect_and_an_example() -> None:
    for cells in ROWS:
        assert len(cells) == 4, cells
        effect, example = cells[2:]
        assert len(re.sub(r"[*:]|DeepSpeed", "", effect).split()) >= 2, cells
        assert re.search(r"`[^`]+`", example), cells
        if cells[0].startswith("`--"):
            names_shown = re.findall(r"`(--[\w-]+)`", cells[0])
            assert any(name in example for name in names_shown), cells


@pytest.mark.parametrize(
    "block", [*sorted(BLOCKS.keys() - {"bfloat16"}), *(f"zero_optimization.{name}" for name in OFFLOAD)]
)
def test_examples_of_deepspeeds_blocks_are_valid(block: str) -> None:
    kind = OFFLOAD[block.split(".")[1]] if "." in block else BLOCKS[block]
    for row_names, example in EXAMPLES[f"`{block}`"]:
        value = json.loads(example.strip("`"))
        stage = {"stage": 1} if block == "zero_optimization" and row_names != ["stage"] else {}
        kind(**{**stage, row_names[0]: value})
