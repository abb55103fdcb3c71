"""What is folded into layers that are called more than once, and how much memory copies of their weights may take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.fused_layers import image, warm
from tests.passes.helpers import capture, check, check_declines, check_fires, run
from tsopt.passes import FUSE, fuse


class Repeated(nn.Module):
    """One layer, called again and again, with something behind each call."""

    def __init__(self, calls, layer=None) -> None:
        super().__init__()
        self.layer, self.calls = layer or nn.Linear(4, 4), calls

    def forward(self, x):
        for call in self.calls:
            x = call(self.layer(x)).tanh()
        return x


def weights_of(found) -> list[torch.Tensor]:
    """The weights of the layers, each once."""
    return [weight for weight in found.after.weights.values() if weight.dim() > 1]


def scaled_by(*factors):
    return Repeated([lambda y, k=k: y * k for k in factors]).eval()


def test_equal_factors_behind_one_layer_make_one_weight():
    found = check_fires(fuse.conv_mul, scaled_by(0.5, 0.5, 0.5), torch.randn(2, 4))
    assert found.ops == ["linear", "tanh"] * 3
    assert len(found.after.weights) == 2, "a weight and a bias"


def test_one_batch_norm_behind_one_convolution_makes_one_weight():
    norm = warm(nn.BatchNorm2d(4))
    found = check_fires(fuse.conv_batch_norm, Repeated([norm, norm], nn.Conv2d(4, 4, 1)).eval(), image(4, 2))
    assert len(found.after.weights) == 2


def test_only_what_has_the_same_bits_is_one_weight():
    found = check_fires(fuse.conv_mul, scaled_by(0.5, -0.5, 0.5, 0.25), torch.randn(2, 4))
    assert len(weights_of(found)) == 3


@pytest.mark.parametrize("terms", [(1.0, 2.0), (1.0, 1.0)])
def test_terms_behind_one_layer_leave_its_weight_as_it_is(terms):
    found = check_fires(fuse.conv_add, Repeated([lambda y, k=k: y + k for k in terms]).eval(), torch.randn(2, 4))
    assert found.after.weights["layer.weight"] is found.before.weights["layer.weight"]
    assert len(found.after.weights) == 1 + len(set(terms))


@pytest.mark.parametrize(("copies", "kept"), [(0, 1), (1, 2), (2, 3), (3, 3)])
def test_a_layer_that_is_called_elsewhere_is_copied_up_to_a_limit(monkeypatch, copies, kept):
    """Three calls: two copies, and the third takes the place of the layer's own weight."""
    monkeypatch.setattr(fuse, "MEMORY", copies * 4 * 4 * 4)
    found = check(FUSE, scaled_by(0.5, 0.25, 0.125), torch.randn(2, 4))
    assert len(weights_of(found)) == kept
    assert found.ops.count("mul.Tensor") == max(0, 3 - copies if copies < 2 else 0)
    assert (fuse.NO_MEMORY in found.reasons) == (copies < 2)


def test_the_limit_is_for_all_runs_of_the_pass(monkeypatch):
    monkeypatch.setattr(fuse, "MEMORY", 2 * 4 * 4 * 4)
    once, _ = run(capture(scaled_by(0.5, 0.25, 0.125, 3.0), torch.randn(2, 4)), (FUSE,))
    again, _ = run(once, (FUSE,))
    assert again.text == once.text


def test_a_layer_with_the_same_factor_behind_all_calls_takes_no_memory(monkeypatch):
    monkeypatch.setattr(fuse, "MEMORY", 0)
    found = check_fires(fuse.conv_mul, scaled_by(0.5, 0.5, 0.5), torch.randn(2, 4))
    assert len(weights_of(found)) == 1
    norm = warm(nn.BatchNorm2d(4))
    found = check_fires(fuse.conv_batch_norm, Repeated([norm, norm], nn.Conv2d(4, 4, 1)).eval(), image(4, 2))
    assert len(weights_of(found)) == 1


def test_what_replaces_a_weight_leaves_the_memory_to_copies(monkeypatch):
    """One layer has the same factor behind both calls; there is room for one copy of the other's weight."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = scaled_by(0.5, 0.5), scaled_by(0.25, 0.125)

        def forward(self, x):
            return self.second(self.first(x))

    monkeypatch.setattr(fuse, "MEMORY", 4 * 4 * 4)
    found = check_fires(fuse.conv_mul, Two().eval(), torch.randn(2, 4))
    assert found.ops == ["linear", "tanh"] * 4
    assert len(weights_of(found)) == 3


OTHER_READERS = {
    "as it is": lambda layer, x: layer(x).tanh(),
    "another op": lambda layer, x: layer(x) + 0.5,
    "another factor": lambda layer, x: layer(x) * 2.0,
    "for others too": lambda layer, x: (y := layer(x)) * 0.5 + y,
    "no layer": lambda layer, x: layer.weight * 0.5,
    "the other way round": lambda layer, x: F.linear(layer.weight, x) * 0.5,
    "itself": lambda layer, x: (y := layer(x)) * y,
}


@pytest.mark.parametrize("reader", OTHER_READERS)
def test_a_layer_with_something_else_behind_a_call_is_copied(monkeypatch, reader):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) * 0.5, OTHER_READERS[reader](self.layer, x.sin())

    monkeypatch.setattr(fuse, "MEMORY", 0)
    check_declines(fuse.conv_mul, Both().eval(), torch.randn(2, 4), fuse.NO_MEMORY)


def test_a_factor_beside_a_weight_that_is_read_as_it_is():
    class Tied(nn.Module):
        """The table of an embedding is the weight of the last layer."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            return F.linear(F.embedding(x, self.table), self.table) * 0.5

    found = check_fires(fuse.conv_mul, Tied().eval(), torch.tensor([1, 5]))
    assert len(weights_of(found)) == 2
