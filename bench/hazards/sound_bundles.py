"""A sound bundle of each backend, and its manifest signed again after a change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.example import as_example
from tsopt.runtime.bundles import store
from tsopt.runtime.racing.environment import environment
from tsopt.runtime.racing.row import Row
from tsopt.runtime.report import Report


class Net(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.one, self.two, self.counts = nn.Linear(6, 8), nn.Linear(8, 6), counts
        self.register_buffer("count", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.count.add_(1)
        return self.two(self.one(x).relu()) + self.count


def saved(backend: str, place: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A sound bundle, an input, and the answer that a sound one gives."""
    torch.manual_seed(0)
    # NOTE: OpenVINO 2026.4 ends the process while it compiles the one that counts.
    model, x = Net(backend != "openvino").eval(), torch.randn(2, 6)
    # oneDNN's files are those of eager, and it compiles only where that pays.
    executable = tsopt.compile(tsopt.capture(model, x), "eager" if backend == "onednn" else backend)
    rows = (Row("eager"),)
    report = Report(model="Net", rows=rows, winner_key="model", why="chosen", environment=environment())
    bundle = store.save(executable, place / "m.tsopt", model, as_example(x), report)
    if backend == "onednn":
        sign(bundle, lambda manifest: manifest.update(backend=backend))
    return bundle, x, model(x).detach()


def sign(bundle: Path, change: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Makes the hashes right again."""
    place = bundle / "manifest.json"
    manifest = json.loads(place.read_text())
    manifest["members"] = {
        file.name: {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size": file.stat().st_size}
        for file in sorted(bundle.iterdir())
        if file != place
    }
    if change is not None:
        change(manifest)
    seal(bundle, manifest)


def seal(bundle: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest with its own hash, whatever it says of the other files."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}))
