from __future__ import annotations

import os

import pytest
import torch

import tsopt as package

pytestmark = pytest.mark.usefixtures("quick")


def bundle_of_others(place):
    """What looks like a bundle, and holds more."""
    place.mkdir()
    (place / "manifest.json").write_text("{}")
    (place / "f").write_text("mine")


def names(place):
    return sorted(p.name for p in place.iterdir() if p.name != "__pycache__")


def test_a_bundle_is_written_and_the_report_names_it(tsopt, write, tmp_path):
    write()
    ran = tsopt("export", "m.py")
    assert ran.code == 0, ran.err
    assert "tsopt: m.tsopt" in ran.out
    assert names(tmp_path) == ["m.py", "m.tsopt"]
    assert package.load(tmp_path / "m.tsopt")(torch.ones(1, 4)).shape == (1, 2)


def test_three_formats_compute_the_same(tsopt, write, tmp_path):
    import onnxruntime

    write()
    ran = tsopt("export", "m.py", "--format", "tsopt", "--format", "onnx", "--format", "torchscript", "-o", "out")
    (tmp_path / "out").mkdir(exist_ok=True)
    if ran.code:
        ran = tsopt("export", "m.py", "--format", "tsopt", "--format", "onnx", "--format", "torchscript", "-o", "out")
    assert ran.code == 0, ran.err
    assert names(tmp_path / "out") == ["m.onnx", "m.ts", "m.tsopt"]
    x = torch.full((1, 4), 2.0)
    wanted = package.load(tmp_path / "out" / "m.tsopt")(x)
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "m.onnx"), providers=["CPUExecutionProvider"])
    assert [item.name for item in session.get_inputs()] == ["input"]
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), wanted)
    script = torch.jit.load(str(tmp_path / "out" / "m.ts"))
    torch.testing.assert_close(script(x)[0], wanted)


def test_several_formats_go_into_a_directory_that_is_not_there_yet(tsopt, write, tmp_path):
    write()
    ran = tsopt("export", "m.py", "--format", "tsopt", "--format", "torchscript", "-o", "out")
    assert ran.code == 0, ran.err
    assert names(tmp_path / "out") == ["m.ts", "m.tsopt"]


def test_an_opset_can_be_asked_for(tsopt, write, tmp_path):
    import onnx

    write()
    assert tsopt("export", "m.py", "--format", "onnx", "--opset", "18", "-o", "x.onnx").code == 0
    assert onnx.load(tmp_path / "x.onnx").opset_import[0].version == 18
    assert names(tmp_path) == ["m.py", "x.onnx"]


def test_an_opset_of_no_file_is_refused(tsopt, write):
    write()
    ran = tsopt("export", "m.py", "--opset", "18")
    assert ran.code == 2
    assert "--opset has no effect on the format tsopt" in ran.err


def test_a_path_that_ends_with_a_separator_is_a_directory(tsopt, write, tmp_path):
    write()
    assert tsopt("export", "m.py", "--format", "torchscript", "-o", "new/", "--no-isolate").code == 0
    assert (tmp_path / "new" / "m.ts").is_file()
    assert tsopt("export", "m.py", "-o", "new/b.tsopt/", "--no-isolate").code == 0
    assert (tmp_path / "new" / "b.tsopt" / "manifest.json").is_file()


def test_an_opset_that_does_not_exist_is_no_traceback(tsopt, write, tmp_path):
    write()
    ran = tsopt("export", "m.py", "--format", "onnx", "--opset", "9999", "-o", "x.onnx")
    assert ran.code == 2, "a file of another opset was written"
    assert "opset" in ran.err.lower()
    assert names(tmp_path) == ["m.py"]


def test_an_opset_that_the_exporter_does_not_reach_is_refused(tsopt, write, tmp_path, monkeypatch):
    write()
    monkeypatch.setattr("onnx.defs.onnx_opset_version", lambda: 10000)
    ran = tsopt("export", "m.py", "--format", "onnx", "--opset", "9999", "-o", "x.onnx")
    assert ran.code == 2
    assert "cannot convert this model to opset 9999" in ran.err
    assert names(tmp_path) == ["m.py"]


def test_the_name_follows_the_model_whatever_its_directory_is_called(tsopt, write, tmp_path):
    write(name="env.python/mlp.py")
    assert tsopt("export", tmp_path / "env.python" / "mlp.py").code == 0
    found = names(tmp_path) + names(tmp_path / "env.python")
    assert "mlp.tsopt" in found


def test_the_bundle_lies_in_the_current_directory_by_default(tsopt, write, tmp_path):
    write(name="models/mlp.py")
    assert tsopt("export", "models/mlp.py").code == 0
    assert names(tmp_path) == ["mlp.tsopt", "models"]
    assert names(tmp_path / "models") == ["mlp.py"]
    assert "the current directory by default" in " ".join(tsopt("export", "--help").out.split())


def test_o_may_be_a_directory_or_a_file(tsopt, write, tmp_path):
    write()
    (tmp_path / "d").mkdir()
    assert tsopt("export", "m.py", "-o", "d").code == 0
    assert names(tmp_path / "d") == ["m.tsopt"]
    assert tsopt("export", "m.py", "-o", "new/deep/x.tsopt").code == 0
    assert names(tmp_path / "new" / "deep") == ["x.tsopt"]


def test_exporting_again_replaces_what_was_there(tsopt, write, tmp_path):
    write()
    for told in (0, 1):
        ran = [
            tsopt("export", "m.py", "--format", "torchscript", "-o", "x.ts"),
            tsopt("export", "m.py", "-o", "x.tsopt"),
        ]
        assert [item.code for item in ran] == [0, 0]
        for item, name in zip(ran, ("x.ts", "x.tsopt"), strict=True):
            assert item.out.splitlines().count(f"replaced the earlier {name}") == told
    assert names(tmp_path) == ["m.py", "x.ts", "x.tsopt"]
    assert "m.tsopt" not in names(tmp_path / "x.tsopt")
    assert tsopt("verify", "x.tsopt").code == 0


def test_weights_beside_an_onnx_file_are_told_when_they_replace_others(tsopt, write, tmp_path, monkeypatch):
    from tsopt.runtime.onnx import onnx_model

    write()
    arguments = ("export", "m.py", "--format", "onnx")
    for limit, told in ((1 << 30, 0), (0, 0), (0, 1)):
        monkeypatch.setattr(onnx_model, "SINGLE_FILE", limit)
        ran = tsopt(*arguments)
        assert ran.code == 0, ran.err
        assert ran.out.splitlines().count("replaced the earlier m.onnx.data") == told
    (tmp_path / "m.onnx.data").unlink()
    (tmp_path / "m.onnx.data").mkdir()
    ran = tsopt(*arguments)
    assert ran.code == 2
    assert "the path for weights that the .onnx file may not hold is a directory" in ran.err


def test_a_directory_that_is_made_on_the_way_is_told(tsopt, write, tmp_path):
    write()
    ran = tsopt("export", "m.py", "-o", "new/deep/x.tsopt")
    assert [line for line in ran.out.splitlines() if "created" in line] == [
        "created the directory new",
        "created the directory new/deep",
    ]
    assert "created" not in tsopt("export", "m.py", "-o", "new/deep/x.tsopt").out
    assert "created the directory t" in tsopt("bench", "m.py", "-o", "t/x.csv").out


def test_a_directory_that_was_made_on_the_way_goes_with_the_failure(tsopt, write, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    write()
    monkeypatch.setattr(torch.jit, "save", fail)
    assert tsopt("export", "m.py", "--format", "torchscript", "-o", "new/deep/x.ts").code == 2
    assert names(tmp_path) == ["m.py"]


@pytest.mark.parametrize(
    ("prepare", "arguments", "text"),
    [
        (lambda p: (p / "f").write_text("mine"), ["-o", "f"], "exists and is not a bundle"),
        (lambda p: (p / "f").write_text("mine"), ["-o", "f/m.tsopt"], "cannot be written"),
        (lambda p: (p / "f").write_text("mine"), ["-o", "f/m.onnx", "--format", "onnx"], "cannot be written"),
        (
            lambda p: ((p / "m.tsopt").mkdir(), (p / "m.tsopt" / "f").write_text("mine")),
            [],
            "directory with other files",
        ),
        (lambda p: (p / "m.onnx").mkdir(), ["--format", "onnx"], "is a directory"),
        (lambda p: bundle_of_others(p / "x.tsopt"), ["-o", "x.tsopt"], "directory with other files"),
        (lambda p: bundle_of_others(p / "b"), ["-o", "b/m.onnx", "--format", "onnx"], "inside a bundle"),
        (lambda p: bundle_of_others(p / "b"), ["-o", "b/deep/m.tsopt"], "inside a bundle"),
        (lambda p: bundle_of_others(p / "b"), ["-o", "b", "--format", "onnx"], "is a directory"),
        (lambda p: (p / "x.tsopt").mkdir(), ["-o", "x.tsopt", "--format", "onnx"], "the suffix of tsopt"),
        (lambda p: None, ["-o", "x.onnx"], "the suffix of onnx"),
        (lambda p: None, ["-o", "x.tsopt", "--format", "onnx"], "the suffix of tsopt"),
        (lambda p: None, ["-o", "/dev/full", "--format", "onnx"], "not a regular file"),
        (lambda p: None, ["-o", "/dev/full"], "exists and is not a bundle"),
        (lambda p: os.mkfifo(p / "pipe"), ["-o", "pipe", "--format", "torchscript"], "not a regular file"),
        (lambda p: (p / "link").symlink_to("m.py"), ["-o", "link", "--format", "onnx"], "is a symbolic link"),
        (lambda p: None, ["-o", "-"], "not a usable path"),
        (lambda p: None, ["-o", "a\nb"], "not a usable path"),
        (lambda p: None, ["-o", "x.onnx", "--format", "onnx", "--format", "tsopt"], "names one file"),
        (lambda p: (p / "link").symlink_to("nowhere"), ["-o", "link"], "exists and is not a bundle"),
        (lambda p: None, ["-o", "n" * 300], "cannot be written"),
        (lambda p: None, ["-o", "n" * 235], "cannot be written"),  # fits, but not while it is written
        (lambda p: None, ["-o", "new/" + "n" * 300], "cannot be written"),
    ],
    ids=range(23),
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(tsopt, write, tmp_path, prepare, arguments, text):
    write("raise RuntimeError('the model file must not be read first')\n")
    prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    ran = tsopt("export", "m.py", *arguments)
    assert ran.code == 2
    assert text in ran.err, ran.err
    assert sorted(tmp_path.rglob("*")) == before
    assert all(path.read_text() == "mine" for path in tmp_path.rglob("f") if path.is_file())


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("export", "m.py", "-o", "{}"), "-o"),
        (("export", "m.py", "--report", "{}.md"), "--report"),
        (("export", "m.py", "--html", "{}.html"), "--html"),
        (("profile", "m.py", "-o", "{}.md"), "-o"),
        (("bench", "m.py", "--html", "{}.html"), "--html"),
        (("inspect", "m.py", "--graph", "{}.html"), "--graph"),
        (("check", "m.py", "--update", "--baseline", "{}"), "--baseline"),
    ],
)
@pytest.mark.parametrize("path", ["n" * 235, "m.py/n"])
def test_a_path_that_cannot_be_written_is_refused_with_its_option(tsopt, write, tmp_path, arguments, option, path):
    write("raise RuntimeError('the model file must not be read first')\n")
    ran = tsopt(*(part.format(path) for part in arguments))
    assert ran.code == 2
    assert "the output cannot be written" in ran.err
    assert ran.err.endswith(f"fix: choose another path with {option}\n")
    assert names(tmp_path) == ["m.py"]


@pytest.mark.parametrize("kind", ["onnx", "torchscript"])
def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(tsopt, write, tmp_path, kind, monkeypatch):
    write()
    (tmp_path / "x.out").write_text("the last good one")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("onnx_ir.save", fail)
    monkeypatch.setattr(torch.jit, "save", fail)
    ran = tsopt("export", "m.py", "--format", kind, "-o", "x.out")
    assert ran.code == 2
    assert "No space left" in ran.err
    assert names(tmp_path) == ["m.py", "x.out"]
    assert (tmp_path / "x.out").read_text() == "the last good one"


def test_a_format_that_the_model_does_not_have_is_told_before_one_is_written(tsopt, write, tmp_path):
    write("import torch\nexample_input = torch.ones(2, 4)\n\ndef model(x):\n    return torch.digamma(x)\n")
    formats = ("--format", "torchscript", "--format", "onnx")
    ran = tsopt("export", "m.py", *formats, "-o", "out/")
    assert ran.code == 2
    assert "digamma" in ran.err
    assert "already written" not in ran.err
    assert names(tmp_path) == ["m.py"]
    ran = tsopt("export", "m.py", *formats, "-o", "out/", "--report", "new/r.json", "--html", "r.html")
    assert ran.code == 2
    assert ran.err.endswith("already written: new/r.json, r.html\n")
    assert names(tmp_path) == ["m.py", "new", "r.html"]


def test_a_write_that_fails_says_what_was_written_before(tsopt, write, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    write()
    monkeypatch.setattr("onnx_ir.save", fail)
    ran = tsopt("export", "m.py", "--format", "torchscript", "--format", "onnx", "--report", "r.md", "--json")
    assert (ran.code, ran.err) == (2, "already written: r.md, m.ts\n")
    assert "No space left" in ran.json["why"]
    assert names(tmp_path) == ["m.py", "m.ts", "r.md"]


def test_a_directory_of_the_user_beside_the_output_is_left_alone(tsopt, write, tmp_path):
    write()
    (tmp_path / "x.ts.parts").mkdir()
    (tmp_path / "x.ts.parts" / "thesis.tex").write_text("mine")
    ran = tsopt("export", "m.py", "--format", "torchscript", "-o", "x.ts")
    assert (tmp_path / "x.ts.parts" / "thesis.tex").read_text() == "mine"
    assert ran.code == 0, ran.err


def test_a_race_that_this_machine_has_stopped_exits_with_1_and_a_line(tsopt, write, tmp_path, monkeypatch):
    from tsopt.runtime.backends.torchscript import TorchScriptBackend

    def fail(self, program):
        raise MemoryError

    write()
    with monkeypatch.context() as patch:
        patch.setattr(TorchScriptBackend, "compile", fail)
        ran = tsopt("bench", "m.py", "--backends", "torchscript")
    line = "warning: no candidate could be tried, so eager is used: TorchScript out of memory (MemoryError: )"
    assert (ran.code, ran.err.splitlines()[-1]) == (1, line)
    assert "out of memory" in ran.out
    ran = tsopt("bench", "m.py")
    assert ran.code == 0
    assert "warning" not in ran.err


def test_control_characters_of_a_model_do_not_reach_the_terminal(tsopt, write):
    text = "model = nn.Sequential()\nmodel.add_module('\\x1b[31mred\\x9b\\u202e', nn.Linear(4, 2))\nmodel.eval()\n"
    write("import torch\nfrom torch import nn\n" + text + "example_input = torch.ones(1, 4)\n")
    for command in (
        ["inspect", "m.py"],
        ["inspect", "m.py", "--passes"],
        ["bench", "m.py"],
        ["export", "m.py", "--dry-run"],
    ):
        ran = tsopt(*command)
        assert ran.code == 0, ran.err
        assert not set("\x1b\x9b\u202e") & set(ran.out + ran.err)


@pytest.mark.parametrize("name", ["r.html", "r.md", "r.json"])
def test_the_report_is_saved_too(tsopt, write, tmp_path, name):
    write()
    ran = tsopt("export", "m.py", "--report", f"new/{name}")
    assert ran.code == 0, ran.err
    assert f"report: new/{name}" in ran.out
    assert "eager" in (tmp_path / "new" / name).read_text()
    assert tsopt("export", "m.py", "--report", "r.txt").code == 2


def test_a_page_for_a_browser_is_saved_with_the_program_in_it(tsopt, write, tmp_path):
    write()
    ran = tsopt("export", "m.py", "--html", "new/r.html")
    assert ran.code == 0, ran.err
    assert "page: new/r.html" in ran.out
    assert 'id="graphs"' in (tmp_path / "new" / "r.html").read_text()


@pytest.mark.parametrize(("kind", "suffix"), [("onnx", "onnx"), ("torchscript", "ts")])
def test_a_file_that_keeps_no_state_says_how_it_is_passed(tsopt, write, tmp_path, kind, suffix):
    write(
        "import torch\nfrom torch import nn\n"
        "class Counting(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('count', torch.zeros(1))\n"
        "    def forward(self, x):\n"
        "        self.count.add_(1)\n"
        "        return x * 2 + self.count\n"
        "model = Counting()\nexample_input = torch.ones(2)\n"
    )
    ran = tsopt("export", "m.py", "--format", kind, "--no-isolate")
    assert ran.code == 0, ran.err
    assert f"m.{suffix}: a call of the model writes count; the new values are the first outputs" in ran.err
    assert "It does not store count: pass the present values behind the model's own inputs" in ran.err
    given = torch.ones(2), torch.full((1,), 5.0)
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
        names = [item.name for item in session.get_inputs()]
        found = session.run(None, {name: value.numpy() for name, value in zip(names, given, strict=True)})
    else:
        found = torch.jit.load(tmp_path / "m.ts")(*given)
    assert [value.tolist() for value in found] == [[6], [8, 8]]
    assert "a call of the model writes" not in tsopt("export", "m.py", "-o", "b.tsopt", "--no-isolate").err
