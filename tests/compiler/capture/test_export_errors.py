"""What a failed export is said to be: a construct, its place, and what to write instead; a case for each family."""

from __future__ import annotations

import concurrent.futures
import copy

import pytest
import torch
from torch import nn

from tests.compiler.helpers import Net
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.capture.export_errors import DECISIONS, FAMILIES, SIZES
from tsopt.errors import CaptureError, GraphBreakError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).abs()


def a_while(self, x):
    while x.norm() > 1:
        x = x * 0.5
    return x


def an_if(self, x):
    if x.sum() > 0:
        return x
    return -x


def an_assert(self, x):
    assert (x > -100).all()
    return x


def a_loop(self, x):
    for _ in range(int(x.sum().clamp(max=3))):
        x = x + 1
    return x


def compared(self, x):
    return x * torch.equal(x, x + 1)


DECIDED = {
    "while": (a_while, "a while loop", "run a fixed number of steps"),
    "if": (an_if, "an if", r"y = torch.where\(condition, a, b\)"),
    "assert": (an_assert, "an assert", r"torch._assert\("),
    "range": (a_loop, "the trip count of a loop", "the largest possible count"),
    "equal": (compared, "a comparison of two tensors", r"\(a == b\).all\(\)"),
    "int": (lambda self, x: x[int(x.argmax()) % 4], r"\.item\(\), ", r"index_select\(0, i\)"),
    "bool": (lambda self, x: x * [1, 2][bool(x.sum() > 0)], r"\.item\(\), ", "keep it a tensor"),
    "tolist": (lambda self, x: x * len(set(x.flatten().tolist())), r"\.item\(\), ", "keep it a tensor"),
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_decision_is_named_with_what_to_write_instead(name):
    function, construct, fix = DECIDED[name]
    with pytest.raises(
        GraphBreakError, match=rf"(?s)the model has data-dependent control flow.*{construct}.*{fix}"
    ) as caught:
        capture(Net(function), X)
    assert "tests/compiler/capture/test_export_errors.py:" in caught.value.where


def test_every_kind_of_decision_has_a_case():
    said = {construct for _, construct, _ in DECISIONS}
    assert len(said) == len(DECISIONS) == 6


SELECTED = {
    "index": lambda self, x: x[x > 0],
    "masked_select": lambda self, x: torch.masked_select(x, x > 0),
    "nonzero": lambda self, x: torch.nonzero(x),
    "argwhere": lambda self, x: torch.argwhere(x > 0),
    "unique": lambda self, x: torch.unique(x),
    "bincount": lambda self, x: torch.bincount(x.flatten().long()),
    "repeat_interleave": lambda self, x: x.repeat_interleave((x[:, 0] > 0).long() + 1, 0),
}


@pytest.mark.parametrize("name", SELECTED)
def test_a_size_that_values_decide_is_named_with_what_to_write_instead(name):
    with pytest.raises(GraphBreakError, match="has a data-dependent output shape") as caught:
        capture(Net(SELECTED[name]), X)
    assert caught.value.fix.startswith((SIZES[name], SIZES["nonzero"]))
    assert caught.value.where


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, g):
        return g


def packed(self, x):
    lengths = x[0].long().clamp(1, 3)[:1]
    rows = nn.utils.rnn.pack_padded_sequence(x[None], lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(rows, batch_first=True)[0]


def _packed(x):
    return nn.utils.rnn.pack_padded_sequence(x[:, None], x.sum().long().clamp(1, 4)[None])


def in_a_thread(self, x):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x * 2).result()


def saved(self, x, place="/dev/null"):
    torch.save(x, place)
    return x


@pytest.fixture
def custom_op():
    with torch.library._scoped_library("tsopt_explain", "DEF") as library:
        library.define("own(Tensor x) -> Tensor")
        library.impl("own", lambda x: x * 2, "CPU")
        yield torch.ops.tsopt_explain.own


def with_a_view(self, x):
    self.all.add_(1)
    return x + self.part


OTHERS = {
    "numpy": (lambda self, x: torch.from_numpy(x.numpy() * 2), "calls numpy", "custom_op"),
    "numpy in a Function": (lambda self, x: Twice.apply(x), "calls numpy", "frontend=.strict"),
    "packed": (packed, "packs sequences", "padded sequences"),
    "size": (lambda self, x: nn.LSTM(3, 2)(_packed(x))[0].data * 2, "packs sequences|a size is a tensor", "mask|hide"),
    "nested": (lambda self, x: torch.nested.nested_tensor([x, x[:2]]).to_padded_tensor(0.0), "a nested tensor", "pad"),
    "file": (saved, "reads or writes a file", "load the file in __init__"),
    "memory": (lambda self, x: x * x.data_ptr(), "reads the memory", r"x.clone\(\)"),
    "deepcopy": (lambda self, x: copy.deepcopy(x) * 2, "reads the memory", r"x.clone\(\)"),
    "thread": (in_a_thread, "runs where it cannot be traced", "directly in forward"),
    "sparse": (lambda self, x: x.to_sparse().to_dense() * 2, "creates a sparse_coo tensor", "use a dense tensor"),
    "map": (
        lambda self, x: torch._higher_order_ops.map(lambda row, y: row + y, x, torch.ones(3)),
        "control flow op map",
        "torch.where",
    ),
    "generator": (
        lambda self, x: x + torch.rand(3, generator=torch.Generator()),
        "holds a Generator, which is not a tensor",
        "torch.manual_seed",
    ),
    "number": (lambda self, x: (x, x.sum().item()), "a Python number that depends on the input", "return the tensor"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_a_construct_is_named_with_what_to_write_instead(name):
    function, what, fix = OTHERS[name]
    with pytest.raises(GraphBreakError, match=rf"(?s){what}.*fix: .*{fix}"):
        capture(Net(function), X)


@pytest.mark.parametrize("register", [nn.Module.register_buffer, setattr])
def test_a_view_of_what_calls_write_is_named(register):
    net = Net(with_a_view, all=torch.zeros(4))
    register(net, "part", net.all[:3])
    with pytest.raises(GraphBreakError, match=r"(?s)shares memory with another one.*fix: .*in forward.*\.clone\(\)"):
        capture(net, X)


def test_an_op_of_the_user_without_a_fake_kernel_is_named(custom_op):
    with pytest.raises(GraphBreakError, match="the custom op tsopt_explain::own has no fake kernel") as caught:
        capture(Net(lambda self, x: custom_op(x)), X)
    assert '@torch.library.register_fake("tsopt_explain::own")' in caught.value.fix
    assert "draft_export" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_part_is_named():
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3))).eval()
    with pytest.raises(GraphBreakError, match=r"(?s)a part of the model is TorchScript: 1.*original nn.Module"):
        capture(model, X)


def test_a_line_in_an_installed_package_is_the_models_and_one_of_python_is_not(tmp_path, monkeypatch):
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "tsopt_third_party.py").write_text(
        "import functools\n\n\n"
        "def forward(x):\n    return functools.reduce(lambda a, b: a if b else a + 1, [x, x.sum() > 0])\n"
    )
    monkeypatch.syspath_prepend(packages)
    import tsopt_third_party

    with pytest.raises(GraphBreakError) as caught:
        capture(tsopt_third_party.forward, X)
    assert caught.value.where.startswith("tsopt_third_party.py:5, in <lambda>")


def test_a_model_that_converts_its_weights_is_named():
    class Converting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            if x.sum() > 0:  # so that nobody else reads it
                x = x + 1
            return self.layer.to(torch.float64)(x.double())

    class First(Converting):
        def forward(self, x):
            self.layer.to(torch.float64)
            return super().forward(x)

    with pytest.raises(GraphBreakError, match=r"(?s)converts its own weights.*fix: .*model\.to\(torch\.float32\)"):
        capture(First().eval(), X)


def test_what_belongs_to_no_family_is_said_in_the_words_of_torch(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("something new\nThe error above occurred when calling torch.export.export. Try draft_export")

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(GraphBreakError, match=r"torch\.export cannot capture the model") as caught:
        capture(nn.Linear(3, 2).eval(), X)
    assert caught.value.why == "RuntimeError: something new"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a leaf Variable that requires grad is being used in an in-place operation", "writes to a parameter in place"),
        ("Expected all tensors to be on the same device", "combines tensors on different devices"),
        ("Multiple dispatch failed for '__torch_dispatch__'", "a subclass of torch.Tensor"),
        ("fam.own.default", "the custom op fam::own"),
        ("aten.some_op.default", "aten::some_op has no fake kernel"),
    ],
)
def test_families_that_hang_on_the_machine_or_the_version(monkeypatch, text, what):
    kind = type("UnsupportedOperatorException", (RuntimeError,), {}) if text.endswith(".default") else RuntimeError

    def fails(*args, **kwargs):
        raise kind(text)

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(GraphBreakError, match=what):
        capture(nn.Linear(3, 2).eval(), X)


def test_a_model_that_nests_too_deep(monkeypatch):
    def fails(*args, **kwargs):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(GraphBreakError, match="is nested too deeply"):
        capture(nn.Linear(3, 2).eval(), X)


def test_every_message_says_what_can_still_be_done():
    with pytest.raises(CaptureError, match=r"without changes to the model, tsopt\.optimize.* runs it partitioned"):
        capture(Net(an_if), X)


def test_there_are_enough_families_and_each_says_what_to_write():
    assert len(FAMILIES) + len(DECISIONS) + len(SIZES) >= 15
    assert all(item.what and item.why and item.fix for item in FAMILIES)
