"""`--input`: shapes and dtypes of inputs, for a file that has no example."""

from __future__ import annotations

import pytest
import torch

import tsopt as package
from tests.cli.helpers import HEAD, failed
from tsopt.cli.model_file import load_model_file, parse_inputs


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("1x3", (1, 3), torch.float32),
        ("7", (7,), torch.float32),
        ("0x3", (0, 3), torch.float32),
        ("scalar", (), torch.float32),
        ("2x2:i64", (2, 2), torch.int64),
        ("2:float64", (2,), torch.float64),
        ("2:bf16", (2,), torch.bfloat16),
        ("2:bool", (2,), torch.bool),
        ("2:c64", (2,), torch.complex64),
        ("scalar:u8", (), torch.uint8),
    ],
)
def test_an_input_has_a_shape_and_a_dtype(text, shape, dtype):
    (found,) = parse_inputs([text], 0)
    assert (tuple(found.shape), found.dtype) == (shape, dtype)
    assert torch.equal(found, parse_inputs([text], 0)[0])


def test_named_inputs_are_keywords():
    found = parse_inputs(["x:1x2:f32", "mask:1x2:bool"], 0)
    assert list(found) == ["x", "mask"]
    assert found["mask"].dtype == torch.bool


@pytest.mark.parametrize(
    "text",
    ["", ":", "x", "x:", "1x", "x1", "1X3", "-1x3", "1x-3", "1.5", "x:1x3:", "x:1x3:f32:f32", "1 x 3", "1,3", "x::f32"],
)
def test_an_input_that_is_not_understood_is_shown_with_the_syntax(text):
    with pytest.raises(package.UsageError) as caught:
        parse_inputs([text], 0)
    assert "NAME:SHAPE:DTYPE" in caught.value.fix or "dtype" in caught.value.what


@pytest.mark.parametrize("dtype", ["f33", "Tensor", "load", "__class__", "qint8", "bits8"])
def test_a_dtype_that_no_input_can_have_is_named(dtype):
    with pytest.raises(package.UsageError, match="dtype"):
        parse_inputs([f"x:2x2:{dtype}"], 0)


@pytest.mark.parametrize("shape", ["99999999x99999999x99999999", "9" * 30])
def test_a_shape_that_no_memory_holds_is_a_usage_error(shape):
    with pytest.raises(package.UsageError):
        parse_inputs([f"x:{shape}:f32"], 0)


def test_names_on_some_inputs_only_are_refused():
    with pytest.raises(package.UsageError, match="some --input options have names and others do not"):
        parse_inputs(["x:1x3", "1x3"], 0)


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(package.UsageError, match="x"):
        parse_inputs(["x:1x3", "x:1x4"], 0)


def test_input_replaces_the_example_of_the_file(tsopt, write):
    write(HEAD + "model = nn.Linear(4, 2).eval()\n")
    assert "%input: f32[7, 4]" in tsopt("inspect", "m.py", "--input", "input:7x4:f32").out


def test_an_input_that_the_model_cannot_take_shows_the_models_own_error(tsopt, write):
    write(HEAD + "model = nn.Linear(4, 2).eval()\n")
    failed(tsopt("inspect", "m.py", "--input", "1x5"), "the model fails on the example input")


TWO = """
class Two(nn.Module):
    def forward(self, x, mask=None):
        return x
model = Two().eval()
"""


@pytest.mark.parametrize(
    ("model", "inputs", "text"),
    [
        (
            "model = nn.Linear(4, 2).eval()",
            ["y:1x4"],
            "--input y: the model has no input with that name|parameters of the model: input",
        ),
        (TWO, ["x:1x4", "masc:1x4"], "--input masc: the model has no input with that name|of the model: x, mask"),
        (TWO, ["mask:1x4"], "no --input for x, which the model requires|parameters of the model: x, mask"),
        (TWO, ["1x4", "1x4", "1x4"], "--input was given 3 times, but the model takes 2 inputs|of the model: x, mask"),
        ("def model(a, b):\n    return a + b", ["1x4"], "--input was given once, but the model takes 2 inputs"),
        ("def model(a, b):\n    return a + b", ["a:1x4", "c:1x4"], "--input c:"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "export", "bench"])
def test_an_input_that_the_model_does_not_take_is_the_options_fault(tsopt, write, command, model, inputs, text):
    write(HEAD + model + "\n")
    ran = tsopt(command, "m.py", *(word for item in inputs for word in ("--input", item)))
    assert ran.code == 2
    assert all(part in ran.err for part in text.split("|")), ran.err
    assert "the model itself" not in ran.err


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (TWO, ["x:1x4"]),
        (TWO, ["1x4"]),
        ("def model(x, *more):\n    return x + more[0]", ["1x4", "1x4"]),
        ("def model(x, **more):\n    return x + more['y']", ["x:1x4", "y:1x4"]),
        ("model = torch.jit.trace(nn.Linear(4, 2).eval(), torch.ones(1, 4))", ["1x4"]),
    ],
)
def test_an_input_that_the_model_may_take_is_left_to_the_model(write, model, inputs):
    place = write(HEAD + model + "\n")
    assert load_model_file(str(place), inputs, 0).example_input
