"""int8 as a knowledgeable user sets it up by hand with each toolkit, by its documentation.

NNCF and torchao are not among the dependencies: `pip install nncf torchao`, which may want other versions of theirs
than `constraints.txt` names, so preferably into an environment of its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

import tsopt

Data = Sequence[tsopt.Example]
Called = Callable[..., Any]


def ort_static(model: nn.Module, example: tsopt.Example, data: Data) -> Called:
    """ONNX Runtime: QDQ, weights in 8 bits per channel, unsigned activations."""
    with _exported(model, example) as (plain, names):
        ready, made = plain.with_name("ready.onnx"), plain.with_name("made.onnx")
        quant_pre_process(plain, ready)
        options: dict[str, Any] = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(ready, made, _Reader(names, data), per_channel=True, **options)
        return _in_session(made)


def ort_dynamic(model: nn.Module, example: tsopt.Example, data: Data) -> Called:
    """ONNX Runtime: weights in 8 bits per channel, scales of activations computed in each call."""
    with _exported(model, example) as (plain, _):
        ready, made = plain.with_name("ready.onnx"), plain.with_name("made.onnx")
        quant_pre_process(plain, ready)
        quantize_dynamic(ready, made, weight_type=QuantType.QInt8, per_channel=True)
        return _in_session(made)


def nncf(model: nn.Module, example: tsopt.Example, data: Data) -> Called:
    """NNCF's post-training quantization, run by OpenVINO: its scheme for transformers where the model is one."""
    import nncf as toolkit
    import openvino

    with _exported(model, example) as (plain, names):
        core = openvino.Core()
        read = core.read_model(plain)
        is_text = any(not value.is_floating_point() for value in _values(example))
        made = toolkit.quantize(
            read,
            toolkit.Dataset(data, lambda item: _feed(names, item)),
            subset_size=len(data),
            model_type=toolkit.ModelType.TRANSFORMER if is_text or _has_attention(model) else None,
        )
        threads = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        request = core.compile_model(made, "CPU", threads).create_infer_request()

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        found = request.infer([value.numpy() for value in (*args, *kwargs.values())])
        return [torch.from_numpy(value.copy()) for value in found.values()]

    return run


def torchao(model: nn.Module, example: tsopt.Example, data: Data) -> Called:
    """torchao's PT2E quantization for x86, compiled by Inductor with frozen weights."""
    from torch._inductor import config
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad(), _quiet():
        prepared = prepare_pt2e(torch.export.export(model, example.args, example.kwargs).module(), quantizer)
        for item in data:
            prepared(*item.args, **item.kwargs)
        compiled = torch.compile(convert_pt2e(prepared))
        with config.patch(freezing=True):
            compiled(*example.args, **example.kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return compiled(*args, **kwargs)

    return run


PEERS: dict[str, Callable[[nn.Module, tsopt.Example, Data], Called]] = {
    "ONNX Runtime, static": ort_static,
    "ONNX Runtime, dynamic": ort_dynamic,
    "OpenVINO + NNCF": nncf,
    "torchao + Inductor": torchao,
}


def _values(call: tsopt.Example) -> list[torch.Tensor]:
    return [*call.args, *call.kwargs.values()]


def _has_attention(model: nn.Module) -> bool:
    return any("attention" in type(module).__name__.lower() for module in model.modules())


def _feed(names: Sequence[str], call: tsopt.Example) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in zip(names, _values(call), strict=True)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _exported(model: nn.Module, example: tsopt.Example) -> Iterator[tuple[Path, list[str]]]:
    """The ONNX file of a model, in a directory that goes with the block, and the names of its inputs."""
    with tempfile.TemporaryDirectory() as directory, _quiet():
        exported = torch.onnx.export(model, example.args, kwargs=example.kwargs, dynamo=True, verbose=False)
        assert exported is not None
        proto = exported.model_proto
        del proto.graph.value_info[:]  # the quantizers trip over what the exporter has recorded
        plain = Path(directory) / "plain.onnx"
        onnx.save(proto, plain)
        yield plain, [item.name for item in proto.graph.input]


def _in_session(file: Path) -> Called:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    inputs = [item.name for item in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        found = session.run(None, _feed(inputs, tsopt.Example(args, kwargs)))
        return [torch.from_numpy(value) for value in found]

    return run


class _Reader(CalibrationDataReader):
    def __init__(self, names: Sequence[str], data: Data) -> None:
        self._items = iter([_feed(names, item) for item in data])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._items, None)
