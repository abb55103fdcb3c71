"""Whether other threads may run code of the user's: what they change meanwhile is not to be put back."""

from __future__ import annotations

import threading

OURS = "tsopt: "  # begins the names of threads that tsopt starts
ONLY_DRAW = ("TMonitor", "_RefreshThread")  # classes of tqdm, which torch imports, and of rich


def others_run() -> bool:
    """Whether a thread beside this one may run code of the user's."""
    return any(map(_is_other, threading.enumerate()))


def _is_other(thread: threading.Thread) -> bool:
    own = thread is threading.current_thread() or thread.name.startswith(OURS)
    return not own and type(thread).__name__ not in ONLY_DRAW
