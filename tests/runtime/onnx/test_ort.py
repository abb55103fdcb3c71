from __future__ import annotations

import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsopt
from tests.runtime.helpers import save
from tsopt.runtime.onnx.export import to_onnx

ONE = torch.ones(2, 3)


# ---- names --------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleDict({"fc": nn.Linear(3, 2)})

    def forward(self, image, mask):
        return {"logits": self.layer["fc"](image) * mask, "total": image.sum()}


def test_names_in_the_file_are_the_users():
    model = to_onnx(tsopt.capture(Named(), (ONE, torch.ones(2, 2)))).model
    assert [value.name for value in model.graph.inputs] == ["image", "mask"]
    assert [value.name for value in model.graph.outputs] == ["logits", "total"]
    assert {"layer.fc.weight", "layer.fc.bias"} <= set(model.graph.initializers)


NAMES = {
    "linear": lambda linear: nn.functional.linear(linear, torch.ones(3, 3)) + linear,
    "output": lambda output: output * 2 + 1,
    "input": lambda input: (input + 1).relu() * input,
    "add": lambda add: (add + 1) * (add + 2),
    "mul": lambda mul: mul * 2 * mul,
    "val_0": lambda val_0: val_0 * 3 - val_0.sum(),
    "weight": nn.Identity(),
}


@pytest.mark.sliced(3)
@pytest.mark.parametrize("name", NAMES)
def test_an_input_may_be_called_as_an_inner_value(name):
    value = torch.randn(2, 3)
    model = NAMES[name]
    found = tsopt.compile(tsopt.capture(model, value), "onnxruntime")(value)
    torch.testing.assert_close(found, model(value))


def test_an_input_and_a_weight_may_have_the_same_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 2.0))
            self.shift = nn.Parameter(torch.full((3,), 5.0))

        def forward(self, shift, scale):
            return shift * self.scale + scale * self.shift

    args = (ONE, ONE * 3)
    found = tsopt.compile(tsopt.capture(Model(), args), "onnxruntime")(*args)
    torch.testing.assert_close(found, Model()(*args).detach())


def test_outputs_may_have_the_names_of_inputs():
    def model(x, y):
        return {"y": x + 1, "x": y * 2, "output": x * y}

    args = (ONE, ONE * 3)
    found = tsopt.compile(tsopt.capture(model, args), "onnxruntime")(*args)
    torch.testing.assert_close(found, model(*args))


def test_equal_inputs_are_not_confused():
    def model(a, b, c):
        return a - 2 * b + 3 * c

    args = tuple(torch.randn(4) for _ in range(3))
    found = tsopt.compile(tsopt.capture(model, args), "onnxruntime")(*args)
    torch.testing.assert_close(found, model(*args))


# ---- numbers that the exporter and the runtime have got wrong -----------------------------------------------


def test_adding_zero_turns_minus_zero_into_zero():
    value = torch.tensor([-0.0, 1.0])
    found = tsopt.compile(tsopt.capture(lambda x: x + 0.0, value), "onnxruntime")(value)
    assert torch.equal(torch.signbit(found), torch.tensor([False, False]))


@pytest.mark.sliced(3)
@pytest.mark.parametrize(
    ("model", "at"),
    [
        (lambda x: x / (x.abs().sum() + 1e-8), 0.0),
        (lambda x: (x + 1e-9).log(), 0.0),
        (lambda x: 1 / (x - 1e-12), 0.0),
        (lambda x: torch.isclose(x, x * 0), 1e-9),
        (lambda x: x / (x + torch.tensor(1e-4) * torch.tensor(1e-4)), 1e-9),
        (lambda x: (x * 1.00001 - x) * 1e5, 3.0),
        (lambda x: (x / 1.00001 - x) * 1e5, 3.0),
    ],
)
def test_a_number_next_to_0_or_1_is_not_taken_for_it(model, at):
    """The exporter's rules are for 0 within 1e-8 and for 1 within 1e-5."""
    value = torch.full((3,), at)
    found = tsopt.compile(tsopt.capture(model, torch.ones(3)), "onnxruntime")(value)
    torch.testing.assert_close(found, model(value), rtol=0.1, atol=0)


def test_a_split_is_one_node_with_and_without_the_rules_of_the_exporter():
    for epsilon in (1e-3, 1e-9):

        def model(x, epsilon=epsilon):
            return torch.cat([part + epsilon for part in x.split(2, -1)], 0)

        made = to_onnx(tsopt.capture(model, torch.ones(3, 4))).model
        kinds = [node.op_type for node in made.graph.all_nodes()]
        assert kinds.count("Split") == 1
        assert not {"SplitToSequence", "SequenceAt"} & set(kinds)


def test_a_half_precision_sum_never_comes_back_as_float32():
    value = torch.ones(4, dtype=torch.float16)
    found = tsopt.compile(tsopt.capture(torch.sum, value), "onnxruntime")
    try:
        assert found(value).dtype == torch.float16
    except tsopt.BackendError as error:
        assert "is float32, expected float16" in error.what  # noqa: PT017


def test_indices_that_are_not_checked_are_stated():
    found = tsopt.compile(tsopt.capture(nn.Embedding(4, 2), torch.tensor([1])), "onnxruntime")
    assert "out-of-range indices" in found.notes[0]


def test_large_weights_are_shared_not_copied_and_outlive_the_program():
    model = nn.Linear(64, 64)
    value = torch.ones(1, 64)
    found = tsopt.compile(tsopt.capture(model, value), "onnxruntime")
    wanted = model(value).detach().clone()
    del model
    junk = [torch.randn(64, 64) for _ in range(50)]
    torch.testing.assert_close(found(value), wanted)
    del junk


def test_nothing_is_printed_or_warned_while_exporting(capfd, recwarn):
    tsopt.compile(tsopt.capture(Named(), (ONE, torch.ones(2, 2))), "onnxruntime")
    found = capfd.readouterr()
    assert found.out + found.err == ""
    assert [str(w.message) for w in recwarn] == []


# ---- options of a session -----------------------------------------------------------------------------------------


@pytest.fixture
def sessions(monkeypatch):
    """The options of the sessions that are made."""

    made = []
    real = onnxruntime.InferenceSession

    def session(model, options, **rest):
        made.append(options)
        return real(model, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    return made


@pytest.mark.sliced(2)
@pytest.mark.parametrize(
    ("asked", "read"),
    [
        ({"spinning": False}, lambda o: o.get_session_config_entry("session.intra_op.allow_spinning") == "0"),
        ({"parallel": True}, lambda o: o.execution_mode.name == "ORT_PARALLEL"),
        ({"arena": False}, lambda o: not o.enable_cpu_mem_arena),
        ({"threads": 1}, lambda o: o.intra_op_num_threads == 1),
    ],
    ids=["spinning", "parallel", "arena", "threads"],
)
def test_options_reach_the_session_and_the_one_that_is_loaded(
    sessions, mlp, mlp_input, mlp_program, tmp_path, asked, read
):
    plain = tsopt.compile(mlp_program, "onnxruntime", threads=2)
    chosen = tsopt.compile(mlp_program, "onnxruntime", **({"threads": 2} | asked))
    torch.testing.assert_close(chosen(mlp_input), plain(mlp_input))
    loaded = tsopt.load(save(chosen, tmp_path / "m.tsopt", mlp, mlp_input))
    torch.testing.assert_close(loaded(mlp_input), plain(mlp_input))
    assert [read(options) for options in sessions] == [False, True, True]
    stops = [options.get_session_config_entry("session.force_spinning_stop") for options in sessions]
    assert stops == ["1"] * 3, "threads that spin after a call are in the way of torch's"


@pytest.mark.parametrize(
    ("version", "disabled"), [("1.29.0", ["SkipLayerNormFusion"]), ("1.30.0.dev1", []), ("2.0", [])]
)
def test_a_kernel_without_digits_is_not_used_where_it_is_that_of_old_versions(
    monkeypatch, mlp_program, version, disabled
):
    given, real = [], onnxruntime.InferenceSession

    def session(model, options, **rest):
        given.append(rest.get("disabled_optimizers", []))
        return real(model, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(onnxruntime, "__version__", version)
    tsopt.compile(mlp_program, "onnxruntime")
    assert given == [disabled]


def test_options_that_are_as_usual_are_not_in_a_bundle(mlp_program):
    assert tsopt.compile(mlp_program, "onnxruntime", threads=2, spinning=True).options == {"threads": 2}


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (lambda a, b: (a > 0) * (b > 0), (torch.randn(4), torch.randn(4))),
        (lambda a: 1.0 - a, (torch.arange(4),)),
        (lambda a: 1.0 - 2 * a, (torch.arange(4, dtype=torch.int32),)),
        (lambda a: a.new_empty(a.shape).copy_(a) * 2, (torch.randn(4),)),
        (lambda a: torch.cat([torch.empty_like(a).fill_(3), a]), (torch.randn(4),)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_runtime_has_no_kernel_for_is_said_in_other_words(model, given):
    program = tsopt.transform(tsopt.capture(model, given))
    torch.testing.assert_close(tsopt.compile(program, "onnxruntime")(*given), model(*given))


@pytest.mark.sliced(3)
@pytest.mark.parametrize("backend", ["onnxruntime", "onnxruntime?fused=false", "openvino"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
@pytest.mark.filterwarnings("ignore")
def test_a_row_that_attends_to_nothing_is_zero(backend, heads, groups):
    def model(q, k, mask):
        return F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=heads != groups)

    q, k = torch.randn(2, heads, 5, 8), torch.randn(2, groups, 5, 8)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask[0, :, 2] = False
    run = tsopt.compile(tsopt.transform(tsopt.capture(model, (q, k, mask))), backend)
    found = run(q, k, mask)
    torch.testing.assert_close(found, model(q, k, mask))
    assert not found[0, :, 2].any()
