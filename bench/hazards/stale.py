"""A hybrid whose model changes between calls: calls are as eager's at once, or a warning says so within 150 calls."""

from __future__ import annotations

import gc
import os
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import tsopt
from bench.hazards import ANY, RIGHT, Case, Outcome
from tsopt.runtime.racing import race
from tsopt.runtime.racing.speedup import Speedup

OPTIONS: dict[str, Any] = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("torchscript",)}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CALLS, AFTER = 150, 3
FACTOR = 1.0
TABLE = {"gain": 1.0}
OFFSET = torch.zeros(8)
Change = Callable[[Any], Any]


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def other_helper(x: torch.Tensor) -> torch.Tensor:
    return x - 2.0


class Config:
    def __init__(self) -> None:
        self.gain = 1.0
        self.inner = types.SimpleNamespace(bias=0.0)


class Act:
    """Callable, and no module."""

    def __init__(self) -> None:
        self.slope = 0.1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(x, self.slope)


class Net(nn.Module):
    """Reads whatever a model may read."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = [(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(6)]
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in pair))
        self.drop = nn.Dropout(0.5)
        self.more = nn.ModuleList([nn.Linear(8, 8), nn.Tanh()])
        self.named = nn.ModuleDict({"a": nn.Linear(8, 8)})
        self.register_buffer("shift", torch.zeros(8))
        self.scale, self.negate, self.mode = 1.0, False, "plain"
        self.gains, self.extras = [1.0, 2.0], {"plus": 0.0}
        self.plain, self.array = torch.ones(8), np.ones(8, dtype=np.float32)
        self.config, self.act = Config(), Act()
        self.function = torch.tanh
        self.pair = (torch.ones(8), 1.0)

    @property
    def doubled(self) -> float:
        return 2 * self._hidden()

    def _hidden(self) -> float:
        return float(getattr(self, "sca" + "le2", 1.0))

    def step(self, x: torch.Tensor, plus: float = 0.0) -> torch.Tensor:
        return x + plus

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.layers(x)) * self.scale / self.temperature + self.shift
        for layer in self.more:
            x = layer(x)
        for layer in self.named.values():
            x = layer(x)
        if self.negate:
            x = -x
        if self.mode == "square":
            x = x * x
        x = x * self.gains[1] + self.extras["plus"] + self.plain * self.pair[0]
        x = x * torch.from_numpy(self.array.copy()) if self.array is None else x
        x = self.act(x - 1.0) * self.config.gain + self.config.inner.bias
        x = self.function(x) * self.doubled
        x = self.step(helper(x)) * TABLE["gain"] + OFFSET
        return x + float(os.environ.get("TSOPT_BENCH_STALE", "0"))


class AsksGrad(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * 3 if torch.is_grad_enabled() else x


class AsksInference(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * 3 if torch.is_inference_mode_enabled() else x


class AsksDtype(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.full((8,), 0.1).to(torch.float64).to(x.dtype) * torch.ones(()).element_size()


def hybrid(model: Any) -> Any:
    """The model hybridized and compiled. Whoever is right is faster here: what is told is not about time."""
    race.speedup = lambda *_: Speedup(2.0, 1.9, 2.1)  # type: ignore[assignment]
    net = tsopt.hybridize(model, **OPTIONS)
    for _ in range(3):
        net(X)
    fast = tsopt.hybrid.compiled_of(net).fast
    assert fast is not None, "it is not compiled"
    assert fast.executable is not None, "eager has won"
    return net


def seen(change: Change, build: Callable[[], Any] = lambda: Net().eval()) -> Callable[[str], Outcome]:
    """What becomes of the calls after a change."""

    def check(_: str) -> Outcome:
        with torch.no_grad():
            model = build()
            net = hybrid(model)
            old = model(X)
            change(model)
            torch.manual_seed(1)
            assert not torch.allclose(model(X), old, atol=1e-4), "the change changes nothing"
            return after(net, model)

    return check


def after(net: Any, model: Any) -> Outcome:
    said: list[str] = []
    wrong_at, noted_at, text = -1, -1, ""
    for number in range(CALLS):
        torch.manual_seed(number)
        wanted = model(X)
        torch.manual_seed(number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = net(X)
        said += [str(item.message) for item in caught if "tsopt" in str(item.message)]
        same = found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
        if said and noted_at < 0:
            noted_at, text = number, said[0]
        if not same:
            wrong_at = number
        if (wrong_at < 0 and number >= 2 * AFTER) or 0 <= noted_at <= number - AFTER:
            break
    if wrong_at < 0:
        return RIGHT
    if noted_at >= 0 and wrong_at < noted_at:
        return Outcome("noted", f"at call {noted_at + 1}: {text[:120]}")
    return Outcome("wrong", f"call {wrong_at + 1} is not eager's")


def by_set(name: str, value: Any) -> Change:
    return lambda model: setattr(model, name, value)


def in_globals(name: str, value: Any) -> Change:
    return lambda model: globals().__setitem__(name, value)


def _numpy(model: Any) -> None:
    model.layers[0].weight.detach().numpy()[:] *= 3


def _item(model: Any) -> None:
    model.layers[0].weight.data[0] = 3.0


def _turn(model: Any) -> None:
    model.layers[0].weight.data = model.layers[0].weight.data.t()


def _swap(model: Any) -> None:
    model.layers[0].weight.data = torch.randn(8, 8)


def _set(model: Any) -> None:
    model.layers[0].weight.set_(torch.randn(8, 8))


def _fresh(model: Any) -> None:
    model.layers[0].weight = nn.Parameter(torch.randn(8, 8))


def _assign(model: Any) -> None:
    model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()}, assign=True)


def _norms(model: Any) -> None:
    model.layers[1].train()


def _swap_layers(model: Any) -> None:
    layers = list(model.layers)
    for number, layer in enumerate((layers[2], layers[1], layers[0])):
        model.layers[number] = layer


def _hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


def _pre_hook(module: Any, args: Any) -> Any:
    return (args[0] + 1,)


def _global_hook(model: Any) -> None:
    nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, nn.BatchNorm1d) else None
    )


def _global_pre_hook(model: Any) -> None:
    nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (args[0] * 2,) if isinstance(module, nn.Linear) else None
    )


def _forward(model: Any) -> None:
    inner = model.forward
    model.forward = lambda x: inner(x) + 1


def _forward_below(model: Any) -> None:
    model.more[0].forward = lambda x: x * 0.5


def _forward_of_class(model: Any) -> None:
    inner = Net.forward
    Net.forward = lambda self, x: inner(self, x) + 1  # type: ignore[method-assign]


def _forward_of_torch(model: Any) -> None:
    inner = nn.BatchNorm1d.forward
    nn.BatchNorm1d.forward = lambda self, x: inner(self, x) + 1  # type: ignore[method-assign]


def _method_of_class(model: Any) -> None:
    Net.step = lambda self, x, plus=0.0: x + 1  # type: ignore[method-assign]


def _defaults(model: Any) -> None:
    Net.step.__defaults__ = (1.0,)


def _shadow(model: Any) -> None:
    model.temperature = 2.0


def _parametrize(model: Any) -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5

    nn.utils.parametrize.register_parametrization(model.layers[0], "weight", Half())


def _environment(model: Any) -> None:
    os.environ["TSOPT_BENCH_STALE"] = "3"


def _function() -> Any:
    """A function over a module and a number in its closure."""
    inner, gain = Net().eval(), 1.0

    def called(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * gain

    def change_gain(value: float) -> None:
        nonlocal gain
        gain = value

    called.inner, called.change_gain = inner, change_gain  # type: ignore[attr-defined]
    return called


def _within(fast_mode: Any, build: Callable[[], Any]) -> Callable[[str], Outcome]:
    """Calls in another mode than the first ones."""

    def check(_: str) -> Outcome:
        model = build().requires_grad_(False)
        with torch.no_grad():
            net = hybrid(model)
        gc.collect()
        with fast_mode:
            return after(net, model)

    return check


class _Dtype:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *details: object) -> None:
        torch.set_default_dtype(torch.float32)


CASES: tuple[Case, ...] = tuple(
    Case(name, check, ANY)
    for name, check in (
        ("p.data.mul_", seen(lambda m: m.layers[0].weight.data.mul_(3))),
        ("p.data.copy_", seen(lambda m: m.layers[0].weight.data.copy_(torch.randn(8, 8)))),
        ("p.data[i] =", seen(_item)),
        ("a write through numpy", seen(_numpy)),
        ("a buffer's .data", seen(lambda m: m.shift.data.add_(1))),
        ("p.data = p.data.t()", seen(_turn)),
        ("p.data = another", seen(_swap)),
        ("p.set_(another)", seen(_set)),
        ("a new Parameter", seen(_fresh)),
        ("load_state_dict(assign=True)", seen(_assign)),
        ("batch norm in training mode", seen(_norms)),
        ("MC dropout", seen(lambda m: m.drop.train())),
        ("a submodule appended", seen(lambda m: m.layers.append(nn.Tanh()))),
        ("a submodule put into a dict", seen(lambda m: m.named.update({"b": nn.Tanh()}))),
        ("a submodule removed", seen(lambda m: m.more.__delitem__(1))),
        ("a submodule replaced", seen(lambda m: setattr(m, "drop", nn.Hardtanh(-0.1, 0.1)))),
        ("submodules in another order", seen(_swap_layers)),
        ("a forward hook", seen(lambda m: m.layers[3].register_forward_hook(_hook))),
        ("a forward pre-hook", seen(lambda m: m.layers[3].register_forward_pre_hook(_pre_hook))),
        ("a hook on the model", seen(lambda m: m.register_forward_hook(_hook))),
        ("a global forward hook", seen(_global_hook)),
        ("a global forward pre-hook", seen(_global_pre_hook)),
        ("forward replaced", seen(_forward)),
        ("forward of a submodule replaced", seen(_forward_below)),
        ("forward of the class replaced", seen(_forward_of_class)),
        ("forward of a class of torch replaced", seen(_forward_of_torch)),
        ("a method of the class replaced", seen(_method_of_class)),
        ("defaults of a method", seen(_defaults)),
        ("a float", seen(by_set("scale", 2.0))),
        ("a bool", seen(by_set("negate", True))),
        ("a text", seen(by_set("mode", "square"))),
        ("bn.eps", seen(lambda m: setattr(m.layers[1], "eps", 1.0))),
        ("an attribute of a callable object", seen(lambda m: setattr(m.act, "slope", -5.0))),
        ("an item of a list", seen(lambda m: m.gains.__setitem__(1, 5.0))),
        ("an item of a dict", seen(lambda m: m.extras.update(plus=1.0))),
        ("a tensor attribute replaced", seen(by_set("plain", torch.full((8,), 2.0)))),
        ("a tensor attribute in place", seen(lambda m: m.plain.add_(1))),
        ("a tensor in a tuple in place", seen(lambda m: m.pair[0].add_(1))),
        ("a function attribute", seen(by_set("function", torch.sin))),
        ("a configuration object", seen(lambda m: setattr(m.config, "gain", 2.0))),
        ("an object in an object", seen(lambda m: setattr(m.config.inner, "bias", 2.0))),
        ("an attribute of the class", seen(lambda m: setattr(Net, "temperature", 2.0))),
        ("an attribute that shadows the class's", seen(_shadow)),
        ("an attribute whose name is computed", seen(by_set("scale2", 2.0))),
        ("a global number", seen(in_globals("FACTOR", 2.0))),
        ("an item of a global dict", seen(lambda m: TABLE.update(gain=2.0))),
        ("a global tensor in place", seen(lambda m: OFFSET.add_(1))),
        ("a global function replaced", seen(in_globals("helper", other_helper))),
        ("an environment variable", seen(_environment)),
        ("a parametrization", seen(_parametrize)),
        ("a number in a closure", seen(lambda f: f.change_gain(2.0), _function)),
        ("a module in a closure", seen(lambda f: f.inner.layers[0].weight.mul_(3), _function)),
        ("a module in a closure, through .data", seen(lambda f: f.inner.layers[0].weight.data.mul_(3), _function)),
        ("a branch on grad mode", _within(torch.enable_grad(), lambda: AsksGrad().eval())),
        ("a branch on inference mode", _within(torch.inference_mode(), lambda: AsksInference().eval())),
        ("another default dtype", _within(_Dtype(), lambda: AsksDtype().eval())),
    )
)
