"""CoNLL columns: tokens and tags of entities, in any of the usual schemes, as BIO."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.words import counted

DOCUMENT_START = "-DOCSTART-"
_PREFIXES = "BIESLU"


def read_conll(path: Path, text: str, token_column: int, tag_column: int) -> list[dict[str, Any]]:
    """Sentences of a file with one token per line and an empty line between sentences; tags become BIO."""
    rows: list[dict[str, Any]] = []
    tokens: list[str] = []
    tags: list[str] = []
    first_line = 1
    for number, line in enumerate([*text.split("\n"), ""], 1):
        parts = line.split()
        if parts and parts[0] == DOCUMENT_START:
            continue
        if parts:
            try:
                tokens.append(parts[token_column])
                tags.append(checked_tag(parts[tag_column], path, number))
            except IndexError:
                raise UserError(
                    f"{path}, line {number}: has {counted(len(parts), 'column')}, but the task reads columns "
                    f'{token_column} and {tag_column} (counted from 0). Correct "columns" of the task, or the file.'
                ) from None
            if len(tokens) == 1:
                first_line = number
        elif tokens:
            rows.append({"tokens": tokens, "label": to_bio(tags), "line": first_line})
            tokens, tags = [], []
    return rows


def checked_tag(tag: str, path: Path, number: int) -> str:
    if tag == "O" or (len(tag) > 2 and tag[1] == "-" and tag[0] in _PREFIXES):
        return tag
    raise UserError(
        f"{path}, line {number}: {tag!r} is not a tag of entities (expected O, or a prefix such as B- or I- and a "
        'type). Correct "columns" of the task, or convert the tags.'
    )


def to_bio(tags: Sequence[str]) -> list[str]:
    """IOB1, BIO, IOBES and BILOU → BIO: every entity starts with B-, and I- continues it."""
    converted, before = [], "O"
    for tag in tags:
        if tag == "O":
            converted.append(tag)
        else:
            starts = tag[0] in "BSU" or before == "O" or before[2:] != tag[2:] or before[0] in "SULE"
            converted.append(f"{'B' if starts else 'I'}-{tag[2:]}")
        before = tag
    return converted
