from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tsopt
from tests.forks import FORKS, in_a_fork
from tests.runtime.helpers import Counter
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.backends.table import BACKENDS
from tsopt.runtime.calling.executable import Executable

CUDA = torch.cuda.is_available()
REAL = ("eager", "torchscript", "onnxruntime")


@pytest.fixture(params=REAL)
def executable(request, executables):
    return executables[request.param]


def compiled(model, example, name):
    return tsopt.compile(tsopt.capture(model, example), name)


# ---- the table ----------------------------------------------------------------------------------------------


def test_an_unknown_backend_is_named_with_the_known_ones():
    with pytest.raises(tsopt.UsageError, match="unknown backend 'tensorrt'") as caught:
        get_backend("tensorrt")
    assert all(name in caught.value.fix for name in BACKENDS)


def test_an_unknown_option_is_named_with_the_known_ones(mlp_program):
    with pytest.raises(tsopt.UsageError, match="unknown option 'opset' of the backend eager") as caught:
        tsopt.compile(mlp_program, "eager", opset=17)
    assert caught.value.fix == "use one of: threads"


def test_a_backend_without_options_says_so():
    with pytest.raises(tsopt.UsageError) as caught:
        get_backend("null", threads=2)
    assert caught.value.fix == "pass no options"


def test_a_missing_library_is_named(monkeypatch):
    from tsopt.runtime.onnx.ort import OnnxRuntimeBackend

    monkeypatch.setattr(OnnxRuntimeBackend, "missing", lambda self: "pip install onnxruntime")
    with pytest.raises(tsopt.BackendError, match="pip install onnxruntime"):
        get_backend("onnxruntime")


@pytest.mark.parametrize(
    "name", [name for name, info in BACKENDS.items() if info.races != "gpu" or torch.cuda.is_available()]
)
def test_every_backend_of_the_table_is_usable_here(name):
    assert get_backend(name).name == name
    assert get_backend(name).missing() is None


def test_the_null_backend_returns_zeros_of_the_right_type(mlp_program, mlp_input):
    assert torch.equal(tsopt.compile(mlp_program, "null")(mlp_input), torch.zeros(2, 3))


def test_compiling_leaves_the_program_alone(mlp_program):
    before = mlp_program.fingerprint(contents=True)
    for name in ("eager", "torchscript"):
        tsopt.compile(mlp_program, name)
    assert mlp_program.fingerprint(contents=True) == before


# ---- the call -----------------------------------------------------------------------------------------------


def test_the_answer_is_the_models(executable, mlp, mlp_input):
    found = executable(mlp_input)
    torch.testing.assert_close(found, mlp(mlp_input).detach())
    assert type(found) is torch.Tensor
    assert not found.requires_grad


def test_two_answers_do_not_share_memory(executable, mlp_input):
    first = executable(mlp_input)
    kept = first.clone()
    executable(mlp_input + 1)
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: torch.cat([x, x])[::2][:0].new_tensor(x.tolist()),
        lambda x: x[:1].expand(2, 6),
        lambda x: nn.Parameter(x.clone(), requires_grad=False),
        lambda x: nn.Parameter(x.t().contiguous().t(), requires_grad=False),
        lambda x: torch.view_as_complex(torch.stack([x, x], -1)).conj().imag,
        lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(2, 6),
    ],
    ids=["transposed", "strided", "fresh", "expanded", "parameter", "both", "negative bit", "unaligned"],
)
def test_any_tensor_of_the_type_is_taken(executable, mlp, mlp_input, change):
    value = change(mlp_input)
    torch.testing.assert_close(executable(value), mlp(value).detach())


@pytest.mark.parametrize("change", [lambda x: x.clone().requires_grad_(), lambda x: nn.Parameter(x.clone())])
def test_an_input_that_wants_gradients_is_taken_where_none_are_computed(executable, mlp, mlp_input, change):
    value = change(mlp_input)
    with torch.no_grad():
        torch.testing.assert_close(executable(value), mlp(value))
    with pytest.raises(tsopt.SignatureError, match=r"(?s)cannot serve.*gradients are required.*torch.no_grad"):
        executable(value)


def test_an_input_from_inference_mode_is_taken(executable, mlp, mlp_input):
    with torch.inference_mode():
        value = mlp_input + 1
        found = executable(value)
    torch.testing.assert_close(found, mlp(mlp_input + 1).detach())


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((torch.zeros(2, 6, dtype=torch.float64),), {}, "is float64, expected float32"),
        ((torch.zeros(2, 6, dtype=torch.int32),), {}, "is int32, expected float32"),
        ((torch.zeros(3, 6),), {}, r"has shape \[3, 6\], expected \[2, 6\]"),
        ((torch.zeros(6),), {}, "has shape"),
        ((torch.zeros(2, 6, device="meta"),), {}, "is on meta, expected cpu"),
        ((), {}, "does not match the signature"),
        ((torch.zeros(2, 6), torch.zeros(1)), {}, "does not match the signature"),
        ((torch.zeros(2, 6),), {"scale": 2}, "does not match the signature"),
        (([torch.zeros(2, 6)],), {}, "does not match the signature"),
        ((None,), {}, "does not match the signature"),
        (("x",), {}, "does not match the signature"),
        ((), {"input": torch.zeros(2, 6)}, "does not match the signature"),
        ((torch.zeros(2, 6).numpy(),), {}, "ndarray|array|tensor"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_by_name(executable, args, kwargs, text):
    assert executable.accepts(args, kwargs) is None
    with pytest.raises(tsopt.SignatureError, match=text) as caught:
        executable(*args, **kwargs)
    assert caught.value.fix


def test_the_order_of_keywords_does_not_count():
    def model(x, *, a, b):
        return x + a - 2 * b

    x, a, b = torch.ones(2), torch.full((2,), 5.0), torch.full((2,), 7.0)
    found = compiled(model, tsopt.example(x, a=a, b=b), "eager")
    assert torch.equal(found(x, b=b, a=a), found(x, a=a, b=b))
    assert torch.equal(found(x, b=b, a=a), model(x, a=a, b=b))


@pytest.mark.parametrize("other", [2, 1.5, True, None, "1.0"])
def test_another_constant_is_another_form(other):
    found = compiled(lambda x, scale: x * 2 if scale == 1.0 else x, (torch.ones(2), 1.0), "eager")
    assert found(torch.ones(2), 1.0).tolist() == [2, 2]
    with pytest.raises(tsopt.SignatureError):
        found(torch.ones(2), other)


def test_minus_zero_is_another_constant_than_zero():
    def model(x, sign):
        return torch.copysign(x, torch.tensor(sign))

    found = compiled(model, (torch.ones(2), 0.0), "eager")
    with pytest.raises(tsopt.SignatureError):
        found(torch.ones(2), -0.0)


def test_a_configuration_object_that_was_changed_is_another_form():
    class Options:
        def __init__(self, scale):
            self.scale = scale

    options = Options(2.0)
    found = compiled(lambda x, options: x * options.scale, (torch.ones(2), options), "eager")
    assert found(torch.ones(2), options).tolist() == [2, 2]
    options.scale = 3.0
    with pytest.raises(tsopt.SignatureError):
        found(torch.ones(2), options)


@pytest.mark.sliced(8)
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3)])
def test_scalars_and_empty_tensors_go_in_and_out(name, shape):
    found = compiled(lambda x: x * 2 + 1, torch.ones(shape), name)(torch.full(shape, 3.0))
    assert type(found) is torch.Tensor
    assert torch.equal(found, torch.full(shape, 7.0))


@pytest.mark.sliced(9)
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_dtypes_go_in_and_out(name, dtype):
    value = torch.tensor([1, 0, 1]).to(dtype)
    model = torch.logical_not if dtype == torch.bool else lambda x: x + x
    found = compiled(model, value, name)(value)
    assert found.dtype == dtype
    assert torch.equal(found, model(value))


@pytest.mark.parametrize("name", REAL)
def test_nested_results_keep_their_types(name):
    def model(pair, *, options):
        total = pair[0] + pair[1] * options["w"]
        return {"total": total, "rest": [total.sum(), (pair[0] * 2, None, 3)]}

    x, y, w = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    example = tsopt.example((x, y), options={"w": w})
    found = compiled(model, example, name)((x, y), options={"w": w})
    wanted = model((x, y), options={"w": w})
    assert list(found) == list(wanted)
    assert type(found["rest"]) is list
    assert type(found["rest"][1]) is tuple
    assert found["rest"][1][1:] == (None, 3)
    torch.testing.assert_close(found["total"], wanted["total"])
    assert found["rest"][0].shape == ()


@pytest.mark.sliced(7)
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize(
    "model",
    [lambda x: x, lambda x: (x, x + 1), lambda x: (x + 1, x + 1), lambda x: x.t(), lambda x: x.view(4)],
    ids=["identity", "input and more", "equal outputs", "transposed", "view"],
)
def test_outputs_that_are_inputs_or_views_have_the_right_values(name, model):
    value = torch.arange(4.0).view(2, 2)
    found, wanted = compiled(model, value, name)(value), model(value)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", REAL)
def test_an_output_that_is_a_weight_has_its_values(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(3.0))

        def forward(self, x):
            return x + self.table, self.table * 2

    found = compiled(Model(), torch.zeros(3), name)(torch.ones(3))
    assert [value.tolist() for value in found] == [[1, 2, 3], [0, 2, 4]]


# ---- state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_a_counter_counts(name):
    model = Counter()
    found = compiled(model, torch.zeros(2), name)
    assert model.count.tolist() == [0, 0]
    assert [found(torch.zeros(2)).tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert model.count.tolist() == [3, 3]


@pytest.mark.parametrize("name", REAL)
def test_a_write_to_the_input_is_kept(name):
    def model(x):
        x.add_(1)
        return x * 2

    value = torch.zeros(3)
    found = compiled(model, torch.zeros(3), name)(value)
    assert value.tolist() == [1, 1, 1]
    assert found.tolist() == [2, 2, 2]


# ---- the output contract ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([torch.zeros(2, 3, dtype=torch.float64)], "output: .* is float64, expected float32"),
        ([torch.zeros(3, 2)], "output: .* has shape"),
        ([torch.zeros(2, 3)] * 2, "returned . outputs, expected 1"),
        ([], "returned . outputs, expected 1"),
    ],
)
def test_a_backend_that_breaks_the_output_contract_is_named(mlp_program, mlp_input, outputs, text):
    broken = Executable("quick", mlp_program.signature, lambda inputs: outputs)
    with pytest.raises(tsopt.BackendError, match=text) as caught:
        broken(mlp_input)
    assert "quick" in caught.value.what


# ---- manners ------------------------------------------------------------------------------------------------


@FORKS
@pytest.mark.parametrize("name", ["eager", "torchscript"])
def test_in_a_fork_torch_has_the_threads_that_it_was_given_there(name, torch_threads):
    """More of them would be waited for that only the parent has."""
    model, x = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).eval(), torch.randn(256, 256)
    program = tsopt.capture(model, x)
    torch_threads(2)
    found = tsopt.compile(program, name, threads=2)
    wanted = found(x)

    def answers():
        torch.set_num_threads(1)
        return torch.allclose(found(x), wanted, atol=1e-5) and torch.get_num_threads() == 1

    assert in_a_fork(answers)


@pytest.mark.parametrize("name", ["eager", "torchscript"])
def test_the_threads_asked_for_are_those_of_the_call_alone(mlp_program, mlp_input, name, monkeypatch):
    before, asked = torch.get_num_threads(), []
    found = tsopt.compile(mlp_program, name, threads=before + 1)
    real = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: (asked.append(n), real(n)))
    found(mlp_input)
    assert asked == [before + 1, before]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", REAL)
def test_compiling_and_calling_leaves_rng_and_grad_mode_alone_and_warns_of_nothing(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Softmax(-1)).eval()
    rng, grad = torch.get_rng_state(), torch.is_grad_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compiled(model, torch.ones(1, 3), name)
        found(torch.ones(1, 3))
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled() == grad


@pytest.mark.parametrize("name", ["eager", "torchscript"])
def test_a_random_model_stays_random_and_compiling_it_draws_nothing(name):
    rng = torch.get_rng_state()
    found = compiled(lambda x: x + torch.rand(100), torch.zeros(100), name)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not torch.equal(found(torch.zeros(100)), found(torch.zeros(100)))


def test_the_options_of_a_name_are_those_of_the_backend():
    made = get_backend("onnxruntime?threads=1", threads=2)
    assert (made.name, made.threads) == ("onnxruntime", 1)
    with pytest.raises(tsopt.UsageError, match="unknown option 'colour'"):
        get_backend("onnxruntime?colour=red")
    with pytest.raises(tsopt.UsageError, match=r"the option 'threads' in .* has no value"):
        get_backend("onnxruntime?threads")


def test_an_input_that_is_the_models_own_state_is_refused():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(3))

        def forward(self, x):
            self.n += 1
            return x + self.n

    model = Counter().eval()
    executable = tsopt.compile(tsopt.capture(model, torch.zeros(3)), "eager")
    assert executable(torch.zeros(3)).tolist() == [1, 1, 1]
    with pytest.raises(tsopt.SignatureError, match="aliases a tensor of the model that the call writes"):
        executable(model.n)
