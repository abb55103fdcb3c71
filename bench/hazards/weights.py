"""Weights that change in place after `optimize`: what was made keeps those of then, or says that it cannot."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tsopt
from bench.hazards import RIGHT, Case, Outcome
from tsopt.runtime.backends import onednn
from tsopt.runtime.racing import race
from tsopt.runtime.racing.speedup import Speedup

OPTIONS: dict[str, Any] = {"seconds": 0.05, "isolate": False, "cache": False}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Build = Callable[[], Any]
Change = Callable[[Any], Any]


class Net(nn.Module):
    """Layers whose weights are folded by passes and engines, others that are not, constants and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = [(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(6)]
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in pair))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.shift = torch.randn(8)  # neither a parameter nor a buffer
        self.base = torch.randn(1)
        self.wide = self.base.expand(8)
        self.square = torch.randn(8, 8)
        self.turned = self.square.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.last(torch.tanh(self.first(self.layers(x)))))
        return (x + self.shift * self.wide) @ self.turned


class Counts(Net):
    """Writes a buffer in each call, and reads it through a view as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return super().forward(x) + self.count


def closure() -> Any:
    net, scale = Net().eval(), torch.randn(8)

    def called(x: torch.Tensor) -> torch.Tensor:
        return net(x) * scale

    called.scale = scale  # type: ignore[attr-defined]
    return called


def made_by(backend: str, model: Any, **options: Any) -> Any:
    """What `optimize` makes with one backend. Whoever is right is faster here: what is told is not about time."""
    race.speedup = lambda *_: Speedup(2.0, 1.9, 2.1)  # type: ignore[assignment]
    onednn._is_faster = lambda *_: True
    fast = tsopt.optimize(model, X, backends=(backend,), **OPTIONS | options)
    assert getattr(fast, "executable", None) is not None, "eager has won"
    return fast


def kept(build: Build, change: Change) -> Callable[[str], Outcome]:
    """Whether calls have the weights of then after a change."""

    def check(backend: str) -> Outcome:
        model = build()
        with torch.no_grad():
            fast = made_by(backend, model)
            wanted = fast(X).clone()
            change(model)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = fast(X)
            new = model(X)
        assert not torch.allclose(new, wanted, atol=1e-3), "the change changes nothing"
        return _outcome(found, wanted, new, said)

    return check


def _outcome(found: torch.Tensor, wanted: torch.Tensor, new: torch.Tensor, said: list[Any]) -> Outcome:
    if torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
        return RIGHT
    text = next((str(item.message) for item in said if "tsopt" in str(item.message)), "")
    is_new = torch.allclose(found, new, rtol=1e-4, atol=1e-5)
    return Outcome("noted" if text else "wrong", text or ("the new ones" if is_new else "neither the old nor the new"))


def another_form(backend: str) -> Outcome:
    """A form that turns up after the change agrees with the first, or is refused."""
    model = Net().eval()
    with torch.no_grad():
        fast = made_by(backend, model)
        wanted = fast(X)[:2].clone()
        model.last.bias.data.add_(1)
        found = fast(X[:2])
    return RIGHT if torch.allclose(found, wanted, rtol=1e-4, atol=1e-5) else Outcome("wrong", "forms differ")


def saved(backend: str) -> Outcome:
    """A bundle that is written after the change holds the weights of then."""
    model = Net().eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as directory:
        fast = made_by(backend, model)
        wanted = fast(X).clone()
        model.last.bias.data.add_(1)
        model.layers[0].weight.data.add_(1)
        found = tsopt.load(fast.save(Path(directory) / "m.tsopt"), trust=True)(X)
    return RIGHT if torch.allclose(found, wanted, rtol=1e-4, atol=1e-5) else Outcome("wrong", "not those of then")


def state_is_live(backend: str) -> Outcome:
    """What the model itself writes is its own: a user who sets it back sees that."""
    model = Counts().eval()
    with torch.no_grad():
        fast = made_by(backend, model)
        model.count.zero_()
        first = fast(X).clone()
        fast(X)
        model.count.zero_()
        again = fast(X)
    same = torch.allclose(first, again, atol=1e-5) and bool((model.count == 1).all())
    return RIGHT if same else Outcome("wrong", "the state is not the model's")


def _step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.enable_grad():
        model(X).square().sum().backward()
    optimizer.step()


def _numpy(model: Any) -> None:
    model.last.bias.detach().numpy()[:] += 1


def _copy(model: Any) -> None:
    model.first.weight.data.copy_(torch.randn(8, 8))


def _item(model: Any) -> None:
    model.last.bias.data[2] = 7.0


def _load(model: Any) -> None:
    model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})


def _init(model: Any) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.3)


def _net() -> Any:
    return Net().eval()


CASES: tuple[Case, ...] = (
    Case("in place under no_grad", kept(_net, lambda m: m.last.bias.add_(1))),
    Case("a weight that was folded", kept(_net, lambda m: m.layers[0].weight.mul_(3))),
    Case("folded and shared ones at once", kept(_net, lambda m: [p.mul_(1.5) for p in m.parameters()])),
    Case("load_state_dict", kept(_net, _load)),
    Case("a step of an optimizer", kept(_net, _step)),
    Case("nn.init", kept(_net, _init)),
    Case(".data.copy_", kept(_net, _copy)),
    Case(".data[i] =", kept(_net, _item)),
    Case("through numpy", kept(_net, _numpy)),
    Case("a buffer", kept(_net, lambda m: m.layers[1].running_mean.add_(1))),
    Case("a tied weight", kept(_net, lambda m: m.first.weight.mul_(-1))),
    Case("a tensor that is a plain attribute", kept(_net, lambda m: m.shift.add_(1))),
    Case("what an expanded tensor is a view of", kept(_net, lambda m: m.base.add_(1))),
    Case("what a transposed tensor is a view of", kept(_net, lambda m: m.square.add_(1))),
    Case("a tensor in a closure", kept(closure, lambda f: f.scale.mul_(2))),
    Case("a form that turns up later", another_form),
    Case("a bundle that is saved later", saved),
    Case("state stays the model's", state_is_live),
)
