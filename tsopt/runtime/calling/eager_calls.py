"""Which calls of a hybrid the model itself serves, whatever is compiled: its modes and those of the process say so."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tsopt.compiler.calls.snapshot import holders
from tsopt.compiler.calls.structure import Structure, flatten
from tsopt.compiler.protect import modules_of, training_of
from tsopt.errors import CaptureError
from tsopt.runtime.calling.ambient import RECORDING, fast_names, objection
from tsopt.runtime.calling.model_changes import Watch
from tsopt.runtime.calling.settings import Settings
from tsopt.runtime.calling.signature_guard import watcher

# Called on every call: a global of this module is looked up faster than an attribute of torch.
_interferes, _gradients = watcher(), torch.is_grad_enabled
_recording = fast_names()["recording"]


class HasTensors(Protocol):
    """What knows the tensors of a model."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...


class HasModules(Protocol):
    """What knows in which mode the modules of a model were."""

    def training_changed(self) -> bool:
        """Whether modules are in training mode that were not, or the other way round."""


class EagerCalls:
    """Why eager serves a call.

    Args:
        follows_threads: whether what is compiled is for torch's number of threads.

    Attributes:
        settings: those that what is compiled is for.
    """

    def __init__(self, model: Callable[..., Any], *, follows_threads: bool) -> None:
        self._model, self._is_module, self._follows_threads = model, isinstance(model, nn.Module), follows_threads
        self._searched: Watch | None = None  # for tensors that require gradients, while nothing is compiled
        self.renew()

    def renew(self, settings: Settings | None = None) -> None:
        """What is compiled from now on is for the settings of the process as they are now, or for these."""
        self.settings = settings or Settings(follows_threads=self._follows_threads)

    def ask(self, names: Container[str]) -> None:
        """Takes the names that the model reads."""
        self._searched = None
        self.settings.ask(names)

    def were_renumbered(self) -> bool:
        """Whether the thread that compiled the model has changed torch's number of threads since."""
        return self.settings.was_renumbered()

    def trains(self, watch: HasModules | None) -> str:
        """Why eager serves calls if a module has been switched to training mode since; empty if none has."""
        trains = watch is not None and watch.training_changed() and any(training_of(modules_of(self._model)))
        return "a submodule is in training mode: call model.eval() first" if trains else ""

    def reason(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: HasTensors | None, *, uncompiled: bool = False
    ) -> str:
        """Why eager serves this call; empty if what is compiled may.

        Args:
            watch: of what is compiled; None to look at the model as it is.
            uncompiled: nothing is compiled yet, so that the settings of the process are what it will be compiled for.
        """
        if self._is_module and self._model.training:  # type: ignore[attr-defined]
            return "it is in training mode: call model.eval() first"
        if _interferes():
            return objection(())
        if _recording():
            return RECORDING
        if _gradients() and self._wants_gradients(args, kwargs, watch):
            return "gradients are required: call it under torch.no_grad() or torch.inference_mode()"
        return "" if uncompiled else self.settings.differs()

    def _wants_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: HasTensors | None) -> bool:
        own = self._model.parameters() if watch is None and self._is_module else ()  # type: ignore[attr-defined]
        if any(tensor.requires_grad for tensor in own):  # of most models, the first one says it
            return True
        if any(tensor.requires_grad for tensor in (watch or self._search()).tensors):
            return True
        try:
            leaves, structure = flatten((args, kwargs))
        except CaptureError:  # it contains itself: whatever it holds, it is a call for eager
            return True
        return any(getattr(leaf, "requires_grad", False) for leaf in leaves) or _holds_weights(structure)

    def _search(self) -> Watch:
        """The model as it is, looked through again only after a change."""
        found = self._searched
        if found is None or found.changed():
            found = self._searched = Watch(self._model)
        return found


def _holds_weights(structure: Structure) -> bool:
    """Whether a call is given modules, or objects that hold some, with parameters that require gradients.

    Modules are constants of a call, and not data: `self` of a method, or a layer that is passed to a function.
    """
    objects = [item.value for item in structure.walk() if item.kind == "const" and item.contents]
    modules = [item for item in holders(*objects) if isinstance(item, nn.Module)] if objects else []
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())
