"""`torch.compile(model, backend="tsopt")`: right in every way that a graph can be called."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import tsopt
from tests.by_dynamo import OPTIONS, compiled
from tsopt import dynamo
from tsopt.runtime.calling import graph_weights

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Breaks(nn.Module):
    """Two graphs with Python between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.second = nn.Linear(16, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return {"y": self.second(hidden) + self.shift}


def test_it_is_registered_under_its_name():
    from importlib.metadata import entry_points

    (found,) = entry_points(group="torch_dynamo_backends", name="tsopt")
    assert found.load() is dynamo.backend


def test_a_model_with_a_graph_break_is_two_optimized_graphs(made):
    model, x = Breaks().eval(), torch.randn(3, 8)
    with torch.no_grad():
        fast = torch.compile(model, backend=dynamo.backend, options=OPTIONS)
        for _ in range(3):
            torch.testing.assert_close(fast(x)["y"], model(x)["y"])
    assert len(made) == 2
    assert all(graph.fast is not None and graph.fast.report.rows for graph in made)


def test_weights_are_constants_until_somebody_writes_them(made):
    model, x = Breaks().eval(), torch.randn(3, 8)
    with torch.no_grad():
        fast = torch.compile(model, backend=dynamo.backend, options=OPTIONS)
        fast(x)
        assert [len(graph.fast.program.signature.user_inputs) for graph in made] == [1, 1]
        before = fast(x)["y"]
        model.second.weight.mul_(2.0)
        model.first[1].running_mean.add_(1.0)
        after = fast(x)["y"]
        torch.testing.assert_close(after, model(x)["y"])
    assert not torch.allclose(before, after)


def test_what_a_fused_optimizer_has_written_is_used():
    model, x = nn.Linear(4, 4).eval(), torch.ones(2, 4)
    fast, optimizer = compiled(model), torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        fast(x)
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


class OwnNorm(nn.Module):
    """A batch norm that counts nothing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


@pytest.mark.parametrize("outside", [True, False], ids=["in the model", "in what was compiled"])
@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(4), OwnNorm], ids=["BatchNorm1d", "own"])
def test_statistics_that_training_has_written_are_used(norm, outside, monkeypatch):
    if outside and norm is OwnNorm:
        monkeypatch.setattr(graph_weights, "SHARE", 1e9)  # they are compared in each call
    model, x = nn.Sequential(nn.Linear(4, 4), norm()).eval(), torch.randn(3, 4)
    fast = compiled(model)
    with torch.no_grad():
        fast(x)
    model.train()
    (model if outside else fast)(x * 3 + 5)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


def test_a_graph_whose_weights_have_changed_is_optimized_again_and_in_the_end_no_more(made, always_faster):
    model, x = nn.Linear(4, 4).eval(), torch.ones(2, 4)
    fast = torch.compile(model, backend=dynamo.backend, options=OPTIONS)
    forms = []
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(dynamo.CHANGES + 3):
            torch.testing.assert_close(fast(x), model(x))
            torch.testing.assert_close(fast(x), model(x))
            forms.append(made[0].fast)
            model.load_state_dict({name: value + 1.0 for name, value in model.state_dict().items()})
    count = dynamo.CHANGES + 1
    assert len({id(form) for form in forms[:count]}) == count
    assert forms[count:] == [None, None]
    assert made[0].refused == "its weights change between calls"
    (text,) = [str(item.message) for item in said if "tsopt" in str(item.message)]
    assert "is not optimized any more: its weights change between calls" in text
    assert f"at {Path(__file__).name}:" in text or "a graph of torch.compile" in text


def test_an_audit_that_finds_a_write_through_data_has_the_graph_optimized_again(made, always_faster):
    model, x = nn.Linear(4, 4).eval(), torch.ones(2, 4)
    fast = torch.compile(model, backend=dynamo.backend, options=OPTIONS)
    with torch.no_grad():
        fast(x)
        first = made[0].fast
        model.weight.data.mul_(2.0)
        with pytest.warns(UserWarning, match=r"an audit found a difference .*its weights were written through numpy"):
            [fast(x) for _ in range(101)]
        assert made[0].fast is not first
        torch.testing.assert_close(fast(x), model(x))


def test_weights_that_are_given_other_memory_are_seen(made):
    layer = nn.Linear(4, 4).eval()
    fast, x = torch.compile(layer, backend="tsopt", options=OPTIONS), torch.ones(2, 4)
    with torch.no_grad():
        fast(x)
        layer.weight.data = torch.zeros(4, 4)
        torch.testing.assert_close(fast(x), layer.bias.expand(2, 4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_gradients_are_those_of_the_model(made):
    model, x = Breaks().eval(), torch.randn(3, 8)
    fast = torch.compile(model, backend=dynamo.backend, options=OPTIONS)
    fast(x)["y"].sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x)["y"].sum().backward()
    for mine, theirs in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad)
    assert all(graph.fast is None for graph in made)


def test_training_statistics_are_written(made):
    model, twin, x = Breaks().train(), Breaks().train(), torch.randn(6, 8)
    with torch.no_grad():
        fast = torch.compile(model, backend=dynamo.backend, options=OPTIONS)
        for _ in range(3):
            torch.testing.assert_close(fast(x)["y"], twin(x)["y"])
    torch.testing.assert_close(model.first[1].running_mean, twin.first[1].running_mean)
    assert int(model.first[1].num_batches_tracked) == 3


def test_other_sizes_are_right():
    model = Breaks().eval()
    fast = compiled(model)
    with torch.no_grad():
        for rows in (3, 5, 7, 2, 5):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fast(x)["y"], model(x)["y"])


def test_a_graph_that_cannot_be_optimized_stays_as_it_is(made, monkeypatch, caplog):
    def refuse(*_, **__):
        raise tsopt.CaptureError("no such thing")

    monkeypatch.setattr(dynamo, "optimize", refuse)
    model, x = Breaks().eval(), torch.randn(3, 8)
    fast = torch.compile(model, backend=dynamo.backend, options=OPTIONS)
    with torch.no_grad(), caplog.at_level("INFO", logger="tsopt"):
        for _ in range(2):
            torch.testing.assert_close(fast(x)["y"], model(x)["y"])
    assert [record.message for record in caplog.records if "is not optimized" in record.message] == [
        "a graph of torch.compile is not optimized: no such thing"
    ] * 2


def test_options_are_those_of_optimize(made):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    with torch.no_grad():
        torch.compile(model, backend=dynamo.backend, options=OPTIONS | {"level": 0})(torch.ones(2, 4))
    assert made[0].fast.report.passes == ()


@pytest.mark.parametrize(
    ("passed", "said"),
    [
        ({"mode": "reduce-overhead"}, "the backend tsopt does not take mode='reduce-overhead'"),
        ({"options": {"secconds": 1}}, r"(?s)unknown option 'secconds' of the backend tsopt.*write 'seconds'"),
        ({"options": {"example_input": 1}}, "unknown option 'example_input'"),
        ({"options": {"frontend": "fx"}}, r"(?s)'frontend' cannot be used with.*leave it out"),
        ({"options": {"backends": "onnxruntime"}}, r"pass a tuple: backends=\('onnxruntime',\)"),
        ({"options": {"audit": 2}}, "audit must be a number from 0 to 1"),
        ({"options": {"level": 9}}, "unknown optimization level 9"),
        ({"options": {"without": ("nobody",)}}, "unknown rule or pass 'nobody'"),
        ({"options": {"warmup": -1}}, "warmup must be a number of calls"),
        ({"options": {"precision": "int9"}}, "unknown precision 'int9'"),
        ({"options": {"precision": "int8", "backends": ("inductor",)}}, "no selected backend supports int8"),
        ({"options": {"precision": "int8", "metric": "acc"}}, "unknown metric 'acc'"),
        ({"options": {"precision": "int8", "max_drop": -1}}, "max_drop must be 0 or more"),
        ({"options": {"precision": "int8", "calibration": 0}}, "calibration must be at least 1"),
        ({"options": {"precision": "int8", "keep_float": "head"}}, "keep_float must be a tuple"),
        ({"options": {"keep_float": ("head",)}}, "have no effect without a lower precision"),
    ],
    ids=str,
)
def test_a_wrong_option_is_said_at_the_first_call_with_gradients_or_not(passed, said):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=said) as caught:
        torch.compile(nn.Linear(4, 4), backend="tsopt", **passed)(torch.ones(3, 4))
    assert isinstance(caught.value.__cause__ or caught.value.inner_exception, tsopt.UsageError)


def test_an_option_that_only_a_graph_shows_to_be_wrong_is_said_when_it_is_optimized(made):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(2, 4)
    fast = compiled(model, precision="int8", keep_float=("nobody",))
    with torch.no_grad(), pytest.warns(UserWarning, match=r"tsopt: .* runs as it is: .*nobody"):
        torch.testing.assert_close(fast(x), model(x))
    assert "nobody" in made[0].refused


def test_what_can_be_read_only_once_is_left_to_the_race():
    given = iter(["head"])
    dynamo.backend(torch.fx.symbolic_trace(nn.ReLU()), [], options={"keep_float": given, "precision": "bf16"})
    assert [*given] == ["head"]


def test_a_backend_takes_what_torch_compile_passes_and_no_more():
    graph = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(tsopt.UsageError, match="the backend tsopt does not take level=1"):
        dynamo.backend(graph, [], level=1)


def test_tensors_of_inference_mode_are_inputs():
    model = nn.Linear(4, 4).eval()
    fast = compiled(model)
    with torch.inference_mode():
        x = torch.ones(2, 4)
        torch.testing.assert_close(fast(x), model(x))


def test_parts_of_a_value_that_overlap_are_written_past_a_graph_break(fresh_dynamo, always_faster):
    def function(x):
        whole = torch.relu(x) + 1
        first, second = whole[:3], whole[1:]
        torch._dynamo.graph_break()
        first[1].zero_()
        return first, second

    options = {"seconds": 0.05, "isolate": False, "cache": False, "backends": ("torchscript",)}
    x = torch.randn(4, 8)
    with torch.no_grad():
        found = torch.compile(function, backend="tsopt", options=options)(x)
    for mine, wanted in zip(found, function(x), strict=True):
        torch.testing.assert_close(mine, wanted)


class Reduced(nn.Module):
    """In float16, with a number among its values."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            y = self.fc(x)
            return y * y.sum().item() + self.shift


def test_a_graph_that_cannot_be_probed_leaves_autocast_as_it_was(made):
    model, x, dtype = Reduced().eval(), torch.randn(3, 8), torch.get_autocast_dtype("cpu")
    wanted = model(x).detach()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), wanted)
    assert len(made) == 1
    assert torch.get_autocast_dtype("cpu") == dtype
    for _ in range(2):  # weights that it has cast are kept until the outermost block ends
        with torch.autocast("cpu", torch.bfloat16):
            found = model.fc(x)
        torch.testing.assert_close(
            found.float(), torch.nn.functional.linear(x, *model.fc.parameters()), atol=0.1, rtol=0.1
        )
        with torch.no_grad():
            model.fc.weight.add_(3)
