"""Copies of weights: other memory, the same values and strides, and who shares memory with whom."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler.graph.owned import copies, owned

BASE = torch.arange(24.0).reshape(4, 6)
VIEWS = {
    "dense": BASE,
    "transposed": BASE.t(),
    "every other": BASE[:, ::2],
    "expanded": torch.ones(1).expand(1000, 1000),
    "row": BASE[2],
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.0),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "negated": torch.tensor([1 + 2j]).conj().imag,
    "half": BASE.half(),
    "integers": torch.arange(3),
}


def bytes_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_has_the_values_and_the_strides_and_memory_of_its_own(name):
    value = VIEWS[name]
    made = copies({"w": value})["w"]
    assert torch.equal(made, value)
    assert (made.stride(), made.dtype, made.shape) == (value.stride(), value.dtype, value.shape)
    assert not value.numel() or made.data_ptr() != value.data_ptr()


def test_tied_weights_and_views_share_memory_in_the_copy_as_well():
    made = copies({"a": BASE, "tied": BASE, "view": BASE[1:3].t()})
    assert made["a"].data_ptr() == made["tied"].data_ptr()
    made["a"][1, 2] = -1
    assert made["view"][2, 0] == -1
    assert BASE[1, 2] == 8


def test_an_expanded_weight_is_not_written_out():
    assert bytes_of(copies({"w": VIEWS["expanded"]}).values()) == 4


def test_a_small_part_of_a_large_storage_is_copied_alone():
    large = torch.zeros(100_000)
    made = copies({"a": large[:10], "b": large[-10:]})
    assert bytes_of(made.values()) == 80


def test_a_view_of_what_calls_write_stays_one():
    state = torch.zeros(4)
    made = copies({"w": state[:2]}, {state.untyped_storage().data_ptr()})
    assert made["w"].data_ptr() == state.data_ptr()


def test_the_state_of_a_program_stays_the_models():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.count.add_(1)
            return x * self.weight + self.count

    model = Counts().eval()
    program = tsopt.capture(model, torch.ones(3))
    made = owned(program)
    assert made.state["count"].data_ptr() == model.count.data_ptr()
    assert [w.data_ptr() for w in made.weights.values()] != [w.data_ptr() for w in program.weights.values()]
