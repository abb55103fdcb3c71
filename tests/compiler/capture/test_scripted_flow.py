"""Branches and loops of TorchScript that values decide, as part of a program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.helpers import assert_computes
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import all_calls
from tsopt.errors import GraphBreakError

X = torch.linspace(-1, 2, 6).reshape(2, 3)
CALLS = [X, -X, X * 0, X * 10]
pytestmark = pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated, and says so


class Weighted(nn.Module):
    """Weights and a buffer in branches, a chain of them, one in another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.register_buffer("shift", torch.ones(3))
        self.factor = 2.0

    def forward(self, x):
        if bool(x.sum() > 5):
            y = self.layers[0](x)
            if bool(x.max() > 15):
                y = y + self.shift
        elif bool(x.sum() > 0):
            y = self.layers[1](x) * self.factor
        else:
            y = x
        return y


def conditions(x: torch.Tensor):
    positive = bool(x.sum() > 0)
    large = bool(x.max() > 5)
    if positive and not large:
        x = x + 1
    if positive or large:
        x = x * 2
    if positive != large:
        x = x - 3
    return x


def counted(x: torch.Tensor):
    i = 0
    while bool(x.norm() > 1):
        x = x / 2
        i += 1
        if i % 3 == 0:
            x = x - 0.01
    return x * i


def broken_off(x: torch.Tensor):
    y = x
    for i in range(10):
        y = y * 1.5 + i
        if bool(y.sum() > 20):
            break
    return y


def flagged(x: torch.Tensor):
    done = False
    while not done:
        x = x + 1
        done = bool(x.min() > 3)
    return x


def several(x: torch.Tensor):
    if bool(x.sum() > 0):
        a, b = x + 1, [x, x * 2]
    else:
        a, b = x.clone().add_(2), [x * 3, x]
    return a, torch.stack(b)


def held(x: torch.Tensor):
    table = torch.tensor([1, 2, 3], dtype=torch.float32)
    if bool(x.sum() > 0):
        x = x * table
    return x


def read_from_a_list(x: torch.Tensor):
    found = [x + 1, x * 5]
    y = found[0] * 2 if bool(x.sum() > 0) else found[1] * 3
    return y


def twice_the_same(x: torch.Tensor):
    y = x
    if bool(x.sum() > 0):
        return x + y
    return x - y


def views(x: torch.Tensor):
    y = x[:1] if bool(x.sum() > 0) else x[1:]
    return y * 2


def remainders(x: torch.Tensor):
    i = 5
    while bool(x.sum() > 0):
        x = x - 1
        i = i - 2
    return x + (i % 3) + (i // 2)


def implicit(x: torch.Tensor):
    while x.sum() > 1:
        x = x - 1
    return x


RIGHT = {
    item.__name__: item
    for item in (
        conditions,
        counted,
        broken_off,
        flagged,
        several,
        held,
        implicit,
        read_from_a_list,
        twice_the_same,
        views,
        remainders,
    )
}
RIGHT["weighted"] = Weighted().eval()


@pytest.mark.parametrize("name", RIGHT)
def test_what_values_decide_is_decided_in_the_call(name):
    script = torch.jit.script(RIGHT[name])
    program = capture(script, X)
    assert any(ops.blocks_of(node) for node in program.calls())
    assert_computes(program, lambda x: script(x), CALLS, exact=True)


@pytest.mark.sliced(4)
@pytest.mark.parametrize("name", RIGHT)
def test_onnx_runtime_decides_as_well_or_it_is_said_why_not(name):
    script = torch.jit.script(RIGHT[name])
    program = tsopt.transform(capture(script, X))
    if name in ("counted", "broken_off"):  # torch's exporter does not know control flow within a loop
        with pytest.raises(tsopt.BackendError, match="ONNX exporter failed on this model"):
            tsopt.compile(program, "onnxruntime")
        return
    made = tsopt.compile(program, "onnxruntime")
    for x in CALLS:
        torch.testing.assert_close(made(x), script(x), rtol=1e-5, atol=1e-5)


def test_weights_keep_their_names():
    program = capture(torch.jit.script(Weighted().eval()), X)
    assert set(program.weights) == {f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")} | {"shift"}
    assert sum(ops.name_of(node) == "cond" for node in all_calls(program)) == 3


def a_float(x: torch.Tensor):
    scale = 1.0
    while bool(x.norm() * scale > 1):
        scale = scale * 0.5
    return x * scale


def another_kind(x: torch.Tensor):
    y: torch.Tensor | None = None
    if bool(x.sum() > 0):
        y = x
    return x if y is None else y + 1


def a_number(x: torch.Tensor):
    if bool(x.sum() > 0):
        return x, 1
    return x, 2


def a_count(x: torch.Tensor):
    i = 0
    while bool(x.norm() > 1):
        x = x / 2
        i += 1
    return x, i


def a_flag(x: torch.Tensor):
    return x, bool(x.sum() > 0)


def flags_of_a_list(x: torch.Tensor):
    return x, [bool(x.sum() > 0)]


def growing(x: torch.Tensor):
    if bool(x.sum() > 0):
        x = torch.cat([x, x])
    return x


def appending(x: torch.Tensor):
    found = [x]
    if bool(x.sum() > 0):
        found.append(x * 2)
    else:
        found.append(x * 3)
    return torch.stack(found)


def in_a_dict(x: torch.Tensor):
    found = {"a": x}
    while bool(found["a"].norm() > 1):
        found["a"] = found["a"] / 2
    return found["a"]


def writing(x: torch.Tensor):
    y = x * 1
    if bool(x.sum() > 0):
        y.add_(1)
        z = y * 2
    else:
        z = y * 3
    return y + z


def writing_in_a_loop(x: torch.Tensor):
    total = torch.zeros(3)
    while bool(x.norm() > 1):
        x = x / 2
        total += x.sum(0)
    return total


def other_dtypes(x: torch.Tensor):
    y = x.double() if bool(x.sum() > 0) else x
    return y.double()


def an_item(x: torch.Tensor):
    if x.sum().item() > 0:
        x = x + 1
    return x


@pytest.mark.sliced(6)
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (a_float, "the loop carries"),
        (another_kind, "one branch returns"),
        (a_number, "one branch returns"),
        (a_count, "a Python number that depends on the input"),
        (a_flag, "a Python number that depends on the input"),
        (flags_of_a_list, "a Python number that depends on the input"),
        (growing, ""),
        (appending, "modifies a list or a dict defined outside it"),
        (in_a_dict, "modifies a list or a dict defined outside it"),
        (writing, "writes in place to a tensor defined outside it"),
        (writing_in_a_loop, "writes in place to a tensor defined outside it"),
        (other_dtypes, "return tensors of different types"),
        (an_item, "values that are known only at run time"),
    ],
)
def test_what_a_program_cannot_hold_is_refused_and_runs_all_the_same(function, why):
    script = torch.jit.script(function)
    with pytest.raises(GraphBreakError) as caught:
        capture(script, X)
    assert why in str(caught.value)
    assert caught.value.fix
    fast = tsopt.optimize(script, X, backends=("eager",), seconds=0.02, isolate=False, cache=False)
    for x in CALLS[1:3]:
        torch.testing.assert_close(fast(x + 0.5), script(x + 0.5))
