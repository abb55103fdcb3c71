"""Models that ONNX Runtime cannot run as torch does are refused, by the name of the op and its place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.runtime.onnx.in_a_block import InABlock
from tsopt.runtime.backends import onednn
from tsopt.runtime.backends.backend import get_backend
from tsopt.runtime.onnx.openvino import OpenVinoBackend
from tsopt.runtime.onnx.ort import OnnxRuntimeBackend

ONE, INTS = torch.ones(2, 3), torch.tensor([7, -7, 9])


class Divide(nn.Module):
    """A module, because torch records source lines only for modules."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


def refusals(model, example):
    return OnnxRuntimeBackend().unsupported(tsopt.capture(model, example))


@pytest.mark.parametrize(
    "model",
    [
        lambda x, y: x // y,
        lambda x, y: x % y,
        lambda x, y: torch.fmod(x, y),
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
    ],
)
def test_an_integer_division_by_a_computed_value_is_refused(model):
    (found,) = refusals(Divide(model), (INTS, INTS + 1))
    assert "integer division" in found.why
    assert "test_refusals.py" in found.where


@pytest.mark.parametrize("divisor", [0, -1])
def test_an_integer_division_by_a_trapping_literal_is_refused(divisor):
    assert refusals(lambda x: torch.div(x, divisor, rounding_mode="trunc"), INTS)


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (lambda x: torch.div(x, 2, rounding_mode="floor"), INTS),
        (lambda x: x / 2, INTS),
        (lambda x, y: x / y, (INTS, INTS + 1)),
        (lambda x, y: torch.fmod(x, y), (ONE, ONE + 1)),
    ],
)
def test_a_division_that_cannot_trap_is_taken_and_right(model, example):
    args = example if isinstance(example, tuple) else (example,)
    assert refusals(model, example) == []
    found = tsopt.compile(tsopt.capture(model, example), "onnxruntime")(*args)
    torch.testing.assert_close(found, model(*args))


@pytest.mark.parametrize(
    "model",
    [
        torch.rand_like,
        lambda x: x + torch.randn(3),
        lambda x: nn.functional.dropout(x, 0.5, training=True),
        torch.bernoulli,
        lambda x: torch.multinomial(x, 1),
    ],
)
def test_random_ops_are_refused(model):
    (found, *_) = refusals(model, ONE)
    assert "random" in found.why


def test_dropout_in_eval_mode_is_not_random():
    assert refusals(nn.Dropout(0.5).eval(), ONE) == []


def test_a_check_that_would_be_lost_is_refused():
    def model(x):
        torch._assert_async((x > 0).all(), "must be positive")
        return x * 2

    (found,) = refusals(model, ONE)
    assert "check" in found.why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_a_dtype_that_the_runtime_has_not_is_refused_by_the_name_of_the_input(dtype):
    found = refusals(lambda image: image + image, ONE.to(dtype))
    assert found[0].where == "image"
    assert str(dtype).removeprefix("torch.") in found[0].why


def test_bf16_inside_is_no_matter_of_the_interface():
    program = tsopt.transform(tsopt.capture(lambda x: x.bfloat16().float(), ONE))
    assert OnnxRuntimeBackend().unsupported(program) == []


def test_the_check_that_every_cast_brings_along_keeps_no_model_out():
    assert refusals(lambda x: x.double(), ONE) == []


def test_compile_refuses_with_the_place():
    with pytest.raises(tsopt.BackendError, match=r"onnxruntime does not support this model: .*random") as caught:
        tsopt.compile(tsopt.capture(torch.rand_like, ONE), "onnxruntime")
    assert caught.value.fix


@pytest.mark.parametrize("op", [torch.special.bessel_j0, torch.linalg.eigvalsh])
def test_an_op_without_translation_is_named_with_its_module(op):
    with pytest.raises(tsopt.BackendError, match="no translation for ") as caught:
        tsopt.compile(tsopt.capture(InABlock(op), torch.eye(3)), "onnxruntime")
    assert "block" in (caught.value.where or "")
    assert "in_a_block.py" in caught.value.where


def test_a_model_that_the_runtime_refuses_is_a_typed_error():
    from tsopt.runtime.onnx.ort import open_session

    with pytest.raises(tsopt.BackendError, match="rejects the exported model"):
        open_session(b"not a model", {"threads": 1})


@pytest.mark.parametrize("several", [False, True])
def test_a_kernel_that_refuses_a_call_is_told_in_our_words(several):
    def forward(x, *more):
        return (torch.zeros_like(x).scatter_add(1, torch.zeros_like(x, dtype=torch.int64), x), *more)

    inputs = [torch.ones(2, 3, dtype=torch.float16), torch.ones(1)][: 2 if several else 1]
    made = tsopt.compile(tsopt.capture(forward, tsopt.example(*inputs)), "onnxruntime")
    with pytest.raises(tsopt.BackendError, match="ONNX Runtime failed to run this call") as caught:
        made(*inputs)
    assert "MLFloat16" in caught.value.why


# ---- what the exporter, or OpenVINO, makes another computation of ---------------------------------------------

IMAGE = torch.ones(1, 2, 6, 7)
MAGIC = 1.5 * 2**23  # adding and subtracting it rounds to an integer
PLACES = torch.zeros(1, 2, 6, 7, dtype=torch.int64)
BY_THE_EXPORTER = [
    (lambda x: torch.zeros_like(x).scatter_reduce(1, PLACES, x, "mean"), "makes a sum of scatter_reduce"),
    (lambda x: F.avg_pool2d(x, 3, divisor_override=5), "leaves out divisor_override"),
    (lambda x: F.avg_pool3d(x, 2, divisor_override=5), "leaves out divisor_override"),
    (lambda x: x[:, :0].mean(1), "do not answer NaN"),
    (lambda x: x.byte() << 3, "signed integers"),
    (lambda x: x.byte() >> 1, "signed integers"),
]
BY_OPENVINO = [
    (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), "by another number"),
    (lambda x: F.avg_pool1d(x[0], 2, 2, 1, ceil_mode=True), "by another number"),
    (lambda x: F.max_pool2d(x, 2, 3, 1, ceil_mode=True), "begins in the padding"),
    (lambda x: F.interpolate(x, size=(4, 4), mode="bilinear", antialias=True), "other weights"),
    (lambda x: F.interpolate(x, size=(4, 4), mode="bicubic", antialias=True), "other weights"),
    *(
        (rounding, "OpenVINO does not round as PyTorch does where 12582")
        for rounding in (
            lambda x: (x * 40 + MAGIC) - MAGIC,
            lambda x: MAGIC - (MAGIC - x).relu(),
            lambda x: (x * 40 + (MAGIC + 3)) - MAGIC,
            lambda x: torch.sub(torch.add(x, MAGIC), 1.0, alpha=MAGIC),
            lambda x: torch.add(x, 1.0, alpha=MAGIC) - MAGIC,
            lambda x: -(x + MAGIC) + MAGIC,
            lambda x: (x + MAGIC) * 2 - 2 * MAGIC,
            lambda x: (x + MAGIC + x) / 2 - MAGIC / 2,
            lambda x: (x + MAGIC).permute(0, 2, 3, 1).clamp(min=0).double() - MAGIC,
            lambda x: (x[..., :3] + MAGIC).split(1, 1)[0] - MAGIC,
        )
    ),
]
TAKEN = [
    lambda x: torch.zeros_like(x).scatter_reduce(1, PLACES, x, "sum"),
    lambda x: F.avg_pool2d(x, 3, 2, 1),
    lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    lambda x: F.avg_pool2d(x[..., :5, :5], 3, 2, 1, ceil_mode=True),
    lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    lambda x: F.interpolate(x, size=(4, 4), mode="bilinear"),
    lambda x: x.mean(1),
    lambda x: (x > 0).int() << 3,
    lambda x: (x + 2.0) - 2.0,
    lambda x: x + 4096.0,
    lambda x: (x > 0).int() + 4096 - 4096,
    lambda x: (x.sin() + 10000.0).log() + (x.cos() + 10000.0).sqrt(),
    lambda x: (x + 4096.0) + 4096.0,
    lambda x: 4096.0 - x * 2.0 + 4096.0,
]


@pytest.mark.parametrize(("model", "why"), BY_THE_EXPORTER)
def test_what_the_exporter_gets_wrong_is_refused(model, why):
    for backend in (OnnxRuntimeBackend(), OpenVinoBackend()):
        assert any(why in found.why for found in backend.unsupported(tsopt.capture(model, IMAGE)))


@pytest.mark.parametrize(("model", "why"), BY_OPENVINO)
def test_what_openvino_gets_wrong_is_refused_by_it_alone(model, why):
    program = tsopt.capture(model, IMAGE)
    assert any(why in found.why for found in OpenVinoBackend().unsupported(program))
    assert not OnnxRuntimeBackend().unsupported(program)


def norm(layer, kind, dtype=torch.float32):
    made = kind(4).eval()
    nn.init.constant_(made.bias, MAGIC)
    return nn.Sequential(layer, made).to(dtype)


class Rounded(nn.Module):
    """Rounds what a layer computes; k is added, if any, and the same or MAGIC subtracted."""

    def __init__(self, layer, k=None):
        super().__init__()
        self.layer = layer
        self.register_buffer("k", k)

    def forward(self, x):
        y = self.layer(x)
        return y - MAGIC if self.k is None else (y + self.k) - self.k


ROWS, PLANES = torch.Size([5, 3]), torch.Size([2, 3, 6, 6])
FEATURES = MAGIC + 2 * torch.arange(4.0)
CHANNELS = FEATURES[:, None, None]
BY_TENSORS = {
    "conv": (Rounded(nn.Conv2d(3, 4, 3), CHANNELS), PLANES),
    "conv1d": (Rounded(nn.Conv1d(3, 4, 3), FEATURES[:, None]), PLANES[:3]),
    "conv, scaled": (Rounded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), CHANNELS), PLANES),
    "conv, norm": (Rounded(norm(nn.Conv2d(3, 4, 3), nn.BatchNorm2d)), PLANES),
    "transposed, norm": (Rounded(norm(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d)), PLANES),
    "linear, norm": (Rounded(norm(nn.Linear(3, 4), nn.BatchNorm1d)), ROWS),
    "linear": (Rounded(nn.Linear(3, 4), FEATURES), ROWS),
    "linear, rows": (Rounded(nn.Linear(3, 4), MAGIC + 2 * torch.arange(5.0)[:, None]), ROWS),
    "linear, 3d": (Rounded(nn.Linear(3, 4, bias=False), FEATURES), torch.Size([1, 5, 3])),
}


@pytest.mark.parametrize("case", BY_TENSORS)
@pytest.mark.parametrize("engine", ["eager", "torchscript", "onednn", "onnxruntime", "openvino"])
def test_every_engine_rounds_by_a_large_tensor_as_pytorch_does_or_refuses(engine, case, monkeypatch):
    """ONNX Runtime and OpenVINO make the tensor part of the layer: then each of its products is rounded."""
    monkeypatch.setattr(onednn, "_is_faster", lambda *_: True)
    model, shape = BY_TENSORS[case]
    x = 10 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    program = tsopt.transform(tsopt.capture(model.eval(), x))
    whys = [found.why for found in get_backend(engine).unsupported(program)]
    if engine in ("onnxruntime", "openvino"):
        assert any("is added and then subtracted" in why for why in whys)
    elif not whys:
        torch.testing.assert_close(tsopt.compile(program, engine)(x), model(x), rtol=0, atol=0.25)


@pytest.mark.parametrize("form", [torch.relu, lambda y: y.view(-1), lambda y: y.clone()])
@pytest.mark.parametrize(("term", "is_refused"), [(1536.0, True), (64.0, False)])
def test_float16_that_is_computed_in_float32_is_not_rounded_by_a_large_term(form, term, is_refused):
    program = tsopt.capture(lambda x: form(x + term) - term, ONE.half())
    for backend in (OnnxRuntimeBackend(), OpenVinoBackend()):
        whys = [found.why for found in backend.unsupported(program)]
        assert any("is added and then subtracted" in why for why in whys) == is_refused


@pytest.mark.parametrize("model", TAKEN)
def test_their_other_forms_are_taken_and_right(model):
    x = torch.randn(IMAGE.shape, generator=torch.Generator().manual_seed(0))
    program = tsopt.capture(model, x)
    for backend in ("onnxruntime", *(["openvino"] if OpenVinoBackend().missing() is None else [])):
        torch.testing.assert_close(tsopt.compile(program, backend)(x), model(x))


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_random_numbers_are_refused_only_where_a_result_depends_on_them(backend):
    def model(x):
        torch.rand(3).lt(0.5)
        return x + 1

    assert torch.equal(tsopt.compile(tsopt.capture(model, ONE), backend)(ONE), ONE + 1)
    with pytest.raises(tsopt.BackendError, match="rand would use a different random number generator"):
        tsopt.compile(tsopt.capture(lambda x: x + torch.rand(3), ONE), backend)


def test_memory_beside_a_value_is_refused():
    wide, x = torch.arange(10.0), torch.arange(8.0)
    read = lambda x: torch.as_strided(x, (2, 2), (1, 1), 1) * 2  # noqa: E731
    for model, example in [(read, wide[2:]), (lambda x: read(x[2:]), x), (lambda x: read(x.view(2, 4).t()), x)]:
        for backend in ("onnxruntime", "openvino"):
            with pytest.raises(tsopt.BackendError, match="reads memory that is not part of its argument"):
                tsopt.compile(tsopt.capture(model, example), backend)
        with pytest.raises(tsopt.BackendError, match="counts from the start of memory"):
            tsopt.compile(tsopt.capture(model, example), "torchscript")
    for model in (lambda x: read(x.exp()), lambda x: torch.as_strided(x, (2, 3), (1, 2))):
        assert torch.allclose(tsopt.compile(tsopt.capture(model, x), "onnxruntime")(x), model(x))
