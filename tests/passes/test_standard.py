"""The standard pipeline: on whole small models, on random graphs, and its ledger of reasons."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.passes.helpers import assert_computes, capture, check, ops_of
from tsopt.compiler.graph.program import Numerics
from tsopt.errors import UsageError
from tsopt.passes import STANDARD
from tsopt.transforms import names_of, transform, transform_with_records

PASSES = Path(tsopt.__file__).parent / "passes"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(4, 3, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.drop(F.relu(self.bn1(self.conv1(x))))
        return F.relu(self.bn2(self.conv2(y)) + x).contiguous()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, 2, width // 2).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mask = torch.full((length, length), float("-inf")).triu(1)
        weights = (q @ k.transpose(-2, -1) / (width // 2) ** 0.5 + mask).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(n, length, width))


def test_a_residual_block_loses_its_norms():
    found = check(STANDARD, Residual().eval(), torch.randn(2, 3, 5, 5))
    assert found.ops == ["conv2d", "relu", "conv2d", "add.Tensor", "relu"]
    assert {"conv_batch_norm", "dropout_eval"} <= found.done


def test_an_attention_block_folds_its_mask():
    found = check(STANDARD, Attention().eval(), torch.randn(2, 4, 8))
    assert "triu" not in found.ops
    assert "full" not in found.ops
    assert "fold_constant" in found.done


@pytest.mark.parametrize("model", [Residual, Attention])
def test_the_program_after_is_as_written_down(model, golden):
    torch.manual_seed(0)
    example = torch.randn(2, 3, 5, 5) if model is Residual else torch.randn(2, 4, 8)
    program = transform(capture(model().eval(), example))
    golden(f"standard_{model.__name__.lower()}", "\n".join(program.lines(origins=False)) + "\n")


def test_levels_choose_the_class_of_numerics():
    program = capture(lambda x: ((x + 0.0) * 1).sin(), torch.ones(3))
    assert transform(program, level=0) is program
    assert ops_of(transform(program, level=1)) == ["add.Tensor", "sin"]
    assert transform(program, level=1).numerics == Numerics.EXACT
    assert ops_of(transform(program, level=2)) == ["sin"]
    assert transform(program, level=2).numerics == Numerics.ROUNDING
    with pytest.raises(UsageError, match="unknown optimization level 7"):
        transform(program, level=7)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"level": [2]}, r"unknown optimization level \[2\]"),
        ({"fuel": "3"}, "(?s)fuel must be a number of rewrites, got '3'.*None for no limit"),
        ({"fuel": -1}, "fuel must be a number of rewrites, got -1"),
        ({"without": "dce"}, r"(?s)without must be a tuple of names, got a string.*without=\('dce',\)"),
    ],
)
def test_options_of_a_wrong_kind_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        transform(capture(lambda x: x * 1 + 1, torch.ones(3)), **options)


def test_unknown_names_are_refused():
    program = capture(lambda x: x * 1 + 1, torch.ones(3))
    with pytest.raises(UsageError, match="unknown rule or pass 'times_two'"):
        transform(program, without=["times_two"])
    assert ops_of(transform(program, without=["times_one"])) == ["mul.Tensor", "add.Tensor"]


def test_names_are_told_apart():
    names = names_of(STANDARD)
    assert len(names) == len(set(names))


def test_an_optimized_program_is_left_alone():
    """D41."""
    once = transform(capture(Residual().eval(), torch.randn(2, 3, 5, 5)))
    twice, records = transform_with_records(once)
    assert twice is once
    assert not any(record.changed for record in records)


def test_every_unit_of_fuel_gives_a_sound_program():
    model, x = Residual().eval(), torch.randn(1, 3, 4, 4)
    program = capture(model, x)
    texts = set()
    for fuel in range(8):
        after = transform(program, fuel=fuel)
        assert_computes(after, model, [x], exact=False)
        texts.add(after.text)
    assert len(texts) == 4


# ---- every reason has its test ----------------------------------------------------------------------------


def _skip_reasons() -> set[str]:
    """The strings that rules give to `at.skip`, and the names of the constants."""
    found = set()
    for path in PASSES.rglob("*.py"):
        tree = ast.parse(path.read_text())
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        imported = {name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "skip":
                argument = node.args[0]
                if isinstance(argument, ast.Constant):
                    found.add(repr(argument.value))
                elif isinstance(argument, ast.Name):
                    assert argument.id in constants or argument.id in imported
                    found.add(argument.id)
    return found


def test_every_reason_is_provoked_by_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    reasons = _skip_reasons()
    assert len(reasons) >= 10
    missing = [r for r in sorted(reasons) if r.strip("'") not in tests]
    assert missing == []


def test_every_rule_has_a_test():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    from tsopt.passes import algebra, canonicalize, constants, data_movement, fuse, slices
    from tsopt.passes.recompose import activations, attention, linear, norms

    homes = (fuse, algebra, slices, data_movement, canonicalize, activations, attention, linear, norms)
    modules = {module.__name__.rpartition(".")[2]: module for module in homes}
    for name, module in modules.items():
        for item in module.RULES:
            home = "constants" if item in (*constants.FORMS, *constants.RULES) else name
            home = "slices" if item in slices.RULES else home
            assert f"{home}.{item.name}" in tests or (name == "fuse" and item.name in tests), item.name


WEIGHT, ROW = torch.randn(4, 4), torch.randn(4)
NUMBERS = {
    "shift": lambda x, n: x.relu() + n.item(),
    "mask": lambda x, n: (x @ x.mT / 2 + n.item()).softmax(-1) @ x,
    "mask, scaled": lambda x, n: (x @ x.mT + (1 - (ROW > 0).to(x.dtype)) * n.item()).softmax(-1) @ x,
    "mask, computed": lambda x, n: (x @ x.mT + (x > 0).to(x.dtype) * n.item()).softmax(-1) @ x,
    "mask, filled": lambda x, n: (x @ x.mT + x.new_zeros(4, 4).masked_fill(x > 0, n.item())).softmax(-1) @ x,
    "mask, chosen": lambda x, n: (x @ x.mT + torch.where(x > 0, 0.0, n.item()).to(x.dtype)).softmax(-1) @ x,
    "scores, chosen": lambda x, n: torch.where(x > 0, n.item(), x @ x.mT).softmax(-1) @ x,
    "scores, scaled": lambda x, n: ((x * n.item()) @ (x / n.item()).mT).softmax(-1) @ x,
    "bound": lambda x, n: x.clamp(0.1, 2.0).clamp(max=n.item()),
    "eps": lambda x, n: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + n.item()),
    "norm, scaled": lambda x, n: F.layer_norm(x, (4,)) * n.item() + n.item(),
    "layer": lambda x, n: F.linear(x * n.item(), WEIGHT.to(x.dtype)) * n.item() + n.item(),
    "layer, turned": lambda x, n: F.linear(x, WEIGHT.to(x.dtype)).mT * n.item(),
    "constant": lambda x, n: x + WEIGHT.to(x.dtype) * n.item(),
    "constant, added to": lambda x, n: x + (ROW.to(x.dtype) + n.item()),
    "constant of one number": lambda x, n: x * (torch.tensor(2.0) * n.item()),
    "sign": lambda x, n: -x + n.item(),
    "sign, other side": lambda x, n: n.item() - -x,
    "sign of a product": lambda x, n: -(x * n.item()),
    "product of numbers": lambda x, n: x * 2 * n.item() * 3 / n.item(),
    "sum of numbers": lambda x, n: x + 2 + n.item() + 3 - n.item(),
    "row": lambda x, n: x[:, :1].expand(2, 4, 4) * n.item(),
    "gate": lambda x, n: x * torch.sigmoid(x * n.item()),
    "power": lambda x, n: x.abs() ** n.item(),
    "branches": lambda x, n: torch.stack([F.linear(x, WEIGHT.to(x.dtype) + i) * n.item() for i in range(8)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_a_call_computes_is_an_operand_as_any_other(name, dtype):
    check(STANDARD, NUMBERS[name], (torch.randn(2, 4, 4).to(dtype), torch.tensor(0.5)))
