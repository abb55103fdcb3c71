"""Atomic output: written next to its target, then moved there in one step.

A writer that is killed leaves its staging directory behind; the next writer of the same target removes it. Imports
nothing heavy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

from tsopt.errors import BundleError
from tsopt.runtime import locked_directory

PART, ASIDE = ".tsopt-part", ".tsopt-aside"  # end the names of what is being written, and of what is being replaced
RANDOM = 8  # characters that tempfile puts into a name
EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}  # a kernel, file system or sandbox without it


class staged:
    """A temporary directory beside a target, moved into its place when the block ends well, removed otherwise.

    Args:
        unpack: move the files in it beside each other instead, the one called like the target last. A file that
            replaces another keeps its permissions.

    Raises:
        BundleError: the place cannot be written.
    """

    def __init__(self, target: Path, *, unpack: bool = False) -> None:
        self.target, self.unpack = target, unpack

    def __enter__(self) -> Path:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            sweep(self.target)
            self.staging, self._lock = locked_directory.create(self.target.parent, f".{self.target.name}.", PART)
        except OSError as error:
            raise self._unwritable(error) from error
        return self.staging

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        try:
            if error is None:
                self._move()
        except OSError as failed:
            raise self._unwritable(failed) from failed
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)
            os.close(self._lock)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise self._unwritable(error) from error

    def _unwritable(self, error: BaseException | None) -> BundleError:
        return BundleError(
            "the output cannot be written",
            where=str(self.target),
            why=str(error),
            fix="choose a writable directory with enough free space",
        )

    def _move(self) -> None:
        mask = os.umask(0)
        os.umask(mask)
        for file in self.staging.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
            file.chmod(self._mode_of_old(file.name) or 0o666 & ~mask)
        if self.unpack:
            for file in sorted(self.staging.iterdir(), key=lambda file: file.name == self.target.name):
                file.replace(self.target.parent / file.name)
        else:
            self.staging.chmod(0o777 & ~mask)  # mkdtemp made it private, safetensors its files
            _sync(self.staging)
            replace(self.staging, self.target)
        _sync(self.target.parent)

    def _mode_of_old(self, name: str) -> int | None:
        """The permission bits of the file that is replaced; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            found = (self.target.parent / name).lstat() if self.unpack else None
            if found is not None and stat.S_ISREG(found.st_mode):
                return found.st_mode & 0o777
        return None


def longest_name(target: Path) -> str:
    """A name as long as the longest one that is in use beside a target while it is written."""
    return f".{target.name}.{'x' * RANDOM}{ASIDE}"


def replace(new: Path, target: Path) -> None:
    """Puts a directory into the place of another, or where nothing is. What was there is removed.

    Where the system can exchange two names, there is no moment without a whole directory at the target. Elsewhere the
    old one is set aside for a moment, where `finished` finds it.

    Raises:
        OSError: it cannot be moved; the target is what it was.
    """
    if not os.path.lexists(target):
        try:
            new.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # otherwise another writer was there first: its bundle is replaced
    if exchange(new, target):
        shutil.rmtree(new, ignore_errors=True)  # what cannot be removed now is swept by the next writer
        return
    aside = new.with_name(new.name.removesuffix(PART) + ASIDE)
    target.rename(aside)
    try:
        new.rename(target)
    except OSError:
        aside.rename(target)  # what was there is better than nothing
        raise
    shutil.rmtree(aside, ignore_errors=True)


def exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one step. False where this system, or this file system, cannot.

    Raises:
        OSError: it can, but not these.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    at_working_directory = -100
    if renameat2(at_working_directory, os.fsencode(a), at_working_directory, os.fsencode(b), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), str(b))


def finished(target: Path) -> Path:
    """Where the directory of a target is now: set aside, where a writer without `exchange` is between its two steps."""
    if os.path.lexists(target):
        return target
    return max(_leftovers(target, ASIDE), key=lambda path: path.lstat().st_mtime, default=target)


def sweep(target: Path) -> None:
    """Removes what writers of this target that were killed have left; puts back what they had set aside."""
    with contextlib.suppress(OSError):  # another writer may be sweeping; what is left is the next one's
        locked_directory.sweep(target.parent, f".{target.name}.", PART)
        for path in sorted(_leftovers(target, ASIDE), key=lambda path: path.lstat().st_mtime, reverse=True):
            # NOTE: the writer's own lock is on its new directory, which is at the target once it has been moved.
            writer = path.with_name(path.name.removesuffix(ASIDE) + PART)
            if writer.exists():
                continue
            if os.path.lexists(target):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(target)


def _leftovers(target: Path, ending: str) -> list[Path]:
    """The directories beside a target that carry our marks."""
    return locked_directory.find(target.parent, f".{target.name}.", ending)


def _sync(directory: Path) -> None:
    """Makes the names in a directory last; some file systems have no such thing."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
