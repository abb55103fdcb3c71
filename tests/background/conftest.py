"""Every candidate wins in the background process, and calls need no gradients."""

from __future__ import annotations

import pytest
import torch

# Python imports this at startup, in the background process too: every candidate that is verified beats eager there.
FASTER = """
from tsopt.runtime.racing import between_ops, new_sizes, preparation, race, tournament
from tsopt.runtime.racing.speedup import Speedup

race.speedup = lambda *_: Speedup(2.0, 1.9, 2.1)
new_sizes.NEW_SIZES = between_ops.TURNS = 0
preparation.HOPELESS = preparation.HOPELESS_IF_LONG = float("inf")
tournament.SETTLE = 0.0
"""


@pytest.fixture(autouse=True)
def faster(tmp_path_factory, monkeypatch):
    place = tmp_path_factory.mktemp("site")
    (place / "sitecustomize.py").write_text(FASTER)
    monkeypatch.syspath_prepend(place)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield
