from __future__ import annotations

import importlib
import sys
import zlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.cli.helpers import HEAD, failed
from tsopt.cli import beside
from tsopt.cli.model_file import load_data, load_model_file

WRAPPER = "def hidden(function):\n    return lambda *args, **kwargs: function(*args, **kwargs)\n"


# ---- what is wrong with the file ----------------------------------------------------------------------------


def test_a_missing_file_is_named_with_its_neighbours(tsopt, write):
    write(name="model.py")
    err = failed(tsopt("inspect", "modle.py"), "no such file: modle.py")
    assert "model.py" in err


def test_a_missing_directory_is_no_traceback(tsopt):
    failed(tsopt("inspect", "no/such/place/m.py"), "no such file")


def test_a_directory_is_no_model(tsopt, tmp_path):
    failed(tsopt("inspect", tmp_path), "is a directory")


def test_a_file_that_is_not_python(tsopt, tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"PK\x03\x04\x00\xff")
    failed(tsopt("inspect", "weights.pt"), "weights.pt")


def test_a_file_in_another_encoding(tsopt, tmp_path):
    (tmp_path / "m.py").write_bytes(b"name = '\xe9'\n")
    failed(tsopt("inspect", "m.py"), "m.py raises")


def test_an_empty_file_has_no_model(tsopt, write):
    write("")
    assert "add `model = ...`" in failed(tsopt("inspect", "m.py"), "m.py defines no 'model'")


def test_other_models_in_the_file_are_offered(tsopt, write):
    write(HEAD + "net = nn.Linear(4, 2)\nclass Small(nn.Linear):\n    pass\n")
    err = failed(tsopt("inspect", "m.py"), "defines no 'model'")
    assert "m.py:net" in err
    assert "m.py:Small" in err
    failed(tsopt("inspect", "m.py:big"), "defines no 'big'")


def test_a_model_that_cannot_be_called(tsopt, write):
    write(HEAD + "model = {'weights': 1}\n")
    failed(tsopt("inspect", "m.py"), "'model' in m.py is a dict, not a model")


def test_a_file_without_an_example_says_what_to_add(tsopt, write):
    write("from torch import nn\nmodel = nn.Linear(4, 2).eval()\n")
    err = failed(tsopt("inspect", "m.py"), "m.py defines no example_input")
    assert "example_input = torch.randn" in err
    assert "--input" in err


def test_a_file_that_raises_is_shown_with_its_line(tsopt, write):
    write("import torch\n\ndef build():\n    raise KeyError('layer3')\n\nmodel = build()\n")
    err = failed(tsopt("inspect", "m.py"), "m.py raises KeyError")
    assert "m.py:4: raise KeyError('layer3')" in err
    assert "python m.py" in err


def test_a_file_that_imports_what_is_missing(tsopt, write):
    write("import a_package_that_nobody_has\n")
    assert "a_package_that_nobody_has" in failed(tsopt("inspect", "m.py"), "raises ModuleNotFoundError")


def test_a_syntax_error_is_shown_in_the_file_that_has_it(tsopt, write, tmp_path):
    write("\n\nx = (\n", "layers.py")
    write("import layers\n")
    said = failed(tsopt("inspect", "m.py"), "m.py raises SyntaxError")
    assert f"where: {tmp_path / 'layers.py'}:3\n" in said
    write("\ncompile('x = (', '<text>', 'exec')\n")
    assert "m.py:2: compile(" in failed(tsopt("inspect", "m.py"), "m.py raises SyntaxError")
    write("# coding: nonsense\n")
    assert "where: m.py" in failed(tsopt("inspect", "m.py"), "m.py raises SyntaxError")


def test_a_syntax_error_is_shown_with_its_line(tsopt, write):
    write("import torch\nmodel = = 3\n")
    assert "m.py:2" in failed(tsopt("inspect", "m.py"), "m.py raises SyntaxError")


@pytest.mark.parametrize("code", ["0", "3", "'bye'", ""])
def test_a_file_that_ends_the_program(tsopt, write, code):
    write(f"import sys\nsys.exit({code})\n")
    assert "__main__" in failed(tsopt("inspect", "m.py"), "m.py exits the process (sys.exit(")


@pytest.mark.parametrize("where", ["model", "example_input"])
def test_a_maker_that_ends_the_program_is_a_mistake_of_the_file(tsopt, write, where):
    write(HEAD + f"import sys\nmodel = nn.Linear(4, 2).eval()\ndef {where}():\n    sys.exit(0)\n")
    failed(tsopt("inspect", "m.py"), "m.py")


def test_a_model_that_ends_the_program_is_a_mistake_of_the_model(tsopt, write):
    write(HEAD + "import sys\ndef model(x):\n    sys.exit(0)\n")
    failed(tsopt("inspect", "m.py"), "m")


def test_a_maker_that_raises_is_shown_with_its_line(tsopt, write):
    write(HEAD + "def model(depth=3):\n    raise ValueError('too deep')\n")
    err = failed(tsopt("inspect", "m.py"), "model() in m.py raises ValueError")
    assert "m.py:5" in err
    assert "too deep" in err


def test_a_class_that_needs_arguments_says_so(tsopt, write):
    write(HEAD + "class Net(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n")
    assert "called without arguments" in failed(tsopt("inspect", "m.py:Net"), "Net() in m.py raises TypeError")


def test_what_a_file_prints_does_not_reach_the_json(tsopt, write):
    write("print('hello from the model')\n" + HEAD + "model = nn.Linear(4, 2).eval()\n")
    assert "captured" in tsopt("inspect", "m.py", "--json").json


@pytest.mark.parametrize(
    "text",
    [
        "def model(x):\n    print('called')\n    return x\n",
        "def model(n=4):\n    print('made')\n    return nn.Linear(n, 2)\n",
    ],
)
def test_what_a_model_prints_does_not_reach_the_json(tsopt, write, quick, text):
    write(HEAD + text)
    ran = tsopt("bench", "m.py", "--json")
    assert ran.json["rows"]
    assert "called" in ran.err or "made" in ran.err


def test_a_path_that_is_too_long_is_no_traceback(tsopt):
    failed(tsopt("inspect", "n" * 300), "cannot be read")


def test_an_error_text_cannot_drive_the_terminal(tsopt, write):
    write("raise ValueError('\\x1b[2J\\x1b]0;owned\\x07')\n")
    assert "\x1b[2J" not in failed(tsopt("inspect", "m.py"), "raises ValueError")


# ---- what a model may be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("model = nn.Linear(4, 2)\n", "m.py"),
        ("net = nn.Linear(4, 2)\n", "m.py:net"),
        ("class model(nn.Linear):\n    def __init__(self, n=4):\n        super().__init__(n, 2)\n", "m.py"),
        ("class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 2)\n", "m.py:Net"),
        ("def make(n=4):\n    return nn.Linear(n, 2)\n", "m.py:make"),
        ("def model(**options):\n    return nn.Linear(4, 2)\n", "m.py"),
    ],
)
def test_a_model_may_be_an_object_a_class_or_a_maker(write, monkeypatch, tmp_path, text, spec):
    monkeypatch.chdir(tmp_path)
    write(HEAD + text)
    found = load_model_file(spec, [], 0)
    assert isinstance(found.model, nn.Linear)
    assert found.example_input.shape == (1, 4)


def test_a_function_of_tensors_is_the_model_itself(write):
    path = write(HEAD + "def model(x, scale=2):\n    return x * scale\n")
    assert load_model_file(str(path), [], 0).model(torch.ones(1)).tolist() == [2]


def test_the_example_may_be_a_function_and_have_another_name(write):
    path = write("import torch\nmodel = torch.relu\ndef example_inputs():\n    return (torch.ones(2),)\n")
    assert load_model_file(str(path), [], 0).example_input[0].tolist() == [1, 1]


def test_a_file_called_as_a_module_of_the_standard_library_does_not_shadow_it(write, tsopt):
    write(HEAD + "import json\njson.dumps({})\nmodel = nn.Linear(4, 2).eval()\n", name="json.py")
    ran = tsopt("inspect", "json.py")
    assert ran.code == 0, ran.err
    import json

    assert "tmp" not in str(json.__file__)


def test_a_neighbouring_module_can_be_imported_and_sys_path_is_as_it_was(write, tsopt):
    write("WIDTH = 4\n", name="neighbour_of_m.py")
    write("import neighbour_of_m\n" + HEAD + "model = nn.Linear(neighbour_of_m.WIDTH, 2).eval()\n")
    before = list(sys.path)
    assert tsopt("inspect", "m.py").code == 0
    assert sys.path == before


@pytest.mark.parametrize(
    "text",
    [
        "def model():\n    from {there} import Net\n    return Net(4, 2).eval()\n",
        "class model(nn.ReLU):\n    def forward(self, x):\n        import {there}\n        return {there}.double(x)\n",
        "def model(x):\n    from {there} import double\n    return double(x)\n",
        "def model(*x):\n    from {there} import double\n    return double(*x)\n",
        "model = nn.ReLU()\ndef example_input():\n    from {there} import example\n    return example\n",
    ],
    ids=range(5),
)
def test_functions_of_the_file_import_their_neighbours_until_the_command_ends(write, tsopt, text):
    there = f"neighbour_of_functions_{zlib.crc32(text.encode())}"
    write(
        "import torch\nNet = torch.nn.Linear\nexample = torch.ones(1, 4)\ndef double(x):\n    return x * 2\n",
        name=f"{there}.py",
    )
    write(HEAD + text.replace("{there}", there))
    before = list(sys.path)
    ran = tsopt("inspect", "m.py", "--eval")
    assert ran.code == 0, ran.err
    assert sys.path == before


def test_each_file_finds_its_own_neighbours_first(write, tmp_path):
    for name in ("one", "two"):
        write(f"NAME = {name!r}\n", name=f"{name}/neighbour_of_{name}.py")
        write("NAME = 'another'\n", name=f"{'two' if name == 'one' else 'one'}/neighbour_of_{name}.py")
    write(HEAD + "model = nn.ReLU()\n", name="one/m.py")
    write("def data():\n    from neighbour_of_two import NAME\n    return [NAME]\n", name="two/m.py")
    loaded = load_model_file(str(tmp_path / "one" / "m.py"), [], 0)
    given = SimpleNamespace(calibration=f"{tmp_path}/two/m.py:data", metric=None)
    assert load_data(given, loaded.files)["calibration"] == ["two"]
    assert importlib.import_module("neighbour_of_one").NAME == "one"  # as a function of the model does in a call


def test_a_directory_that_was_on_the_path_stays_where_it_was(write, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = list(sys.path)
    load_model_file(str(write(HEAD + "model = nn.ReLU()\n")), [], 0)
    assert sys.path == before


def test_a_directory_that_the_file_adds_itself_stays_where_the_file_has_put_it(write, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = list(sys.path)
    path = write("import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\n" + HEAD + "model = nn.ReLU()\n")
    load_model_file(str(path), [], 0)
    assert sys.path == [str(tmp_path), *before, str(tmp_path)]
    beside.forget()
    assert sys.path == [str(tmp_path), *before]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("def model():\n    import a_package_that_nobody_has\n", "make sure that model() runs"),
        (
            "def model(x=None):\n    return x + 1\n",
            "if it is the model itself, write its first parameter without a def",
        ),
        ("class model(nn.Module):\n    def __init__(self, n):\n        pass\n", "give its parameters defaults"),
    ],
)
def test_the_advice_for_a_maker_that_raises_is_about_its_own_mistake(tsopt, write, text, advice):
    write(HEAD + text)
    assert advice in failed(tsopt("inspect", "m.py"), "model() in m.py raises")


@pytest.mark.parametrize(
    "text",
    [
        "model = torch.export.export(nn.Linear(4, 2).eval(), (example_input,))\n",
        "def model(*xs):\n    return torch.stack(xs).sum(0)\n",
        "def model(*xs):\n    return sum(xs)\n",
        "@hidden\ndef model(x):\n    return x + 1\n",
        "model = torch.jit.trace(lambda x: x + 1, example_input)\n",
    ],
    ids=range(5),
)
def test_what_takes_any_arguments_may_be_the_model_itself(tsopt, write, text):
    write(HEAD + WRAPPER + text)
    ran = tsopt("inspect", "m.py")
    assert ran.code == 0, ran.err
    assert "f32[1, " in ran.out


@pytest.mark.parametrize(
    "text",
    [
        "def model(*sizes):\n    return nn.Linear(*sizes or (4, 2))\n",
        "@hidden\ndef model():\n    return nn.Linear(4, 2)\n",
    ],
    ids=range(2),
)
def test_what_takes_any_arguments_may_be_a_maker(write, text):
    assert isinstance(load_model_file(str(write(HEAD + WRAPPER + text)), [], 0).model, nn.Linear)


def test_the_seed_decides_the_weights(write):
    path = write(HEAD + "model = nn.Linear(4, 2)\n")
    first, second, other = (load_model_file(str(path), [], seed).model.weight for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_the_seed_decides_what_numpy_and_python_draw(write):
    path = write(
        "import random\nimport numpy\n" + HEAD + "model = nn.Identity()\n"
        "example_input = torch.tensor([random.random(), numpy.random.rand()])\n"
    )
    first, second, other = (load_model_file(str(path), [], seed).example_input for seed in (2**40, 2**40, 2))
    assert torch.equal(first, second)
    assert (first != other).all()


def test_a_metric_sees_the_model_and_the_example_that_are_optimized(tsopt, write):
    write(
        "import torch\nfrom torch import nn\nprint('the file runs')\n"
        "model = nn.Linear(4, 2).eval()\nexample_input = torch.randn(3, 4)\ndata = [example_input]\n"
        "def same(candidate):\n"
        "    score = float(torch.equal(candidate(example_input), model(example_input)))\n"
        "    print('score', score)\n    return score\n"
    )
    options = ("--backends", "eager", "--seconds", "0.01", "--precision", "bf16", "--no-isolate", "--no-cache")
    data = ("--metric", "m.py:same", "--max-drop", "0.5", "--calibration", "m.py:data")
    ran = tsopt("export", "m.py", *options, *data, "--json")
    assert ran.code == 0, ran.err
    assert "score 1.0" in ran.err, "eager itself"
    assert ran.err.count("the file runs") == 1


def test_files_of_one_name_in_two_places_keep_their_own_classes(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(HEAD + "class Net(nn.Linear):\n    pass\nmodel = Net(4, 2)\n")
    write("class Item:\n    pass\ndata = [Item()]\n", name="other/m.py")
    loaded = load_model_file("m.py", [], 0)
    found = load_data(SimpleNamespace(calibration="other/m.py:data", metric=None), loaded.files)
    item = found["calibration"][0]
    for value in (loaded.model, item):
        assert getattr(sys.modules[type(value).__module__], type(value).__name__) is type(value)


def test_a_path_may_hold_colons_spaces_and_dots(write, tsopt):
    path = write(name="a b.c:d/my.model.v2.py")
    assert tsopt("inspect", path).code == 0
    assert tsopt("inspect", f"{path}:model").code == 0


# ---- --input ------------------------------------------------------------------------------------------------
