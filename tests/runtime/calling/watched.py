"""Models whose calls a change makes different, which a watch sees."""

from __future__ import annotations

import torch

from tsopt.runtime.calling.model_changes import Watch

X = torch.ones(1, 4)


def is_seen(model, change):
    watch = Watch(model)
    with torch.no_grad():
        before = model(X)
        assert not watch.changed()
        change()
        assert watch.changed()
        assert not torch.equal(model(X), before)
