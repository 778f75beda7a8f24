"""The table, the user's additions to it, and --gpus."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from training.planning.accelerators import TABLE, find_accelerator, parse_gpus, read_table

ENTRY: dict[str, Any] = json.loads(TABLE.read_text())["H100"]


def test_the_shipped_table_has_what_people_rent() -> None:
    table = read_table()
    assert {"A100-40", "A100-80", "H100", "H200", "B200", "V100-32", "L40S", "RTX-4090", "MI300X"} <= table.keys()
    for accelerator in table.values():
        assert accelerator.peak_tflops["fp16"] > accelerator.peak_tflops["fp32"]
        assert 0.2 < accelerator.efficiency < 0.9
        assert accelerator.efficiency_origin
        assert accelerator.usable_gib < accelerator.memory_gib
    assert "bf16" not in table["V100-16"].peak_tflops


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x128:H100", ("H100", 8, 128)),
        ("8:A100-80", ("A100-80", 8, 1)),
        ("H100", ("H100", 1, 1)),
    ],
)
def test_gpus(text: str, expected: tuple[str, int, int]) -> None:
    assert parse_gpus(text) == expected


@pytest.mark.parametrize(
    "text", ["", "8x:H100", "8x4x2:H100", "8*4:H100", "0x4:H100", "8x0:H100", ":H100", "1000x2000:H100"]
)
def test_malformed_gpus(text: str) -> None:
    with pytest.raises(UserError, match="--gpus"):
        parse_gpus(text)


def test_names_are_found_in_any_case_and_near_ones_are_named() -> None:
    table = read_table()
    assert find_accelerator("h100", table).name == "H100"
    with pytest.raises(UserError, match=r"did you mean 'RTX-4090'\?"):
        find_accelerator("RTX4090", table)
    with pytest.raises(UserError, match="A100-40 or A100-80"):
        find_accelerator("A100", table)
    with pytest.raises(UserError, match=r"unknown accelerator 'TPU'.*known: A100-40"):
        find_accelerator("TPU", table)


def test_a_file_replaces_and_extends(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"H100": {**ENTRY, "efficiency": 0.4}, "Mine": ENTRY}))
    table = read_table(path)
    assert (table["H100"].efficiency, table["Mine"].efficiency) == (0.4, ENTRY["efficiency"])
    assert table["A100-80"] == read_table()["A100-80"]


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    wrong = {**ENTRY, "memory_gib": -1, "efficiency": 1.5, "peak_tflops": {"fp9": 3}, "memory": 80}
    path.write_text(json.dumps({"Mine": wrong, "Other": 3, "Third": {**ENTRY, "compute_capability": 9}}))
    with pytest.raises(UserError) as raised:
        read_table(path)
    wrong_keys = ("memory_gib: found -1", "efficiency: found 1.5", "peak_tflops.fp9: found 'fp9'", "compute_capability")
    for part in (*wrong_keys, "unknown key 'memory'", "Other: found 3, expected an object"):
        assert part in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_is_no_table(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"mine\.json"):
        read_table(path)
