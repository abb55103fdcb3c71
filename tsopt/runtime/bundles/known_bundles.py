"""The bundles that this machine has written or probed before: an empty file for each in the cache directory.

A bundle is known by the digest of its manifest, which covers every byte of it. Needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from pathlib import Path

from tsopt._version import __version__
from tsopt.runtime.racing.cache_directory import directory, objection

log = logging.getLogger("tsopt")
FOLDER = "bundles"
MOST = 4096  # the oldest go
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_known(digest: str) -> bool:
    """Whether a bundle has been written or tried out here, by this version."""
    try:
        place = _file(digest)
        if place is None or _objection(place.parent):
            return False
        return stat.S_ISREG(place.lstat().st_mode)
    except OSError:
        return False


def remember(digest: str) -> None:
    """Makes a bundle known. A cache that cannot be written is no error: the bundle is tried out again next time."""
    try:
        place = _file(digest)
        if place is None:
            return
        place.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not objection():
            place.parent.mkdir(mode=0o700, exist_ok=True)
        reason = _objection(place.parent)
        if reason:
            log.info("cannot record that the bundle was probed: %s", reason)
            return
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
        _drop_oldest(place.parent)
    except OSError as error:
        log.info("cannot record that the bundle was probed: %s", error)


def forget_all() -> None:
    """Every bundle will be tried out again."""
    if objection():
        return
    folder = directory() / FOLDER
    if objection(folder) or not folder.is_dir():
        return
    for place in _files(folder):
        place.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds something else as well
        folder.rmdir()


def _file(digest: str) -> Path | None:
    if not _SHA256.fullmatch(digest):
        return None
    # By version: what a later one refuses, it must be able to look at again.
    return directory() / FOLDER / hashlib.sha256(f"{__version__} {digest}".encode()).hexdigest()


def _objection(folder: Path) -> str:
    return objection(folder.parent) or objection(folder)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _SHA256.fullmatch(path.name)]


def _drop_oldest(folder: Path) -> None:
    found = _files(folder)
    if len(found) > MOST:
        found.sort(key=lambda path: path.lstat().st_mtime)
        for path in found[:-MOST]:
            path.unlink(missing_ok=True)
