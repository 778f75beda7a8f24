"""Extracts the files of zip and tar archives, under names that cannot leave the folder."""

import re
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from common.errors import UserError
from data.text.files import DAMAGED, is_damage, open_source

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.zst")
_UNSAFE = re.compile(r"[^\w.-]+")
_MAX_NAME = 100  # characters
_COPY_BYTES = 2**20


def is_archive(path: str) -> bool:
    return path.lower().endswith(ARCHIVES)


def extract(path: str, folder: Path, counts: Counter[str]) -> list[tuple[str, str]]:
    """Extract the files that are not hidden; return (extracted file, name in the archive) in the archive's order.

    Of a damaged archive, the files before the damage are extracted, and `counts` notes it.
    """
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
    folder.mkdir(parents=True)
    extracted: list[tuple[str, str]] = []
    try:
        with open_source(path) as stream:
            members = _zip_members(stream, path) if path.lower().endswith(".zip") else _tar_members(stream)
            for name, content in members:
                if any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts):
                    continue
                target = folder / f"{len(extracted):06d}-{_UNSAFE.sub('_', PurePosixPath(name).name)[-_MAX_NAME:]}"
                extracted.append((str(target), name))
                with target.open("wb") as output:
                    shutil.copyfileobj(content, output, _COPY_BYTES)
    except Exception as error:
        if not is_damage(error):
            raise
        counts[DAMAGED] += 1
    return extracted


def _zip_members(stream: IO[bytes], path: str) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(stream) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.flag_bits & 1:
                raise UserError(
                    f"{path}: {info.filename} is encrypted; expected an archive without a password; extract it, and "
                    f"give the folder as --input"
                )
            with archive.open(info) as content:
                yield info.filename, content


def _tar_members(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for info in archive:
            content = archive.extractfile(info) if info.isfile() else None  # no links: they could point anywhere
            if content is not None:
                yield info.name, content
