"""`optimize` for many sizes, end to end: each backend, bundles, other forms, the command line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.calls import signature_json

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = {"seconds": 0.02, "isolate": False, "cache": False}


class Encoder(nn.Module):
    """Attention over tokens as it is written by hand, with positions, a mask, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.register_buffer("order", torch.arange(32)[None])
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, tokens, mask):
        batch, length = tokens.shape
        x = self.words(tokens) + self.places(self.order[:, :length])
        q, k, v = (part(x).view(batch, length, 4, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / 2 + (1.0 - mask[:, None, None, :].float()) * -1e4
        x = self.norm(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 16)))
        return {"logits": self.head(x.mean(1)), "hidden": x}


def net():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8, 4)).eval()


def encoder():
    torch.manual_seed(0)
    return Encoder().eval()


def text(batch, length):
    return torch.randint(0, 50, (batch, length)), torch.ones(batch, length, dtype=torch.long)


@pytest.mark.sliced(2)
@pytest.mark.parametrize("backend", ["eager", "torchscript", "onnxruntime", "openvino", "onednn"])
def test_an_image_net_with_any_batch_by_every_backend(backend):
    model = net()
    fast = tsopt.optimize(model, [torch.randn(2, 3, 8, 8), torch.randn(8, 3, 8, 8)], backends=(backend,), **QUICK)
    row = fast.report.rows[1]
    assert row.status in ("ok", "no gain"), row.reason
    assert fast.report.sizes == "batch: 1..16, checked at 1, 2, 7, 16"
    if row.status == "ok":
        run = tsopt.compile(fast.program, backend)
        for batch in (1, 3, 16):
            x = torch.randn(batch, 3, 8, 8)
            torch.testing.assert_close(run(x), model(x))


@pytest.fixture(scope="module")
def any_text():
    """The encoder for any batch and length, raced once by every backend."""
    racing = ("eager", "torchscript", "onnxruntime", "openvino")
    return tsopt.optimize(encoder(), [text(1, 8), text(4, 12)], backends=racing, **QUICK)


@pytest.mark.sliced(1)
@pytest.mark.parametrize("backend", ["eager", "torchscript", "onnxruntime", "openvino"])
def test_an_encoder_with_any_batch_and_length_by_every_backend(backend, any_text):
    model = encoder()
    assert [row.status for row in any_text.report.rows] == ["ok"] * 5, any_text.report
    assert "batch: 1..8" in any_text.report.sizes
    assert "tokens_1: 1..24, checked at 1, 2, 7, 24" in any_text.report.sizes
    run = tsopt.compile(any_text.program, backend)
    for sizes in ((1, 1), (3, 5), (8, 24)):
        given = text(*sizes)
        found = run(*given)
        for name, value in model(*given).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_passes_are_at_work_for_all_sizes():
    program = tsopt.capture(net(), torch.randn(2, 3, 8, 8), dynamic={"input": {0: "batch"}})
    assert tsopt.transform(program).node_count < program.node_count


def test_a_cuda_graph_is_recorded_for_one_size():
    program = tsopt.capture(net(), torch.randn(2, 3, 8, 8), dynamic={"input": {0: "batch"}})
    with pytest.raises(tsopt.BackendError, match="cudagraph"):
        tsopt.compile(program, "cudagraph")


def test_sizes_beyond_the_range_are_another_form():
    fast = tsopt.optimize(net(), torch.randn(2, 3, 8, 8), dynamic={"input": {0: "batch[1..4]"}}, **QUICK)
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(fast(x), net()(x))
    strict = tsopt.optimize(
        net(), torch.randn(2, 3, 8, 8), dynamic={"input": {0: "batch[1..4]"}}, on_new_signature="error", **QUICK
    )
    with pytest.raises(tsopt.SignatureError, match=r"batch is 5, expected 1\.\.4"):
        strict(x)
    with pytest.raises(tsopt.SignatureError, match=r"has shape \[2, 3, 8, 9\], expected \[batch, 3, 8, 8\]"):
        strict(torch.randn(2, 3, 8, 9))


@pytest.mark.sliced(1)
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_bundle_keeps_its_sizes(tmp_path, backend):
    model = encoder()
    fast = tsopt.optimize(model, [text(1, 8), text(4, 12)], backends=(backend,), **QUICK)
    tsopt.compile(fast.program, backend)
    again = tsopt.load(fast.save(tmp_path / "encoder.tsopt"))
    assert again.signature == fast.program.signature
    given = text(5, 3)
    torch.testing.assert_close(again(*given)["logits"], model(*given)["logits"], rtol=1e-4, atol=1e-5)
    with pytest.raises(tsopt.SignatureError, match="batch is 9"):
        again(*text(9, 3))


def test_a_candidate_that_is_wrong_at_one_size_is_out(monkeypatch):
    from tsopt.runtime.backends import eager

    runner = eager.torch_runner

    def broken(forward, signature, threads):
        run = runner(forward, signature, threads)
        return lambda inputs: [v * (2 if signature.dims and inputs[0].shape[0] == 7 else 1) for v in run(inputs)]

    model = net()
    plain = tsopt.optimize(
        model, torch.randn(2, 3, 8, 8), dynamic={"input": {0: "n[1..9]"}}, backends=("eager",), **QUICK
    )
    assert plain.report.rows[1].status == "ok"
    monkeypatch.setattr("tsopt.runtime.backends.torchscript.torch_runner", broken)
    fast = tsopt.optimize(
        model, torch.randn(2, 3, 8, 8), dynamic={"input": {0: "n[1..9]"}}, backends=("torchscript",), **QUICK
    )
    assert fast.report.rows[1].status == "wrong", fast.report.rows[1].reason
    assert fast.report.rows[1].reason.startswith("at n 7: ")


def test_onnx_files_name_their_sizes(tmp_path):
    onnx = pytest.importorskip("onnx")
    program = tsopt.capture(encoder(), [text(1, 8), text(4, 12)])
    made = tsopt.compile(program, "onnxruntime")
    made.save(tmp_path / "m.onnx")
    inputs = onnx.load(tmp_path / "m.onnx").graph.input
    assert [[d.dim_param for d in item.type.tensor_type.shape.dim] for item in inputs] == [["batch", "tokens_1"]] * 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_in_parts_says_that_no_size_is_dynamic():
    def model(x):
        return x * 2 if x.sum() > 0 else x

    fast = tsopt.optimize(model, [torch.ones(2, 3), torch.ones(4, 3)], backends=("eager",), **QUICK)
    assert fast.report.sizes.startswith("none is dynamic")
    assert torch.equal(fast(torch.ones(5, 3)), torch.full((5, 3), 2.0))


class MaskedStep(nn.Module):
    """Attention of one more token, under a mask over the cache and itself."""

    def forward(self, x, keys, mask):
        keys = torch.cat([keys, x], 1)
        if mask.shape[1] < keys.shape[1]:
            raise ValueError("the mask is too short")
        scores = (x @ keys.mT).masked_fill(~mask[:, None, : keys.shape[1]], -1e9)
        return scores.softmax(-1) @ keys, keys


def masked_step(past, longer=1):
    return torch.randn(2, 1, 8), torch.randn(2, past, 8), torch.rand(2, past + longer) > 0.3


@pytest.mark.sliced(2)
@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "openvino", "torchscript"])
def test_a_size_that_is_always_one_larger(backend, tmp_path):
    torch.manual_seed(0)
    model = MaskedStep()
    fast = tsopt.optimize(model, [masked_step(4), masked_step(9)], backends=("eager",), seconds=0.05)
    assert [item.axes for item in fast.program.signature.user_inputs][1:] == [
        (None, "keys_1", None),
        (None, "keys_1+1"),
    ]
    assert fast.report.sizes.startswith("keys_1: 1..18, checked at 1, 2, 7, 18")
    run = fast.verified(backend)
    for past in (1, 5, 17):
        call = masked_step(past)
        for found, wanted in zip(run(*call), model(*call), strict=True):
            torch.testing.assert_close(found, wanted)
    with pytest.raises(tsopt.SignatureError, match=r"keys_1 is 5 and 6 in the same call"):
        run(*masked_step(5, longer=2))
    with pytest.raises(tsopt.SignatureError, match=r"keys_1 is 40, expected 1\.\.18"):
        run(*masked_step(40))
    if backend == "eager":
        stored = signature_json.from_json(signature_json.to_json(fast.program.signature))
        assert stored == fast.program.signature


def test_names_of_sizes_that_are_apart():
    given = {"keys": {1: "past[1..30]"}, "mask": {1: "covered[1..20]"}}
    signature = tsopt.capture(MaskedStep(), masked_step(6), dynamic=given).signature
    assert signature.inputs[2].axes == (None, "past+1")
    assert [(dim.name, dim.high) for dim in signature.dims] == [("past", 19)]


def test_sizes_that_are_not_always_so_far_apart_are_not_one():
    with pytest.raises(tsopt.CaptureError, match="specializes on a size"):
        tsopt.capture(MaskedStep(), [masked_step(6), masked_step(9, longer=2)])
