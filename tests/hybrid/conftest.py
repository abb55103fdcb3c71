from __future__ import annotations

import pytest

import tsopt
from tests.hybrid.models import QUICK, Net
from tsopt import hybrid_state


@pytest.fixture
def calls(monkeypatch):
    """What `optimize` was called with."""
    seen = []
    real = hybrid_state.optimize

    def optimize(model, example, **options):
        seen.append(model)
        return real(model, example, **options)

    monkeypatch.setattr(hybrid_state, "optimize", optimize)
    return seen


@pytest.fixture
def net(always_faster):
    return tsopt.hybridize(Net().eval(), **QUICK)
