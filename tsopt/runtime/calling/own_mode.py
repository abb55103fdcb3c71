"""The mode that a model was optimized in, which `train()` on the model does not change for an Optimized."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tsopt.compiler.protect import as_eval, modules_of, training_of

FUNCTION = SimpleNamespace(training=False)


class OwnMode:
    """Calls a model as it was optimized, whatever mode it is in by now.

    A compiled form computes what the model did in that mode. So do the calls that the model itself serves, or the
    answers would depend on who has won a race.

    Attributes:
        root: what has a flag that tells whether `train()` or `eval()` was called on the model.
        flag: what it was.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model
        self._modules = modules_of(model)
        self._flags = training_of(self._modules)
        flagged = [module for module in self._modules[:1] if hasattr(module, "training")]
        self.root: Any = flagged[0] if flagged else FUNCTION
        self.flag = self.root.training
        self.is_other_inside = False

    def look(self) -> None:
        """Looks at the modules inside of the model, too, which takes too long for each call."""
        self.is_other_inside = not self.holds()

    def holds(self) -> bool:
        """Whether every module is in the mode that it was in."""
        return training_of(self._modules) == self._flags

    def as_optimized(self, called: Callable[..., Any]) -> Callable[..., Any]:
        """What to call in a call of the user's, for what is the model or a module around it."""
        if self.root.training is self.flag and not self.is_other_inside:
            return called
        return as_eval(called, eval_mode=True)

    def in_eval(self) -> Callable[..., Any]:
        """The same as a reference. A model that was optimized in training mode does the same in both: see `capture`."""
        return as_eval(self.model, eval_mode=True)
