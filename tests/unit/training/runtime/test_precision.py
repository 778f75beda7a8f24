"""Choice of precision, and CPUs with broken AMX."""

import signal
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from training.runtime.precision import ISA_LIMIT, Abilities, avoid_broken_amx, choose_precision, read_cpu_flags

CPU = Abilities("CPU", fp16=False, bf16=True)
FILE = Path("ds.json")


def test_auto_follows_the_file_where_the_machine_can() -> None:
    assert choose_precision("auto", "bf16", CPU, FILE) == "bf16"
    assert choose_precision("auto", "fp16", Abilities("GPU", fp16=True, bf16=True), FILE) == "fp16"


def test_auto_falls_back_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_precision("auto", "fp16", CPU, FILE) == "fp32"
    said = capsys.readouterr().err
    assert "ds.json requests fp16" in said
    assert "--precision fp32" in said


def test_the_flag_overrides_the_file_or_is_refused() -> None:
    assert choose_precision("fp32", "fp16", CPU, FILE) == "fp32"
    with pytest.raises(UserError, match=r"--precision fp16.*does not support fp16; expected one of fp32, bf16"):
        choose_precision("fp16", "fp32", CPU, FILE)


def dying_unless(condition: str) -> list[str]:
    """A child that really dies of SIGILL unless `condition` on its environment holds."""
    body = f"import os, signal\nif not ({condition}): os.kill(os.getpid(), signal.SIGILL)"
    return [sys.executable, "-c", body]


def test_broken_amx_is_found_by_a_child_and_limited(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"PATH": "/usr/bin"}
    probe = dying_unless(f"os.environ.get('{ISA_LIMIT}') == 'AVX512_CORE_FP16'")
    avoid_broken_amx(environment, {"amx_bf16"}, probe)
    assert environment[ISA_LIMIT] == "AVX512_CORE_FP16"
    assert ISA_LIMIT in capsys.readouterr().err


def test_working_amx_and_other_cpus_are_left_alone() -> None:
    environment = {"PATH": "/usr/bin"}
    avoid_broken_amx(environment, {"amx_bf16"}, dying_unless("True"))
    avoid_broken_amx(environment, {"avx2"}, dying_unless("False"))
    assert ISA_LIMIT not in environment


def test_a_users_own_limit_is_kept() -> None:
    environment = {"PATH": "/usr/bin", ISA_LIMIT: "AVX2"}
    avoid_broken_amx(environment, {"amx_bf16"}, dying_unless("False"))
    assert environment[ISA_LIMIT] == "AVX2"


def test_hopeless_amx_is_refused_with_a_message() -> None:
    with pytest.raises(UserError, match="illegal instruction"):
        avoid_broken_amx({"PATH": "/usr/bin"}, {"amx_bf16"}, dying_unless("False"))
    assert signal.SIGILL  # the children above died of it, this process did not


def test_cpu_flags(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n")
    assert read_cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "amx_bf16"}
    assert read_cpu_flags(tmp_path / "absent") == set()
