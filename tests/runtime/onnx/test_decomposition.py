"""The exporter traces a program again only where one of its ops has no translation."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.onnx import decomposition
from tsopt.runtime.onnx.export import to_onnx

passes = pytest.importorskip("torch.onnx._internal.exporter._fx_passes")


@pytest.fixture
def decomposed(monkeypatch):
    """The programs that are traced again."""
    seen, real = [], passes.decompose_with_registry

    def counted(program, registry):
        seen.append(program)
        return real(program, registry)

    monkeypatch.setattr(passes, "decompose_with_registry", counted)
    return seen


def kinds(made):
    return [node.op_type for node in made.model.graph]


class Translated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.gelu(self.layer(self.norm(x))).softmax(-1).to(torch.float64)


@pytest.mark.parametrize("dynamic", [None, {"x": {0: "batch"}}])
def test_a_program_that_can_be_translated_as_it_is_is_left(decomposed, monkeypatch, dynamic):
    program = tsopt.capture(Translated(), torch.randn(4, 8), dynamic=dynamic)
    made = to_onnx(program)
    assert not decomposed
    monkeypatch.setattr(decomposition, "_passes", lambda: None)  # as with a torch that decomposes in another way
    assert kinds(to_onnx(program)) == kinds(made)
    assert decomposed


def test_what_has_no_translation_is_decomposed(decomposed):
    program = tsopt.capture(nn.AdaptiveAvgPool2d(2), torch.randn(1, 2, 8, 8))
    assert "AveragePool" in kinds(to_onnx(program))
    assert len(decomposed) == 1


class Branches(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2), (x,))


def test_branches_count_as_well(decomposed):
    assert "If" in kinds(to_onnx(tsopt.capture(Branches(), torch.randn(1, 2, 8, 8))))
    assert len(decomposed) == 1


def test_exports_of_the_user_are_as_torch_makes_them(decomposed):
    program = torch.export.export(nn.ReLU().eval(), (torch.ones(2),))

    def export():
        torch.onnx.export(program, dynamo=True, verbose=False)

    with decomposition.only_where_needed():
        other = threading.Thread(target=export)
        other.start()
        other.join()
    assert len(decomposed) == 1
    export()
    assert len(decomposed) == 2
