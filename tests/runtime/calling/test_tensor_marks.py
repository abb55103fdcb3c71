"""What marks of tensors tell of a write, of other memory, and of another way to read it."""

from __future__ import annotations

import pytest
import torch

from tsopt.runtime.calling.tensor_marks import TensorMarks

BASE = torch.arange(64.0).reshape(8, 8)
CHANGES = {
    "written": lambda t: t.add_(1),
    "other memory": lambda t: setattr(t, "data", t.data.clone()),
    "cut": lambda t: setattr(t, "data", t.data[:2]),
    "cut in two ways": lambda t: setattr(t, "data", t.data.as_strided((2, 4), t.stride())),
    "turned": lambda t: setattr(t, "data", t.data.t()),
    "flat": lambda t: setattr(t, "data", t.data.flatten()),
    "a dimension more": lambda t: setattr(t, "data", t.data[None]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_change_is_told(name, mode):
    tensor = torch.arange(8.0).reshape(4, 2)
    marks = TensorMarks([tensor])
    assert marks.hold()
    with mode():
        CHANGES[name](tensor)
    assert not marks.hold()


def test_as_much_memory_in_another_shape_is_told():
    """As networks do that are made narrower: views of one weight, whose first value is the same."""
    weight = torch.empty(0)
    weight.data = BASE[:4, :2]
    marks = TensorMarks([weight])
    weight.data = BASE[:2, :4]
    assert not marks.hold()


@pytest.mark.parametrize(("before", "after"), [(torch.int32, torch.float32), (torch.float16, torch.bfloat16)])
def test_memory_that_is_read_as_another_type_is_told(before, after):
    tensor = torch.zeros(4, dtype=before)
    marks = TensorMarks([tensor])
    tensor.data = tensor.data.view(after)
    assert not marks.hold()


def test_earlier_marks_count_where_there_are_any():
    old, new = torch.zeros(2, 2), torch.zeros(3)
    marks = TensorMarks([old])
    old.add_(1)
    new.add_(1)
    assert not TensorMarks([old, new], marks).hold()
    assert TensorMarks([new], marks).hold()
    assert TensorMarks([old, new]).hold()


def test_of_what_is_left_out_nothing_is_told():
    kept, out = torch.zeros(2, 2), torch.zeros(3)
    marks = TensorMarks([kept, out])
    marks.leave_out(frozenset([id(out)]))
    out.add_(1)
    assert marks.hold()
    assert not marks.overwritten()
    kept.add_(1)
    assert marks.overwritten()
