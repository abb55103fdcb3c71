"""The standard passes under comparison on models of all kinds, and what a user reads when a rule is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.helpers import Edit, aten, capture, ops_of, specials
from tests.passes.programs import Builder
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.graph.values import Values, with_seeds
from tsopt.compiler.rewriting.rewrite import RulePass, rule
from tsopt.errors import AccuracyError, SignatureError
from tsopt.passes import STANDARD
from tsopt.transforms import debug_passes, transform

X = torch.tensor([[0.1, -0.7, 2.0], [0.3, 5.0, 7.0]])


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x, *, scale):
        self.count.add_(1)
        return {"y": self.norm(x["a"] * 1 + self.count) * scale, "n": self.count.long()}


class Noisy(nn.Module):
    def forward(self, x):
        unused = torch.rand_like(x)  # noqa: F841
        return torch.nn.functional.dropout(x, 0.5) * torch.rand_like(x) * 1 + torch.rand_like(x)


GOOD = {
    "state, nesting and keywords": (Counter().eval(), tsopt.example({"a": torch.randn(3, 2)}, scale=torch.tensor(2.0))),
    "random": (Noisy().eval(), X),
    "convolution": (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)).eval(),
        torch.randn(2, 2, 5, 5),
    ),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)),
    "half precision": (nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).half().eval(), X.half()),
    "integers": (lambda i: (i * 2 + 0) // 3 % 5, torch.arange(-4, 5)),
    "special values": (lambda x: (x + 0.0).log().sqrt() * 1 / 2.0, specials(18)),
    "strided input": (lambda x: x.t().reshape(-1) + 1 * 2, torch.randn(3, 4).t()),
    "uninitialized": (lambda x: torch.empty_like(x).copy_(x * 1) + torch.zeros_like(x), X),
}  # fmt: skip


@pytest.mark.sliced(3)
@pytest.mark.parametrize("name", GOOD)
def test_the_standard_passes_change_no_value(name):
    torch.manual_seed(0)
    model, example = GOOD[name]
    program = capture(model, example)
    text, before = program.text, torch.get_rng_state()
    found = debug_passes(program, example)
    assert found.findings == ()
    assert found.not_compared == {}
    assert torch.equal(before, torch.get_rng_state())
    assert program.text == text
    assert found.program.text == transform(program).text
    assert not any("seed" in node.meta for p in (program, found.program) for node in p.graph.nodes)


def test_random_calls_that_are_merged_are_found():
    def merge(program):
        first, second = (node for node in program.calls() if node.target is aten.rand_like.default)
        second.replace_all_uses_with(first)
        program.graph.erase_node(second)

    program = capture(lambda x: torch.rand_like(x) - torch.rand_like(x), X)
    (found,) = debug_passes(program, X, (Edit(merge, "merger"),)).findings
    assert found.in_pass == "merger"


def test_random_calls_made_anew_are_not_compared_and_counted():
    @rule(lambda x, p: aten.rand_like.default(x, pin_memory=p))
    def rand_again(at, x, p):
        """rand_like(x) -> rand_like(-x)"""
        return None if x.op == "call_function" else at.call(aten.rand_like.default, at.call(aten.neg.default, x))

    found = debug_passes(capture(lambda x: torch.rand_like(x) + 1, X), X, (RulePass("mine", (rand_again,)),))
    assert found.findings == ()
    assert found.not_compared["a random call created by a pass"] >= 1


def test_memory_that_was_not_written_counts_as_zeros():
    b = Builder()
    node = b.call(aten.empty.memory_format, [1000], dtype=torch.float32)
    program = with_seeds(b.program(node))
    filled = [torch.full((1000,), 7.0) for _ in range(10)]
    del filled
    assert torch.equal(Values.on(program, ())[program.outputs[0]], torch.zeros(1000))


def test_inputs_get_the_strides_of_the_capture():
    program = capture(lambda x: x.view(-1) * 1 + 1, torch.randn(4, 4))
    found = debug_passes(program, torch.randn(4, 4).t())
    assert (found.findings, found.not_compared) == ((), {})
    assert found.rewrites >= 1


def test_an_example_of_another_form_is_refused():
    with pytest.raises(SignatureError, match="has shape"):
        debug_passes(capture(lambda x: x.sin(), X), X[0])


def test_a_deep_program_is_no_problem():
    b = Builder()
    value = b.input(torch.ones(2))
    for _ in range(3000):
        value = b.call(aten.neg.default, value)
    program = b.program(value)
    assert torch.equal(Values.on(program, (torch.ones(2),))[program.outputs[0]], torch.ones(2))


@rule(lambda x: aten.sin.default(x), numerics=Numerics.ROUNDING)
def sin_is_cos(at, x):
    """sin(x) -> cos(x)"""
    return at.call(aten.cos.default, x)


class Sines(nn.Module):
    def forward(self, x):
        return x.sin() + (x * 2).sin()


def test_transform_raises_with_the_name_the_place_and_the_fix():
    program = capture(Sines().eval(), X)
    with pytest.raises(AccuracyError) as caught:
        transform(program, (RulePass("mine", (sin_is_cos,)),), debug=X)
    error = caught.value
    assert error.what == "sin_is_cos in the pass mine changes values (and 1 more findings)"
    assert "test_rewrite_checks.py:" in error.where
    assert error.why.endswith("on the example input; declared numerics: ROUNDING")
    assert error.fix == "leave it out: --without sin_is_cos"
    assert error.exit_code == 1


def test_transform_gives_what_it_gives_without_debug():
    model, example = GOOD["convolution"]
    program = capture(model, example)
    after = transform(program, debug=example)
    assert after.text == transform(program).text
    assert "batch_norm" in ops_of(program)
    assert "batch_norm" not in ops_of(after)
    assert transform(program, STANDARD, level=0, debug=example).text == program.text
