"""CPUs with broken AMX."""

import signal
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from nvidia.cpu.amx import ISA_LIMIT, avoid_broken_amx, read_cpu_flags


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
