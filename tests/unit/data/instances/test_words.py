"""The table of words against a dictionary."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.instances import words
from data.instances.words import WordTable

# Short and long words, many with a common beginning of 8 or 16 bytes, in and beyond ASCII.
word = st.builds(
    "{}{}".format,
    st.sampled_from(["", "a", "abcdefgh", "abcdefgi", "0123456789abcdef", "жжжжжжжж", "я"]),
    st.text("abcé", min_size=1, max_size=3),
)
WORDS = re.compile(r"[^\W_]+|[!-/:-@\[-`{-~]|\n")


@settings(max_examples=40)
@given(st.lists(st.lists(st.one_of(word, st.sampled_from(["", "\t", "_", ".", "\n"])), max_size=60), max_size=4))
def test_numbers_are_those_of_a_dictionary(texts: list[list[str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:  # so few slots that keys share them and the table grows
        patch.setattr(words, "_MIN_SLOTS", 4)
        patch.setattr(words, "_WORDS_AT_ONCE", 7)
        table = WordTable()
        known: list[str] = []
        for text in (" ".join(parts) for parts in texts):
            numbers, new = table.number(text.encode())
            known += new
            assert [known[number] for number in numbers.tolist()] == WORDS.findall(text)
        assert len(known) == len(set(known)) == len(table)
