"""`tsopt export --dry-run`: ops, who takes them, sizes; nothing is timed or written."""

from __future__ import annotations

MASKED = """
import torch
def model(x):
    return x[x > 0].sum()
example_input = torch.ones(2, 4)
"""
RANDOM = """
import torch
def model(x):
    return torch.relu(x) + torch.rand_like(x)
example_input = torch.ones(2, 4)
"""


def left(tmp_path):
    return [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"]


def test_ops_and_backends(tsopt, write, tmp_path):
    write()
    done = tsopt("export", "m.py", "--dry-run", "--backends", "eager,onnxruntime")
    assert done.code == 0, done.err
    assert "Sequential: 3 op nodes, 3 after the passes; captured by torch.export" in done.out
    rows = [line.split() for line in done.out.splitlines()]
    assert ["aten.linear", "2", "0"] in rows
    assert ["onnxruntime", "yes"] in rows
    assert "nothing was timed or written" in done.out
    assert left(tmp_path) == ["m.py"]


def test_who_would_not_take_it_and_why(tsopt, write):
    write(RANDOM)
    found = tsopt("export", "m.py", "--dry-run", "--json").json
    takers = {item["backend"]: item for item in found["backends"]}
    assert takers["eager"]["takes"]
    assert not takers["onnxruntime"]["takes"]
    assert "different random number generator (m.py:4)" in takers["onnxruntime"]["why"]
    assert found["frontend"] == "by torch.export"


def test_sizes(tsopt, write):
    write()
    done = tsopt("export", "m.py", "--dry-run", "--dynamic", "input:0=batch[1..32]", "--json")
    assert done.json["dims"] == ["batch: 1..32"]


def test_what_is_no_single_graph_is_refused_as_by_an_export(tsopt, write, tmp_path):
    write(MASKED)
    done = tsopt("export", "m.py", "--dry-run")
    assert done.code == 2
    assert "m.py:4" in done.err
    assert "runs it partitioned" in done.err
    assert left(tmp_path) == ["m.py"]


def test_ops_of_branches_are_shown_and_who_has_read_them(tsopt, write):
    write(
        """
import torch

def model(x):
    if x.sum() > 0:
        x = x.sin()
    else:
        x = x.cos()
    return x * 2

example_input = torch.ones(2, 3)
"""
    )
    found = tsopt("export", "m.py", "--dry-run", "--backends", "eager,torchscript,onnxruntime", "--json").json
    assert {"cond", "aten.sin", "aten.cos"} <= {name for name, _, _ in found["ops"]}
    assert found["frontend"].startswith(
        "by TorchScript, because torch.export failed: the model has data-dependent control flow"
    )
    assert [item["takes"] for item in found["backends"]] == [True, False, True]


def test_a_model_that_is_not_one_graph_is_shown_part_by_part(tsopt, write, tmp_path):
    write(
        """
import torch

def model(x):
    h = x.sin() * 2
    if h.sum().item() > 0:
        h = h + 1
    return h.cos()

example_input = torch.ones(2, 3)
"""
    )
    ran = tsopt("export", "m.py", "--dry-run")
    assert ran.code == 2
    assert "model is not one graph; TorchDynamo splits it into 2 parts" in ran.out
    rows = [line.split() for line in ran.out.splitlines() if line[:1].isdigit()]
    assert [row[:3] for row in rows] == [["1", "3", "m.py:6"], ["2", "2", "-"]]
    assert "item" in ran.out
    assert "data-dependent control flow" in ran.err
    assert tsopt("export", "m.py", "--dry-run", "--json").code == 2
    assert tsopt("export", "m.py", "--dry-run", "--frontend", "export").code == 2
    assert left(tmp_path) == ["m.py"]


def test_a_sweep_that_asks_for_one_graph_does_not_race_parts(tsopt, write):
    write(
        "import torch\n\ndef model(x):\n    return x if x.sum().item() > 0 else -x\n\nexample_input = torch.ones(2)\n"
    )
    ran = tsopt("bench", "m.py", "--frontend", "one-graph", "--seconds", "0.01", "--no-isolate")
    assert ran.code == 2
    assert "data-dependent control flow" in ran.err
