"""The random state of the process: of torch on every device in use, of numpy and of Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tsopt.compiler.contents import same_state


def seed_torch(seed: int) -> None:
    """Seeds the CPU, and the GPUs if they are in use.

    `torch.manual_seed` also seeds devices that are not in use yet, as soon as they are: in the user's code, in place of
    the seed that the user has set.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_all(seed: int) -> None:
    """Seeds torch, numpy and Python."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # takes no more bits


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of all generators at one moment."""

    cpu: torch.Tensor
    gpus: list[torch.Tensor] | None
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> RandomState:
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), gpus, np.random.get_state(), random.getstate())

    def is_current(self) -> bool:
        """Whether nothing has been drawn since."""
        now = RandomState.now()
        mine, theirs = (self.cpu, *(self.gpus or ())), (now.cpu, *(now.gpus or ()))
        same = len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
        return same and self.python == now.python and same_state(self.numpy, now.numpy)

    def restore(self) -> None:
        if not torch.equal(torch.get_rng_state(), self.cpu):
            torch.set_rng_state(self.cpu)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        if self.gpus is not None:
            torch.cuda.set_rng_state_all(self.gpus)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Runs a block that may draw random numbers, then puts the state back."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()
