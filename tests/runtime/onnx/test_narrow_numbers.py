"""Numbers next to bfloat16 and float16 are rounded where PyTorch rounds them."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tsopt.runtime.onnx.narrow_numbers import with_rounded_numbers

ENGINES = ["onnxruntime", "openvino"]
NARROW = [torch.bfloat16, torch.float16]
LITERAL = {torch.bfloat16: 0.1, torch.float16: 0.3}  # the first is rounded up, the second too
WHOLE = {torch.bfloat16: 257, torch.float16: 2049}
WAYS = ("eq", "ne", "lt", "le", "gt", "ge")


def near(dtype, number):
    """The number as the dtype has it, and its neighbors."""
    x = torch.full((3,), number, dtype=torch.float64).to(dtype)
    return (x.float() * torch.tensor([1.0, 1 + torch.finfo(dtype).eps, 1 - torch.finfo(dtype).eps])).to(dtype)


def check(model, *args):
    """Inputs in float32 that hold numbers of the narrow dtype: the engines take no bfloat16."""
    wanted = model(*args)
    for engine in ENGINES:
        found = tsopt.compile(tsopt.transform(tsopt.capture(model, args)), engine)(*args)
        assert torch.equal(found, wanted), engine


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_comparisons_with_a_number(way, dtype):
    compare = getattr(operator, way)

    def model(x, y):
        x, y = x.to(dtype), y.to(dtype)
        found = [compare(x, LITERAL[dtype]), compare(LITERAL[dtype], x), compare(y, WHOLE[dtype])]
        return torch.stack(found)

    check(model, near(dtype, LITERAL[dtype]).float(), near(dtype, WHOLE[dtype]).float())


@pytest.mark.parametrize("way", WAYS)
def test_comparisons_with_tensors_of_other_dtypes(way):
    """In bfloat16: OpenVINO holds float16 in float32, and does not round to it."""
    compare = getattr(torch, way)

    def model(x, y, number, whole):
        x, y = x.bfloat16(), y.bfloat16()
        return torch.stack(
            [compare(x, number), compare(x, torch.tensor(0.1)), compare(y, whole), compare(x, y.float())]
        )

    check(
        model,
        near(torch.bfloat16, 0.1).float(),
        near(torch.bfloat16, 257).float(),
        torch.tensor(0.1),
        torch.tensor([257, 257, 257]),
    )


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_other_jumps_at_a_number(dtype):
    def model(x):
        x, number = x.to(dtype), LITERAL[dtype]
        jumps = torch.isin(x, number), F.hardshrink(x, number), F.threshold(x, number, 5.0)
        return torch.stack([value.float() for value in jumps])

    check(model, near(dtype, LITERAL[dtype]).float())


def test_branches_are_rounded_too():
    def model(x):
        y = x.bfloat16()
        return torch.cond(x.sum() > 0, lambda y: (y == 0.1).float(), lambda y: (y == -0.1).float(), (y,))

    for x in (torch.full((4,), 0.1), torch.full((4,), -0.1)):
        check(model, x)


def test_nothing_else_is_changed():
    def model(x, y):
        return x.bfloat16() * 0.1, x.bfloat16() > 0.5, x > 0.1, x.bfloat16() > y, y > 0.1, x.bfloat16() > float("inf")

    program = tsopt.capture(model, (torch.randn(3), torch.randn(3, dtype=torch.float64)))
    assert with_rounded_numbers(program).text == program.text
