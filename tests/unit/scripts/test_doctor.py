"""The checks of doctor.py, with invented machines and with this one."""

import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import doctor
from tests.support import run_command


def test_versions_are_compared_with_the_pinned_ones() -> None:
    numpy, absent, torch = doctor.check_versions("# why\nnumpy==0.0.1\nno-such-package==1.0\ntorch==2.13.0\n")
    assert numpy.remedy == "pip install numpy==0.0.1"
    assert absent.text.startswith("missing")
    assert [numpy.is_problem, absent.is_problem, torch.is_problem] == [False, True, False]
    assert torch.remedy is None


@pytest.mark.parametrize(
    ("ranks", "allowed", "threads", "words"),
    [
        (2, None, None, None),
        (9, None, None, "at most 8 ranks"),
        (2, None, "8", "unset OMP_NUM_THREADS"),
        (2, None, "4", None),
        (2, None, "1", "idle cores: 6; export OMP_NUM_THREADS=4"),
        (3, None, "2", None),  # two cores stay idle, but no number of threads would use them
        (2, None, "all", "unset OMP_NUM_THREADS"),
        (2, None, "0", "unset OMP_NUM_THREADS"),
        (2, 16.0, None, None),
        (2, 8.0, "4", None),
        (1, 2.0, None, "export OMP_NUM_THREADS=2"),
        (2, 2.0, None, "export OMP_NUM_THREADS=1"),
        (1, 1.5, None, "export OMP_NUM_THREADS=1"),
        (1, 0.5, "1", None),
        (1, 2.0, "8", "export OMP_NUM_THREADS=2"),
        (1, 2.0, "all", "export OMP_NUM_THREADS=2"),
        (1, 2.0, "2", None),  # as recommended: no further advice
        (1, 2.0, "1", "idle cores: 1; export OMP_NUM_THREADS=2"),
        (4, 2.0, "1", "at most 2 ranks"),
    ],
)
def test_threads_are_compared_with_the_allowed_cores(
    ranks: int, allowed: float | None, threads: str | None, words: str | None
) -> None:
    environment = {} if threads is None else {"OMP_NUM_THREADS": threads}
    remedy = doctor.check_cores(ranks, 8, allowed, environment).remedy
    assert remedy is None if words is None else words in str(remedy)


def test_amx_that_is_reported_but_cannot_be_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "dies_of_illegal_instruction", lambda *_: True)
    assert "ONEDNN_MAX_CPU_ISA" in str(doctor.check_instructions({"avx2", "amx_bf16"}).remedy)
    assert doctor.check_instructions({"avx2"}).remedy is None


def test_a_much_faster_precision_is_recommended() -> None:
    assert doctor.check_speed({"fp32": 170e9, "bf16": 350e9}).text == (
        "fp32 170, bf16 350 GFLOP/s; --precision bf16 is 2.1 times as fast as fp32"
    )
    assert doctor.check_speed({"fp32": 170e9, "bf16": 180e9}).text == "fp32 170, bf16 180 GFLOP/s"
    assert all(speed > 1e8 for speed in doctor.measure_speeds(doctor.BertConfig(vocab_size=512)).values())


def test_memory_and_disk(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemAvailable:    1048576 kB\n")
    finding = doctor.check_memory(meminfo)
    assert finding.text == "16 GiB, 1 free"
    assert finding.remedy
    assert doctor.check_disk(meminfo / "below").text == f"{meminfo} is a file, not a folder"
    assert "GiB free" in doctor.check_disk(tmp_path / "not" / "there" / "yet").text


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content + "\n")


def test_limits_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/jobs/mine\n")
    root = tmp_path / "cgroup"
    assert doctor.read_limits(root, own) == (None, None)
    write_group(root / "jobs", cpu__max="400000 100000", memory__max=str(8 * 2**30))
    write_group(root / "jobs" / "mine", cpu__max="150000 100000", memory__max="max")
    assert doctor.read_limits(root, own) == (1.5, 8.0)
    old = tmp_path / "old"
    write_group(old / "cpu", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    write_group(old / "memory", memory__limit_in_bytes=str(2**63 - 4096))
    assert doctor.read_limits(old, tmp_path / "none") == (2.0, None)


def test_limits_are_reported() -> None:
    assert doctor.check_limits(None, None).text == "none set by a control group"
    assert doctor.check_limits(2.0, 16.0).text == "2 cores, 16.0 GiB of memory"
    assert doctor.check_limits(2.0, 16.0).remedy is None
    assert "allow more memory" in str(doctor.check_limits(None, 2.0).remedy)


def test_a_missing_torch_is_reported() -> None:
    """The import of torch fails in the subprocess as if torch were not installed."""
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['doctor.py']"
    code += "; runpy.run_path('scripts/doctor.py', run_name='__main__')"
    outcome = run_command([sys.executable, "-c", code])
    assert "Traceback" not in outcome.stderr
    assert outcome.returncode == 1
    assert "torch cannot be imported" in outcome.stdout
    assert "pip install -r requirements.txt" in outcome.stdout


@pytest.mark.parametrize(
    ("findings", "code", "summary"),
    [
        ([("a", "fine", None)], 0, "no problems found\n"),
        ([("a", "slow", "do this", True)], 0, "no problems found; - advice on 1 check, without which"),
        ([("a", "slow", "do this", True), ("b", "lost", "do that")], 1, "! 1 problem found in 2 checks; - advice on 1"),
    ],
)  # fmt: skip
def test_advice_alone_is_no_failure(
    findings: list[tuple[Any, ...]],
    code: int,
    summary: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "check_machine", lambda *_: [doctor.Finding(*values) for values in findings])
    assert doctor.main([]) == code
    assert summary in capsys.readouterr().out


def test_the_whole_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "dies_of_illegal_instruction", lambda *_: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = doctor.main([])
    printed = capsys.readouterr().out
    assert code == (0 if "no problems found" in printed else 1)
    for topic in ("python", "torch", "deepspeed", "accelerator", "instructions", "launcher", "cores", "memory", "disk"):
        assert topic in printed


REPORT = """<testsuites><testsuite>
<testcase name="test_attention_is_the_plain_formula[varlen-window-float16]"/>
<testcase name="test_attention_is_the_plain_formula[flex-window-float16]"><failure message="assert 3 &lt;= 1&#10;x"/></testcase>
<testcase name="test_attention_is_the_plain_formula[grouped-window-float16]"><skipped message="is for CPUs"/></testcase>
<testcase name="test_a_resumed_run_is_the_same"/>
</testsuite></testsuites>"""  # noqa: E501


def test_what_may_be_trusted_is_read_from_the_report_of_the_gpu_tests() -> None:
    attention, resumed = doctor.read_trust(REPORT)
    assert attention.text == "attention is the plain formula: 1 passed, 1 failed, not available: is for CPUs"
    assert attention.remedy == "do not rely on flex-window-float16 (assert 3 <= 1)"
    assert attention.is_problem
    assert (resumed.text, resumed.remedy) == ("a resumed run is the same: 1 passed", None)
