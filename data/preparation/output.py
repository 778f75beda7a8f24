"""Where prepared files go: a local folder, or whatever fsspec knows by a URL."""

from pathlib import Path
from typing import Any

import fsspec

from common.errors import UserError
from common.files import write_atomically
from data.text.sources import is_url


class Storage:
    """A folder of files that are written whole or not at all. Names are relative, with forward slashes."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._system: Any = None
        if is_url(root):
            try:
                self._system, self._base = fsspec.core.url_to_fs(self.root)
            except (ImportError, ValueError) as error:
                raise UserError(
                    f"--output_dir {root}: cannot be written ({error}); install its package for fsspec"
                ) from error

    @property
    def is_local(self) -> bool:
        return self._system is None

    def path(self, name: str) -> Path:
        """Of a local file."""
        return Path(self.root) / name

    def exists(self, name: str) -> bool:
        return self.path(name).is_file() if self.is_local else bool(self._system.isfile(f"{self._base}/{name}"))

    def read_text(self, name: str) -> str:
        return self.path(name).read_text() if self.is_local else self._system.cat_file(f"{self._base}/{name}").decode()

    def read_bytes(self, name: str) -> bytes:
        return self.path(name).read_bytes() if self.is_local else self._system.cat_file(f"{self._base}/{name}")

    def write(self, name: str, content: str | bytes) -> None:
        if self.is_local:
            self.path(name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path(name), content)
            return
        folder, _, file = f"{self._base}/{name}".rpartition("/")
        self._system.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.{file}.tmp"
        self._system.pipe_file(temporary, content.encode() if isinstance(content, str) else content)
        self._system.mv(temporary, f"{folder}/{file}")

    def sizes(self, folder: str) -> dict[str, int]:
        """name → bytes of the files directly in a folder, hidden ones too; none where there is no folder."""
        if self.is_local:
            path = self.path(folder)
            found = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
            return {file.name: file.stat().st_size for file in found}
        if not self._system.isdir(f"{self._base}/{folder}"):
            return {}
        entries = self._system.ls(f"{self._base}/{folder}", detail=True)
        return {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries if entry["type"] == "file"}

    def remove(self, name: str) -> None:
        if self.is_local:
            self.path(name).unlink()
        else:
            self._system.rm_file(f"{self._base}/{name}")
