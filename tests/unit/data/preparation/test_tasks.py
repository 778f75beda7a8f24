"""Encoders are shared between the tasks of a thread, and only these."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from data.preparation.tasks import thread_encoder
from data.tokenizer_training import train_tokenizer

WORDS = [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in "mnrst"]


def test_threads_of_one_worker_never_share_an_encoder(tmp_path: Path) -> None:
    train_tokenizer(WORDS, 200).save(tmp_path)
    together = Barrier(2)

    def own(_: int) -> object:
        together.wait(timeout=300)
        encoder = thread_encoder(str(tmp_path))
        assert encoder is thread_encoder(str(tmp_path)), "a thread keeps the words that it has learnt"
        return encoder

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(own, range(2))
    assert first is not second


def test_a_replaced_tokenizer_is_loaded_again(tmp_path: Path) -> None:
    train_tokenizer(WORDS, 200).save(tmp_path)
    before = thread_encoder(str(tmp_path)).vocab_size
    train_tokenizer(WORDS, 60).save(tmp_path)
    assert thread_encoder(str(tmp_path)).vocab_size < before
