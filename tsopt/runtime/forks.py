"""What the child of a fork must not share with its parent: locks of threads that it does not have, and open files."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forks(Protocol):
    """What is told when it has become a copy in a fork."""

    def forked(self) -> None:
        """Lets go of what is the parent's. No other thread runs yet."""


_there: WeakSet[Forks] = WeakSet()


def tell(item: Forks) -> None:
    """Tells it of each fork, in the child, for as long as it is there."""
    _there.add(item)


def _tell_all() -> None:
    for item in list(_there):
        item.forked()


if hasattr(os, "register_at_fork"):  # elsewhere nothing forks
    os.register_at_fork(after_in_child=_tell_all)
