"""Branches and loops that values decide, as part of a program."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.helpers import assert_computes
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import Cond, Control, While, all_calls, with_blocks
from tsopt.compiler.graph.serialize import GRAPH, read_program, write_program
from tsopt.compiler.graph.verify import verify_program
from tsopt.errors import BundleError, CaptureError, GraphBreakError, InvalidProgram
from tsopt.runtime.backends.backend import get_backend

X = torch.linspace(-1, 2, 6).reshape(2, 3)
BOTH = [X, -X]


class Branching(nn.Module):
    """Weights and a buffer in the branches, one of which writes what it has made itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x).relu_(), lambda x: self.b(x) + self.shift, (x,))


class Looping(nn.Module):
    def forward(self, x):
        def going(i, z):
            return (i < 5) & (z.abs().sum() > 0.1)

        def once(i, z):
            return i + 1, z * 0.5 + x

        i, z = torch.while_loop(going, once, (x.new_zeros((), dtype=torch.int64), x))
        return z, i


class Nested(nn.Module):
    """A branch in a branch, and two results."""

    def forward(self, x, y):
        def inner(x, y):
            return torch.cond(y.sum() > 0, lambda x, y: (x + y, x * y), lambda x, y: (x - y, y + 1), (x, y))

        return torch.cond(x.sum() > 0, inner, lambda x, y: (x * 2, y * 3), (x, y))


class Drawing(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x * 2, (x,))


MODELS = {
    "cond": (Branching(), BOTH),
    "while": (Looping(), [*BOTH, X * 0]),
    "nested": (Nested(), [(X, X), (X, -X), (-X, X)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_program_holds_it(name):
    model, calls = MODELS[name]
    program = capture(model.eval(), calls[0])
    verify_program(program)
    assert_computes(program, model, calls, exact=True)
    better = tsopt.transform(program)
    assert_computes(better, model, calls, exact=False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_backends_take_it(name, backend):
    model, calls = MODELS[name]
    made = tsopt.compile(tsopt.transform(capture(model.eval(), calls[0])), backend)
    for given in calls:
        args = given if isinstance(given, tuple) else (given,)
        with torch.no_grad():
            wanted = model(*args)
        torch.testing.assert_close(made(*args), wanted)


def test_what_a_trace_would_fix_is_refused():
    program = capture(Branching().eval(), X)
    (found,) = get_backend("torchscript").unsupported(program)
    assert found.why == "a trace records only one branch of cond"
    assert "test_control.py:" in found.where


def test_random_numbers_in_a_branch_are_random():
    program = capture(Drawing(), X)
    (node,) = [node for node in program.calls() if ops.blocks_of(node)]
    assert ops.is_random(node)
    assert not ops.is_pure(node)
    assert "random number generator" in get_backend("onnxruntime").unsupported(program)[0].why
    made = tsopt.compile(program, "eager")
    assert not torch.equal(made(X), made(X))
    assert torch.equal(made(-X), -X * 2)


def test_one_that_nobody_uses_is_dead():
    def model(x):
        torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return x + 1

    assert [ops.name_of(node) for node in tsopt.transform(capture(model, X)).calls()] == ["aten.add.Tensor"]


def test_the_text_shows_what_is_within():
    text = capture(Branching().eval(), X).text
    assert "    if:\n" in text
    assert "    else:\n" in text
    assert "      %1: f32[2, 3] = aten.relu(%0)" in text
    other = Branching()
    other.forward = lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
    third = Branching()
    third.forward = lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.tan(), (x,))
    assert capture(other.eval(), X).fingerprint() != capture(third.eval(), X).fingerprint()


def test_the_ops_within_are_counted():
    program = capture(Branching().eval(), X)
    assert program.node_count == 7  # sum, gt, cond; linear, relu; linear, add
    assert len(list(all_calls(program))) == 8


def test_a_program_for_many_sizes_holds_none():
    with pytest.raises(CaptureError, match="cond is not supported with dynamic sizes") as caught:
        capture(Branching().eval(), [X, torch.ones(4, 3)])
    assert not isinstance(caught.value, GraphBreakError), "it is one graph at one size"
    assert "test_control.py:" in caught.value.where


def control_of(program):
    return next(node for node in program.calls() if ops.blocks_of(node))


@pytest.mark.parametrize("name", MODELS)
def test_it_is_stored(name, tmp_path):
    model, calls = MODELS[name]
    program = tsopt.transform(capture(model.eval(), calls[0]))
    write_program(program, tmp_path)
    again = read_program(tmp_path)
    assert list(again.lines(origins=False)) == list(program.lines(origins=False))
    assert_computes(again, model, calls, exact=True)


def changed(tmp_path, change):
    write_program(capture(Branching().eval(), X), tmp_path)
    data = json.loads((tmp_path / GRAPH).read_text())
    change(next(node for node in data["nodes"] if node.get("target") == "cond"))
    (tmp_path / GRAPH).write_text(json.dumps(data))
    return tmp_path


def drop_a_block(node):
    node["blocks"].pop()


def hold_a_weight(node):
    block = node["blocks"][0]
    block["nodes"].insert(0, {"op": "get_attr", "target": "a.weight", "stride": [3, 1]})


def another_type(node):
    node["blocks"][0]["signature"]["inputs"][0]["type"]["shape"] = [3, 3]


def no_op(node):
    next(item for item in node["blocks"][1]["nodes"] if item["op"] == "call_function")["target"] = "os.system"


def no_flag(node):
    node["args"]["tuple"][0] = node["args"]["tuple"][1]


@pytest.mark.parametrize("change", [drop_a_block, hold_a_weight, another_type, no_op, no_flag])
def test_what_is_damaged_within_is_refused(tmp_path, change):
    with pytest.raises((BundleError, InvalidProgram)):
        read_program(changed(tmp_path, change))


def test_a_file_is_as_deep_as_python_can_read(tmp_path):
    def nest(node):
        block = node["blocks"][0]
        for _ in range(2000):
            node["blocks"] = [{"nodes": [dict(node)]}, block]

    with pytest.raises((BundleError, RecursionError)):
        read_program(changed(tmp_path, nest))


def test_programs_within_are_verified():
    program = capture(Branching().eval(), X)
    node = control_of(program)

    def broken(block):
        copy = block.copy()
        next(iter(copy.calls())).meta["val"] = torch.empty(1)
        return copy

    node.target = with_blocks(node.target, broken)
    with pytest.raises(InvalidProgram, match="invariant 3"):
        verify_program(program)


def test_a_program_within_returns_memory_of_its_own():
    program = capture(Nested(), (X, X))
    assert isinstance(control_of(program).target, Cond)
    node = control_of(program)

    def returning_its_input(block):
        copy = block.copy()
        value = next(iter(copy.graph.nodes))
        copy.output_node.args = ((value, copy.outputs[1]),)
        return copy

    node.target = with_blocks(node.target, returning_its_input)
    with pytest.raises(InvalidProgram, match="invariant 2: a nested program"):
        verify_program(program)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda block: capture(lambda *given: given[1] * 2, tuple(t for t in operands(block))),
            "return different types",
        ),
        (lambda block: capture(lambda x: x * 2, X), "operand types do not match"),
    ],
    ids=["results", "operands"],
)
def test_types_are_compared(change, message):
    program = capture(Branching().eval(), X)
    node = control_of(program)
    first, second = node.target.blocks
    node.target = Cond((change(first), second))
    with pytest.raises(InvalidProgram, match=f"(?s)invariant 3.*{message}"):
        verify_program(program)


def test_strides_are_compared():
    node = control_of(capture(Branching().eval(), X))
    predicate, x, *others = [arg.meta["val"] for arg in node.args]
    with x.fake_mode:
        transposed = torch.empty_strided((2, 3), (1, 2))
        assert node.target(predicate, x, *others)[0].shape == (2, 3)
        with pytest.raises(ValueError, match="operand types do not match"):
            node.target(predicate, transposed, *others)


def operands(block):
    return [torch.zeros(item.type.shape) for item in block.signature.inputs]


def test_a_loop_that_carries_something_else_is_refused():
    program = capture(Looping(), X)
    node = control_of(program)
    assert isinstance(node.target, While)
    _, body = node.target.blocks
    node.target = While((body, body))
    with pytest.raises(InvalidProgram, match="the condition must be a single boolean"):
        verify_program(program)


def test_a_loop_of_no_steps_returns_other_memory():
    def model(x):
        return torch.while_loop(lambda z: z.sum() > 1e9, lambda z: (z * 2,), (x,))[0]

    program = capture(model, X)
    made = tsopt.compile(program, "eager")(X)
    assert torch.equal(made, X)
    assert made.data_ptr() != X.data_ptr()


def test_python_numbers_are_refused():
    def model(x):
        return torch.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * 2), (0, x))[1]

    with pytest.raises(GraphBreakError) as caught:
        capture(model, X)
    assert caught.value.fix


def test_every_kind_knows_its_parts():
    for kind in (Cond, While):
        assert issubclass(kind, Control)
        assert len(kind.titles) == 2


def test_optimize_saves_and_loads_it(tmp_path):
    model = Branching().eval()
    fast = tsopt.optimize(model, X, backends=("eager", "onnxruntime"), seconds=0.05, isolate=False, cache=False)
    assert [row.status for row in fast.report.rows] == ["ok"] * 3
    loaded = tsopt.load(fast.save(tmp_path / "m.tsopt"))
    for x in BOTH:
        torch.testing.assert_close(loaded(x), model(x).detach())
