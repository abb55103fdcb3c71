"""Models on a device other than the CPU: what passes create is on that device."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.elsewhere import elsewhere
from tests.passes.helpers import Limits, ops_of
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.rewriting.rewrite import RulePass, rule
from tsopt.passes.merge import MergeBranches

MAKERS = {"arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "scalar_tensor", "tensor"}
MAKERS |= {"normal", "rand", "randint", "randn", "randperm", "zeros"}


def makers(path: Path) -> list[str]:
    """The calls in a file that make a tensor on whatever device is the default."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    places = [(call, *ast.unparse(call.func).split(".")) for call in calls]
    return [
        f"{path.name}:{call.lineno}: {ast.unparse(call)}"
        for call, *name in places
        if name[0] == "torch" and name[1:2] and name[1] in MAKERS and len(name) == 2
        if not any(keyword.arg == "device" for keyword in call.keywords)
    ]


def test_every_new_tensor_names_its_device():
    """Otherwise it is on the CPU while the model is on a GPU, or on the default device that the user has set."""
    files = list(Path(tsopt.__file__).parent.rglob("*.py"))
    assert len(files) > 200
    assert [line for path in files for line in makers(path)] == []


@pytest.mark.sliced(1)
@pytest.mark.parametrize("options", [{"precision": "int8", "calibration": 8}, {"precision": "bf16"}, {}], ids=str)
def test_the_default_device_changes_nothing(options):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(4, 64)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = tsopt.optimize(model, x, seconds=0.1, **options)
        found = fast(x)
    said = [row.reason for row in fast.report.rows if row.status in ("failed", "wrong")]
    assert said == []
    torch.testing.assert_close(found, model(x).detach(), rtol=0.05, atol=0.05)


@rule(lambda x: aten.relu.default(x))
def adds_a_constant(at, x):
    """relu(x) -> x + a constant, which is made on the CPU"""
    return at.call(aten.add.Tensor, x, at.constant(torch.zeros(3, device="cpu"), "zeros"))


def test_a_constant_of_a_rule_is_on_the_device_of_what_it_replaces():
    program = elsewhere(tsopt.capture(nn.ReLU(), torch.ones(3)))
    (made,) = tsopt.transform(program, passes=(RulePass("adds", (adds_a_constant,)),)).weights.values()
    assert made.device.type == "meta"


def test_a_folded_constant_stays_where_it_is():
    model = Net(lambda self, x: x + self.w.t().relu(), w=torch.randn(4, 3))
    made = tsopt.transform(elsewhere(tsopt.capture(model, torch.ones(3, 4))))
    assert ops_of(made) == ["add.Tensor"]
    assert {weight.device.type for weight in made.weights.values()} == {"meta"}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


@pytest.mark.parametrize(("most", "linears"), [(64 * 128 * 128, 1), (64 * 128 * 128 - 1, 3)])
def test_on_a_gpu_layers_that_do_not_fill_it_are_one(most, linears):
    program = tsopt.capture(Attention(128).eval(), torch.ones(1, 64, 128))
    merge = MergeBranches(parallel_elsewhere=most)
    assert merge.parallel < 64 * 128 * 128 < MergeBranches().parallel_elsewhere
    programs = [program.copy(), elsewhere(program)]
    for item in programs:
        merge.run(item, Limits())
    assert [ops_of(item).count("linear") for item in programs] == [3, linears]
