"""The doctor's findings, on machines made up for it and on this one."""

from pathlib import Path

import pytest

from scripts import doctor


def test_versions_against_the_pins() -> None:
    numpy, absent, torch = doctor.examine_versions("# why\nnumpy==0.0.1\nno-such-package==1.0\ntorch==2.13.0\n")
    assert numpy.remedy == "pip install numpy==0.0.1"
    assert absent.text.startswith("missing")
    assert torch.remedy is None


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "words"),
    [
        (2, 8, None, None),
        (9, 8, None, "at most 8 ranks"),
        (2, 8, "8", "unset OMP_NUM_THREADS"),
        (2, 8, "4", None),
        (2, 8, "1", "6 cores stay idle"),
        (2, 8, "all", "unset OMP_NUM_THREADS"),
        (2, 8, "0", "unset OMP_NUM_THREADS"),
    ],
)
def test_cores(ranks: int, cores: int, threads: str | None, words: str | None) -> None:
    environment = {} if threads is None else {"OMP_NUM_THREADS": threads}
    remedy = doctor.examine_cores(ranks, cores, environment).remedy
    assert remedy is None if words is None else words in str(remedy)


def test_amx_that_is_announced_but_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "dies_of_illegal_instruction", lambda *_: True)
    assert "ONEDNN_MAX_CPU_ISA" in str(doctor.examine_instructions({"avx2", "amx_bf16"}).remedy)
    assert doctor.examine_instructions({"avx2"}).remedy is None


def test_memory_and_disk(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemAvailable:    1048576 kB\n")
    finding = doctor.examine_memory(meminfo)
    assert finding.text == "16 GiB, 1 free"
    assert finding.remedy
    assert doctor.examine_disk(meminfo / "below").text == f"{meminfo} is a file, not a folder"
    assert "GiB free" in doctor.examine_disk(tmp_path / "not" / "there" / "yet").text


def test_the_whole_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "dies_of_illegal_instruction", lambda *_: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = doctor.main([])
    said = capsys.readouterr().out
    assert code == (0 if "all is well" in said else 1)
    for topic in ("python", "torch", "deepspeed", "accelerator", "instructions", "launcher", "cores", "memory", "disk"):
        assert topic in said
