from __future__ import annotations

import pytest

FOLDS = """
import torch
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, image):
        return self.norm(self.conv(image * 1))

model = Net().eval()
example_input = torch.ones(1, 1, 5, 5)
"""


@pytest.fixture
def folds(write):
    return write(FOLDS)


@pytest.mark.usefixtures("folds")
class TestInspect:
    def test_the_text_names_inputs_weights_modules_and_lines(self, tsopt):
        ran = tsopt("inspect", "m.py")
        assert ran.code == 0, ran.err
        assert "program Net" in ran.out
        assert "%image: f32[1, 1, 5, 5] = input" in ran.out
        assert "%conv.weight" in ran.out
        assert "m.py:14" in ran.out
        assert "after " in ran.out

    def test_diff_shows_only_what_changed(self, tsopt):
        ran = tsopt("inspect", "m.py", "--diff")
        body = [line for line in ran.out.splitlines() if line and not line.startswith("after ")]
        assert ran.code == 0
        assert any(line.startswith("-") for line in body)
        assert len(body) < len(tsopt("inspect", "m.py").out.splitlines())

    def test_passes_shows_a_row_for_each_pass(self, tsopt):
        ran = tsopt("inspect", "m.py", "--passes")
        assert ran.code == 0
        assert ran.out.splitlines()[0].split()[:2] == ["pass", "nodes"]
        assert "program Net" not in ran.out

    def test_why_shows_where_a_rule_was_applied(self, tsopt):
        records = tsopt("inspect", "m.py", "--json").json["passes"]
        rule = next(done["rule"] for record in records for done in record["done"])
        ran = tsopt("inspect", "m.py", "--why", rule)
        assert ran.code == 0
        assert ran.out.startswith(f"{rule}: applied ")
        assert "done in " in ran.out

    def test_why_with_an_unknown_rule_lists_the_known(self, tsopt):
        ran = tsopt("inspect", "m.py", "--why", "fold_everything")
        assert ran.code == 2
        assert "'fold_everything'" in ran.err
        assert "one of: " in ran.err

    def test_without_leaves_a_rule_out(self, tsopt):
        records = tsopt("inspect", "m.py", "--json").json["passes"]
        rule = next(done["rule"] for record in records for done in record["done"])
        left = tsopt("inspect", "m.py", "--json", "--without", rule).json["passes"]
        assert rule not in {done["rule"] for record in left for done in record["done"]}

    def test_level_0_shows_the_program_alone(self, tsopt):
        ran = tsopt("inspect", "m.py", "-O0")
        assert ran.code == 0
        assert "after " not in ran.out

    def test_json_holds_the_texts(self, tsopt):
        found = tsopt("inspect", "m.py", "--json").json
        assert found["captured"].startswith("program Net")
        assert all({"name", "changed", "done", "declined", "text"} <= set(record) for record in found["passes"])
