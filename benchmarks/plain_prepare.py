"""A plain reference for benchmarks/prepare.py: BERT's published procedure in Python, one instance at a time.

Written from the procedure's description and not a copy of anybody's script: text is cleaned and split character by
character, WordPiece is a greedy search, pairs are assembled and truncated token by token, masks are drawn instance by
instance, and h5py compresses the six datasets with gzip. `python -m benchmarks.plain_prepare TEXT VOCABULARY OUTPUT`
takes a sentence per line and blank lines between documents, and prints the number of instances.
"""

import random
import string
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

COPIES, LENGTH, PREDICTIONS, SHORT = 5, 128, 20, 0.1
CJK = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))
Instance = tuple[list[str], list[int], list[int], list[str], int]  # tokens, segments, positions, labels, is_random


def clean(text: str) -> str:
    """Remove control characters, unify white space, and put spaces around CJK characters."""
    output = []
    for character in text:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            output.append(" ")
        elif any(low <= ord(character) <= high for low, high in CJK):
            output.append(f" {character} ")
        elif category[0] != "C" and character != "\ufffd":
            output.append(character)
    return "".join(output)


def is_sign(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def split_words(text: str) -> Iterator[str]:
    """Yield lower-case words without accents; every sign is a word."""
    for part in clean(text).split():
        word = ""
        for character in unicodedata.normalize("NFD", part.lower()):
            if unicodedata.category(character) == "Mn":
                continue
            if is_sign(character):
                yield from filter(None, (word, character))
                word = ""
            else:
                word += character
        if word:
            yield word


def split_pieces(word: str, vocabulary: dict[str, int]) -> list[str]:
    """Return the longest pieces of the vocabulary, from the beginning of the word on."""
    pieces, start = [], 0
    while start < len(word) and len(word) <= 100:
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocabulary:
                break
        else:
            return ["[UNK]"]
        pieces.append(piece)
        start = end
    return pieces or ["[UNK]"]


def instances_of(documents: list[list[list[str]]], number: int, words: list[str], rng: random.Random) -> list[Instance]:
    """Return the instances of one document."""
    document, found, chunk, i = documents[number], [], [], 0
    target = rng.randint(2, LENGTH - 3) if rng.random() < SHORT else LENGTH - 3
    while i < len(document):
        chunk.append(document[i])
        if i == len(document) - 1 or sum(map(len, chunk)) >= target:
            split = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            a = [token for sentence in chunk[:split] for token in sentence]
            is_random = len(chunk) == 1 or rng.random() < 0.5
            if is_random:
                other = number
                while other == number:
                    other = rng.randrange(len(documents))
                b: list[str] = []
                for sentence in documents[other][rng.randrange(len(documents[other])) :]:
                    b.extend(sentence)
                    if len(b) >= target - len(a):
                        break
                i -= len(chunk) - split  # these sentences are used again
            else:
                b = [token for sentence in chunk[split:] for token in sentence]
            while len(a) + len(b) > LENGTH - 3:
                longer = a if len(a) > len(b) else b
                longer.pop(0 if rng.random() < 0.5 else -1)
            tokens = ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
            segments = [0] * (len(a) + 2) + [1] * (len(b) + 1)
            found.append((tokens, segments, *mask(tokens, words, rng), int(is_random)))
            chunk = []
        i += 1
    return found


def mask(tokens: list[str], words: list[str], rng: random.Random) -> tuple[list[int], list[str]]:
    """Mask `tokens` in place; return the sorted positions and the original tokens there."""
    candidates = [place for place, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]")]
    rng.shuffle(candidates)
    positions = sorted(candidates[: min(PREDICTIONS, max(1, round(len(tokens) * 0.15)))])
    labels = [tokens[place] for place in positions]
    for place in positions:
        if rng.random() < 0.8:
            tokens[place] = "[MASK]"
        elif rng.random() < 0.5:
            tokens[place] = words[rng.randrange(len(words))]
    return positions, labels


def write(path: str, instances: list[Instance], vocabulary: dict[str, int]) -> None:
    widths = dict.fromkeys(("input_ids", "input_mask", "segment_ids"), LENGTH)
    widths |= dict.fromkeys(("masked_lm_positions", "masked_lm_ids"), PREDICTIONS)
    arrays = {name: np.zeros([len(instances), width], dtype="int32") for name, width in widths.items()}
    arrays["next_sentence_labels"] = np.zeros(len(instances), dtype="int32")
    for row, (tokens, segments, positions, labels, is_random) in enumerate(instances):
        values = {
            "input_ids": [vocabulary[token] for token in tokens],
            "input_mask": [1] * len(tokens),
            "segment_ids": segments,
            "masked_lm_positions": positions,
            "masked_lm_ids": [vocabulary[token] for token in labels],
        }
        for name, width in widths.items():
            arrays[name][row] = values[name] + [0] * (width - len(values[name]))
        arrays["next_sentence_labels"][row] = is_random
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            kind = "i1" if name in ("input_mask", "segment_ids", "next_sentence_labels") else "i4"
            file.create_dataset(name, data=array, dtype=kind, compression="gzip")


def main(text: str, vocabulary_file: str, output: str) -> None:
    words = Path(vocabulary_file).read_text().splitlines()
    vocabulary = {word: number for number, word in enumerate(words)}
    rng = random.Random(0)
    documents: list[list[list[str]]] = [[]]
    with Path(text).open() as stream:
        for line in stream:
            tokens = [piece for word in split_words(line) for piece in split_pieces(word, vocabulary)]
            if tokens:
                documents[-1].append(tokens)
            elif documents[-1]:
                documents.append([])
    documents = [document for document in documents if document]
    rng.shuffle(documents)
    numbers = [*range(len(documents))] * COPIES
    found = [instance for number in numbers for instance in instances_of(documents, number, words, rng)]
    rng.shuffle(found)
    write(output, found, vocabulary)
    print(len(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
