"""Facts for the model card that the files of a run contain: its data, its hardware, its validation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common.words import counted
from training.checkpoints.paths import MODEL_JSON, RESOLVED
from training.metrics.reader import first_and_last_probe, last_validation, read_metrics

MAX_FILES = 10  # named for each folder of shards
# data.prepare splits sentences as for English unless --language says otherwise, so that the language is known only if
# the text has the commonest English words.
DEFAULT_LANGUAGE = "en"
ENGLISH_WORDS = frozenset(("the", "of", "and", "to", "in", "a"))
MIN_ENGLISH_WORDS = 4  # among the 25 commonest tokens


class CardRequest(NamedTuple):
    """What the user states about the model."""

    license: str | None = None  # as Hugging Face names it: apache-2.0
    language: str | None = None  # codes, separated by commas: en,de


class CardFacts(NamedTuple):
    """What the files of a run state; empty where they do not."""

    data: tuple[str, ...] = ()  # a line for each folder of shards
    languages: tuple[str, ...] = ()  # codes
    hardware: str | None = None
    validation: Mapping[str, Any] | None = None
    probes: tuple[Mapping[str, float], Mapping[str, float]] | None = None  # the first and the last


def read_card_facts(checkpoint: Path, metrics: Path | None, step: int) -> CardFacts:
    """The facts of `checkpoint`, which was saved at `step`. What cannot be read is left out."""
    hardware = None
    if metrics is not None:
        ends = [row for row in read_metrics(metrics) if isinstance(row.get("hardware"), str)]
        hardware = ends[-1]["hardware"] if ends else None
    folders = _find_folders(checkpoint)
    languages = {code for folder in folders.values() if (code := _find_language(folder)) is not None}
    return CardFacts(
        tuple(_describe_folder(name, folder) for name, folder in folders.items()),
        tuple(sorted(languages)),
        hardware,
        last_validation(metrics, step),
        first_and_last_probe(metrics, step),
    )


def _find_folders(checkpoint: Path) -> dict[str, Path]:
    """The folders of shards that the run read, by name."""
    resolved = _read(checkpoint / RESOLVED)
    flags, model = _object(resolved.get("flags")), resolved.get("model") or _read(checkpoint / MODEL_JSON)
    datasets = _object(_object(_object(model).get("data")).get("mixed_seq_datasets"))
    folders = _object(datasets.get(str(flags.get("max_seq_length"))))
    prefix = Path(str(flags.get("data_path_prefix", "")))
    return {name: prefix / path for name, path in folders.items() if isinstance(path, str)}


def _describe_folder(name: str, folder: Path) -> str:
    report = _read(folder / "report.json")
    counts, inputs = _object(report.get("preparation")), report.get("inputs")
    parts = [
        f"{counts[key]:,} {key}" for key in ("documents", "sentences", "tokens") if isinstance(counts.get(key), int)
    ]
    language = _prepared_language(folder)
    if language is not None:
        parts.append(f"prepared for the language `{language}`")
    if isinstance(inputs, list) and inputs:
        files = [Path(str(_object(file).get("file"))).name for file in inputs]
        more = f" and {counted(len(files) - MAX_FILES, 'more file')}" if len(files) > MAX_FILES else ""
        parts.append(f"from {', '.join(f'`{file}`' for file in files[:MAX_FILES])}{more}")
    return f"`{name}` ({folder.name}): {', '.join(parts) or 'no report of its preparation was found'}"


def _prepared_language(folder: Path) -> str | None:
    language = _object(_read(folder / "manifest.json").get("settings")).get("language")
    return language if isinstance(language, str) else None


def _find_language(folder: Path) -> str | None:
    """The language of the text as its preparation knows it, or None."""
    language = _prepared_language(folder)
    if language != DEFAULT_LANGUAGE:
        return language
    splits = _read(folder / "report.json").get("splits")
    commonest = _object(splits[0]).get("commonest_tokens") if isinstance(splits, list) and splits else None
    tokens = [str(entry[0]).lstrip("\u0120\u2581").lower() for entry in commonest or () if entry]
    return language if len(ENGLISH_WORDS.intersection(tokens)) >= MIN_ENGLISH_WORDS else None


def _read(path: Path) -> dict[str, Any]:
    try:
        return _object(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError):
        return {}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
