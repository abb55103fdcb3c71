"""The random state in which a model and its candidates are called to be compared."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tsopt.compiler.random_state import seed_torch


class Seeded(AbstractContextManager[Any]):
    """A context entered with the same random state each time, so that dropout draws the same.

    Python's and numpy's differ from one kind of input to the next: what was drawn while tracing is not drawn again.
    """

    def __init__(self, inner: AbstractContextManager[Any], seed: int, kind: str) -> None:
        self.inner, self.seed, self.kind = inner or nullcontext(), seed, kind

    def __enter__(self) -> None:
        self.inner.__enter__()
        seed_torch(self.seed)
        random.seed(f"{self.seed} {self.kind}")
        np.random.seed(random.getrandbits(32))

    def __exit__(self, *details: Any) -> bool | None:
        return self.inner.__exit__(*details)
