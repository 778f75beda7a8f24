"""The files of a preparation: those of archives included, what each is read as, and how it begins."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.console import console
from common.words import counted
from data.text.documents import check_text_fields
from data.text.sources import Source, describe_formats, find_extracted

MAX_FILES = 1000  # in the report


class InputFiles:
    """Collects what is read as what."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._names: dict[str, str] = {}  # of extracted files
        self._samples: dict[str, str] = {}
        self._encodings: dict[str, str] = {}  # of files that are not UTF-8, as far as they can be guessed

    def name(self, path: str) -> str:
        """Return the path as the user knows it: of an extracted file, its archive and its name there."""
        return self._names.get(path, path)

    def add(
        self, sources: Sequence[Source], extracted: Mapping[Source, dict[str, Any]], layout: str, text_field: str
    ) -> None:
        """Add the sources, each archive replaced by its files."""
        found: list[Source] = []
        for archive, result in extracted.items():
            self._names |= {path: f"{archive.path}/{name}" for path, name in result["files"]}
            found += find_extracted(archive.path, [path for path, _ in result["files"]], layout)
        if extracted:
            console.say(f"{counted(len(extracted), 'archive')}: {describe_formats(found)}")
        check_text_fields(found, text_field, self._names)
        self.sources += [source for source in sources if source not in extracted] + found

    def add_samples(self, read: Sequence[dict[str, Any]], parts_of: Mapping[Source, Sequence[str]]) -> None:
        """Add how each file begins, and its encoding. `parts_of`: the files into which streams were unpacked."""
        sources = {part: source.path for source, parts in parts_of.items() for part in parts}
        for result in read:
            self._samples |= result.get("samples", {})
            for path, encoding in result["encodings"].items():
                if encoding is not None:
                    self._encodings.setdefault(sources.get(path, path), encoding)
        for source, parts in parts_of.items():
            if parts and source.path not in self._samples:
                self._samples[source.path] = self._samples.get(parts[0], "")

    def describe(self) -> list[dict[str, str]]:
        """Return the first files: path, format and sample."""
        formats = {source.path: source.format for source in self.sources}
        for path, encoding in self._encodings.items():
            formats[path] += f", but it is not UTF-8 ({encoding}?)"
        return [
            {"file": self.name(path), "read_as": formats[path], "sample": self._samples.get(path, "")}
            for path in list(formats)[:MAX_FILES]
        ]

    def describe_encodings(self) -> str:
        """Name the files that are not UTF-8, their likely encoding, and the remedy; "" if there are none."""
        if not self._encodings:
            return ""
        path, encoding = min(self._encodings.items())
        others = len(self._encodings) - 1
        files = self.name(path) + (f" and {counted(others, 'other file')}" if others else "")
        return (
            f"{files}: not UTF-8 but probably {encoding}; bytes that are not UTF-8 are dropped, and with them letters; "
            f"convert with `iconv -f {encoding} -t utf-8 OLD > NEW`, and give the new files as --input"
        )
