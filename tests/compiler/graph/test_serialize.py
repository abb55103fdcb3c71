"""Programs as files, and files that lie."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.passes.helpers import assert_same_bits, call, capture, ops_of
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.serialize import GRAPH, WEIGHTS, read_program, write_program
from tsopt.errors import BackendError, BundleError, TsoptError
from tsopt.transforms import transform

X = torch.randn(2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wide", torch.randn(1, 4).expand(2, 4))
        self.register_buffer("turned", torch.randn(4, 2).t())

    def forward(self, x, *, scale=1.0):
        self.count += 1
        y = self.norm(self.linear(x)) * scale + self.wide - self.turned
        first, second = y.split(2, 1)
        return {"y": first.to(torch.float16), "z": [second.masked_fill(second > 1, float("-inf")), None, "text"]}


def stored(program, folder):
    write_program(program, folder)
    return read_program(folder, list(program.state.values()))


@pytest.mark.parametrize("optimized", [False, True], ids=["captured", "optimized"])
def test_a_program_comes_back_the_same(tmp_path, optimized):
    program = capture(Net().eval(), X)
    program = transform(program) if optimized else program
    made = stored(program, tmp_path)
    assert made.text == program.text
    assert made.fingerprint(contents=True) == program.fingerprint(contents=True)
    assert (made.numerics, made.name) == (program.numerics, program.name)
    assert made.state["count"] == 0
    for name, weight in program.weights.items():
        assert made.weights[name].stride() == weight.stride()
        assert_same_bits(made.weights[name], weight)


@pytest.mark.parametrize("axes", [(1, 0, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_a_permuted_weight_is_stored_as_it_lies_in_memory(tmp_path, axes):
    """So that the file is mapped, and nothing is copied when it is read."""
    weight = torch.randn(2, 3, 4, 5).permute(axes)
    program = capture(lambda x: x + weight, torch.ones(()))
    write_program(program, tmp_path)
    (data,) = load_file(tmp_path / WEIGHTS).values()
    assert data.shape == (2, 3, 4, 5)
    (made,) = read_program(tmp_path).weights.values()
    assert made.stride() == weight.stride()
    assert made.permute([axes.index(dim) for dim in range(4)]).is_contiguous()
    assert_same_bits(made, weight)


@pytest.mark.parametrize(
    "view", [lambda w: w[::2], lambda w: w.t()[::2], lambda w: w[:, :1].expand(4, 6), lambda w: w[1]]
)
def test_a_weight_that_is_a_part_of_another_is_stored_as_what_it_shows(tmp_path, view):
    whole = torch.randn(4, 6)
    weight = view(whole)
    program = capture(lambda x: x + weight.sum() + whole.sum(), torch.ones(()))
    made = stored(program, tmp_path)
    for name, value in program.weights.items():
        assert_same_bits(made.weights[name], value)
        assert made.weights[name].stride() == value.stride()


def test_a_program_that_came_back_runs(tmp_path):
    program = capture(nn.Sequential(nn.Linear(3, 4), nn.GELU()).eval(), X)
    assert_same_bits(call(stored(program, tmp_path), X), call(program, X))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-45, 0.1])
def test_literals_come_back_to_the_bit(tmp_path, value):
    program = capture(lambda x: x * value, X)
    assert_same_bits(stored(program, tmp_path).module()(X)[0], program.module()(X)[0])


SPECTRUM = torch.randn(2, 5, 4, dtype=torch.complex64)


def test_a_type_that_only_capture_can_derive_is_stored(tmp_path):
    """istft asks whether its window is zero, which fake tensors cannot answer."""
    program = transform(capture(lambda x: torch.istft(x * 1, 8).neg(), SPECTRUM))
    assert ops_of(program) == ["mul.Tensor", "istft", "neg"]
    made = stored(program, tmp_path)
    assert made.fingerprint() == program.fingerprint()
    assert_same_bits(call(made, SPECTRUM), call(program, SPECTRUM))


@pytest.mark.parametrize("change", [{"dtype": "load"}, {"shape": [2, -6]}, {"stride": None}, {"shape": [9]}])
def test_a_damaged_type_ends_in_a_typed_error(tmp_path, change):
    write_program(capture(lambda x: torch.istft(x, 8), SPECTRUM), tmp_path)
    data = json.loads((tmp_path / GRAPH).read_text())
    nodes_of(data, "call_function")["type"].update(change)
    (tmp_path / GRAPH).write_text(json.dumps(data))
    with pytest.raises(TsoptError):
        read_program(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.normal(0.0, 1.0, (3,)),
        lambda x: torch.blackman_window(3),
        lambda x: torch.kaiser_window(3),
        lambda x: torch.bartlett_window(3),
        lambda x: torch.fft.fftfreq(3),
        lambda x: torch.fft.rfftfreq(4),
        lambda x: torch.empty_permuted((2, 3), (1, 0)),
    ],
)
def test_factories_are_stored(tmp_path, make):
    program = capture(lambda x: x + make(x), X)
    assert stored(program, tmp_path).text == program.text


@pytest.mark.parametrize("device", ["cuda:7", "meta", "moon"])
def test_a_program_for_a_device_that_is_not_here_says_so(tmp_path, device):
    write_program(capture(nn.Linear(2, 2).eval(), torch.ones(1, 2)), tmp_path)
    data = json.loads((tmp_path / GRAPH).read_text())
    next(node for node in data["nodes"] if node["op"] == "get_attr")["device"] = device
    (tmp_path / GRAPH).write_text(json.dumps(data))
    with pytest.raises(BundleError, match=f"the program needs {device}, which is not usable on this machine") as caught:
        read_program(tmp_path)
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_program_on_a_gpu_comes_back_there(tmp_path):
    model, x = Net().eval().cuda(), X.cuda()
    program = capture(model, x)
    made = stored(program, tmp_path)
    assert made.text == program.text
    assert {weight.device for weight in made.weights.values()} == {x.device}
    assert {value.device for value in made.state.values()} == {x.device}


def test_custom_ops_are_not_stored(tmp_path):
    with torch.library._scoped_library("tsopt_stored", "DEF") as library:
        library.define("own(Tensor x) -> Tensor")
        library.impl("own", lambda x: x.clone(), "CompositeExplicitAutograd")
        torch.library.register_fake("tsopt_stored::own", lambda x: torch.empty_like(x), lib=library)
        program = capture(lambda x: torch.ops.tsopt_stored.own(x), X)
        with pytest.raises(BackendError, match="is a custom op and cannot be stored"):
            write_program(program, tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    write_program(capture(nn.Linear(3, 2).eval(), X), folder)
    return (folder / GRAPH).read_text(), (folder / WEIGHTS).read_bytes()


def nodes_of(data, op):
    return next(node for node in data["nodes"] if node["op"] == op)


DAMAGE = {
    "system": lambda d: nodes_of(d, "call_function").update(target="os.system.default"),
    "dunder": lambda d: nodes_of(d, "call_function").update(target="aten.__class__.__init__"),
    "mro": lambda d: nodes_of(d, "call_function").update(target="aten.add.__class__"),
    "writes": lambda d: nodes_of(d, "call_function").update(target="aten.add_.Tensor"),
    "unknown-op": lambda d: nodes_of(d, "call_function").update(target="aten.nothing.default"),
    "list-op": lambda d: nodes_of(d, "call_function").update(target=["aten"]),
    "method": lambda d: nodes_of(d, "call_function").update(op="call_method"),
    "cycle": lambda d: nodes_of(d, "call_function")["args"]["tuple"].__setitem__(0, {"node": len(d["nodes"]) - 1}),
    "later": lambda d: nodes_of(d, "call_function")["args"]["tuple"].__setitem__(0, {"node": 99}),
    "argument": lambda d: nodes_of(d, "call_function")["args"]["tuple"].__setitem__(0, {"eval": "1"}),
    "arity": lambda d: nodes_of(d, "call_function")["args"].update(tuple=[]),
    "torch-attribute": lambda d: nodes_of(d, "call_function")["args"]["tuple"].append(
        {"torch": "dtype", "text": "torch.load"}
    ),
    "weight": lambda d: nodes_of(d, "get_attr").update(target="nowhere"),
    "stride": lambda d: nodes_of(d, "get_attr").update(stride=[10**12, 1]),
    "order": lambda d: nodes_of(d, "get_attr").update(order=[0, 0]),
    "long-order": lambda d: nodes_of(d, "get_attr").update(order=[1, 0, 2]),
    "short-order": lambda d: nodes_of(d, "get_attr").update(order=[0]),
    "wrong-order": lambda d: nodes_of(d, "get_attr").update(order=[1, 0]),
    "negative-stride": lambda d: nodes_of(d, "get_attr").update(stride=[-1, 1]),
    "short-stride": lambda d: nodes_of(d, "get_attr").update(stride=[1]),
    "no-nodes": lambda d: d.update(nodes=[]),
    "no-output": lambda d: d["nodes"].pop(),
    "two-outputs": lambda d: d["nodes"].append(d["nodes"][-1]),
    "more-inputs": lambda d: d["nodes"].insert(0, {"op": "placeholder"}),
    "numerics": lambda d: d.update(numerics="BEST"),
    "no-signature": lambda d: d.pop("signature"),
    "input-type": lambda d: d["signature"]["inputs"][0]["type"].update(dtype="load"),
    "input-shape": lambda d: d["signature"]["inputs"][0]["type"].update(shape=[2, 4]),
    "output-type": lambda d: d["signature"]["outputs"][0]["type"].update(shape=[2, 9]),
    "output-index": lambda d: d["signature"].update(result={"kind": "leaf", "index": 4}),
    "device": lambda d: d["signature"]["inputs"][0]["type"].update(device="moon"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_program_ends_in_a_typed_error(tmp_path, written, damage):
    data = json.loads(written[0])
    damage(data)
    (tmp_path / GRAPH).write_text(json.dumps(data))
    (tmp_path / WEIGHTS).write_bytes(written[1])
    with pytest.raises(TsoptError):
        read_program(tmp_path)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "3", "{" * 10, "[" * 100_000, '{"nodes": NaN}', "\x00"])
def test_what_is_no_program_ends_in_a_typed_error(tmp_path, written, text):
    (tmp_path / GRAPH).write_text(text)
    (tmp_path / WEIGHTS).write_bytes(written[1])
    with pytest.raises(BundleError):
        read_program(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 7, 8, 50, -1])
def test_cut_weights_end_in_a_typed_error(tmp_path, written, size):
    (tmp_path / GRAPH).write_text(written[0])
    (tmp_path / WEIGHTS).write_bytes(written[1][:size])
    with pytest.raises(BundleError):
        read_program(tmp_path)


def test_missing_files_end_in_a_typed_error(tmp_path):
    with pytest.raises(BundleError):
        read_program(tmp_path)


def test_a_stored_graph_names_ops_exactly(tmp_path):
    program = capture(lambda x: x + 1, X)
    write_program(program, tmp_path)
    assert nodes_of(json.loads((tmp_path / GRAPH).read_text()), "call_function")["target"] == "aten.add.Tensor"
    assert ops_of(read_program(tmp_path)) == ["add.Tensor"]


# ---- sizes ------------------------------------------------------------------------------------------------


def for_any_batch():
    return capture(lambda x: x.sum(0) * (x.shape[0] * x.shape[0] + 1) / x.shape[0] ** 0.5, X, dynamic={"x": {0: "n"}})


def test_a_program_for_many_sizes_is_stored(tmp_path):
    program = for_any_batch()
    made = stored(program, tmp_path)
    assert made.text == program.text
    assert made.signature == program.signature
    assert made.fingerprint() == program.fingerprint()


def numbered(data, target, *args):
    """Data with one more number from sizes, after those that are there."""
    last = max(
        i for i, node in enumerate(data["nodes"]) if str(node.get("target", "")).startswith(("size.", "aten.sym"))
    )
    node = {"op": "call_function", "target": target, "args": {"tuple": list(args)}, "kwargs": {"dict": {}}}
    data["nodes"][last] = node | {"args": {"tuple": [{"node": last - 1} if a == "last" else a for a in args]}}


HOSTILE_NUMBERS = {
    "huge-power": ("size.pow", 9, 10**9),
    "power-of-a-size": ("size.pow", "last", "last"),
    "text": ("size.mul", "a", 10**12),
    "list": ("size.mul", {"list": [1]}, 10**12),
    "long": ("size.mul", "last", 10**400),
    "nothing": ("size.add",),
    "flag": ("size.add", True, 1),
    "a-tensor": ("size.add", {"node": 0}, 1),
    "no-tensor": ("aten.sym_size.int", 3, 0),
    "unknown": ("size.__import__", "os"),
}


@pytest.mark.parametrize("numbers", HOSTILE_NUMBERS.values(), ids=HOSTILE_NUMBERS)
def test_a_hostile_number_ends_in_a_typed_error(tmp_path, numbers):
    write_program(for_any_batch(), tmp_path)
    data = json.loads((tmp_path / GRAPH).read_text())
    numbered(data, *numbers)
    (tmp_path / GRAPH).write_text(json.dumps(data))
    with pytest.raises(TsoptError):
        read_program(tmp_path)


def test_products_of_products_are_refused_before_they_are_computed(tmp_path):
    program = for_any_batch()
    size = made = next(node for node in program.calls() if ops.is_number(node))
    user = next(iter(size.users))
    with program.graph.inserting_before(user):
        for _ in range(40):
            made = program.graph.call_function(ops.NUMBERS["mul"], (made, made))
    user.replace_input_with(size, made)
    write_program(program, tmp_path)
    with pytest.raises(BundleError, match="can become too large"):
        read_program(tmp_path)


DAMAGED_SIZES = {
    "unused": lambda s: s["dims"].append(["m", 1, 4, 1]),
    "missing": lambda s: s.pop("dims"),
    "another": lambda s: s["inputs"][0]["type"].update(axes=["m", None]),
    "axes": lambda s: s["inputs"][0]["type"].update(axes=["n"]),
    "axes-list": lambda s: s["inputs"][0]["type"].update(axes=[["n"], None]),
    "step": lambda s: s["dims"][0].__setitem__(3, 0),
    "low": lambda s: s["dims"][0].__setitem__(1, -1),
    "high": lambda s: s["dims"][0].__setitem__(2, "x"),
    "short": lambda s: s["dims"][0].pop(),
    "output": lambda s: s["outputs"][0]["type"].update(axes=["x"]),
}


@pytest.mark.parametrize("damage", DAMAGED_SIZES.values(), ids=DAMAGED_SIZES)
def test_damaged_sizes_end_in_a_typed_error(tmp_path, damage):
    write_program(for_any_batch(), tmp_path)
    data = json.loads((tmp_path / GRAPH).read_text())
    damage(data["signature"])
    (tmp_path / GRAPH).write_text(json.dumps(data))
    with pytest.raises(TsoptError):
        read_program(tmp_path)
