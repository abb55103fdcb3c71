"""Compiled forms for states that a model may come back to: adapters are switched off, and on again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tsopt.runtime.calling.audit import Audits
from tsopt.runtime.calling.in_service import InService
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.optimized import Optimized
from tsopt.runtime.calling.partitioned import Partitioned
from tsopt.runtime.calling.settings import Settings

MOST = 2  # forms: each has an engine, with memory of its own


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A compiled form, the state of the model that it is for, and the settings that it was compiled under."""

    fast: Optimized | Partitioned
    watch: Watch
    audits: Audits
    service: InService
    settings: Settings

    def audited(self, audit: Callable[[], str | None]) -> str | None:
        """What an audit finds, if it is affordable."""
        with self.audits.turn() as is_affordable:
            return audit() if is_affordable and self.audits.share else ""

    def timed(self, *args: Any, **kwargs: Any) -> Any:
        """Its first call since it was taken back, which pays for audits: there may be few before the next state."""
        self.audits.resume()
        return self.audits.timed(lambda: self.fast(*args, **kwargs))


class PutAside:
    """The forms that are not in use, the last one first."""

    def __init__(self) -> None:
        self._forms: list[Form] = []

    def __bool__(self) -> bool:
        return bool(self._forms)

    def put(self, form: Form) -> None:
        """Keeps a form, unless the model cannot come back to its state: tensors were written to, or are gone."""
        if not form.watch.was_overwritten() and not _are_replaced(form.watch):
            self._forms = [form, *self._forms][:MOST]
        self._doubt()

    def take(self) -> Form | None:
        """The form for the state that the model is in now, if there is one; it is kept no longer."""
        self._forms = [form for form in self._forms if not form.watch.was_overwritten()]
        found = next((form for form in self._forms if not form.settings.differs() and not form.watch.changed()), None)
        self._forms = [form for form in self._forms if form is not found]
        self._doubt()
        return found

    def _doubt(self) -> None:
        """Statistics may be written without a trace while nobody looks: they are compared when a form is taken."""
        for form in self._forms:
            form.watch.doubt()


def _are_replaced(watch: Watch) -> bool:
    """Whether a module has other parameters than it had."""
    own = {id(parameter) for module in watch.modules for parameter in module.parameters(recurse=False)}
    return any(isinstance(tensor, nn.Parameter) and id(tensor) not in own for tensor in watch.tensors)
