"""Facts about ops: what writes, what is random, what has an effect, what may share memory."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from tests.passes.helpers import aten, capture, find
from tsopt.compiler.graph import ops

X = torch.ones(4, 4)


def node(model, name, given=X):
    return find(capture(model, given), name)


@pytest.mark.parametrize(
    ("target", "expected"),
    [(aten.add.Tensor, False), (aten.add_.Tensor, True), (aten.add.out, True), (operator.getitem, False)],
    ids=str,
)
def test_writes_is_read_from_the_schema(target, expected):
    assert ops.writes(target) is expected


@pytest.mark.parametrize(
    ("flag", "running", "expected"), [(True, True, True), (False, True, False), (True, False, False)]
)
@pytest.mark.parametrize("name", ops.SECRET_WRITES)
def test_writes_that_the_schema_denies_depend_on_the_arguments(name, flag, running, expected):
    target = getattr(aten, name.removeprefix("aten::")).default
    assert not ops.writes(target)
    made = torch.fx.Graph().call_function(target, tuple(None for _ in target._schema.arguments))
    names = [argument.name for argument in target._schema.arguments]
    values = {"training": flag, "use_input_stats": flag, "running_mean": 1 if running else None}
    made.args = tuple(values.get(name) for name in names)
    assert ops.writes_in_secret(made) is expected
    assert ops.has_effect(made) is expected


@pytest.mark.parametrize(
    ("model", "name", "random"),
    [
        (lambda x: F.dropout(x, 0.5, True), "dropout", True),
        (lambda x: F.dropout(x, 0.5, False), "dropout", False),
        (lambda x: F.dropout(x, 0.0, True), "dropout", False),
        (torch.rand_like, "rand_like", True),
        (lambda x: x + torch.empty(4), "empty.memory_format", True),
        (lambda x: x + torch.empty_like(x), "empty_like", True),
        (torch.bernoulli, "bernoulli", True),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention", False),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "scaled_dot_product_attention", True),
        (lambda x: x.sin(), "sin", False),
    ],
)
def test_randomness_depends_on_the_arguments(model, name, random):
    found = node(model, name)
    assert ops.is_random(found) is random
    assert ops.is_pure(found) is not random


def test_every_exception_names_an_op_of_torch_and_a_reason():
    for name, (_, reason) in ops.RANDOM_ONLY_IF.items():
        assert hasattr(aten, name.removeprefix("aten::")), name
        assert reason
    for name in ops.UNINITIALIZED | ops.ALWAYS_NEW | ops.SECRET_WRITES.keys():
        assert hasattr(aten, name.removeprefix("aten::")), name


def test_checks_have_an_effect():
    found = node(lambda x: x.double(), "_assert_tensor_metadata")
    assert ops.has_effect(found)
    assert not ops.is_pure(found)


def test_bind_fills_in_defaults():
    bound = ops.bind(node(lambda x: x.sum(0), "sum.dim_IntList"))
    assert bound["keepdim"] is False
    assert bound["dtype"] is None
    assert list(bound)[:2] == ["self", "dim"]


def test_names_are_short():
    program = capture(lambda x: x.split(2)[0].sin() + 1, X)
    assert [ops.name_of(n) for n in program.calls()][-2:] == ["aten.sin", "aten.add.Tensor"]
    assert "getitem" in [ops.name_of(n) for n in program.calls()]


VIEWS = [
    lambda x: x.t(),
    lambda x: x.view(16),
    lambda x: x.reshape(2, 8),
    lambda x: x[1:],
    lambda x: x.split(2)[1],
    lambda x: x.expand(2, 4, 4),
    lambda x: x.contiguous(),
    lambda x: x.detach(),
    lambda x: F.dropout(x, 0.5, False),
    lambda x: F.pad(x, (-1, 0)),
    lambda x: x.squeeze().unsqueeze(0).transpose(0, 1),
    lambda x: x.to(torch.float32),
    lambda x: x.chunk(2)[0].diagonal(),
    lambda x: aten.feature_dropout.default(x, 0.5, False),
    lambda x: aten.expand_as.default(x, x),
    lambda x: x.type_as(x),
    lambda x: x.flatten().unflatten(0, (4, 4)),
    lambda x: x.broadcast_to(4, 4),
    lambda x: torch.broadcast_tensors(x, x)[1],
    lambda x: torch.atleast_3d(x),
    lambda x: x.real,
    lambda x: x.conj().resolve_conj(),
    lambda x: x.positive(),
    lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
    lambda x: x.unfold(0, 2, 1),
    lambda x: x.tensor_split(2)[0],
    lambda x: F.feature_alpha_dropout(x, 0.5, False),
    lambda x: F.rrelu(x, 0, 0, False),
    lambda x: x.masked_fill(x > 7, 1.0),
    lambda x: x.repeat(1, 1),
    lambda x: x.tile((1,)),
    lambda x: x.cumsum(0),
    lambda x: torch.cat([x]),
    lambda x: F.interpolate(x[None, None], size=(4, 4))[0, 0],
    lambda x: F.fold(F.unfold(x[None, None], 1), (4, 4), 1),
    lambda x: x.roll(0),
    lambda x: x.flip(()),
    lambda x: x.rot90(0),
    lambda x: torch.einsum("ij->ij", x),
    lambda x: torch.hstack([x]),
    lambda x: x.sum_to_size(4, 4),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: F.celu(x),
    lambda x: x.clamp(),
    lambda x: x.round(),
]


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("index", range(len(VIEWS)))
@pytest.mark.filterwarnings("ignore")
def test_what_shares_memory_is_known_to_do_so(index):
    """The facts against torch itself: whoever returns (a view of) the input must be listed as such."""
    model = VIEWS[index]
    try:
        really = share(model(X), X)
    except RuntimeError:
        really = False
    if not really:
        return
    program = capture(model, X)
    roots = ops.storage_roots(program.graph.nodes)
    first = next(n for n in program.graph.nodes if n.op == "placeholder")
    assert roots[program.outputs[0]] & roots[first], program.text


def test_what_shares_memory_is_known_when_arguments_become_one():
    """What is kept of a call between two passes must not go by the number of its different arguments."""
    program = capture(lambda x: torch.broadcast_tensors(x + 1, x * 2, x * 3), X)
    node = find(program, "broadcast_tensors")
    first, second, third = node.all_input_nodes
    assert ops.may_alias(node) == [first, second, third]
    node.replace_input_with(second, first)
    assert ops.may_alias(node) == [first, third]


def test_new_values_share_nothing():
    program = capture(lambda x: (x.sin(), x + 1, x.split(2)[0] * 2), X)
    roots = ops.storage_roots(program.graph.nodes)
    a, b, c = (roots[value] for value in program.outputs)
    assert not a & b
    assert not b & c


def test_the_results_of_one_call_are_apart():
    program = capture(lambda x: tuple(x.max(0)), X)
    roots = ops.storage_roots(program.graph.nodes)
    assert not roots[program.outputs[0]] & roots[program.outputs[1]]


def test_a_result_that_hangs_on_values_may_be_any_argument():
    """istft looks into its window, which a fake tensor does not have."""
    found = node(lambda x: torch.istft(x, 8), "istft", torch.randn(2, 5, 4, dtype=torch.complex64))
    assert ops.may_alias(found) == found.all_input_nodes
