"""The generated guard agrees with the thorough check about which calls are of the captured form."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest
import torch

import tsopt
from tests.passes.helpers import capture
from tsopt.compiler.calls.example import Example, example
from tsopt.errors import SignatureError
from tsopt.runtime.backends.backend import compile
from tsopt.runtime.calling.signature_guard import leaves_of, quick_call

X = torch.arange(12.0).reshape(3, 4)
Y = X + 1


def positional(x, y):
    return x + y


def keyword(x, *, y, flag=1):
    return x + y * flag


def nested(pair, rest):
    return pair["a"] + rest[0] * rest[1][0]


def plain(x, times, name, ratio, none, flag):
    return x * times * ratio


def collects(x, *, flag=1, **rest):
    return x + torch.cat(list(rest.values()), -1) * flag


def written(x, y):
    x.add_(1)
    return x + y


def asks(x, y):
    return x if x.is_contiguous() and not y.requires_grad else y


CALLS = {
    "positional": (
        positional,
        example(X, Y),
        [((X, X), {}), ((X.t(), Y.t()), {}), ((X,), {}), ((X, Y, Y), {}), ((X, Y.double()), {}), ((X,), {"y": Y})],
    ),
    "keyword": (
        keyword,
        example(X, y=Y, flag=2),
        [((X,), {"flag": 2, "y": Y}), ((X,), {"y": Y, "flag": 3}), ((X,), {"y": Y, "flag": True}), ((X,), {"y": Y})],
    ),
    "collected": (
        collects,
        example(torch.ones(3, 8), a=X, flag=2, b=Y),
        [
            ((torch.ones(3, 8),), {"b": X, "flag": 2, "a": Y}),
            ((torch.ones(3, 8),), {"a": X, "b": Y, "flag": 2}),
            ((torch.ones(3, 8),), {"a": X, "c": Y, "flag": 2}),
        ],
    ),
    "nested": (
        nested,
        example({"a": X, "b": 1}, [X, (Y,)]),
        [
            (({"b": 1, "a": X}, [X, (Y,)]), {}),
            (({"a": X, "b": 1}, [X, [Y]]), {}),
            (({"a": X, "b": 1}, (X, (Y,))), {}),
            (({"a": X, "b": 2}, [X, (Y,)]), {}),
            (({"a": X, "b": 1}, [X, (Y,), X]), {}),
            ((OrderedDict(a=X, b=1), [X, (Y,)]), {}),
            (({"a": X}, [X, (Y,)]), {}),
        ],
    ),
    "keys": (
        lambda given: sum(key * value for key, value in given.items() if not isinstance(key, tuple)),
        example({1: X, 3: X}),
        [
            (({1.0: X, 3: X},), {}),
            (({True: X, 3: X},), {}),
            (({1: X, 3.0: X},), {}),
            (({1: X, 2: X},), {}),
        ],
    ),
    "constants": (
        plain,
        example(X, 3, "a", 0.5, None, True),
        [
            ((X, 3.0, "a", 0.5, None, True), {}),
            ((X, 3, "b", 0.5, None, True), {}),
            ((X, 3, "a", 0.25, None, True), {}),
            ((X, 3, "a", 0.5, False, True), {}),
            ((X, 3, "a", 0.5, None, 1), {}),
            ((X, True, "a", 0.5, None, True), {}),
        ],
    ),
    "written": (
        written,
        example(X.clone(), Y),
        [((X, X), {}), ((X, X.view(3, 4)), {}), ((Y, X), {}), ((X.view(-1)[:12].view(3, 4), Y), {})],
    ),
    "one tensor twice": (written, Example((X, X)), [((X, Y), {}), ((Y, Y), {}), ((X, X.view(3, 4)), {})]),
    "asks": (asks, example(X, Y), [((X.t().contiguous().t(), Y), {}), ((X, Y.clone().requires_grad_()), {})]),
}


def taken(check, args, kwargs):
    try:
        return check(args, kwargs)
    except SignatureError:
        return None


@pytest.mark.parametrize("name", CALLS)
def test_the_guard_takes_what_the_thorough_check_takes_and_nothing_else(name):
    model, captured_for, others = CALLS[name]
    executable = compile(capture(model, captured_for), "eager")
    for args, kwargs in [(captured_for.args, captured_for.kwargs), *others]:
        mine, thorough = executable.accepts(args, kwargs), taken(executable.bind, args, kwargs)
        assert (mine is None) == (thorough is None), (args, kwargs)
        assert mine is None or all(a is b for a, b in zip(mine, thorough, strict=True))
    assert executable.accepts(captured_for.args, captured_for.kwargs) is not None


def test_the_order_of_keywords_counts_where_the_model_collects_them():
    executable = compile(capture(lambda **rest: torch.cat(list(rest.values()), -1), example(a=X, b=Y)), "eager")
    assert executable.accepts((), {"b": X, "a": Y}) is None
    named = compile(capture(lambda a, b: torch.cat([a, b], -1), example(a=X, b=Y)), "eager")
    found = named.accepts((), {"b": Y, "a": X})
    assert found is not None
    assert found[0] is X
    mixed = compile(capture(collects, example(torch.ones(3, 8), a=X, flag=2, b=Y)), "eager")
    assert mixed.accepts((torch.ones(3, 8),), {"flag": 2, "a": X, "b": Y}) is not None


def test_containers_that_are_one_object_are_another_form():
    executable = compile(capture(lambda a, b: a[0] + b[0], example([X], [X])), "eager")
    one = [X]
    assert executable.accepts(([X], [Y]), {}) is not None
    assert executable.accepts((one, one), {}) is None


def test_sizes_are_in_their_range_and_the_same_at_all_axes():
    signature = capture(lambda x, y: x + y, [example(torch.ones(n, 3), torch.ones(n, 3)) for n in (4, 8)]).signature
    leaves = leaves_of(signature)
    dim = signature.dims[0]
    for rows, more in itertools.product((1, 5, 8), (0, 1)):
        fits = dim.admits(rows) and not more
        assert (leaves((torch.ones(rows, 3), torch.ones(rows + more, 3)), {}) is not None) == fits
    assert leaves((torch.ones(5, 4), torch.ones(5, 4)), {}) is None
    assert leaves((torch.ones(5), torch.ones(5)), {}) is None


ODD = {
    "sparse": lambda: X.to_sparse(),
    "csr": lambda: X.to_sparse_csr(),
    "mkldnn": lambda: X.to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([X[0], X[1], X[2]]),
    "subclass": lambda: X.as_subclass(type("Mine", (torch.Tensor,), {})),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_a_plain_dense_tensor_is_refused_by_name(kind):
    executable = compile(capture(lambda x: x * 2, X), "eager")
    with pytest.raises(SignatureError, match=r"(?s)input 'x' is a .*, expected a dense tensor.*fix: pass a"):
        executable(ODD[kind]())


def test_a_mode_that_the_model_asks_for_is_part_of_the_form():
    executable = compile(capture(lambda x: x * 2 if torch.is_inference_mode_enabled() else x, X), "eager")
    assert executable.accepts((X,), {}) is not None
    with torch.inference_mode():
        assert executable.accepts((X,), {}) is None
        with pytest.raises(SignatureError, match="queries inference mode"):
            executable(X)


WHOLE = torch.arange(6)
FOLLOW = {
    "whole numbers": (lambda x: x / 3, WHOLE),
    "new tensors": (lambda x: x + torch.zeros(4), X),
    "a choice": (lambda x: torch.where(x > 1, 0.5, 2.0), X),
    "a literal": (lambda x: x * torch.tensor(0.5), WHOLE),
    "a question": (lambda x: x.to(torch.get_default_dtype()), WHOLE),
    "what is written": (lambda x: torch.ones(6).mul_(x), WHOLE),
    "complex numbers": (lambda x: x * 1j, WHOLE),
}
DO_NOT = {
    "real numbers": (lambda x: x / 3 + 1, X),
    "a cast": (lambda x: x.float() * x.to(torch.float32), WHOLE),
    "a dtype": (lambda x: x + torch.zeros(4, dtype=torch.float32) + torch.tensor(0.5, dtype=torch.float32), X),
    "that of another": (lambda x: torch.zeros_like(x) + x.new_ones(4) + torch.ones(4, dtype=x.dtype), X),
    "results of whole numbers": (lambda x: torch.arange(6) + x * 2 + torch.tensor(3), WHOLE),
}


class Adds(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x + torch.zeros(4)


@pytest.mark.parametrize("name", FOLLOW)
def test_where_the_default_dtype_decides_it_is_part_of_the_form(name, default_dtype):
    model, x = FOLLOW[name]
    executable = compile(capture(model, x), "eager")
    assert torch.equal(executable(x), model(x))
    default_dtype(torch.float64)
    assert executable.accepts((x,), {}) is None
    with pytest.raises(SignatureError, match="default dtype, which is float64 now and was float32"):
        executable(x)


@pytest.mark.parametrize("frontend", ["strict", "fx", "torchscript"])
def test_every_front_end_records_the_default_dtype(frontend):
    assert tsopt.capture(Adds().eval(), X, frontend=frontend).signature.default_dtype == "float32"


@pytest.mark.parametrize("name", DO_NOT)
def test_where_it_decides_nothing_it_may_change(name, default_dtype):
    model, x = DO_NOT[name]
    executable = compile(capture(model, x), "eager")
    assert executable.signature.default_dtype == ""
    default_dtype(torch.float64)
    assert torch.equal(executable(x), model(x))


def test_the_quick_call_checks_what_comes_out():
    signature = capture(lambda x: x * 2, X).signature

    def broken(outputs):
        return ValueError("not as promised")

    for made in ([X.double()], [X[:2]], [X, X], []):
        with pytest.raises(ValueError, match="not as promised"):
            quick_call(signature, lambda inputs, made=made: made, broken)(X)
    assert quick_call(signature, lambda inputs: [inputs[0]], broken)(X) is X
    assert quick_call(signature, lambda inputs: [inputs[0]], broken)(X[:2]) is None


@pytest.mark.parametrize("model", [positional, written, lambda x: (x, x), lambda x, flag=1: {"y": x}])
def test_a_model_of_another_form_has_no_quick_call(model):
    args = (X.clone(), Y) if model in (positional, written) else (X,)
    assert quick_call(capture(model, Example(args)).signature, lambda inputs: inputs, ValueError) is None
