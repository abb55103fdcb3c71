from __future__ import annotations

import pytest

from tests.runtime.backends.gpu_imitation import imitate


@pytest.fixture
def imitation(monkeypatch):
    """No GPU is needed: the calls of a CUDA graph are played."""
    return imitate(monkeypatch)
