"""The files in the cache directory: small, private to the user, written atomically. Imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import tempfile
from pathlib import Path

from tsopt.runtime.bundles import known_bundles
from tsopt.runtime.racing.cache_directory import directory, objection

LARGEST = 5 << 18  # bytes of a file: what is kept of a winner is at most 1 MB and the names of its files
LARGEST_STEP = 64 << 20  # bytes of a step of quantization: a few numbers for each channel
MOST_BYTES = 256 << 20  # of the files of all winners; and of all steps
MOST_STEPS = 2000
# End the names of an entry, of the files of its winner, of a step of quantization, and of what is being written.
SUFFIX, FILES, STEP, UNFINISHED = ".json", ".files", ".step", ".new"
# What precedes these: the key of a race, and in the name of what is being written some random characters. Other files
# are the user's: TSOPT_CACHE_DIR may be a directory that holds more than the cache.
_KEY = r"(?:[0-9a-f]{16}-)?[0-9a-f]{64}"
_STEM = {**dict.fromkeys((SUFFIX, FILES, STEP), re.compile(_KEY)), UNFINISHED: re.compile(rf"{_KEY}-\w+")}


def read(key: str, suffix: str = SUFFIX) -> bytes | None:
    """An entry, the files of its winner, or a step; None where there is none.

    Raises:
        OSError: it cannot be read.
        ValueError: what is there is not a file of that size.
    """
    if objection():
        return None
    place, most = _file(key, suffix), LARGEST_STEP if suffix == STEP else LARGEST
    try:
        _check(place.lstat(), most)  # before it is opened: to open a device may do something
        # NOTE: never through a link, which could lead to anybody's file, and without waiting for the other end of a
        # pipe: what is there may have been put in its place meanwhile.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with os.fdopen(os.open(place, flags), "rb") as file:
            _check(os.fstat(file.fileno()), most)
            return file.read(most)
    except FileNotFoundError:
        return None


def _check(found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    if found.st_size > most:
        raise ValueError(f"it is too large: {found.st_size} bytes")


def write(key: str, raw: bytes, suffix: str = SUFFIX) -> None:
    """Puts an entry, the files of its winner, or a step in its place, whole or not at all.

    Raises:
        OSError: it cannot be written.
        ValueError: the directory is one that others may write into.
    """
    directory().mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = objection()
    if reason:
        raise ValueError(reason)
    file, name = tempfile.mkstemp(dir=directory(), prefix=f"{key}-", suffix=UNFINISHED)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(raw)
        os.replace(name, _file(key, suffix))
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def forget(key: str) -> None:
    """Removes an entry, or what is in its place, if that can be removed."""
    with contextlib.suppress(OSError):
        _file(key, SUFFIX).unlink()
    forget_files(key)


def forget_files(key: str) -> None:
    """Removes the files of a winner, if there are any that can be removed."""
    with contextlib.suppress(OSError):
        _file(key, FILES).unlink()


def is_any(beginning: str) -> bool:
    """Whether there is an entry whose key begins like this."""
    return any(path.name.startswith(beginning) for path in _named(SUFFIX))


def entries() -> list[Path]:
    """The files of the entries, the oldest first."""
    return _regular(SUFFIX)


def steps() -> list[Path]:
    """The files of steps of quantization, the oldest first."""
    return _regular(STEP)


def _regular(suffix: str) -> list[Path]:
    found = []
    for path in _named(suffix):
        with contextlib.suppress(OSError):  # another process may just have removed it
            facts = path.lstat()
            if stat.S_ISREG(facts.st_mode):
                found.append((facts.st_mtime, path))
    return [path for _, path in sorted(found)]


def size() -> int:
    """Bytes of all entries, of the files of their winners, and of steps."""
    return sum(map(_size, (*_regular(SUFFIX), *_regular(FILES), *_regular(STEP))))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # another process has just removed it
        return 0


def drop_oldest(most: int) -> None:
    """Removes entries until so many are left, and files of winners until they take MOST_BYTES at most."""
    for path in entries()[:-most]:
        path.unlink(missing_ok=True)
        path.with_suffix(FILES).unlink(missing_ok=True)
    _drop_oldest_of(FILES)


def drop_oldest_steps() -> None:
    """Removes steps of quantization until there are MOST_STEPS, and they take MOST_BYTES at most."""
    for path in steps()[:-MOST_STEPS]:
        path.unlink(missing_ok=True)
    _drop_oldest_of(STEP)


def _drop_oldest_of(suffix: str) -> None:
    total = 0
    for path in reversed(_regular(suffix)):
        total += _size(path)
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)


def clear() -> int:
    """Removes all entries, what is in place of one, steps, and what is known of bundles; how many entries there were.

    Raises:
        OSError: for one that cannot be removed.
    """
    count = len(entries())
    for path in itertools.chain.from_iterable(map(_named, _STEM)):
        if path.is_dir() and not path.is_symlink():
            continue  # not ours: nothing here makes one
        path.unlink(missing_ok=True)
    known_bundles.forget_all()
    return count


def _named(suffix: str) -> list[Path]:
    """What is in the directory under a name that the cache writes, and that ends like this."""
    if objection():
        return []
    try:
        with os.scandir(directory()) as found:
            return [Path(item.path) for item in found if _is_ours(item.name, suffix)]
    except OSError:  # there is none, or it cannot be listed
        return []


def _is_ours(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and _STEM[suffix].fullmatch(name.removesuffix(suffix)) is not None


def _file(key: str, suffix: str) -> Path:
    return directory() / f"{key}{suffix}"
