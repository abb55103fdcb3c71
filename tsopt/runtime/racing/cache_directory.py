"""The user's cache directory, and whether it can be trusted. Needs no torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PLACE = "TSOPT_CACHE_DIR"  # environment variable: another directory than the user's cache


class NoPlaceError(OSError):
    """There is no place for a cache, so nothing is cached. Callers go on without one."""


def directory() -> Path:
    """Where entries are, whether it is there or not.

    Raises:
        NoPlaceError: the process runs as a user who has no home directory, as in a container; or platformdirs is not
            installed, which a bundle can do without.
    """
    try:
        # Files that set variables, such as a Dockerfile, leave `~` to whoever reads them.
        return Path(os.environ.get(PLACE) or _of_user()).expanduser()
    except RuntimeError as error:
        raise NoPlaceError(f"the user has no home directory; set {PLACE} to another directory") from error


def _of_user() -> str:
    try:
        import platformdirs
    except ImportError as error:
        raise NoPlaceError(f"platformdirs is not installed; install it, or set {PLACE} to a directory") from error
    return platformdirs.user_cache_dir("tsopt", appauthor=False)


def objection(place: Path | None = None) -> str:
    """Why there is no directory, or an existing one is not used: others could write to it. Empty if it can be used.

    Args:
        place: a directory within the cache; the cache's own when it is None.
    """
    try:
        place = place or directory()
        found = place.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(found.st_mode):
        return f"{place} is not a directory"
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        return f"{place} belongs to another user"
    if os.name == "posix" and found.st_mode & 0o022:
        return f"{place} is writable by other users; run chmod 700 on it"
    return ""
