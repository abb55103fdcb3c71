"""Where values come from: the rule that made them, and all that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.graph.ops import bind
from tsopt.compiler.graph.origin import comment_on, module_of, origin_of, origins_of, rule_of
from tsopt.compiler.graph.quantized import DIMENSIONS
from tsopt.compiler.graph.serialize import read_program, write_program

X = torch.randn(1, 3, 8, 8)


class Net(nn.Module):
    """A batch norm that is folded, a constant, a formula that is recognized, branches, a call that is made twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        h = torch.relu(self.bn(self.conv(x))).mean((2, 3))
        h = h * torch.sigmoid(h)
        return sum(torch.tanh(head(h)) for head in self.heads) * (self.scale.exp() + 1.0), self.bn(self.conv(x)).sum()


def optimized(model, example=X, **options):
    return tsopt.transform(tsopt.capture(model.eval(), example, **options))


def by_rule(program):
    return {rule_of(node): node for node in program.graph.nodes if rule_of(node)}


def modules(node):
    return list(dict.fromkeys(origin.split(",")[0] for origin in origins_of(node)))


def test_what_a_rule_makes_has_its_name_and_the_origins_of_all_that_it_replaces():
    made = by_rule(optimized(Net()))
    assert modules(made["conv_batch_norm"]) == ["bn", "conv"]
    assert comment_on(made["conv_batch_norm"]).endswith("; by conv_batch_norm")
    assert "test_origin.py:" in comment_on(made["silu_formula"])


def test_a_weight_that_was_computed_says_so():
    node = by_rule(optimized(Net()))["fold_constant"]
    assert node.op == "get_attr"
    assert "test_origin.py:" in comment_on(node)


def test_a_stack_of_branches_stands_for_all_of_them():
    stacked = [n for n in optimized(Net()).graph.nodes if rule_of(n) == "isomorphic_branches" and "baddbmm" in n.name]
    assert modules(stacked[0]) == [f"heads.{i}" for i in range(9)]
    assert " + 7 more; by isomorphic_branches" in comment_on(stacked[0])


def test_a_call_that_two_places_share_has_both_origins_and_no_rule():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Softplus(), nn.Softplus()

        def forward(self, x):
            return self.first(x) * self.second(x).neg()

    (node,) = [node for node in optimized(Twice()).graph.nodes if "softplus" in node.name]
    assert (modules(node), rule_of(node)) == (["first", "second"], "")


class Twins(nn.Module):
    """Two layers with equal weights, and something behind each of them."""

    def __init__(self, make, behind):
        super().__init__()
        self.a, self.b = make(), make()
        self.b.load_state_dict(self.a.state_dict())
        self.behind = behind
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.shift = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        ends = {
            "norms": (self.first, self.second),
            "factors": (lambda y: y * 0.5, lambda y: y * 0.5),
            "terms": (lambda y: y * 0.5 + self.shift[0], lambda y: y * 0.5 + self.shift[1]),
            "sizes": (lambda y: y.reshape(5, 1, 3) * 0.5, lambda y: y.reshape(1, 5, 3) * 0.5),
        }
        first, second = ends[self.behind]
        return second(self.b(first(self.a(x)).sin().reshape(x.shape)))


TWINS = {
    "norms": (lambda: nn.Conv2d(3, 3, 1), torch.randn(1, 3, 4, 4)),
    "factors": (lambda: nn.Conv2d(3, 3, 1), torch.randn(1, 3, 4, 4)),
    "terms": (lambda: nn.Linear(3, 3, bias=False), torch.randn(5, 3)),
    "sizes": (lambda: nn.Linear(3, 3), torch.randn(5, 3)),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("behind", TWINS)
def test_a_layer_keeps_its_name_and_its_line_whatever_goes_into_it(behind, inside):
    """The second one has the weight of the first, which has the name of the first."""
    make, x = TWINS[behind]
    model = nn.Sequential(Twins(make, behind)) if inside else Twins(make, behind)
    layers = [node for node in optimized(model, x).calls() if node.target in DIMENSIONS]
    assert len({str(bind(layer)["weight"].target) for layer in layers}) == 1
    paths = ["0.a", "0.b"] if inside else ["a", "b"]
    assert list(map(module_of, layers)) == paths
    assert [origin_of(layer).partition(",")[0] for layer in layers] == paths


def test_a_pass_without_rules_is_what_made_its_values():
    class Doubled(tsopt.RulePass.__mro__[1]):
        name = "doubled"

        def run(self, program, limits):
            from tsopt.compiler.graph.edit import new_call
            from tsopt.compiler.rewriting.pass_base import Changes, Done

            (old,) = program.outputs
            new = new_call(program, program.output_node, old, torch.ops.aten.relu.default, (old,), {})
            program.output_node.replace_input_with(old, new)
            return Changes((Done("doubled", ""),))

    program = tsopt.transform(tsopt.capture(nn.ReLU(), X), [Doubled()])
    assert rule_of(program.outputs[0]) == "doubled"


def test_it_is_kept_for_many_sizes_and_in_files(tmp_path):
    program = optimized(Net(), [X, torch.randn(2, 3, 8, 8)])
    assert modules(by_rule(program)["conv_batch_norm"]) == ["bn", "conv"]
    write_program(program, tmp_path)
    read = read_program(tmp_path, list(program.state.values()))
    assert [comment_on(node) for node in read.graph.nodes] == [comment_on(node) for node in program.graph.nodes]


def test_it_does_not_tell_programs_apart():
    program = tsopt.capture(Net().eval(), X)
    other = program.copy()
    for node in other.graph.nodes:
        node.meta["rule"] = "other"
    assert other.fingerprint() == program.fingerprint()
