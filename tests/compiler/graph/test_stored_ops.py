"""No op that a file may call reads or writes memory that is not its, whatever it is given."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.compiler.hostile_calls import MOST, Call, mutations, outcomes
from tests.passes.helpers import capture
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.serialize import read_program, write_program
from tsopt.compiler.graph.stored_ops import ARGUMENTS, FACTORIES, LISTED, REFUSED, computes, fill_uninitialized, refusal
from tsopt.errors import BundleError, TsoptError

aten = torch.ops.aten
X, AT = torch.randn(4, 5), torch.tensor([[0, 1, 2, 3, 0]])
IMAGE = torch.randn(1, 2, 6, 6)

# Calls of ops with indices, and of those that no sample of torch's own database makes.
CALLS: dict[str, Call] = {
    "gather.default": ((X, 0, AT), {}),
    "scatter.src": ((X, 0, AT, X), {}),
    "scatter_add.default": ((X, 0, AT, X), {}),
    "scatter_reduce.two": ((X, 0, AT, X, "sum"), {}),
    "index_select.default": ((X, 0, torch.tensor([0, 3])), {}),
    "index_add.default": ((X, 0, torch.tensor([0, 3]), X[:2]), {}),
    "index_copy.default": ((X, 0, torch.tensor([0, 3]), X[:2]), {}),
    "index.Tensor": ((X, [torch.tensor([0, 3])]), {}),
    "index_put.default": ((X, [torch.tensor([0, 3])], X[:2]), {}),
    "embedding.default": ((X, torch.tensor([0, 3])), {}),
    "embedding_renorm.default": ((X, torch.tensor([0, 3]), 1.0, 2.0), {}),
    "take.default": ((X, torch.tensor([0, 19])), {}),
    "put.default": ((X, torch.tensor([0, 19]), torch.ones(2)), {}),
    "nll_loss_nd.default": ((X, torch.tensor([0, 1, 2, 4])), {}),
    "one_hot.default": ((torch.tensor([0, 2]), 3), {}),
    "as_strided.default": ((X, [2, 2], [5, 1], 3), {}),
    "as_strided_scatter.default": ((X, torch.ones(2, 2), [2, 2], [5, 1], 3), {}),
    "repeat_interleave.self_Tensor": ((X, torch.tensor([1, 2, 0, 1]), 0), {"output_size": 4}),
    "unfold.default": ((X, 1, 3, 1), {}),
    "max_unpool2d.default": ((IMAGE, torch.zeros(1, 2, 6, 6, dtype=torch.int64), [6, 6]), {}),
    "searchsorted.Tensor": ((X.sort().values, X), {"sorter": AT.expand(4, 5).contiguous()}),
    "nonzero.default": ((X,), {}),
    "argwhere.default": ((X,), {}),
    "bincount.default": ((torch.tensor([1, 2, 2]),), {}),
    "_unique2.default": ((X, True, True, True), {}),
    "unique_dim.default": ((X, 0, True, True, True), {}),
    "unique_consecutive.default": ((X, True, True, 0), {}),
    "conv_tbc.default": ((torch.randn(5, 2, 3), torch.randn(3, 3, 4), torch.randn(4), 1), {}),
    "tensor_split.sections": ((X, 2, 0), {}),
    "upsample_nearest2d.default": ((IMAGE, [3, 3]), {}),
    "_upsample_nearest_exact2d.default": ((IMAGE, [3, 3]), {}),
    "chain_matmul.default": (([X, X.t()],), {}),
    "col2im.default": ((torch.randn(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), {}),
    "affine_grid_generator.default": ((torch.randn(1, 2, 3), [1, 2, 4, 4], False), {}),
    "fake_quantize_per_tensor_affine.default": ((X, 0.1, 0, -128, 127), {}),
    "fake_quantize_per_channel_affine.default": (
        (X, torch.rand(4), torch.zeros(4, dtype=torch.int32), 0, -128, 127),
        {},
    ),
    "random.to": ((X, 5), {}),
    "rand_like.default": ((X,), {}),
    "poisson.default": ((X.abs(),), {}),
    "binomial.default": ((X.abs() * 5, torch.rand(4, 5)), {}),
    "pad_sequence.default": (([X, X[:2]], True, 0.0), {}),
    "norm.ScalarOpt_dim": ((X, 2, [1]), {}),
    "nuclear_norm.dim": ((X, [0, 1]), {}),
    "frobenius_norm.dim": ((X, [0, 1]), {}),
    "slogdet.default": ((X[:, :4],), {}),
    "vander.default": ((X[0], 3), {}),
    "orgqr.default": ((X[:, :4], X[0, :4]), {}),
    "rnn_tanh.input": (
        (
            *(torch.randn(3, 2, 4), torch.zeros(1, 2, 5), [torch.randn(5, 4), torch.randn(5, 5), *torch.randn(2, 5)]),
            *(True, 1, 0.0, False, False, False),
        ),
        {},
    ),
}
IS_PUBLIC = re.compile(r"(?!_)(?!.*(backward|native|torch_nn::))")
# What torch's database calls although no model does: `resize_as` leaves memory as it was.
NOT_FOR_FILES = {"hash_tensor", "resize_as"}
SLICE = 8  # of the calls that are like one, in `make test`


def op_of(name: str):
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


@pytest.mark.sliced(12)
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the limits of a child are those of Linux")
@pytest.mark.parametrize("name", CALLS)
def test_an_op_that_a_file_may_call_survives_hostile_arguments(name, fuzz_factor):
    calls = list(itertools.islice(mutations(CALLS[name]), MOST))
    if fuzz_factor == 1:
        calls = calls[-SLICE:]  # indices come last
    assert refusal(op_of(name), (), {}) == ""
    assert not outcomes(op_of(name), calls)


def test_what_does_not_survive_is_told():
    indices = torch.full((1, 1, 2, 2), 2**40)
    call = ((torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, indices), {})
    assert outcomes(aten.max_pool2d_with_indices_backward.default, [call])
    assert outcomes(aten.empty.memory_format, [(([64],), {})]) == ["call 0: its answer depends on what was in memory"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not os.environ.get("TSOPT_FUZZ"), reason="make fuzz")
def test_every_op_that_a_file_may_call_survives_hostile_arguments(monkeypatch):
    from torch.testing._internal import common_methods_invocations

    from tests.test_opinfo import Case, fresh, not_seeded, op_database, samples_of

    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", not_seeded)
    seen, refused, wrong = set[str](), dict[str, str](), list[str]()
    for info in op_database():
        aliases = [alias.op for alias in info.aliases]
        for op, sample in itertools.product((info.op, *aliases), itertools.islice(samples_of(info), 2)):
            try:
                model, inputs = fresh(Case.of(op, sample), "inputs")
                found = made_calls(capture(model, inputs, allow_nan=True), inputs)
            except TsoptError:
                continue  # eager refuses it, or capture does
            for target, call in found:
                if reason := refusal(target, *call):
                    refused[target._schema.name.removeprefix("aten::")] = reason
                elif str(target) not in seen:
                    seen.add(str(target))
                    calls = [item for item in itertools.islice(mutations(call), MOST) if not refusal(target, *item)]
                    random = torch.Tag.nondeterministic_seeded in target.tags
                    random = random or target._schema.name in ops.UNINITIALIZED
                    wrong += [f"{target} {said}" for said in outcomes(target, calls, not random)]
    assert len(seen) > 500
    assert wrong == []
    assert {name for name in refused if name not in REFUSED and IS_PUBLIC.match(name)} <= NOT_FOR_FILES


def made_calls(program, inputs):
    values, given, found = {}, iter(inputs), []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = program.weights.get(str(node.target))
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            if isinstance(node.target, torch._ops.OpOverload):
                found.append((node.target, (args, kwargs)))
            values[node] = node.target(*args, **kwargs)
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("max_pool2d_with_indices_backward.default", "segment_reduce.default", "_sparse_coo_tensor_unsafe.default"),
        *(
            "_unsafe_index.Tensor",
            "_unsafe_masked_index.default",
            "embedding_bag.padding_idx",
            "_embedding_bag.default",
        ),
        *("_foreach_add.Scalar", "_thnn_fused_lstm_cell.default", "_native_multi_head_attention.default"),
        *("resize.default", "set.default", "to_sparse.default", "quantize_per_tensor.default", "dequantize.self"),
        *("_nested_view_from_buffer.default", "linalg_ldl_solve.default", "lu_unpack.default", "gelu_backward.default"),
        *("tanh_backward.default", "native_batch_norm.default", "_ctc_loss.default", "_cdist_forward.default"),
        *(
            "_scaled_dot_product_efficient_attention.default",
            "mkldnn_rnn_layer.default",
            "_pack_padded_sequence.default",
        ),
    ],
)
def test_an_op_that_believes_its_arguments_is_refused(name):
    assert refusal(op_of(name), (), {})


def test_an_op_that_is_new_is_refused():
    library = torch.library.Library("aten", "FRAGMENT")
    library.define("tsopt_test_new(Tensor x, int i) -> Tensor")
    try:
        assert computes(aten.tsopt_test_new.default)
        assert "not on the list" in refusal(aten.tsopt_test_new.default, (), {})
    finally:
        library._destroy()


def test_nothing_is_both_allowed_and_refused():
    assert not LISTED & set(REFUSED)
    assert set(ARGUMENTS) - {"div", "divide"} <= LISTED | FACTORIES
    assert {name for name in LISTED if not hasattr(aten, name)} <= {"qr", "cholesky"}  # not in torch 2.14
    assert not [
        name for name in LISTED if re.search("backward|sparse|(?<!fake_)quantize|nested|mkldnn|cudnn|foreach", name)
    ]


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"device": torch.device("meta")}, "unsupported device meta"),
        ({"layout": torch.sparse_coo}, "sparse_coo"),
        ({"dtype": torch.qint8}, "qint8"),
    ],
)
def test_a_tensor_of_another_kind_is_refused(kwargs, reason):
    assert reason in refusal(aten.zeros.default, ([2],), kwargs)
    assert refusal(aten.zeros.default, ([2],), {"device": torch.device("cpu"), "dtype": torch.float16}) == ""


@pytest.mark.parametrize(("mode", "fine"), [((0, 0), True), ((2, 2), True), ((3, 0), False), ((0, -1), False)])
def test_a_mode_that_there_is_not_is_refused(mode, fine):
    assert (refusal(aten.grid_sampler.default, (None, None, *mode, False), {}) == "") is fine


@pytest.mark.parametrize(
    "model",
    [
        lambda x: nn.functional.fold(x, (4, 4), 2),
        lambda x: nn.functional.affine_grid(x[:, :2, :3], [1, 2, 4, 4]),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
        lambda x: nn.utils.rnn.pad_sequence([x[0], x[0, :3]]),
        lambda x: x.swapdims(0, 1).absolute().arccos(),
        lambda x: torch.inverse(x[:, :8, :8]) * torch.det(x[:, :8, :8]),
        lambda x: torch.rand_like(x).greater(torch.special.expit(x)),
    ],
    ids=["fold", "affine_grid", "fake_quantize", "pad_sequence", "aliases", "matrices", "random"],
)
def test_public_ops_can_be_stored_before_any_pass(tmp_path, model):
    program = written(tmp_path, model, torch.rand(1, 8, 9))
    assert read_program(tmp_path).fingerprint() == program.fingerprint()


def written(tmp_path, model, *inputs):
    program = capture(model, *inputs)
    write_program(program, tmp_path)
    return program


@pytest.mark.sliced(4)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False}, {"proj_size": 2}])
@pytest.mark.parametrize("batch_first", [False, True])
def test_an_lstm_comes_back(tmp_path, options, batch_first):
    model = nn.LSTM(4, 3, batch_first=batch_first, num_layers=options.pop("num_layers", 1), **options).eval()
    program = written(tmp_path, model, torch.randn(5, 2, 4))
    assert read_program(tmp_path).fingerprint() == program.fingerprint()


@pytest.mark.parametrize(
    ("old", "new"),
    [((1, 2, 3), (1, 0, 3)), ((1, 2, 3), (1, 3, 3)), ((12, 4), (11, 4)), ((12,), (3,))],
)
def test_an_lstm_of_other_sizes_than_its_input_is_refused(tmp_path, old, new):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)
            self.register_buffer("h", torch.zeros(1, 2, 3))

        def forward(self, x):
            return self.lstm(x, (self.h, self.h + 1))[0]

    from safetensors.torch import load_file, save_file

    written(tmp_path, Net().eval(), torch.randn(5, 2, 4))
    place = tmp_path / "weights.safetensors"
    save_file({n: torch.zeros(new) if tuple(t.shape) == old else t for n, t in load_file(place).items()}, place)
    data = (tmp_path / "program.json").read_text()
    (tmp_path / "program.json").write_text(
        data.replace('"stride": [6, 3, 1]', f'"stride": [{3 * new[1 % len(new)]}, 3, 1]', 1)
    )
    with pytest.raises(BundleError):
        read_program(tmp_path)


@pytest.mark.parametrize(
    ("model", "fine"),
    [
        (lambda x: torch.div(x, x, rounding_mode="trunc"), False),
        (lambda x: torch.div(x, -1, rounding_mode="trunc"), False),
        (lambda x: torch.div(x, 3, rounding_mode="trunc"), True),
        (lambda x: torch.div(x, x, rounding_mode="floor"), True),
        (lambda x: torch.div(x.float(), x, rounding_mode="trunc"), True),
    ],
)
def test_a_division_that_can_end_the_process_is_refused(tmp_path, model, fine):
    written(tmp_path, model, torch.tensor([4, 5]))
    if fine:
        read_program(tmp_path)
        return
    with pytest.raises(BundleError) as caught:
        read_program(tmp_path)
    assert "can crash the process" in caught.value.why


def test_own_programs_may_call_everything(tmp_path):
    written(tmp_path, lambda x: torch.div(x, x, rounding_mode="trunc"), torch.tensor([4, 5]))
    assert read_program(tmp_path, own=True)


def test_memory_that_nobody_has_written_is_zero(tmp_path):
    program = written(tmp_path, lambda x: (x + 1, torch.empty(3, 2), torch.empty_like(x)), X)
    made = read_program(tmp_path)
    assert made.fingerprint() == program.fingerprint()
    fill_uninitialized(made)
    _, *rest = made.module()(X)
    assert all(not tensor.any() for tensor in rest)


def test_memory_that_cannot_be_filled_is_refused(tmp_path):
    written(tmp_path, lambda x: (x + 1, torch.empty_strided((2, 2), (5, 1))), X)
    with pytest.raises(BundleError, match="uninitialized memory"):
        fill_uninitialized(read_program(tmp_path))
