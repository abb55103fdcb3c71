"""What a call must look like, and what it is told when it does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.passes.helpers import capture
from tsopt.compiler.calls import signature_json
from tsopt.compiler.calls.example import Example, as_example, example
from tsopt.compiler.calls.signature import mismatch
from tsopt.compiler.calls.types import TensorType, contiguous_strides
from tsopt.errors import BundleError, CaptureError, SignatureError, UsageError

X = torch.ones(2, 3)


@pytest.fixture(scope="module")
def signature():
    return capture(lambda x, scale, *, flag=1: {"y": x * scale + flag}, example(X, scale=X, flag=2)).signature


def test_bind_gives_the_tensors_in_order(signature):
    assert signature.bind((X,), {"scale": X + 1, "flag": 2})[1][0, 0] == 2


def test_the_order_of_keyword_arguments_does_not_count(signature):
    assert signature.bind((X,), {"flag": 2, "scale": X + 1})[1][0, 0] == 2


def test_the_order_of_collected_keyword_arguments_counts():
    made = capture(lambda **rest: torch.cat(list(rest.values())), example(a=X, b=X)).signature
    for signature in (made, signature_json.from_json(signature_json.to_json(made))):
        assert signature.bind((), {"a": X, "b": X + 1})[1][0, 0] == 2
        with pytest.raises(SignatureError, match="does not match the signature"):
            signature.bind((), {"b": X, "a": X + 1})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, X), {"flag": 2}),
        ((X,), {"scale": X, "flag": 3}),
        ((X,), {"scale": X, "flag": 2.0}),
        ((X,), {"scale": X, "flag": True}),
        ((X,), {"scale": X}),
        ((X,), {"scale": [X], "flag": 2}),
        ((), {}),
        ((X,), {"scale": X, "flag": 2, "more": X}),
    ],
)
def test_another_form_is_refused(signature, args, kwargs):
    with pytest.raises(SignatureError, match=r"(?s)does not match the signature.*captured for .*called with .*fix:"):
        signature.bind(args, kwargs)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (X.double(), r"input 'x' is float64, expected float32"),
        (X.t(), r"input 'x' has shape \[3, 2\], expected \[2, 3\]"),
        (X.to("meta"), r"input 'x' is on meta, expected cpu"),
    ],
)
def test_another_tensor_is_refused(signature, value, words):
    with pytest.raises(SignatureError, match=words):
        signature.bind((value,), {"scale": X, "flag": 2})


def test_strides_and_numpy_are_taken(signature):
    signature.bind((torch.ones(3, 2).t(),), {"scale": X, "flag": 2})
    signature.bind((np.ones((2, 3), np.float32),), {"scale": X, "flag": 2})
    assert mismatch(TensorType("float32", (2,), (1,)), np.ones(2)) == "is float64, expected float32"


def test_json_keeps_the_signature(signature):
    import json

    made = signature_json.from_json(json.loads(json.dumps(signature_json.to_json(signature))))
    assert made.inputs == signature.inputs
    assert made.outputs == signature.outputs
    assert made.unbind([X], (X,), {"scale": X, "flag": 2})["y"] is X


def test_a_signature_read_back_binds_the_same_calls(signature):
    made = signature_json.from_json(signature_json.to_json(signature))
    assert made.bind((X,), {"scale": X, "flag": 2})[0] is X
    assert made.outer == signature.outer
    with pytest.raises(SignatureError, match="does not match the signature"):
        made.bind((X,), {"scale": X, "flag": 3})


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("inputs"),
        lambda d: d["inputs"].pop(),
        lambda d: d["outputs"].pop(),
        lambda d: d["inputs"][0].pop("name"),
        lambda d: d["inputs"][0]["type"].update(shape=[-1, 3]),
        lambda d: d["inputs"][0]["type"].update(shape=[2**60, 3]),
        lambda d: d["inputs"][0]["type"].update(shape=[1] * 70, stride=[1] * 70),
        lambda d: d["inputs"][0]["type"].update(stride=[1]),
        lambda d: d["inputs"][0]["type"].update(shape="2x"),
        lambda d: d.update(outer={"kind": "leaf", "index": 9}),
        lambda d: d.update(result=None),
        lambda d: d.update(inputs=7),
        lambda d: d.update(default_dtype="int8"),
        lambda d: d.update(default_dtype=["float32"]),
    ],
)
def test_damaged_signatures_are_refused(signature, damage):
    import copy

    data = copy.deepcopy(signature_json.to_json(signature))
    damage(data)
    with pytest.raises(BundleError):
        signature_json.from_json(data)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((X, iter([2.0])), "an input is an iterator: a list_iterator\n  where: input args.1"),
        (example(X, scales=[(s for s in [2.0])]), "an input holds an iterator: a generator\n  where: input scales"),
    ],
)
def test_examples_with_iterators_are_refused(given, words):
    with pytest.raises(CaptureError, match=words):
        as_example(given)


def test_examples_are_read_as_calls():
    assert as_example(X).args == (X,)
    assert as_example((X, 3)) == Example((X, 3))
    assert as_example({"x": X}).kwargs == {"x": X}
    assert as_example(example(X, k=1)) == Example((X,), {"k": 1})
    with pytest.raises(UsageError, match="example_input is a list"):
        as_example([X])


def test_types_print_and_compare():
    assert str(TensorType("bfloat16", (2, 3), (3, 1))) == "bf16[2, 3]"
    assert str(TensorType("float8_e4m3fn", (), (), "cuda:0")) == "float8_e4m3fn[]@cuda:0"
    assert contiguous_strides((2, 0, 3)) == (3, 3, 1)
    a = TensorType("float32", (1, 3), (3, 1))
    assert a.matches(TensorType("float32", (1, 3), (99, 1)))
    assert not a.matches(TensorType("float32", (1, 3), (3, 2)))
    assert TensorType("float32", (0, 3), (7, 7)).contiguous
    assert not TensorType("float32", (2, 2), (1, 2)).contiguous


def test_a_long_call_is_told_where_it_differs():
    def model(x, cache):
        return x + sum(layer["k"] for layer in cache)

    def cache(kind):
        return [{"k": X, "v": X, "kind": "usual"} for _ in range(12)] + [{"k": X, "v": X, "kind": kind}]

    signature = capture(model, (X, cache("last"))).signature
    with pytest.raises(SignatureError) as caught:
        signature.bind((X, cache("first")), {})
    assert "captured for 'last', called with 'first', at args.1.12.kind" in str(caught.value)
    with pytest.raises(SignatureError) as caught:
        signature.bind((X, cache("last")[1:]), {})
    assert len(str(caught.value)) < 1000
