"""The user's cache directory, and whether it can be trusted. Needs no torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PLACE = "TSOPT_CACHE_DIR"  # environment variable: another directory than the user's cache


def directory() -> Path:
    """Where entries are, whether it is there or not."""
    import platformdirs

    return Path(os.environ.get(PLACE) or platformdirs.user_cache_dir("tsopt", appauthor=False))


def objection(place: Path | None = None) -> str:
    """Why an existing directory is not used: other users could write to it. Empty if it can be used.

    Args:
        place: a directory within the cache; the cache's own when it is None.
    """
    place = place or directory()
    try:
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
