"""Calls of a model in other threads while it is captured, verified and timed: all of them are right.

Two threads call the model; a third optimizes it, or calls what was made of it in new forms.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tsopt
from bench.hazards import ANY, RIGHT, Case, Outcome

OPTIONS: dict[str, Any] = {"seconds": 0.05, "backends": ("eager",), "cache": False, "isolate": False}
PAUSE = 1e-3  # seconds between the calls of a thread: the one that works has to get on as well
Input = Callable[[int], Any]


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.conv(x)).relu()).mean((2, 3)))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class Counter(nn.Module):
    """Counts its calls in a buffer; the count is not part of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.layer(x)


class Shared(nn.Module):
    """One module in two places, and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second, self.third = self.first, nn.Linear(4, 4)
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).relu()))


class Parent(nn.Module):
    """Children that know their parent, in a plain attribute and through a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.child = nn.Linear(4, 4), nn.Module()
        self.child.__dict__["parent"] = self
        self.step = self.layer.forward
        self.steps = [self.layer, nn.Tanh()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.child.parent.layer(x)
        for step in (self.step, *self.steps):
            x = step(x)
        return x


class Cached(nn.Module):
    """Keeps a mask for each length in a dict, and what it has seen last in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.masks, self.last = nn.Linear(4, 4), {}, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.ones(len(x), 1)
        self.last = self.layer(x) * self.masks[len(x)]
        return self.last


class Asks(nn.Module):
    """Decides by what torch says about tracing: another thread's trace is not this call's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        elsewhere = torch.compiler.is_compiling() and torch._guards.detect_fake_mode() is None
        return self.layer(x) * (100 if elsewhere else max(1, min(2, 3)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.other = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.layer(x))


class Hooked(nn.Module):
    """Hooks that close over the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layer.register_forward_hook(lambda module, given, result: result * self.gate(given[0]).sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Decides(nn.Module):
    """No single graph: it is optimized in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        if float(x.sum()) > 1e6:
            return x.neg()
        return self.second(x)


def _decoder() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, use_cache=True, **sizes))


def rows(*shape: int) -> Input:
    return lambda count: torch.randn(count, *shape)


def tokens(count: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 32, (1, count))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Input]] = {
    "a convolution and batch norm": (Cnn, rows(3, 8, 8)),
    "an LSTM": (Lstm, rows(5, 4)),
    "a counter in a buffer": (Counter, rows(4)),
    "a module in two places, tied weights": (Shared, rows(4)),
    "a child that knows its parent": (Parent, rows(4)),
    "tensors kept in a dict": (Cached, rows(4)),
    "a model that asks whether it is compiled": (Asks, rows(4)),
    "parametrized weights": (Normed, rows(4)),
    "hooks that close over the model": (Hooked, rows(4)),
    "a decoder of transformers with a cache": (_decoder, tokens),
}


def optimize(model: Any, forms: list[Any]) -> None:
    for form in forms:
        tsopt.optimize(model, form, **OPTIONS)


def with_engines(model: Any, forms: list[Any]) -> None:
    """Engines export the program, in this process: tracers at work again."""
    for form in forms:
        tsopt.optimize(model, form, **OPTIONS | {"backends": ("onnxruntime", "torchscript")})


def in_eval_mode(model: Any, forms: list[Any]) -> None:
    """The caller's own flags are those of training: what sets them for a moment is seen."""
    for form in forms:
        tsopt.optimize(model, form, eval_mode=True, **OPTIONS)


def hybrid(model: Any, forms: list[Any]) -> Callable[..., Any]:
    """A hybrid that has compiled its first form: the others are captured while it is called."""
    fast = tsopt.hybridize(model, **OPTIONS)
    _call(fast, forms[0])
    return fast


def optimized(model: Any, forms: list[Any]) -> Callable[..., Any]:
    return tsopt.optimize(model, forms[0], on_new_signature="capture", **OPTIONS)


def _call(called: Callable[..., Any], form: Any) -> torch.Tensor:
    with torch.no_grad():
        found = called(**form) if isinstance(form, dict) else called(form)
    return found if isinstance(found, torch.Tensor) else found[0]


def watch(
    model: nn.Module,
    given: Input,
    work: Callable[[Any, list[Any]], None] | None = None,
    serve: Callable[[Any, list[Any]], Callable[..., Any]] | None = None,
    calls: int = 0,
    forms: int = 1,
) -> Outcome:
    """Calls a model in two threads while a third works; every answer is that of the beginning.

    Args:
        work: what the third thread does with the model and examples of new forms.
        serve: makes what all three call instead; the third in new forms.
        calls: as many at least.
    """
    torch.manual_seed(0)
    examples = [given(count) for count in range(2, 3 + forms)]
    wanted = _call(model, examples[0]).clone()
    called = model if serve is None else serve(model, examples[1:])
    done, wrong, made = threading.Event(), set[str](), [0, 0]

    def caller(number: int) -> None:
        while not done.is_set() or made[number] < calls // 2:
            try:
                found = _call(called, examples[0])
                if type(found) is not torch.Tensor or not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
                    wrong.add(f"a {type(found).__name__} of other values")
            except Exception as error:
                wrong.add(f"{type(error).__name__}: {str(error)[:80]}")
            made[number] += 1
            time.sleep(PAUSE)

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if work is not None:
                work(model, examples[1:])
            else:
                for form in examples[2:]:
                    _call(called, form)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    if wrong:
        return Outcome("wrong", f"of {sum(made)} calls: {', '.join(sorted(wrong))[:200]}")
    return RIGHT


def _case(name: str, **how: Any) -> Case:
    make, given = MODELS[name]

    def check(backend: str) -> Outcome:
        torch.manual_seed(0)
        return watch(make().eval(), given, **how)

    title = next(function.__name__ for function in how.values() if callable(function))
    return Case(f"{name}, {title}", check, ANY)


def _eval_mode(backend: str) -> Outcome:
    """The callers' model is in training mode, and its answer depends on that."""

    class Flagged(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + float(self.training)

    return watch(Flagged(4, 4).train(), rows(4), work=in_eval_mode)


def _in_parts(backend: str) -> Outcome:
    torch.manual_seed(0)
    return watch(Decides().eval(), rows(4), work=optimize)


CASES: tuple[Case, ...] = (
    *(_case(name, work=optimize) for name in MODELS),
    *(_case(name, work=with_engines) for name in list(MODELS)[:1]),
    *(_case(name, serve=hybrid, forms=2) for name in list(MODELS)[:3]),
    *(_case(name, serve=optimized, forms=2) for name in list(MODELS)[:3]),
    Case("flags that eval_mode=True sets, optimize", _eval_mode, ANY),
    Case("a model in parts, optimize", _in_parts, ANY),
)
