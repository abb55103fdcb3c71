from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.backends.gpu_imitation import needs_gpu
from tsopt.runtime.backends.torchscript import TorchScriptBackend


def compiled(model, *args):
    return tsopt.compile(tsopt.capture(model, args), "torchscript")


def test_batch_norm_and_convolution_compute_the_same():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).eval()
    model[1].running_mean.normal_()
    value = torch.randn(2, 1, 6, 6)
    found = compiled(model, value)
    for scale in (1, 10):
        torch.testing.assert_close(found(value * scale), model(value * scale).detach(), rtol=1e-4, atol=1e-5)


def test_a_term_that_rounds_on_purpose_is_not_folded_into_a_convolution():
    model = nn.Conv2d(1, 2, 3)
    value = torch.randn(2, 1, 6, 6)
    found = compiled(lambda x: (model(x) + 1.5 * 2**23) - 1.5 * 2**23, value)(value)
    assert torch.equal(found, found.round())


def test_the_trace_depends_on_no_value():
    def model(x, i):
        return torch.where(x > 0, x, -x)[i], x.argmax()

    found = compiled(model, torch.ones(3), torch.tensor([0]))
    args = (torch.tensor([-1.0, -2.0, 3.0]), torch.tensor([1]))
    torch.testing.assert_close(found(*args), model(*args))


def test_numbers_that_it_would_not_draw_are_refused_where_others_come_after_them():
    def model(x):
        torch.rand(3).lt(0.5)
        return x + torch.randn_like(x)

    with pytest.raises(tsopt.BackendError, match=r"does not draw the numbers of aten\.rand that"):
        compiled(model, torch.ones(3))
    assert torch.equal(
        compiled(lambda x: (torch.rand(3), x + 1)[1], torch.ones(3))(torch.ones(3)), torch.full((3,), 2.0)
    )


def test_an_error_of_the_compiler_is_typed(monkeypatch, mlp_program):
    def fail(*args, **kwargs):
        raise RuntimeError("INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.jit, "freeze", fail)
    with pytest.raises(tsopt.BackendError, match="TorchScript failed to compile this model") as caught:
        tsopt.compile(mlp_program, "torchscript")
    assert "INTERNAL ASSERT" in caught.value.why


def test_a_torch_without_torchscript_is_missing_it(monkeypatch):
    from tsopt.runtime.backends.backend import get_backend

    monkeypatch.delattr(torch.jit, "trace")
    with pytest.raises(tsopt.BackendError, match="has no TorchScript"):
        get_backend("torchscript")


def test_no_warning_reaches_the_user(mlp_program, mlp_input, recwarn, capfd):
    tsopt.compile(mlp_program, "torchscript")(mlp_input)
    assert [str(w.message) for w in recwarn] == []
    found = capfd.readouterr()
    assert found.out + found.err == ""


def test_what_eager_raises_is_raised_as_eager_raises_it():
    model = torch.nn.Embedding(4, 2).eval()
    executable = tsopt.compile(tsopt.capture(model, torch.tensor([1, 3])), "torchscript")
    with pytest.raises(IndexError, match=r"^index out of range in self$"):
        executable(torch.tensor([1, 4]))


class TimesSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return x + self.factor * x.shape[0]


def test_a_size_may_be_an_operand_of_a_number_that_is_a_weight():
    model = TimesSize().eval()
    program = tsopt.capture(model, torch.randn(4, 3), dynamic={"x": {0: "n[2..20]"}})
    x = torch.randn(7, 3)
    torch.testing.assert_close(tsopt.compile(program, "torchscript")(x), model(x))


@pytest.mark.parametrize(
    ("dtype", "constant", "is_refused"),
    [
        (torch.int64, torch.tensor(1.1, dtype=torch.float64), True),
        (torch.bool, torch.tensor(1.1, dtype=torch.float64), True),
        (torch.int64, torch.tensor(1.1), False),
        (torch.float32, torch.tensor(1.1, dtype=torch.float64), False),
        (torch.int64, torch.tensor([1.1], dtype=torch.float64), False),
    ],
)
def test_a_constant_that_it_takes_for_a_number_of_another_dtype_is_refused(dtype, constant, is_refused):
    program = tsopt.capture(lambda x: x * constant, torch.ones(3, dtype=dtype))
    found = TorchScriptBackend().unsupported(program)
    assert [("Python number" in item.why) for item in found] == [True] * is_refused
    if not is_refused:
        x = torch.ones(3, dtype=dtype)
        torch.testing.assert_close(tsopt.compile(program, "torchscript")(x), x * constant)


@needs_gpu
def test_on_a_gpu_no_kernels_are_generated():
    """They would take 20 minutes for this model, whose second call generates them."""

    def model(x):
        return torch.cat([x[:, i : i + 1 + i % 3] * i for i in range(20)], dim=1)

    x = torch.randn(4, 64, device="cuda")
    made = tsopt.compile(tsopt.transform(tsopt.capture(model, x)), "torchscript")
    for scale in (1, 2, 3):
        torch.testing.assert_close(made(x * scale), model(x * scale))
    assert "TensorExpr" not in str(torch.jit.last_executed_optimized_graph())


@pytest.mark.parametrize("part", [lambda y: y[:, :2] * 1, lambda y: y[:, :2] + 0, lambda y: y[:, 1] * 1])
def test_a_result_that_torch_packs_is_packed(part):
    x = torch.randn(3, 4)
    found = tsopt.compile(tsopt.capture(lambda x: part(x.tanh()), x), "torchscript")(x)
    torch.testing.assert_close(found, part(x.tanh()))
    assert found.is_contiguous()
