"""Models become programs, or are refused by name."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.helpers import assert_computes, call, ops_of
from tsopt.compiler.calls.example import example
from tsopt.compiler.capture.capture import LEAKED, capture
from tsopt.compiler.graph.verify import verify_program
from tsopt.errors import CaptureError

X = torch.randn(2, 3)
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Plain:
    value: torch.Tensor
    note: str = "kept"
    nothing: Any = None


@dataclass
class ModelOutput(OrderedDict):
    """As in transformers: fields that are not None are items as well."""

    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None
    loss: torch.Tensor | None = None

    def __post_init__(self):
        for name in ("logits", "hidden", "loss"):
            if getattr(self, name) is not None:
                super().__setitem__(name, getattr(self, name))

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self):
        return tuple(self.values())


def captured(model, given):
    program = capture(model, given)
    verify_program(program)
    assert_computes(program, model, [given], exact=True)
    return program


# ---- inputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (lambda x: x + 1, X),
        (lambda x, y: x - y, (X, X + 1)),
        (lambda x, *, scale: x * scale, example(X, scale=X)),
        (lambda first, second: first - second, {"second": X, "first": X + 1}),
        (lambda d: d["a"] - d["b"][0], ({"b": [X], "a": X + 1},)),
        (lambda p: p.first - p.second, (Pair(X, X + 1),)),
        (lambda p: p.value * (2 if p.note == "kept" else 3), (Plain(X),)),
        (lambda xs: torch.cat(xs), ([X, X],)),
        (lambda x, y=None: x if y is None else y, (X, None)),
        (lambda x, flag: x * 2 if flag else x, (X, True)),
        (lambda x, mode: x.sum(mode), (X, 1)),
        (lambda *xs: xs[0] + xs[1], (X, X)),
        (lambda x, **more: x + more["k"], example(X, k=X)),
        (lambda x, y: x + y, (X, X)),
    ],
)
def test_any_nesting_of_inputs_is_taken(model, given):
    captured(model, given)


def test_inputs_are_named_after_the_parameters():
    program = capture(lambda x, batch, *rest, k: x + batch["a"] + rest[0] + k, example(X, {"a": X}, X, k=X))
    assert [item.name for item in program.signature.inputs] == ["x", "batch.a", "arg2", "k"]


def test_a_partial_and_a_bound_method_are_functions():
    captured(functools.partial(lambda a, x: a * x, 3), X)
    captured(Net(lambda self, x: x * 2).forward, X)


def test_zero_operations_and_scalars_and_empty_tensors_are_taken():
    captured(lambda x: x, X)
    captured(lambda x: x + 1, torch.tensor(1.0))
    captured(lambda x: x.sum(1), torch.zeros(0, 3))


def test_an_input_of_odd_strides_keeps_them():
    program = captured(lambda x: x * 2, torch.randn(3, 4).t())
    assert program.signature.inputs[0].type.stride == (1, 4)
    captured(lambda x: x * 2, torch.randn(3, 1).expand(3, 4))


def test_an_input_with_gradient_and_a_complex_one_are_taken():
    captured(lambda x: x * 2, torch.randn(3, requires_grad=True))
    captured(lambda x: x.abs(), torch.randn(3, dtype=torch.complex64))


# ---- outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        lambda x: {"a": x + 1, "b": [x * 2, None], "c": (x.sin(),)},
        lambda x: Pair(x + 1, None),
        lambda x: Plain(x + 1, "other"),
        lambda x: ModelOutput(logits=x + 1, hidden=(x, x * 2)),
        lambda x: OrderedDict(b=x + 1, a=x * 2),
        lambda x: (x + 1, 3, "text", 2.5, None, True, torch.float32),
        lambda x: [x + 1],
        lambda x: {1: x + 1, "two": x},
    ],
)
def test_outputs_come_back_as_they_were(model):
    found, wanted = call(captured(model, X), X), model(X)
    assert type(found) is type(wanted)
    assert str(found) == str(wanted)


def test_a_model_output_keeps_items_and_attributes():
    found = call(capture(lambda x: ModelOutput(logits=x + 1, hidden=(x * 2,)), X), X)
    assert list(found) == ["logits", "hidden"]
    assert found["logits"] is found.logits
    assert found.loss is None
    assert len(found.to_tuple()) == 2


def test_a_tensor_returned_twice_is_the_same_object_twice():
    def model(x):
        y = x + 1
        return y, {"again": y}

    found = call(captured(model, X), X)
    assert found[0] is found[1]["again"]


def test_an_object_returned_twice_is_the_same_object_twice():
    def model(x):
        y = Plain(x + 1)
        return y, [y]

    found = call(capture(model, X), X)
    assert found[0] is found[1][0]


def test_an_input_that_is_returned_is_the_input():
    program = captured(lambda x: (x, x + 1), X)
    assert call(program, X)[0] is X


def test_a_weight_and_a_buffer_can_be_returned():
    model = Net(lambda self, x: (self.w, self.b, x + self.w), w=nn.Parameter(torch.ones(3)), b=torch.zeros(3))
    found = call(captured(model, X), X)
    assert found[0].data_ptr() == model.w.data_ptr()


def test_views_of_the_input_are_returned_as_views():
    assert call(captured(lambda x: (x.t(), x[0]), X), X)[0].data_ptr() == X.data_ptr()


def test_an_output_without_tensors_is_refused():
    with pytest.raises(CaptureError, match="the model does not return a tensor"):
        capture(lambda x: 3, X)
    with pytest.raises(CaptureError, match="the model does not return a tensor"):
        capture(lambda x: None, X)


def test_an_output_that_contains_itself_is_refused():
    def model(x):
        out = [x + 1]
        out.append(out)
        return out

    with pytest.raises(CaptureError, match="contains itself"):
        capture(model, X)


# ---- where things come from -------------------------------------------------------------------------------


def test_nodes_know_module_and_source_line():
    model = nn.Sequential(OrderedDict(body=Net(lambda self, x: x.sin(), act=nn.ReLU()), head=nn.Linear(3, 2))).eval()
    program = capture(model, X)
    sin, linear = program.calls()
    assert sin.meta["module"] == "body"
    assert sin.meta["source"].startswith("tests/compiler/helpers.py:")
    assert linear.meta["module"] == "head"
    assert "# body, tests/compiler/helpers.py:" in program.text


def scaled(x):
    y = x * 2
    return y.sin()


def test_the_lines_of_a_plain_function_are_known():
    lines = [node.meta["source"].rpartition(":") for node in capture(scaled, X).calls()]
    assert [int(line) - scaled.__code__.co_firstlineno for _, _, line in lines] == [1, 2]
    assert {file for file, _, _ in lines} == {"tests/compiler/capture/test_capture.py"}


def test_a_function_keeps_its_defaults_and_what_it_has_around_it():
    factor = torch.full((3,), 3.0)

    def model(x, *, plus=1.0):
        return x * factor + plus

    assert torch.equal(tsopt.compile(capture(model, X), "eager")(X), X * 3 + 1)


@pytest.mark.parametrize("name", ["dropout", "alpha_dropout", "feature_alpha_dropout"])
def test_a_dropout_in_eval_mode_has_the_memory_of_what_it_is_given(name):
    def model(x):
        return getattr(F, name)(x[None].expand(2, 3, 3), 0.5, False) + 1, getattr(F, name)(x.t(), 0.5, False).exp()

    x = torch.randn(3, 3)
    program = tsopt.transform(capture(model, x))
    for mine, other in zip(tsopt.compile(program, "eager")(x), model(x), strict=True):
        assert torch.equal(mine, other)
        assert mine.stride() == other.stride()


# ---- other kinds ------------------------------------------------------------------------------------------


def test_hooks_are_captured_and_kept():
    model = nn.Linear(3, 2).eval()
    handle = model.register_forward_hook(lambda module, args, out: out * 2)
    assert ops_of(captured(model, X)) == ["linear", "mul.Tensor"]
    assert len(model._forward_hooks) == 1
    handle.remove()


def test_capture_works_under_inference_mode_and_no_grad_inside():
    def model(self, x):
        with torch.no_grad():
            return self.linear(x).detach()

    program = capture(Net(model, linear=nn.Linear(3, 2)), X)
    assert "linear" in ops_of(program)


def test_max_norm_of_an_embedding_writes_its_weight_or_is_refused():
    """The table is renormalized in each call; a program that forgets it would be wrong in silence."""
    model = nn.Embedding(4, 3, max_norm=0.5).eval()
    before = model.weight.detach().clone()
    try:
        program = capture(model, torch.tensor([0, 1]))
    except CaptureError:
        pass
    else:
        assert_computes(program, model, [torch.tensor([0, 1])], exact=True)
        assert program.signature.writes
    assert torch.equal(model.weight, before)


def test_an_exported_program_is_taken():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval()
    exported = torch.export.export(model, (X,))
    program = capture(exported, X)
    assert ops_of(program) == ["linear", "relu"]
    assert_computes(program, model, [X], exact=True)


def test_composites_are_kept_whole():
    q = torch.randn(1, 2, 4, 8)

    def model(q):
        return F.gelu(F.layer_norm(F.scaled_dot_product_attention(q, q, q), (8,)))

    assert ops_of(captured(model, q)) == ["scaled_dot_product_attention", "layer_norm", "gelu"]


def test_capture_is_deterministic():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    assert capture(model, X).text == capture(model, X).text
    assert capture(model, X).fingerprint(contents=True) == tsopt.capture(model, X).fingerprint(contents=True)


@pytest.mark.parametrize(("failures", "is_captured"), [(2, True), (3, False)])
def test_what_another_thread_has_spoilt_is_tried_again(monkeypatch, failures, is_captured):
    """A sampling profiler keeps the tensors of a trace alive: torch.export then fails by chance."""
    export, messages = torch.export.export, [f"We found a {LEAKED}. This typically means our tracing system"] * failures

    def spoilt(*args, **kwargs):
        if messages:
            raise RuntimeError(messages.pop())
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", spoilt)
    model = Net(lambda self, x: x * 2)
    if is_captured:
        assert_computes(capture(model, torch.ones(3)), model, [torch.ones(3)], exact=True)
    else:
        with pytest.raises(CaptureError, match="cannot be traced"):
            capture(model, torch.ones(3))


def test_what_fails_for_another_reason_is_not_tried_again(monkeypatch):
    tried = []

    def fails(*args, **kwargs):
        tried.append(1)
        raise RuntimeError("no")

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(CaptureError):
        capture(torch.sin, torch.ones(3), frontend="export")
    assert len(tried) == 1
