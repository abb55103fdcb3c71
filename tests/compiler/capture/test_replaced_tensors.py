"""Models that read and write by `.data`, and those that replace their tensors, which are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tsopt

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.call = nn.Linear(8, 8), call
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("later", None)
        self.first = self.mean

    def forward(self, x):
        return self.call(self, x)


def scaled(model, x):
    model.mean.data.mul_(0.9).add_(0.1 * x.mean(0))
    return model.layer(x) + model.mean


def clamped(model, x):
    model.layer.weight.data.clamp_(-0.1, 0.1)
    return model.layer(x)


def first_row_cleared(model, x):
    y = model.layer(x)
    y.data[0] = 0
    return y


def input_written(model, x):
    x.data.add_(1)
    return model.layer(x)


def filled_once(model, x):
    if model.later is None:
        model.later = torch.arange(8.0)
    return model.layer(x) + model.later


def grown(model, x):
    if len(model.mean) < 9:
        model.mean = torch.cat([model.mean, torch.ones(1)])
    return model.layer(x) + model.mean[:8]


def put_back(model, x):
    model.mean = model.first
    return model.layer(x) + model.mean


BY_DATA = {
    "a weight": lambda model, x: x @ model.layer.weight.data.t(),
    "a weight that is returned": lambda model, x: (model.layer(x), model.layer.weight.data[0] * 1),
    "a result": lambda model, x: model.layer(x).data,
    "a buffer that is written": scaled,
    "a parameter that is written": clamped,
    "a result that is written": first_row_cleared,
    "an input that is written": input_written,
    "a buffer that is made by the first call": filled_once,
    "a buffer that the first call enlarges": grown,
    "a buffer that each call puts back": put_back,
}


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("name", BY_DATA)
def test_what_is_read_and_written_by_data_is_what_it_is_in_eager(name, backend):
    model = Model(BY_DATA[name]).eval()
    reference = copy.deepcopy(model)
    executable = tsopt.compile(tsopt.capture(model, X), backend)
    for scale in (1.0, 2.0):
        mine, theirs = scale * X, scale * X
        with torch.no_grad():
            torch.testing.assert_close(executable(mine), reference(theirs))
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(model.layer.weight, reference.layer.weight)
        torch.testing.assert_close(model.mean, reference.mean[: len(model.mean)])


def parameter(model, x):
    model.layer.weight = nn.Parameter(model.layer.weight * 0.9)
    return model.layer(x)


def buffer(model, x):
    model.mean = x.mean(0)
    return model.layer(x)


def registered(model, x):
    model.register_buffer("mean", x.mean(0))
    return model.layer(x)


def data_of_a_buffer(model, x):
    model.mean.data = x.mean(0)
    return model.layer(x)


def data_of_an_input(model, x):
    x.data = 2 * x
    return model.layer(x)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (parameter, "replaces 'weight', one of its own tensors"),
        (buffer, "replaces 'mean', one of its own tensors"),
        (registered, "replaces 'mean', one of its own tensors"),
        (data_of_a_buffer, r"replaces what a tensor holds \(x.data = ...\)"),
        (data_of_an_input, r"replaces what a tensor holds \(x.data = ...\)"),
    ],
)
def test_a_model_that_replaces_tensors_is_no_program(call, what):
    model = Model(call).eval()
    before = {name: (tensor, tensor.clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    with pytest.raises(tsopt.GraphBreakError, match=what) as caught:
        tsopt.capture(model, X.clone())
    assert "copy_" in caught.value.fix
    after = {name: (tensor, tensor.clone()) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert all(after[name][0] is tensor for name, (tensor, _) in before.items())
    torch.testing.assert_close({name: pair[1] for name, pair in after.items()}, {n: p[1] for n, p in before.items()})
