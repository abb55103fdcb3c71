from __future__ import annotations

import functools

import pytest

from tsopt import transforms
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import RulePass, rule

FOLDS = """
import torch
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.other = nn.Conv2d(2, 2, 3)
        self.last = nn.BatchNorm2d(2)

    def forward(self, image):
        value = self.norm(self.conv(image * 1))
        between = self.other(value)
        return self.last(between), between

model = Net().eval()
example_input = torch.ones(1, 1, 7, 7)
"""
USED_ELSEWHERE = "a value inside the pattern has other users"


@pytest.fixture
def folds(write):
    return write(FOLDS)


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text."""
    return [line.split() for line in text.splitlines()]


@pytest.mark.usefixtures("folds")
class TestTexts:
    def test_the_text_names_inputs_weights_modules_and_lines(self, tsopt):
        ran = tsopt("inspect", "m.py")
        assert ran.code == 0, ran.err
        assert "program Net" in ran.out
        assert "%image: f32[1, 1, 7, 7] = input" in ran.out
        assert "%conv.weight" in ran.out
        assert "m.py:16" in ran.out
        assert "after " in ran.out

    def test_diff_shows_only_what_changed(self, tsopt):
        ran = tsopt("inspect", "m.py", "--diff", "--pass", "fuse")
        first, *body = ran.out.splitlines()
        assert ran.code == 0
        assert first == "after fuse: 4 -> 3 nodes"
        changed = [line.split(":")[0] for line in body if not line.startswith("  ... ")]
        assert "- " + "  %norm" in changed
        assert "+ " + "  %norm" in changed, "the convolution that stands for both has the name of what it replaces"
        assert not any("%other" in line.split("=")[0] or "%last" in line.split("=")[0] for line in changed)
        assert any(line.endswith("unchanged") for line in body)

    def test_only_the_passes_that_are_asked_for_are_shown(self, tsopt):
        ran = tsopt("inspect", "m.py", "--pass", "fuse", "--pass", "order")
        assert [line for line in ran.out.splitlines() if line.startswith("after ")] == ["after fuse: 4 -> 3 nodes"]
        assert ran.out.count("program Net") == 1

    def test_where_no_pass_changed_anything_that_is_said(self, tsopt, write):
        assert tsopt("inspect", "m.py", "--diff", "--pass", "order").out == "order changed nothing\n"
        assert tsopt("inspect", "m.py", "--pass", "fuse", "--without", "fuse").out == "fuse was not run\n"
        assert tsopt("inspect", "m.py", "--diff", "-O0").out == "no passes were run\n"
        write()
        assert tsopt("inspect", "m.py", "--diff").out == "no pass changed anything\n"

    @pytest.mark.parametrize("name", ["nothing", "conv_batch_norm"])
    def test_what_is_no_pass_is_refused(self, tsopt, name):
        ran = tsopt("inspect", "m.py", "--pass", name)
        assert ran.code == 2
        assert "unknown" in ran.err

    def test_the_json_and_the_table_show_these_passes_too(self, tsopt):
        found = tsopt("inspect", "m.py", "--pass", "fuse", "--json").json
        assert {record["name"] for record in found["passes"]} == {"fuse"}
        table = rows(tsopt("inspect", "m.py", "--pass", "fuse", "--passes").out)
        assert [row[0] for row in table if row][:2] == ["pass", "fuse"]
        assert "algebra" not in {row[0] for row in table if row}

    def test_the_json_has_the_names_of_the_texts(self, tsopt):
        found = tsopt("inspect", "m.py", "--json").json
        last = [record["text"] for record in found["passes"] if record["changed"]][-1]
        assert all(f"  {node['name']}: " in last for node in found["nodes"])

    def test_level_0_shows_the_program_alone(self, tsopt):
        ran = tsopt("inspect", "m.py", "-O0")
        assert ran.code == 0
        assert "after " not in ran.out

    def test_json_holds_the_texts(self, tsopt):
        found = tsopt("inspect", "m.py", "--json").json
        assert found["captured"].startswith("program Net")
        assert all({"name", "changed", "done", "declined", "text"} <= set(record) for record in found["passes"])

    def test_json_says_of_each_value_which_rule_made_it_from_what(self, tsopt):
        nodes = tsopt("inspect", "m.py", "--json").json["nodes"]
        (conv,) = [node for node in nodes if (node["op"], node["rule"]) == ("aten.conv2d", "conv_batch_norm")]
        assert [origin.split(",")[0] for origin in conv["origins"]] == ["norm", "conv"]


@pytest.mark.usefixtures("folds")
class TestPasses:
    def test_there_is_a_row_for_each_pass_with_what_it_cost_and_gained(self, tsopt):
        ran = tsopt("inspect", "m.py", "--passes")
        assert ran.code == 0
        table = rows(ran.out)
        assert table[0] == ["pass", "nodes", "weights", "peak", "rewrites", "near", "misses", "ms"]
        fuse = next(row for row in table if row[0] == "fuse")
        assert fuse[1:4] == ["4", "->", "3"]
        assert "program Net" not in ran.out
        assert "total: nodes 5 -> 3; weights " in ran.out

    def test_there_is_a_row_for_each_rule_that_did_or_nearly_did_something(self, tsopt):
        table = rows(tsopt("inspect", "m.py", "--passes").out)
        start = table.index(["rule", "in", "rewrites", "near", "misses", "because"])
        rules = {row[0]: row[1:] for row in table[start + 1 :] if row}
        assert rules["conv_batch_norm"] == ["fuse", "1", "1", *USED_ELSEWHERE.split()]
        assert rules["times_one"] == ["algebra", "1", "-"]
        assert "pad_conv" not in rules

    def test_level_0_has_no_passes_to_show(self, tsopt):
        assert tsopt("inspect", "m.py", "--passes", "-O0").out == "no passes were run\n"

    def test_json_counts_by_pass_and_by_rule(self, tsopt):
        found = tsopt("inspect", "m.py", "--passes", "--json").json
        rules = {item["rule"]: item for item in found["rules"]}
        assert rules["conv_batch_norm"] == {
            "rule": "conv_batch_norm",
            "done": 1,
            "declined": {USED_ELSEWHERE: 1},
        }
        first = next(record for record in found["passes"] if record["name"] == "fuse")
        assert first["rules"] == [rules["conv_batch_norm"]]
        assert first["nodes"] == {"before": 4, "after": 3}
        for size in ("weight_bytes", "peak_bytes"):
            assert first[size]["before"] > 0
            assert found["size"]["before"][size] == found["passes"][0][size]["before"]
            assert found["size"]["after"][size] == found["passes"][-1][size]["after"]
        assert first["seconds"] > 0


@pytest.mark.usefixtures("folds")
class TestWhy:
    def test_it_lists_the_places_done_and_not_done(self, tsopt):
        ran = tsopt("inspect", "m.py", "--why", "conv_batch_norm")
        assert ran.code == 0
        assert ran.out.splitlines() == [
            "conv_batch_norm: applied once, 1 near miss",
            "  batch_norm(conv(x, w, b)) -> conv(x, w * s, (b - mean) * s + beta), s = gamma / sqrt(var + eps)",
            "  in pass fuse",
            "",
            "applied",
            "  norm, m.py:16",
            "",
            f"not applied: {USED_ELSEWHERE}",
            "  last, m.py:18",
        ]

    def test_json_holds_the_same(self, tsopt):
        (why,) = tsopt("inspect", "m.py", "--why", "conv_batch_norm", "--json").json["why"]
        assert why["done"] == {"norm, m.py:16": 1}
        assert why["declined"] == {USED_ELSEWHERE: {"last, m.py:18": 1}}
        assert why["equation"].startswith("batch_norm(conv(x, w, b)) -> ")
        assert (why["rule"], why["passes"], why["obstacle"]) == ("conv_batch_norm", ["fuse"], "")

    def test_a_pass_is_explained_by_its_rules(self, tsopt):
        assert tsopt("inspect", "m.py", "--why", "fuse").out == tsopt("inspect", "m.py", "--why", "conv_batch_norm").out
        ran = tsopt("inspect", "m.py", "--why", "dce")
        assert (ran.code, ran.out) == (0, "dce: no rewrites, no near misses\n")

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["neg_neg"], "there are no calls to aten.neg"),
            (["pad_conv"], "2 calls to aten.conv1d, aten.conv2d, aten.conv3d, none with matching operands"),
            (["conv_batch_norm", "-O1"], "not tried: the rule is ROUNDING, which -O1 does not allow"),
            (["conv_batch_norm", "-O0"], "not tried: the rule is ROUNDING, which -O0 does not allow"),
            (["conv_batch_norm", "--without", "conv_batch_norm"], "not tried: left out with --without"),
            (["conv_batch_norm", "--without", "times_one", "--without", "fuse"], "not tried: left out with --without"),
        ],
    )
    def test_a_rule_that_was_not_near_says_what_it_needs(self, tsopt, arguments, reason):
        ran = tsopt("inspect", "m.py", "--why", *arguments)
        first, equation, in_pass, obstacle = ran.out.splitlines()
        assert first == f"{arguments[0]}: not applied"
        assert " -> " in equation
        assert in_pass.startswith("  in pass ")
        assert obstacle.endswith(reason)

    def test_the_rewrites_of_other_passes_have_no_equation(self, tsopt, write):
        write("import torch\nexample_input = torch.ones(3)\ndef model(x):\n    return x + torch.ones(3) * 2\n")
        ran = tsopt("inspect", "m.py", "--why", "fold_constant")
        assert ran.code == 0, ran.err
        assert ran.out.splitlines()[:2] == ["fold_constant: applied once", "  in pass fold"]

    def test_places_without_a_line_are_counted(self, tsopt, write):
        body = "def negated(x):\n    return -(-(-(-x.exp())))\nmodel = functools.partial(negated)\n"
        write(f"import functools, torch\nexample_input = torch.ones(3)\n{body}")
        ran = tsopt("inspect", "m.py", "--why", "neg_neg")
        assert ran.out.startswith("neg_neg: applied 2 times\n")
        assert ran.out.endswith("applied\n  no source location  x2\n")

    def test_an_unknown_name_gets_those_that_are_near(self, tsopt):
        ran = tsopt("inspect", "m.py", "--why", "conv_norm")
        assert ran.code == 2
        assert "unknown rule or pass 'conv_norm'" in ran.err
        assert "one of: " in ran.err
        assert "conv_batch_norm" in ran.err


@pytest.mark.parametrize(
    ("option", "other"),
    [
        (("--diff",), ("--passes",)),
        (("--diff",), ("--why", "conv_batch_norm")),
        (("--diff",), ("--debug-passes",)),
        (("--pass", "fold"), ("--why", "conv_batch_norm")),
        (("--pass", "fold"), ("--debug-passes",)),
    ],
)
def test_an_option_that_would_do_nothing_beside_another_is_refused(tsopt, option, other):
    ran = tsopt("inspect", "m.py", *option, *other)
    assert ran.code == 2
    assert f"{option[0]} has no effect beside {other[0]}" in ran.err


@pytest.mark.usefixtures("folds")
def test_without_leaves_rules_and_passes_out(tsopt):
    found = tsopt("inspect", "m.py", "--json", "--without", "conv_batch_norm", "--without", "algebra").json
    assert "conv_batch_norm" not in {item["rule"] for item in found["rules"]}
    assert "times_one" not in {item["rule"] for item in found["rules"]}
    assert "algebra" not in {record["name"] for record in found["passes"]}


@rule(lambda x, k: aten.mul.Tensor(x, k), numerics=Numerics.ROUNDING)
def half_of_it(at, x, k):
    """x * k -> x * (k / 2)"""
    return at.call(aten.mul.Tensor, x, k / 2) if isinstance(k, float) and k > 2 else None


DOUBLES = """
import torch
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return (x * 3.0).sin() + (x.cos() * 4.0).sin()

model = Net().eval()
example_input = torch.ones(3)
"""


@pytest.fixture
def wrong_rule(monkeypatch, write):
    """A model, and a pipeline with a wrong rule in it."""
    write(DOUBLES)
    mine = functools.partial(transforms.debug_passes, passes=(*transforms.STANDARD, RulePass("mine", (half_of_it,))))
    monkeypatch.setattr("tsopt.cli.inspect.debug_passes", mine)


class TestDebugPasses:
    @pytest.mark.usefixtures("folds")
    def test_right_passes_end_with_0(self, tsopt):
        ran = tsopt("inspect", "m.py", "--debug-passes")
        assert ran.code == 0
        assert ran.out.startswith("compared ")
        assert ran.out.endswith(" passes on the example and special inputs: no values changed\n")

    @pytest.mark.usefixtures("wrong_rule")
    def test_a_wrong_rule_is_named_with_place_difference_and_fix(self, tsopt):
        ran = tsopt("inspect", "m.py", "--debug-passes")
        assert ran.code == 1
        lines = ran.out.splitlines()
        assert lines[0].endswith("on the example and special inputs: 2 changed values")
        assert lines[2:] == [
            "half_of_it in the pass mine changes values",
            "  where:    m.py:7",
            "  promise:  ROUNDING",
            "  differs:  on the example input: 3 of 3 values exceed rtol 0.0001, atol 3e-05; max difference 1.5; "
            "against float64: RMSE 1.5 (eager 0), largest error 1.5 (eager 0)",
            "  before:   %1: f32[3] = aten.mul.Tensor(%x, 3.0)",
            "  after:    %0: f32[3] = aten.mul.Tensor(%x, 1.5)",
            "  fix:      --without half_of_it",
            "  also at:  m.py:7",
        ]

    @pytest.mark.usefixtures("wrong_rule")
    def test_json_holds_the_findings(self, tsopt):
        ran = tsopt("inspect", "m.py", "--debug-passes", "--json")
        assert ran.code == 1
        found = ran.json["debug"]
        assert (found["rewrites"], found["inputs"], found["not_compared"]) == (2, ["example", "special"], {})
        first, _ = found["findings"]
        assert (first["rule"], first["in_pass"], first["where"], first["trial"]) == (
            "half_of_it",
            "mine",
            "m.py:7",
            "example",
        )
        assert (first["numerics"], first["leave_out"]) == ("ROUNDING", "half_of_it")
        assert first["difference"].startswith("3 of 3 values exceed rtol")

    @pytest.mark.usefixtures("wrong_rule")
    def test_left_out_it_does_no_harm(self, tsopt):
        ran = tsopt("inspect", "m.py", "--debug-passes", "--without", "half_of_it")
        assert ran.code == 0

    @pytest.mark.usefixtures("folds")
    def test_it_goes_with_passes_and_why(self, tsopt):
        ran = tsopt("inspect", "m.py", "--debug-passes", "--passes", "--why", "conv_batch_norm")
        assert ran.code == 0
        places = [ran.out.index(text) for text in ("conv_batch_norm: applied", "total: nodes", "compared ")]
        assert places == sorted(places)

    def test_a_random_model_is_compared_as_well(self, tsopt, write):
        write(
            "import torch\nexample_input = torch.ones(3)\n"
            "def model(x):\n    return (x * 1 + torch.rand_like(x)) * torch.rand_like(x) * 1\n"
        )
        ran = tsopt("inspect", "m.py", "--debug-passes")
        assert ran.code == 0, ran.out
        assert "not compared" not in ran.out
