"""Files behind a URL, by fsspec: an object store, http, and others. Calls that fail are repeated for some minutes."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

import fsspec

from common.console import console
from common.errors import UserError

T = TypeVar("T")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")
WAITS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0, 60.0)  # seconds between two attempts: four minutes in all
POLL_SECONDS = 0.1
# The package that fsspec needs for each of these; it names others itself.
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "http": "aiohttp", "https": "aiohttp", "gs": "gcsfs", "gcs": "gcsfs"}
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "oci", "http", "https"}


class Interrupted(Exception):
    """The run was asked to stop while it waited for a store."""


def is_url(text: str) -> bool:
    return URL.match(text) is not None


def as_tuple(protocol: str | tuple[str, ...]) -> tuple[str, ...]:
    return (protocol,) if isinstance(protocol, str) else protocol


def without_password(url: str) -> str:
    """The URL as messages and file names show it."""
    return re.sub(r"//[^/@]*@", "//", url)


class Store:
    """The files below a URL that `flag` named. Names are relative to it.

    A call that fails with an error that may be transient is repeated; the last error becomes a UserError. What does not
    exist is a FileNotFoundError.
    """

    def __init__(self, url: str, flag: str) -> None:
        self.url = without_password(url.rstrip("/"))
        self.flag = flag
        self._is_interrupted = False
        scheme = re.split("::|://", url)[0].lower()
        try:
            # Without a cache of listings: other machines write to the same store.
            self._system, self._root = fsspec.core.url_to_fs(url.rstrip("/"), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            package = PACKAGES.get(scheme)
            remedy = f"run `pip install {package}`" if package else "install the file system's package for fsspec"
            raise UserError(
                f"{flag} {self.url}: cannot be used ({error}); expected a folder, or a URL that fsspec knows, such as "
                f"s3://bucket/folder; {remedy}, or correct the URL"
            ) from None

        # There a folder exists with its first file, and creating one would create a missing bucket.
        self._has_buckets = not OBJECT_STORES.isdisjoint(as_tuple(self._system.protocol))

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def read(self, name: str) -> bytes:
        return bytes(self.attempt(lambda: self._system.cat_file(self._path(name)), name))

    def open(self, name: str) -> IO[bytes]:
        """A stream of the file's bytes, read in order. Not tried again: the reader does that."""
        return self._system.open(self._path(name), "rb", cache_type="readahead", block_size=2**23)

    def write(self, name: str, content: bytes) -> None:
        self._put(name, lambda path: self._system.pipe_file(path, content))

    def upload(self, local: Path, name: str) -> None:
        self._put(name, lambda path: self._system.put_file(str(local), path))

    def download(self, name: str, local: Path) -> None:
        self.attempt(lambda: self._system.get_file(self._path(name), str(local)), name)

    def _put(self, name: str, put: Callable[[str], None]) -> None:
        path = self._path(name)

        def create() -> None:
            if not self._has_buckets:
                self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            put(path)

        try:
            self.attempt(create, name)
        except FileNotFoundError as error:
            raise UserError(
                f"{self.flag}: {self.url_of(name)}: cannot be written ({error}); expected a bucket or folder that "
                f"exists. Create it, or correct the URL"
            ) from None

    def remove(self, name: str) -> None:
        """Remove a file or a folder; nothing happens if it does not exist."""
        with suppress(FileNotFoundError):
            self.attempt(lambda: self._system.rm(self._path(name), recursive=True), name)

    def list(self, name: str = "") -> dict[str, int | None]:
        """Name → bytes of the files and folders directly in a folder, None for a folder; empty if it does not exist."""
        try:
            entries = self.attempt(lambda: self._system.ls(self._path(name), detail=True), name)
        except FileNotFoundError:
            return {}
        found = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}
        return {key: entry["size"] if entry["type"] == "file" else None for key, entry in found.items()}

    def attempt(self, action: Callable[[], T], name: str) -> T:
        """The result of `action`, which reads or writes the file `name`."""
        for wait in (*WAITS, None):
            try:
                return action()
            except (FileNotFoundError, UserError, Interrupted):
                raise
            except Exception as error:  # every file system has its own errors
                reason = f"{type(error).__name__}: {error}".split("\n")[0].rstrip(": ")[:300]
                if is_final(error):
                    raise UserError(
                        f"{self.flag}: {self.url_of(name)}: access was denied ({reason}); expected permission to read "
                        f"and write there. Give this process the credentials of the store (for s3: AWS_PROFILE, or "
                        f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), and start again"
                    ) from None
                if wait is None:
                    raise UserError(
                        f"{self.flag}: {self.url_of(name)}: failed {len(WAITS) + 1} times in {sum(WAITS):.0f} s "
                        f"({reason}). Check the store and the network, and start again"
                    ) from None
                if wait == WAITS[0]:
                    console.warn(f"{self.url_of(name)}: {reason}; trying again for {sum(WAITS):.0f} s")
            self._sleep(wait)
        raise AssertionError  # the last attempt has no wait

    def interrupt(self) -> None:
        """End all waiting with Interrupted. Can be called by a signal handler."""
        self._is_interrupted = True

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._is_interrupted:
                raise Interrupted(f"stopped while waiting for {self.url}")
            time.sleep(POLL_SECONDS)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root


def is_final(error: Exception) -> bool:
    """Whether trying again is useless: no permission, no credentials, or a store that can only be read."""
    status = getattr(error, "status", None)  # of an http client's error
    is_refused = isinstance(status, int) and (status == 501 or (400 <= status < 500 and status not in (408, 425, 429)))
    is_denied = is_refused or "Credential" in type(error).__name__
    return is_denied or isinstance(error, PermissionError | NotImplementedError)
