"""What makes a GPU unusable is not tried there, above all indices that do not exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.runtime.checking import gpu_asserts, made_up, other_sizes
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.held_out_sizes import validate_ranges

X = torch.linspace(-1, 1, 12).reshape(3, 4)
ROWS = torch.tensor([0, 2, 1])
EDGES = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 1]])


class Messages(nn.Module):
    """Sums over edges, and over a loop at each node."""

    def forward(self, x, edges):
        loops = torch.arange(3, device=x.device).expand(2, 3)
        source, target = torch.cat([edges, loops], dim=1)
        return torch.zeros_like(x).index_add(0, target, x[source])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 2)

    def forward(self, rows, offsets):
        return self.bag(rows, offsets)


EMBEDDING = nn.Embedding(3, 2)


@pytest.mark.parametrize(
    ("model", "call", "named"),
    [
        (nn.ReLU(), (X,), ()),
        (EMBEDDING, (ROWS,), ()),
        (lambda rows: EMBEDDING(rows.clamp(0, 1) + 1), (ROWS,), ()),
        (lambda x: x.gather(1, x.argmax(1, keepdim=True)), (X,), ()),
        (lambda x, rows: x[rows + 1 - 1], (X, ROWS), ()),
        (lambda x: x[(x[:, 0] * 1.5).long()], (X.abs(),), ("index",)),
        (lambda x: x[(x[:, 0] * 1.5).long().clamp(0, 2)], (X.abs(),), ()),
        (lambda x: x[(x[:, 0].sigmoid() * 2).long()], (X,), ("index",)),
        (lambda x: x[(x[:, 0].sigmoid().nan_to_num() * 2).long()], (X,), ()),
        (lambda x, rows: x.flatten()[rows * 4 + rows], (X, ROWS), ("index",)),
        (Messages(), (X, EDGES), ("index", "index_add")),
        (Bag(), (ROWS, torch.tensor([0, 2])), ("embedding_bag",)),
        (lambda x: torch.nn.functional.binary_cross_entropy(x, x), (X.abs(),), ("binary_cross_entropy",)),
        (lambda x, rows: x.repeat_interleave(rows, dim=0, output_size=3), (X, ROWS), ("repeat_interleave",)),
    ],
)
def test_indices_that_may_not_exist_are_found(model, call, named):
    program = tsopt.capture(model.eval() if isinstance(model, nn.Module) else model, call)
    assert gpu_asserts.unbounded(program) == named
    assert gpu_asserts.of_program(program) == (), "on the CPU, the model refuses them"


@pytest.mark.parametrize("captured", [True, False])
def test_on_a_gpu_such_a_model_is_called_with_values_near_the_example(monkeypatch, captured):
    monkeypatch.setattr(gpu_asserts, "of_program", gpu_asserts.unbounded)
    monkeypatch.setattr(made_up, "is_on_gpu", lambda example: True)
    seen = []

    class Watched(Messages):
        def forward(self, x, edges):
            seen.append(edges.clone())
            return super().forward(x, edges)

    model, example = Watched().eval(), tsopt.example(X, EDGES)
    program = tsopt.capture(Messages().eval(), example) if captured else None
    oracle = Oracle(model, example, program)
    assert [expected.inputs.kind for expected in oracle.expected] == ["example", "near-1", "near-2"]
    assert all(torch.equal(edges, EDGES) for edges in seen)
    (said,) = oracle.skipped
    assert "on a GPU, an assert could fail and make it unusable (index, index_add" in said


def test_on_the_cpu_it_is_called_with_others(monkeypatch):
    oracle = Oracle(Messages().eval(), tsopt.example(X, EDGES), None)
    assert {"random", "large"} <= {expected.inputs.kind for expected in oracle.expected}


class Positions(nn.Module):
    """Has a table of 12 positions, and reads it at as many as there are tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 4), nn.Embedding(12, 4)

    def forward(self, tokens):
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))


class Last(nn.Module):
    """The state at the last token of each row, whose index is an input."""

    def forward(self, x, last):
        return x[torch.arange(x.shape[0], device=x.device), last] * 2


TOKENS = torch.arange(16).reshape(2, 8)


@pytest.mark.parametrize(
    ("model", "call", "dynamic", "found", "excluded"),
    [
        (Positions(), (TOKENS,), {"tokens": {1: "length"}}, "length: 1..12", None),
        (
            Last(),
            (torch.randn(2, 8, 4), torch.tensor([4, 7])),
            {"x": {1: "length"}},
            "length: 8..16",
            "excluded length 1",
        ),
    ],
    ids=["positions", "last token"],
)
def test_on_a_gpu_sizes_at_which_an_index_does_not_exist_are_not_tried(
    monkeypatch, model, call, dynamic, found, excluded
):
    monkeypatch.setattr(other_sizes, "is_on_gpu", lambda example: True)
    model, example, sizes = model.eval(), tsopt.example(*call), []
    program = tsopt.capture(model, example, dynamic=dynamic)
    model.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    validated = validate_ranges(model, program, example, seed=0, wanted=dynamic)
    (dim,) = validated.program.signature.dims
    assert str(dim) == found
    assert excluded is None or any(note.startswith(excluded) for note in validated.notes)
    assert all(dim.low <= size <= dim.high for size in sizes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("frontend", ["one-graph", "parts"])
def test_on_a_gpu_the_process_survives(frontend):
    model, call = Messages().eval().cuda(), (X.cuda(), EDGES.cuda())
    fast = tsopt.optimize(model, call, cache=False, seconds=0.2, frontend=frontend)
    torch.testing.assert_close(fast(*call), model(*call))
    torch.cuda.synchronize()
