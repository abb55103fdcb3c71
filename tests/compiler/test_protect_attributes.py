"""What is put back of tensors in plain attributes, and of modules that a function reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compiler.helpers import Net
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.protect import is_untouched, protected
from tsopt.compiler.small_state import is_small_state
from tsopt.errors import CaptureError


class Attributed(nn.Module):
    """Writes to a buffer and to a plain tensor attribute, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sum", torch.zeros(2))
        self.last, self.calls = torch.zeros(2), 0

    def forward(self, x):
        self.sum += x
        self.last.copy_(x)
        self.calls += 1
        return x


@pytest.mark.parametrize("as_function", [False, True])
def test_tensors_in_attributes_are_put_back_and_modules_that_a_function_reads_are_too(as_function):
    module = Attributed()
    model = (lambda x: module(x)) if as_function else module
    with protected(model):
        model(torch.ones(2))
    assert (module.sum.tolist(), module.last.tolist(), module.calls) == ([0, 0], [0, 0], 0)


@pytest.mark.parametrize("as_function", [False, True])
def test_what_a_call_leaves_in_modules_is_seen(as_function):
    module = Attributed()
    model = (lambda x: module(x)) if as_function else module
    assert not is_untouched(model, lambda: model(torch.ones(2)))
    assert is_untouched(model, lambda: None)
    assert not is_untouched(Net(torch.relu), lambda: module.last.add_(1), [module.last])


def test_a_function_whose_capture_fails_leaves_a_module_around_it_as_it_was():
    module = Attributed()

    def model(x):
        return module(x) * float(x.numpy().sum())

    with pytest.raises(CaptureError):
        capture(model, torch.ones(2))
    assert (module.sum.tolist(), module.last.tolist(), module.calls) == ([0, 0], [0, 0], 0)


class Odd(nn.Module):
    """Has tensors in plain attributes whose bytes nobody compares."""

    def __init__(self):
        super().__init__()
        self.quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.freed = torch.ones(4)
        self.freed.untyped_storage().resize_(0)
        self.expanded = torch.ones(1, 1).expand(30_000, 20_000)
        self.large = torch.ones(1 << 23)

    def forward(self, x):
        return x + self.quantized.dequantize()


@pytest.mark.filterwarnings("ignore::UserWarning")  # quantized tensors are deprecated, and nested ones a prototype
def test_only_small_tensors_of_usual_types_are_put_back():
    model = Odd()
    assert not any(map(is_small_state, vars(model).values()))
    assert is_small_state(torch.ones(4))
    with protected(model):
        model(torch.ones(4))


@pytest.mark.usefixtures("another_thread")
def test_modules_that_a_function_reaches_are_left_alone_beside_other_threads():
    module = Attributed()
    with protected(lambda x: (module, x)):
        module(torch.ones(2))  # another thread's
    assert (module.sum.tolist(), module.last.tolist()) == ([1, 1], [1, 1])
