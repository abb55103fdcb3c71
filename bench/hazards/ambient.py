"""What a call is made under: gradients, transforms of torch.func, tracing, autocast, modes that watch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tsopt
from bench.hazards import RIGHT, Case, Outcome, served_by


class Counts(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += "addmm" in str(func) or "mm" in str(func)
        return func(*args, **(kwargs or {}))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval().requires_grad_(False)


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(2, 6)


def check(use: Callable[[Any], torch.Tensor]) -> Callable[[str], Outcome]:
    """Uses what was made as the model is used."""

    def outcome(backend: str) -> Outcome:
        warnings.simplefilter("ignore")
        model = mlp()
        refused = ""
        for called in served_by(model, x(), backend):
            wanted = use(model)
            try:
                found = use(called)
            except tsopt.SignatureError as error:
                refused = error.what
                continue
            if (
                found.dtype != wanted.dtype
                or found.shape != wanted.shape
                or not torch.allclose(found, wanted, 1e-3, 1e-4)
            ):
                return Outcome("wrong", "other than eager")
        return Outcome("refused", refused) if refused else RIGHT

    return outcome


def jacrev(called: Any) -> torch.Tensor:
    return torch.func.jacrev(lambda v: called(v))(x())


def jacfwd(called: Any) -> torch.Tensor:
    return torch.func.jacfwd(lambda v: called(v))(x())


def grad(called: Any) -> torch.Tensor:
    return torch.func.grad(lambda v: called(v).sum())(x())


def hessian(called: Any) -> torch.Tensor:
    return torch.func.hessian(lambda v: called(v).square().sum())(x())


def vmap(called: Any) -> torch.Tensor:
    return torch.func.vmap(lambda v: called(v))(torch.stack([x(), x() + 1]))


def vjp(called: Any) -> torch.Tensor:
    out, pull = torch.func.vjp(lambda v: called(v), x())
    return pull(torch.ones_like(out))[0]


def backward(called: Any) -> torch.Tensor:
    given = x().requires_grad_()
    (called(given).sum() + given.sum()).backward()
    assert given.grad is not None
    return given.grad


def higher(called: Any) -> torch.Tensor:
    given = x().requires_grad_()
    (first,) = torch.autograd.grad(called(given).square().sum() + given.sum(), given, create_graph=True)
    return torch.autograd.grad(first.sum() + 0 * given.sum(), given)[0]


def forward_mode(called: Any) -> torch.Tensor:
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(called(forward_ad.make_dual(x(), torch.ones_like(x()))))
        return out.primal.new_zeros(out.primal.shape) if out.tangent is None else out.tangent.clone()


def traced(called: Any) -> torch.Tensor:
    made = torch.jit.trace(lambda v: called(v), x(), check_trace=False)
    return made(x() + 1)


def autocast(called: Any) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return called(x())


def watched(called: Any) -> torch.Tensor:
    with torch.no_grad(), Counts() as counts:
        called(x())
    return torch.tensor(counts.found)


def under_no_grad(called: Any) -> torch.Tensor:
    with torch.no_grad():
        return called(x().requires_grad_())


def under_inference(called: Any) -> torch.Tensor:
    with torch.inference_mode():
        return called(x()).clone()


CASES = tuple(
    Case(use.__name__, check(use))
    for use in (
        *(jacrev, jacfwd, grad, hessian, vmap, vjp, backward, higher, forward_mode, traced, autocast, watched),
        *(under_no_grad, under_inference),
    )
)
