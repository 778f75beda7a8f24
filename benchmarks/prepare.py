"""Measures the speed, scaling and memory of turning text into shards: `python benchmarks/prepare.py`.

Instances per second and core cover the whole command, from raw sentences to finished shards and report, with a given
tokenizer, five static copies and one worker, in CPU time of the process tree. The peer is a plain reference of BERT's
published procedure (benchmarks/plain_prepare.py) with the same vocabulary and text, start-up included; with --nvidia
also NVIDIA's own script (DeepLearningExamples, PyTorch/LanguageModeling/BERT). Memory is measured with a given
tokenizer, and with one that is trained in the run. The largest corpus is also prepared by several workers: their
instances per second of wall time show whether all cores are used on a machine without other load; the share of CPU time
outside of the workers, which more workers do not divide, shows it on any machine.
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py

from data.tokenizer_training import train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 30_000
SENTENCES_PER_DOCUMENT = (6, 30)
SYLLABLES = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "on")]
NEW_WORDS_PER_SENTENCE = 0.4  # which has 20 words on average


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure data.prepare.")
    parser.add_argument("--sizes_mb", type=float, nargs="+", default=[1, 5, 20, 200], help="corpus sizes")
    parser.add_argument(
        "--rss_mb", type=float, default=20, help="corpus whose memory is compared with one of ten times its size"
    )
    parser.add_argument("--peer_mb", type=float, default=15, help="corpus to compare with the plain reference on")
    parser.add_argument("--nvidia", type=Path, help="a folder with NVIDIA's create_pretraining_data.py, to compare too")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="number of workers to compare with one")
    parser.add_argument("--sample_mb", type=float, default=5, help="amount of text to train the tokenizer on")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        folder = Path(name)
        tokenizer = _tokenizer(folder, arguments.sample_mb)
        given, trained = ["--vocab_file", str(tokenizer)], ["--vocab_size", str(VOCAB_SIZE)]
        print(f"{'corpus':>10} {'instances':>10} {'wall s':>8} {'cpu s':>8} {'inst/s/core':>12} {'peak MB':>8}")
        once, tenfold = arguments.rss_mb, arguments.rss_mb * 10
        sizes = sorted({*arguments.sizes_mb, once, tenfold})
        results = {size: _measure(folder, given, size, 1) for size in sizes}
        print("with a tokenizer trained in the run:")
        with_training = {size: _measure(folder, trained, size, 1) for size in (once, tenfold)}
        print(f"with {arguments.workers} workers:")
        together = _measure(folder, given, sizes[-1], arguments.workers)
        print("beside the plain reference:")
        ours = _measure(folder, given, arguments.peer_mb, 1)["rate"]
        peer = _peer_rate(folder, tokenizer, arguments.peer_mb)
        print(f"plain reference: {peer:,.0f} instances/s/core, ours {ours / peer:.1f} times as many")
        nvidia = _nvidia_rate(arguments.nvidia, folder, tokenizer, arguments.peer_mb) if arguments.nvidia else None
        if nvidia is not None:
            print(f"NVIDIA's script: {nvidia:,.0f} instances/s/core, ours {ours / nvidia:.1f} times as many")
    best = results[sizes[-1]]
    print(
        json.dumps(
            {
                "instances_per_s_per_core": round(best["rate"]),
                "peer_instances_per_s_per_core": round(peer),
                "ratio_to_peer": round(ours / peer, 2),
                "ratio_to_nvidia": None if nvidia is None else round(ours / nvidia, 2),
                "rss_1x_mb": round(results[once]["rss_mb"]),
                "rss_10x_mb": round(results[tenfold]["rss_mb"]),
                "rss_1x_mb_vocab_trained": round(with_training[once]["rss_mb"]),
                "rss_10x_mb_vocab_trained": round(with_training[tenfold]["rss_mb"]),
                "workers": arguments.workers,
                "instances_per_s": round(best["instances"] / best["seconds"]),
                "instances_per_s_all_workers": round(together["instances"] / together["seconds"]),
                "cpu_share_outside_workers": round(together["own_share"], 3),
                "rate_by_mb": {str(size): round(result["rate"]) for size, result in results.items()},
            }
        )
    )
    return 0


def _vocabulary(rng: random.Random) -> list[str]:
    """Return words of one to four syllables."""
    return sorted({"".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(40_000)})


def _new_word(number: int) -> str:
    """Return a different word for every number: text always has new names, numbers and misspellings."""
    word = "x"
    while number:
        number, place = divmod(number, len(SYLLABLES))
        word += SYLLABLES[place]
    return word


def write_corpus(path: Path, megabytes: float) -> None:
    """Write sentences, one per line, with blank lines between documents. One word in fifty is new."""
    rng = random.Random(1)
    words = _vocabulary(rng)
    weights = [1 / (rank + 5) for rank in range(len(words))]
    rng.shuffle(words)
    pool = rng.choices(words, weights, k=1_000_000)
    size = num_new = 0
    with path.open("w") as stream:
        while size < megabytes * 2**20:
            lines = []
            for _ in range(rng.randint(*SENTENCES_PER_DOCUMENT)):
                start = rng.randrange(len(pool) - 40)
                words = pool[start : start + rng.randint(5, 35)]
                if rng.random() < NEW_WORDS_PER_SENTENCE:
                    words[rng.randrange(len(words))] = _new_word(num_new)
                    num_new += 1
                lines.append(" ".join(words).capitalize() + ".")
            size += stream.write("\n".join(lines) + "\n\n")


def _tokenizer(folder: Path, megabytes: float) -> Path:
    write_corpus(folder / "sample.txt", megabytes)
    train_tokenizer((folder / "sample.txt").read_text().split("\n"), VOCAB_SIZE).save(folder / "tokenizer")
    return folder / "tokenizer"


def _run(module: str, *arguments: object, folder: Path = ROOT) -> tuple[str, float, float]:
    """Run a module as a process; return the last line of its output, wall time and CPU time, start-up included."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    child = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return child.stdout.splitlines()[-1], seconds, cpu


def _measure(folder: Path, tokenizer: Sequence[str], megabytes: float, workers: int) -> dict[str, float]:
    corpus, output = folder / "corpus.txt", folder / "out"
    write_corpus(corpus, megabytes)
    line, seconds, cpu = _run(
        "benchmarks.prepare_child", "--input", corpus, "--output_dir", output, *tokenizer, "--max_seq_length", 128,
        "--dupe_factor", 5, "--workers", workers,
    )  # fmt: skip
    found = json.loads(line)
    rss = found["rss_mb"]
    files = json.loads((output / "128" / "manifest.json").read_text())["files"]
    instances = sum(file["rows"] for file in files)
    shutil.rmtree(output)
    corpus.unlink()
    print(f"{megabytes:>7.0f} MB {instances:>10,} {seconds:>8.1f} {cpu:>8.1f} {instances / cpu:>12,.0f} {rss:>8.0f}")
    own_share = found["own_cpu_s"] / cpu
    return {
        "rate": instances / cpu, "rss_mb": rss, "seconds": seconds, "instances": instances, "own_share": own_share
    }  # fmt: skip


def _peer_rate(folder: Path, tokenizer: Path, megabytes: float) -> float:
    corpus = folder / "peer.txt"
    write_corpus(corpus, megabytes)
    instances, _, cpu = _run("benchmarks.plain_prepare", corpus, tokenizer / "vocab.txt", folder / "peer.hdf5")
    return int(instances) / cpu


def _nvidia_rate(script_folder: Path, folder: Path, tokenizer: Path, megabytes: float) -> float:
    corpus, output, vocabulary = folder / "nvidia.txt", folder / "nvidia.hdf5", tokenizer / "vocab.txt"
    write_corpus(corpus, megabytes)
    _, _, cpu = _run(
        "create_pretraining_data", "--input_file", corpus, "--output_file", output, "--vocab_file", vocabulary,
        "--bert_model", vocabulary, "--dupe_factor", 5, folder=script_folder,
    )  # fmt: skip
    with h5py.File(output) as file:
        return len(file["next_sentence_labels"]) / cpu


if __name__ == "__main__":
    sys.exit(main())
