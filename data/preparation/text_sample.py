"""The text that a tokenizer is trained on: the whole corpus, or an evenly spread part of a large one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

_MAX_FILES = 512  # opened in a second, however large the corpus


class TextSample:
    """Lines of the files, read again on every iteration, with at most one file in memory.

    Of files that exceed `max_bytes` together, up to 512 evenly spaced ones give an equal number of bytes from their
    beginning. The sample depends on the files and their order alone.
    """

    def __init__(self, paths: Sequence[Path], max_bytes: int) -> None:
        self.size = sum(path.stat().st_size for path in paths)
        self.is_part = self.size > max_bytes
        self._paths, self._bytes_per_file = paths, -1
        if self.is_part:
            count = min(len(paths), _MAX_FILES)
            self._paths = [paths[i * len(paths) // count] for i in range(count)]
            self._bytes_per_file = max_bytes // count
            self.size = sum(len(self._read(path)) for path in self._paths)

    def __iter__(self) -> Iterator[str]:
        for path in self._paths:
            yield from self._read(path).decode().split("\n")

    def _read(self, path: Path) -> bytes:
        """Return the whole lines within the bytes that the file gives."""
        with path.open("rb") as stream:
            content = stream.read(self._bytes_per_file)
        return content[: content.rfind(b"\n") + 1]
