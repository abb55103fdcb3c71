"""The ops that a program from a file may call, and the arguments they accept: only ops that validate their arguments.

ATen also has internal ops that trust their arguments: a call with invalid indices reads or writes memory out of bounds.
So an op must be pointwise or on the list, and arguments that disable checks are refused. Ops that are new in a PyTorch
version are refused until they have been reviewed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tsopt.compiler.calls.types import SHORT
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.infer import infer_type
from tsopt.compiler.graph.program import Program, type_of
from tsopt.errors import BundleError

CHECKS = frozenset({"aten::_assert_tensor_metadata", "aten::_assert_async", "aten::_assert_scalar"})
FACTORIES = frozenset(
    {"arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm"}
    | {"scalar_tensor", "tril_indices", "triu_indices", "zeros", "empty_strided", "empty_permuted", "normal", "range"}
    | {"hann_window", "hamming_window", "bartlett_window", "blackman_window", "kaiser_window"}
    | {"fft_fftfreq", "fft_rfftfreq"}
)

# Those that capture makes of public functions, and that have withstood `tests/compiler/hostile_calls.py`. Pointwise ops
# need no entry: they have no indices, and TensorIterator checks their shapes.
_NAMES = """
__and__ __or__ __xor__ _safe_softmax _to_copy _unique2 _unsafe_view _upsample_bilinear2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d absolute adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d addbmm addmm addmv addr adjoint
affine_grid_generator alias alias_copy all alpha_dropout amax amin aminmax any arange arccos arccosh arcsin arcsinh
arctan arctan2 arctanh argmax argmin argsort argwhere as_strided as_strided_copy as_strided_scatter atleast_1d
atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window batch_norm bernoulli bilinear
binary_cross_entropy binary_cross_entropy_with_logits bincount binomial blackman_window block_diag bmm
broadcast_tensors broadcast_to bucketize cartesian_prod cat cauchy cdist chain_matmul chalf channel_shuffle cholesky
cholesky_inverse cholesky_solve chunk col2im column_stack complex concat concatenate constant_pad_nd contiguous conv1d
conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d copy cosine_embedding_loss cosine_similarity
count_nonzero cross cross_entropy_loss cummax cummin cumprod cumsum cumulative_trapezoid det detach diag diag_embed
diagflat diagonal diagonal_copy diagonal_scatter diff dist divide dot dropout dsplit dstack einsum embedding
embedding_renorm empty empty_like empty_permuted empty_strided expand expand_as expand_copy exponential eye
fake_quantize_per_channel_affine fake_quantize_per_tensor_affine feature_alpha_dropout feature_dropout fft_fft fft_fft2
fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill fix flatten flip
fliplr flipud floor_divide fractional_max_pool2d fractional_max_pool3d frobenius_norm full full_like gather geometric
geqrf ger glu gradient greater greater_equal grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell
hamming_window hann_window hardswish hinge_embedding_loss histc histogram histogramdd hsplit hstack huber_loss im2col
imag index index_add index_copy index_fill index_put index_reduce index_select inner instance_norm inverse isclose isin
isreal istft kaiser_window kl_div kron kthvalue l1_loss layer_norm less less_equal lift_fresh_copy linalg_cholesky
linalg_cholesky_ex linalg_cond linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvalsh
linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_lu linalg_lu_factor
linalg_lu_factor_ex linalg_lu_solve linalg_matmul linalg_matrix_exp linalg_matrix_norm linalg_matrix_power
linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot
linalg_vector_norm linear linspace log_normal log_sigmoid log_softmax logcumsumexp logdet logspace logsumexp lstm
lstm_cell lu_solve mH mT margin_ranking_loss masked_fill masked_scatter matmul matrix_H matrix_exp matrix_power max
max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d
max_unpool3d mean median meshgrid min mm mode moveaxis movedim mse_loss msort multi_margin_loss multilabel_margin_loss
multinomial multiply mv nanmean nanmedian nanquantile nansum narrow narrow_copy native_group_norm native_layer_norm
negative new_empty new_empty_strided new_full new_ones new_zeros nll_loss_nd nonzero nonzero_static norm normal
normal_functional not_equal nuclear_norm numpy_T one_hot ones ones_like orgqr ormqr outer pad pad_sequence
pairwise_distance pdist permute permute_copy pinverse pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar
prelu prod put qr quantile rand rand_like randint randint_like randn randn_like random randperm range ravel real renorm
repeat repeat_interleave reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu rnn_relu_cell rnn_tanh
rnn_tanh_cell roll rot90 row_stack rsub scalar_tensor scaled_dot_product_attention scatter scatter_add scatter_reduce
searchsorted select select_scatter slice slice_scatter slogdet smooth_l1_loss soft_margin_loss softmax sort
special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1 special_gammainc
special_gammaincc special_gammaln special_i0 special_log1p special_log_softmax special_logit special_logsumexp
special_multigammaln special_ndtr special_polygamma special_psi special_round special_sinc special_softmax
special_xlogy split split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack std std_mean stft subtract sum
sum_to_size svd swapaxes swapdims t t_copy take take_along_dim tensor_split tensordot tile to topk trace transpose
transpose_copy trapezoid trapz triangular_solve tril tril_indices triplet_margin_loss triu triu_indices true_divide
type_as unbind unbind_copy unflatten unfold unfold_copy uniform unique_consecutive unique_dim unsafe_chunk unsafe_split
unsqueeze unsqueeze_copy upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_trilinear3d vander var var_mean vdot view view_as view_as_complex view_as_real view_copy
vsplit vstack where zero zeros zeros_like
"""
LISTED = frozenset(_NAMES.split())

# Public functions that the same calls have shown to trust their arguments (PyTorch 2.13, CPU).
REFUSED: dict[str, str] = {
    "embedding_bag": "offsets are not bounds-checked: it can read past the indices",
    "linalg_eigvals": "a NaN or an infinity crashes the process in LAPACK",
    "linalg_ldl_solve": "pivots are not bounds-checked: it can write outside the matrix",
    "lu_unpack": "the number of pivots is not checked: it can read past them",
    "segment_reduce": "offsets are not bounds-checked: it can read outside the data",
}

DEVICES = frozenset({"cpu", "cuda", "xpu", "mps"})
DTYPES = frozenset(getattr(torch, name) for name in SHORT)


def computes(op: OpOverload) -> bool:
    """Whether an op makes tensors of its arguments, or checks them, and does nothing else: no seeding, no files."""
    schema = op._schema
    if schema.name in CHECKS:
        return True
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    gives = bool(schema.returns) and all("Tensor" in str(result.type) for result in schema.returns)
    makes = schema.name.removeprefix("aten::") in FACTORIES
    return gives and (takes or makes) and not ops.writes(op)


def refusal(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Why a program from a file may not make a call; empty when it may."""
    if not isinstance(target, OpOverload) or target is ops.SIZE:
        return ""  # getitem, numbers from sizes, control flow: checked where they are read
    name = target._schema.name.removeprefix("aten::")
    if name in REFUSED:
        return REFUSED[name]
    pointwise = torch.Tag.pointwise in target.tags and not name.startswith("_") and "backward" not in name
    if not (pointwise or name in LISTED or target._schema.name in CHECKS or ops.is_quantization(target)):
        return "it is not on the list of ops that validate their arguments"
    for value in (*args, *kwargs.values()):
        reason = _of_another_kind(value)
        if reason:
            return reason
    bound = {parameter: default for parameter, _, default in ops.parameters(target)}
    bound |= {**dict(zip(bound, args, strict=False)), **kwargs}
    check = ARGUMENTS.get(name)
    return check(bound) if check is not None else ""


def _of_another_kind(value: Any) -> str:
    """Tensors that are not dense, or have no memory: kernels do not expect them where no type says so."""
    if isinstance(value, torch.layout) and value is not torch.strided:
        return f"unsupported layout {value}"
    if isinstance(value, torch.device) and value.type not in DEVICES:
        return f"unsupported device {value}"
    if isinstance(value, torch.dtype) and value not in DTYPES:
        return f"unsupported dtype {value}"
    return ""


def _modes(bound: Mapping[str, Any]) -> str:
    """With a mode that there is not, the result is left as it was in memory."""
    modes = bound["interpolation_mode"], bound["padding_mode"]
    known = all(type(mode) is int and 0 <= mode <= 2 for mode in modes)
    return "" if known else f"invalid modes {str(modes)[:40]}"


def _cells(bound: Mapping[str, Any]) -> str:
    """NOTE: oneDNN takes the sizes of the state and of the weights for granted; only Python's `nn.LSTM` checks them."""
    bad = "the sizes of its state or its weights do not match its input"
    if not {"input", "hx", "params", "num_layers", "bidirectional", "has_biases", "batch_first"} <= set(bound):
        return "the sizes of a packed sequence are not checked"
    x, *state = (_shape(value) for value in (bound["input"], *bound["hx"]))
    weights = [_shape(value) for value in bound["params"]]
    layers, ways, biases = bound["num_layers"], 1 + bool(bound["bidirectional"]), bool(bound["has_biases"])
    if len(x) != 3 or len(state) != 2 or len(state[0]) != 3 or len(state[1]) != 3 or type(layers) is not int:
        return bad
    hidden, out, batch = state[1][2], state[0][2], x[0] if bound["batch_first"] else x[1]
    wanted: list[tuple[int, ...]] = []
    for cell in range(layers * ways if 0 < layers * ways <= len(weights) else 0):
        wanted += [(4 * hidden, x[2] if cell < ways else out * ways), (4 * hidden, out)]
        wanted += [(4 * hidden,)] * 2 * biases + [(out, hidden)] * (out != hidden)
    fits = wanted == weights and state == [(layers * ways, batch, out), (layers * ways, batch, hidden)]
    return "" if fits and weights else bad


def _shape(value: Any) -> tuple[int, ...]:
    """Of a value that is a tensor; that of a number otherwise."""
    found = value.meta["val"] if isinstance(value, fx.Node) else value
    return tuple(found.shape) if isinstance(found, torch.Tensor) else ()


def _truncating(bound: Mapping[str, Any]) -> str:
    """NOTE: the processor traps on the smallest integer by -1, and PyTorch does not look."""
    divisor, values = bound["other"], (bound["self"], bound["other"])
    if bound.get("rounding_mode") != "trunc" or any(_is_real(value) for value in values):
        return ""
    literal = type(divisor) is int and divisor != -1
    return "" if literal else "truncating integer division by a computed value can crash the process"


def _is_real(value: Any) -> bool:
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, float)


# Arguments that an op of the table believes: name -> why a call with these is refused, or nothing.
ARGUMENTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "div": _truncating,
    "divide": _truncating,
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), _modes),
    "lstm": _cells,
}


def fill_uninitialized(program: Program) -> None:
    """Replaces uninitialized values with zeros, so that a program cannot read what another model left in memory."""
    for node in [node for node in program.graph.nodes if ops.is_call(node)]:
        for block in ops.blocks_of(node):
            fill_uninitialized(block)
        if not ops.is_uninitialized(node):
            continue
        with program.graph.inserting_after(node):
            zeros = program.graph.call_function(torch.ops.aten.zeros_like.default, (node,))
        zeros.meta = dict(node.meta)
        node.replace_all_uses_with(zeros, delete_user_cb=lambda user, zeros=zeros: user is not zeros)
        if infer_type(program, zeros) != type_of(node):
            raise BundleError("the stored program reads uninitialized memory", why=str(node.target))
