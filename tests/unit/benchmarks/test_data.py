"""The data benchmarks run at tiny sizes and print the documented keys."""

import json
from collections.abc import Callable, Sequence

import pytest

from benchmarks import prepare, read

DOCUMENTED = {
    "prepare": (
        prepare.main,
        ["--sizes_mb", "0.1", "--rss_mb", "0.1", "--sample_mb", "0.2", "--peer_mb", "0.1", "--workers", "2"],
        {
            "instances_per_s_per_core",
            "rss_1x_mb",
            "rss_10x_mb",
            "rss_1x_mb_vocab_trained",
            "rss_10x_mb_vocab_trained",
            "instances_per_s",
            "instances_per_s_all_workers",
            "peer_instances_per_s_per_core",
            "ratio_to_peer",
        },
    ),
    "read": (read.main, ["--rows", "2000", "--file_rows", "600"], {"rows_per_s", "rows_per_s_nvidia", "rss_mb"}),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_last_line_is_json_with_the_documented_keys(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main: Callable[[Sequence[str]], int]
    main, words, keys = DOCUMENTED[name]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert keys <= result.keys()
    assert all(result[key] > 0 for key in keys)


def test_new_words_of_the_prepare_benchmark_are_distinct() -> None:
    assert len({prepare._new_word(number) for number in range(50_000)}) == 50_000
