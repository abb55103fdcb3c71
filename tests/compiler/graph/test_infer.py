"""Types of calls, by fake tensors."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tsopt
from tests.compiler.helpers import Net
from tests.elsewhere import elsewhere
from tsopt.compiler.graph import infer
from tsopt.compiler.graph.infer import fakes, infer_type
from tsopt.compiler.graph.program import type_of


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_on_a_gpu_have_the_types_that_they_have_on_the_cpu(cls, batch_first):
    """Kernels of cuDNN would look into the memory of the weights, which a fake has not."""
    layer = cls(8, 16, bidirectional=True, batch_first=batch_first)
    program = tsopt.capture(Net(lambda self, x: self.layer(x), layer=layer), torch.ones(3, 5, 8))
    there = elsewhere(program, "cuda:0")
    (node,) = (node for node in there.calls() if isinstance(type_of(node), tuple))
    assert infer_type(there, node) == type_of(node)
    assert "cuda:0" in str(type_of(node))


def test_the_kernel_of_a_recurrent_layer_is_asked_on_the_cpu(monkeypatch):
    seen = []

    def layer(x, weights):
        seen.extend(value.device.type for value in (x, *weights))
        return x + 1, [x]

    monkeypatch.setattr(infer, "_RECURRENT", frozenset([layer]))
    with fakes(FakeTensorMode()):
        found = infer.fake_call(layer, (torch.ones(2, device="cuda"), [torch.ones(2, device="cuda")]), {})
    assert seen == ["cpu", "cpu"]
    assert [str(found[0].device), str(found[1][0].device)] == ["cuda:0", "cuda:0"]


@pytest.fixture
def logged():
    """What torch logs of calls on fake tensors."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    yield logger, said
    logger.removeHandler(handler)


def test_threads_that_infer_at_once_leave_the_log_on(logged):
    logger, said = logged
    entered, left = threading.Event(), threading.Event()

    def infers_for_longer():
        with fakes(FakeTensorMode()):
            entered.set()
            left.wait()
            logger.error("refused")

    thread = threading.Thread(target=infers_for_longer)
    with fakes(FakeTensorMode()):
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    logger.error("after both")
    assert said == ["after both"]


def test_only_the_thread_that_infers_logs_nothing(logged, in_a_thread):
    logger, said = logged
    with fakes(FakeTensorMode()):
        with fakes(FakeTensorMode()):
            pass
        logger.error("refused")
        in_a_thread(lambda: logger.error("another's"))
    assert said == ["another's"]
