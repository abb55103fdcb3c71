"""Reads the files of a bundle: one directory with a manifest, which gives the size and hash of every file.

Nothing in them is trusted; links, pipes and files outside the directory are not opened. Needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tsopt.compiler.graph.strict_json import parse
from tsopt.errors import BundleError
from tsopt.runtime.bundles.staging import finished

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST = 1 << 23
MOST_FILES = 64
CHUNK = 1 << 20
HOLES_FROM, HOLES_SHARE = 1 << 26, 8  # a file that is larger, and of which less than an eighth is there, is sparse
TRIES = 20

Found = TypeVar("Found")
Identity = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A directory whose every file is what its manifest says."""

    directory: Path
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of the manifest, and so of all that is in the bundle."""
        return str(self.manifest["sha256"])

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each member."""
        return {name: int(fact["size"]) for name, fact in self.manifest["members"].items()}


def reading(path: Path, read: Callable[[Bundle], Found]) -> Found:
    """What `read` makes of a bundle, all of it from the same one: read again when a writer has replaced it meanwhile.

    Raises:
        BundleError: missing, damaged, changed since it was written, from a newer version, or never the same for long
            enough to be read.
    """
    for _ in range(TRIES):
        directory = finished(path)
        with _held(directory):
            before = _identity(directory)
            try:
                found = read(Bundle(directory, read_manifest(directory)))
            except Exception as error:
                if _identity(directory) != before:
                    continue
                if isinstance(error, OSError):
                    raise BundleError("the bundle cannot be read", where=str(path), why=str(error)) from error
                raise
            if _identity(directory) == before:
                return found
    raise BundleError(
        "the bundle was replaced every time it was read",
        where=str(path),
        fix="load it when no other process is writing it",
    )


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Keeps a directory open, so that no other can get its number while it is being read."""
    try:
        handle = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:  # nothing is there, or a system where directories cannot be opened
        yield
        return
    try:
        yield
    finally:
        os.close(handle)


def _identity(directory: Path) -> Identity:
    """What changes when a directory is replaced, or anything in it."""
    try:
        place = directory.stat()
        with os.scandir(directory) as entries:
            files = sorted((entry.name, *_facts(entry)) for entry in itertools.islice(entries, MOST_FILES + 1))
    except OSError as error:
        return (error.errno,)
    return (place.st_dev, place.st_ino, *files)


def _facts(entry: os.DirEntry[str]) -> tuple[int, ...]:
    found = os.stat(entry.path, follow_symlinks=False)  # NOTE: the entry's own is not all there on every system
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a bundle whose every file is what the manifest says. Raises BundleError."""
    if not os.path.lexists(f"{directory}/{MANIFEST}"):
        if directory.is_dir():
            raise BundleError(
                "the directory is not a bundle", where=str(directory), why=f"it does not contain {MANIFEST}"
            )
        what = "is not a directory" if directory.exists() else "does not exist"
        raise BundleError(f"the bundle {what}", where=str(directory), fix="pass the path of a .tsopt directory")
    with _opened(directory, MANIFEST) as (handle, facts):
        if facts.st_size > MAX_MANIFEST:
            raise damaged(directory, "the manifest is too large")
        raw = b"".join(_chunks(handle, facts.st_size))
    try:
        manifest = parse(raw)
    except ValueError as error:
        raise damaged(directory, f"the manifest is not valid JSON: {error}") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise damaged(directory, f"invalid format version {str(version)[:40]!r}")
    if version > FORMAT:
        raise BundleError(
            f"the bundle has format version {version}, but this version of tsopt supports only up to {FORMAT}",
            where=str(directory),
            fix="pip install -U torch-tsopt",
        )
    if manifest.get("sha256") != digest_of(manifest):
        raise damaged(directory, "the manifest was modified after it was written")
    _check_members(directory, manifest.get("members"))
    return manifest


def digest_of(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def facts_of(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return {"sha256": _sha256(file.fileno(), size), "size": size}


def _check_members(directory: Path, members: Any) -> None:
    if not isinstance(members, dict):
        raise damaged(directory, "the manifest has no list of files")
    with os.scandir(directory) as entries:
        present = {entry.name for entry in itertools.islice(entries, MOST_FILES + 1)}
    if len(present) > MOST_FILES:
        raise damaged(directory, f"it contains more than {MOST_FILES} files")
    extra = present - set(members) - {MANIFEST}
    if extra:
        raise damaged(directory, f"{sorted(extra)[0]!r} is not listed in the manifest")
    for name, fact in members.items():
        if name not in present or name == MANIFEST:
            raise damaged(directory, f"{name[:80]!r} is missing, a link, or outside the bundle")
        if not isinstance(fact, dict) or type(fact.get("size")) is not int:
            raise damaged(directory, f"the manifest does not describe {name!r}")
        with _opened(directory, name) as (handle, found):
            if found.st_size != fact["size"]:
                raise damaged(directory, f"{name!r} has {found.st_size} bytes, expected {fact['size']}")
            if _is_sparse(handle, found):
                raise damaged(directory, f"{name!r} is sparse: most of its {found.st_size} bytes were never written")
            if _sha256(handle, found.st_size) != fact.get("sha256"):
                raise damaged(directory, f"{name!r} was modified after it was written")


@contextlib.contextmanager
def _opened(directory: Path, name: str) -> Iterator[tuple[int, os.stat_result]]:
    """A plain file of the directory, that has no other name. Looked at once it is open: nobody can swap it then."""
    # NOTE: without O_NONBLOCK, opening a pipe waits for somebody to write into it.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(os.path.join(directory, name), flags)
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise damaged(directory, f"{name[:80]!r} is missing, a link, or outside the bundle") from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise damaged(directory, f"{name[:80]!r} is missing, a link, or outside the bundle")
        yield handle, found
    finally:
        os.close(handle)


def _is_sparse(handle: int, facts: os.stat_result) -> bool:
    """Whether a file is far larger than what it holds: minutes of zeros to read, made with no effort."""
    blocks = getattr(facts, "st_blocks", None)
    least = facts.st_size // HOLES_SHARE
    if facts.st_size < HOLES_FROM or blocks is None or blocks * 512 >= least or not hasattr(os, "SEEK_DATA"):
        return False
    # Some file systems count no blocks: one that knows of no holes says here that all of it is data.
    there, place = 0, 0
    for _ in range(10_000):
        try:
            start = os.lseek(handle, place, os.SEEK_DATA)
            place = os.lseek(handle, start, os.SEEK_HOLE)
        except OSError:  # no more data
            break
        there += place - start
    os.lseek(handle, 0, os.SEEK_SET)
    return there < least


def _chunks(handle: int, size: int) -> Iterator[bytes]:
    """The contents of a file of this size, and at most one byte more if it has grown."""
    while size >= 0 and (chunk := os.read(handle, min(size + 1, CHUNK))):
        size -= len(chunk)
        yield chunk


def _sha256(handle: int, size: int) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(handle, size):
        digest.update(chunk)
    return digest.hexdigest()


def damaged(directory: Path, why: str) -> BundleError:
    plain = "".join(c if c.isprintable() else "?" for c in why)  # the files decide what is in it
    return BundleError("the bundle is damaged", where=str(directory), why=plain, fix="export the model again")
