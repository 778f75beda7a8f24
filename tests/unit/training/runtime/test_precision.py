"""Choice of precision."""

from pathlib import Path

import pytest

from common.errors import UserError
from training.runtime.precision import Abilities, choose_precision

CPU = Abilities("CPU", ("fp32", "bf16"))
FILE = Path("ds.json")


def test_auto_follows_the_file_where_the_machine_can() -> None:
    assert choose_precision("auto", "bf16", CPU, FILE) == "bf16"
    assert choose_precision("auto", "fp16", Abilities("GPU", ("fp32", "fp16", "bf16")), FILE) == "fp16"


def test_auto_falls_back_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_precision("auto", "fp16", CPU, FILE) == "fp32"
    said = capsys.readouterr().err
    assert "ds.json requests fp16" in said
    assert "--precision fp32" in said


def test_the_flag_overrides_the_file_or_is_refused() -> None:
    assert choose_precision("fp32", "fp16", CPU, FILE) == "fp32"
    with pytest.raises(UserError, match=r"--precision fp16.*does not support fp16; expected one of fp32, bf16"):
        choose_precision("fp16", "fp32", CPU, FILE)
