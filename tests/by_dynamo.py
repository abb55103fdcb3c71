"""Models that `torch.compile` compiles with this backend, quickly."""

from __future__ import annotations

import torch

OPTIONS = {"isolate": False, "seconds": 0.02, "backends": ("eager", "onednn")}


def compiled(model, **options):
    return torch.compile(model, backend="tsopt", options=OPTIONS | options)
