"""TensorFloat-32, by whichever of torch's two settings."""

from __future__ import annotations

import pytest
import torch

from tsopt.runtime import tensor_float

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def _as_it_was():
    before = MATMUL.allow_tf32, CUDNN.allow_tf32
    yield
    MATMUL.fp32_precision = "none"
    MATMUL.allow_tf32 = before[0]
    assert CUDNN.allow_tf32 == before[1]


@pytest.mark.parametrize("value", [True, False])
def test_the_first_setting_is_read_and_put_back(value):
    MATMUL.allow_tf32 = value
    assert tensor_float.is_on() is value
    with tensor_float.turned_on():
        assert (MATMUL.allow_tf32, CUDNN.allow_tf32) == (True, True)
    assert MATMUL.allow_tf32 is value


@pytest.mark.parametrize(("value", "on"), [("tf32", True), ("ieee", False)])
def test_where_the_user_has_set_the_second_one_that_is_used(value, on):
    MATMUL.fp32_precision = value
    if on:
        with pytest.raises(RuntimeError):
            bool(MATMUL.allow_tf32)
    assert tensor_float.is_on() is on
    with tensor_float.turned_on():
        assert tensor_float.is_on()
    assert MATMUL.fp32_precision == value


def test_they_are_put_back_where_the_block_fails():
    with pytest.raises(KeyError), tensor_float.turned_on():
        raise KeyError
    assert not tensor_float.is_on()
