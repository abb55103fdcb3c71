"""The text of a program, its fingerprint, its copies."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.passes.helpers import capture, find, ops_of
from tsopt.compiler.graph.program import attribute_name, format_value

X = torch.ones(2, 3)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.register_buffer("x", torch.ones(4))
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, x, more):
        self.n += 1
        y = torch.relu(self.fc(x)) * self.x + 1.0
        first, second = y.split(2, 1)
        return {"y": first.t(), "z": [torch.cat([second, more["k"]], -1).to(torch.float16), self.n.clone()]}


def text():
    return capture(Text().eval(), (X, {"k": X}))


def test_the_text_is_as_written_down(golden):
    golden("program_text", re.sub(r"test_program\.py:\d+", "test_program.py:N", text().text) + "\n")


def test_origins_are_left_out_when_asked():
    assert not any("#" in line for line in text().lines(origins=False))
    assert "# fc" in text().text


def test_str_is_the_text():
    program = text()
    assert str(program) == program.text


def test_a_copy_has_its_own_graph_and_the_same_weights():
    program = text()
    copy = program.copy()
    assert copy.text == program.text
    find(copy, "add.Tensor").args = (find(copy, "add.Tensor").args[0], 2.0)
    assert copy.text != program.text
    assert all(copy.weights[name] is program.weights[name] for name in program.weights)
    copy.weights.clear()
    assert program.weights


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda x: x + 1, lambda x: x + 1.0),
        (lambda x: x + 1, lambda x: torch.ops.aten.add.Tensor(x, True)),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x.sin(), lambda x: x.cos()),
        (lambda x: (x.sin(), x.cos()), lambda x: (x.cos(), x.sin())),
        (lambda x: x - x.sin(), lambda x: x.sin() - x),
        (lambda x: {"a": x + 1}, lambda x: {"b": x + 1}),
    ],
)
def test_programs_that_differ_have_other_fingerprints(a, b):
    assert capture(a, X).fingerprint() != capture(b, X).fingerprint()


def test_the_fingerprint_does_not_know_where_things_come_from():
    def one(x):
        return x + 1

    def two(x):
        return x + 1

    first, second = capture(one, X), capture(two, X)
    second.name = first.name
    assert first.fingerprint() == second.fingerprint()


def test_the_contents_of_weights_count_when_asked():
    model = nn.Linear(3, 2).eval()
    program = capture(model, X)
    plain, deep = program.fingerprint(), program.fingerprint(contents=True)
    model.weight.data[0, 0] += 1
    assert program.fingerprint() == plain
    assert program.fingerprint(contents=True) != deep


def test_what_a_model_writes_is_part_of_its_contents():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return x + self.count

    program = capture(Counter().eval(), X)
    deep = program.fingerprint(contents=True)
    program.state["count"].add_(1)
    assert program.fingerprint(contents=True) != deep


def test_the_fingerprint_takes_every_dtype():
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("bool", "int8", "float16", "bfloat16", "complex64", "float64"):
                self.register_buffer(f"b_{name}", torch.ones(2, 1).expand(2, 3).to(getattr(torch, name)))
            self.register_buffer("empty", torch.zeros(0))
            self.register_buffer("conj", torch.ones(2, dtype=torch.complex64).conj())

        def forward(self, x):
            return [x, *(buffer + 1 for buffer in self.buffers())]

    assert capture(Many().eval(), X).fingerprint(contents=True)


def test_node_count_leaves_out_bookkeeping():
    assert capture(lambda x: x.split(1, 1)[0] + x.split(1, 1)[1], X).node_count == 3


def test_the_module_runs_and_shares_the_weights():
    program = capture(nn.Linear(3, 2).eval(), X)
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    assert module(X)[0].shape == (2, 2)
    assert {t.data_ptr() for t in program.weights.values()} == {
        getattr(module, attribute_name(name)).data_ptr() for name in program.weights
    }


@pytest.mark.parametrize(
    "names", [("a.b", "a_b"), ("a.b", "a"), ("ä", "a"), ("a-b", "a.b"), ("0.weight", "0"), ("a_b", "a.5f.b")]
)
def test_weights_of_similar_names_stay_apart(names):
    assert len({attribute_name(name) for name in names}) == 2
    assert all(attribute_name(name).isidentifier() for name in names)


def test_weights_of_similar_names_keep_their_values():
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Module()
            self.a.register_buffer("b", torch.ones(3))
            self.register_buffer("a_b", torch.zeros(3))

        def forward(self, x):
            return x * self.a.b + self.a_b

    program = capture(Names().eval(), X)
    assert torch.equal(program.module()(X)[0], X)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, "1"),
        (1.0, "1.0"),
        (True, "True"),
        (-0.0, "-0.0"),
        (float("nan"), "nan"),
        ([1, (2,)], "[1, (2,)]"),
        (torch.float16, "float16"),
        (slice(1, None), "slice(1, None, None)"),
        ("text", "'text'"),
        (None, "None"),
    ],
)
def test_literals_as_text(value, expected):
    assert format_value(value, {}) == expected


def test_names_of_values_do_not_depend_on_the_graphs_own():
    program = capture(lambda x: x.sin().cos(), X)
    for node in program.calls():
        node.name = f"renamed_{node.name}"
    assert program.text.splitlines()[2].startswith("  %0: f32[2, 3] = aten.sin(%x)")
    assert ops_of(program) == ["sin", "cos"]
