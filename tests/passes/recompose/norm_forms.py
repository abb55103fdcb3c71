"""Norms as people write them."""

from __future__ import annotations

import torch
from torch import nn

from tsopt.passes.recompose import norms

N = 7
ARGS = dict(dim=-1, keepdim=True)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


X, VECTOR = values(2, 3, N), values(N)


def mean(x):
    return x.mean(**ARGS)


LAYER = {
    "power": lambda x: (x - mean(x)) / torch.sqrt((x - mean(x)).pow(2).mean(**ARGS) + 1e-5),
    "square": lambda x: (x - mean(x)) / torch.sqrt((x - mean(x)).square().mean(**ARGS) + 1e-5),
    "product": lambda x: (x - mean(x)) * torch.rsqrt(((x - mean(x)) * (x - mean(x))).mean(**ARGS) + 1e-5),
    "root as a power": lambda x: (x - mean(x)) / (((x - mean(x)) ** 2).mean(**ARGS) + 1e-5) ** 0.5,
    "inverse root as a power": lambda x: (x - mean(x)) * (x.var(-1, False, True) + 1e-5) ** -0.5,
    "var": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
    "correction": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, correction=0, keepdim=True) + 1e-5),
    "var of the centred": lambda x: (x - mean(x)) / ((x - mean(x)).var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt(),
    "unbiased": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-2),
    "mean of squares": lambda x: (x - mean(x)) / torch.sqrt((x**2).mean(**ARGS) - mean(x) ** 2 + 1e-5),
    "reciprocal": lambda x: (x - mean(x)) * (1 / torch.sqrt((x - mean(x)).pow(2).mean(**ARGS) + 1e-5)),
    "axis given back": lambda x: (
        (x - x.mean(-1).unsqueeze(-1)) / torch.sqrt(((x - x.mean(-1).unsqueeze(-1)) ** 2).mean(-1).unsqueeze(-1) + 1e-5)
    ),
    "sum": lambda x: (x - x.sum(**ARGS) / N) / torch.sqrt(((x - x.sum(**ARGS) / N) ** 2).sum(**ARGS) * (1 / N) + 1e-5),
    "eps first": lambda x: (x - mean(x)) / torch.sqrt(1e-5 + (x - mean(x)).pow(2).mean(**ARGS)),
}


def _var_mean(x):
    var, m = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - m) / torch.sqrt(var + 1e-5)


LAYER["var_mean"] = _var_mean
RMS = {
    "power": lambda x: x * torch.rsqrt(x.pow(2).mean(**ARGS) + 1e-6),
    "product": lambda x: x * torch.rsqrt((x * x).mean(**ARGS) + 1e-6),
    "quotient": lambda x: x / torch.sqrt(x.pow(2).mean(**ARGS) + 1e-6),
    "sum": lambda x: x / ((x**2).sum(**ARGS) / N + 1e-6).sqrt(),
}


class Affine(nn.Module):
    """A norm with a scale and a shift, in one of the orders that people write."""

    def __init__(self, form, order, shape=(N,)):
        super().__init__()
        self.form, self.order = form, order
        self.g, self.b = nn.Parameter(values(*shape, seed=1)), nn.Parameter(values(*shape, seed=2))

    def forward(self, x):
        if self.order == "before the root":
            return self.g * (x - mean(x)) / torch.sqrt((x - mean(x)).pow(2).mean(**ARGS) + 1e-5) + self.b
        y = self.form(x)
        forms = {
            "scale": lambda: self.g * y,
            "shift": lambda: y + self.b,
            "scale, shift": lambda: y * self.g + self.b,
            "shift last": lambda: self.b + self.g * y,
        }
        return forms[self.order]()


def rule_of(form):
    return norms.rms_norm_formula if form in RMS.values() else norms.layer_norm_formula
