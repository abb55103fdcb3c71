"""How engines differ from PyTorch, by dtype and op: measured against eager on the extremes of each dtype.

`python -m bench.hazards dtypes` shows what is left of it.
"""

from __future__ import annotations

import torch

from tsopt.compiler.analysis.intervals import FLAG, Range, of_dtype
from tsopt.runtime.onnx.integers.engine import AS_BOOL, Engine, signed

WHOLE = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)
WIDE = (torch.int64, torch.uint32, torch.uint64)
INT32 = of_dtype(torch.int32)
IN_FLOAT32, IN_FLOAT64 = signed(24), signed(53)
# A quotient in floats, rounded to the nearest float before it is cut: another number next to a multiple.
QUOTIENTS = frozenset({"div", "floor_divide", "remainder", "fmod"})
REDUCTIONS = frozenset(
    {"sum", "prod", "cumprod", "amax", "amin", "max", "min", "mm", "bmm", "addmm", "matmul", "linear"}
    | {"scatter_add", "scatter_reduce", "index_add"}
)

# OpenVINO compares in float32, and makes one kernel of a comparison and what it chooses, which is of float32 too.
COMPARISONS = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater", "greater_equal"}
    | {"maximum", "minimum", "clamp", "clamp_min", "clamp_max", "clip", "isin", "bucketize"}
)
CHOICES = ("where", "masked_fill", "pad", "constant_pad_nd")

# NOTE: ONNX Runtime compares the lower halves of int64 as signed numbers: its largest of 2**31 and 0 is 0. `minimum`,
# `maximum` and `clamp` have translations of ours that do not.
COMPARED = ("max", "min", "amax", "amin", "aminmax", "sign", "sgn", "hardtanh", "relu6")

# The ONNX exporter translates others for whole numbers by way of floats; ONNX Runtime's sums saturate.
ONNX_RUNTIME = Engine(
    "ONNX Runtime",
    by_op={
        "div": IN_FLOAT32,
        "fmod": IN_FLOAT64,
        **dict.fromkeys(COMPARED, INT32),
        "isclose": FLAG,  # PyTorch subtracts in floats, the translation in the dtype, where it may wrap
        "sum": IN_FLOAT64,
        "prod": IN_FLOAT64,
        "pow": IN_FLOAT64,
    },
    rounds=frozenset({"div", "floor_divide", "remainder"}),
)

# The plugin for CPUs makes int32 of all wide integers and float32 of float64, saturates narrow ones, and divides,
# reduces and compares in float32. What stays within a dtype is not affected by how its end is treated.
OPENVINO = Engine(
    "OpenVINO",
    dtypes={**{dtype: of_dtype(dtype) for dtype in WHOLE}, **{dtype: of_dtype(dtype) & INT32 for dtype in WIDE}},
    by_op={
        **dict.fromkeys((*QUOTIENTS, *REDUCTIONS, *CHOICES, "pow", "relu"), IN_FLOAT32),
        **dict.fromkeys(("rshift", "bitwise_right_shift"), Range(0, IN_FLOAT32.high)),  # it computes -7 >> 1 as -1
        # It takes the lowest int32 for zero.
        **dict.fromkeys((AS_BOOL, "logical_not", "logical_and", "logical_or", "logical_xor", "all", "any"), signed(31)),
        **dict.fromkeys(
            ("floor", "ceil", "round", "trunc", "isclose"), FLAG
        ),  # in floats, which are cut at another end
    },
    compared=dict.fromkeys(COMPARISONS, IN_FLOAT32),
    absent={
        torch.float64: "it computes in float32",
        **dict.fromkeys((torch.complex64, torch.complex128), "it has no complex dtypes"),
    },
    rounds=QUOTIENTS,
    beyond="reads memory outside the tensor for out-of-range indices,",
)
