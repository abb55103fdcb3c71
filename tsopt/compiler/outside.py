"""What a model's code reaches outside of the model, put back after calls that nobody has asked for.

Globals, variables of closures, attributes of classes, and what these and hooks hold: a list that collects activations,
a counter, a table. Capturing and racing call a model hundreds of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tsopt.compiler.contents import Contents, holds_tensor, is_library, process_wide
from tsopt.compiler.model_reads import Reads, content_of, reads_of
from tsopt.compiler.other_threads import others_run
from tsopt.compiler.places import ABSENT


class Outside:
    """All of that as it is now, of a model or of what it was found to read.

    Where other threads run, only what has brought tensors is put back: the rest may be theirs.
    """

    def __init__(self, model: Any) -> None:
        reads = model if isinstance(model, Reads) else reads_of(model)
        self._among_threads = others_run()
        self._globals = [(place, name, place.get(name, ABSENT)) for place, name in reads.places]
        self._classes = [
            (base, name, vars(base).get(name, ABSENT))
            for cls, name in reads.classes
            for base in {cls, *[base for base in cls.__mro__ if name in vars(base)][:1]}
            if not is_library(base.__module__)
        ]
        self._cells = [(cell, cell.cell_contents) for cell in reads.cells]
        values = [value for *_, value in (*self._globals, *self._classes, *self._cells)]
        self._contents = Contents([*values, *reads.objects], process_wide(reads.places))

    def put_back(self) -> bool:
        """Restores what has changed. Returns whether anything was."""
        self._among_threads |= others_run()
        changed = False
        for place, name, value in self._globals:
            if self._is_ours(value, place.get(name, ABSENT)):
                place[name] = value  # type: ignore[index]
                changed = True
        for cls, name, value in self._classes:
            if self._is_ours(value, vars(cls).get(name, ABSENT)):
                delattr(cls, name) if value is ABSENT else setattr(cls, name, value)
                changed = True
        for cell, value in self._cells:
            if self._is_ours(value, content_of(cell)):
                cell.cell_contents = value
                changed = True
        return self._contents.put_back(only_tensors="all" if self._among_threads else "") or changed

    def put_back_values(self) -> None:
        """Restores what small tensors and arrays held, where no other thread may have written to them."""
        if not self._among_threads and not others_run():
            self._contents.put_back_values()

    def _is_ours(self, before: Any, now: Any) -> bool:
        return now is not before and (not self._among_threads or holds_tensor(now))


@contextmanager
def kept_outside(model: Any) -> Iterator[None]:
    """Runs a block in which the model may be called, then puts back what that has changed outside of it."""
    outside = Outside(model)
    try:
        yield
    finally:
        outside.put_back()
