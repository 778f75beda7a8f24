"""The sample that a tokenizer is trained on."""

from pathlib import Path

import pytest

from data import tokenizer_training
from data.tokenizer_training import TextSample


@pytest.fixture(name="paths")
def _paths_fixture(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.txt" for number in range(9)]
    for number, path in enumerate(paths):
        path.write_text("".join(f"Zeile {number} {place} größer\n" for place in range(50)))
    return paths


def test_a_small_corpus_is_used_whole(paths: list[Path]) -> None:
    total = sum(path.stat().st_size for path in paths)
    sample = TextSample(paths, total)
    assert (sample.size, sample.is_part) == (total, False)
    for _ in range(2):
        assert [line for line in sample if line] == "".join(path.read_text() for path in paths).splitlines()


@pytest.mark.parametrize("max_files", [512, 4])
def test_a_large_corpus_gives_whole_lines_of_evenly_spaced_files(
    paths: list[Path], max_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_training, "_MAX_FILES", max_files)
    sample = TextSample(paths, 2000)
    lines = [line for line in sample if line]
    assert sample.is_part
    assert sample.size == sum(len(f"{line}\n".encode()) for line in lines)
    assert 1700 < sample.size <= 2000
    assert set(lines) <= set("".join(path.read_text() for path in paths).splitlines())
    numbers = [int(line.split()[1]) for line in lines]
    assert sorted(set(numbers)) == (list(range(9)) if max_files == 512 else [0, 2, 4, 6])
    counts = [numbers.count(number) for number in set(numbers)]
    assert max(counts) - min(counts) <= 1
