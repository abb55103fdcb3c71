from __future__ import annotations

import pytest
import torch

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.checking.inputs import ZEROS, blank, by_column, input_sets, sets_near


def leaves(sets, position=0):
    return {item.kind: item.example.args[position] for item in sets}


def test_floats_get_seven_kinds_at_least():
    found = leaves(input_sets(Example((torch.randn(4, 4),)), 0))
    assert {"example", "drawn-1", "drawn-2", "random", "large", "tiny"} <= set(found)
    assert found["large"].abs().mean() > 10 * found["random"].abs().mean()
    assert found["tiny"].abs().max() < 0.1
    assert not found[ZEROS].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_inputs_reach_to_where_exp_overflows(dtype):
    example = (torch.rand(4, 4) / 10).to(dtype)
    found = leaves(input_sets(Example((example,)), 0))["large"]
    assert found.abs().max() >= 199
    assert not found.exp().isfinite().all()


def test_large_inputs_are_a_hundred_times_the_example_where_that_is_more():
    found = leaves(input_sets(Example((torch.full((8, 8), 30.0) + torch.randn(8, 8),)), 0))["large"]
    assert 2_500 < found.mean() < 3_500


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_are_drawn_from_the_examples_own_values(dtype):
    example = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    found = leaves(input_sets(Example((example,)), 0))
    assert len(found) >= 5
    assert all(set(value.reshape(-1).tolist()) <= {0, 1} and value.dtype == dtype for value in found.values())


def test_dtype_shape_and_layout_are_the_examples():
    example = torch.randn(3, 5, dtype=torch.float64).t()
    for value in leaves(input_sets(Example((example,)), 0)).values():
        assert (value.dtype, value.shape, value.stride()) == (example.dtype, example.shape, example.stride())


def test_a_constant_example_still_gives_values_that_differ():
    for item in input_sets(Example((torch.zeros(4),)), 0)[1:]:
        if item.kind == ZEROS:
            continue
        assert len(set(item.example.args[0].tolist())) > 1


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
def test_scalars_and_empty_tensors_are_taken(shape):
    assert all(item.example.args[0].shape == shape for item in input_sets(Example((torch.ones(shape),)), 0))


def test_the_seed_decides():
    def values(seed):
        return [item.example.args[0].nan_to_num() for item in input_sets(Example((torch.arange(9.0),)), seed)]

    assert all(torch.equal(a, b) for a, b in zip(values(1), values(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(values(1), values(2), strict=True))


def test_making_inputs_draws_nothing_from_the_users_generator():
    before = torch.get_rng_state()
    input_sets(Example((torch.ones(4),)), 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_clone_shares_no_memory_with_the_example():
    example = torch.ones(3)
    (first, *_) = input_sets(Example((example,), {"k": [example]}), 0)
    call = first.clone()
    call.args[0].zero_()
    call.kwargs["k"][0].zero_()
    assert example.tolist() == [1, 1, 1]


def test_blank_inputs_are_zeros_laid_out_as_captured():
    example = (torch.randn(3, 5, dtype=torch.float64).t(), torch.arange(4))
    first, second = blank(tsopt.capture(lambda x, y: (x * 2, y), example).signature)
    assert (first.dtype, first.shape, first.stride()) == (torch.float64, (5, 3), (1, 5))
    assert (second.dtype, second.shape) == (torch.int64, (4,))
    assert not first.any()
    assert not second.any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
def test_floats_of_one_byte_are_varied_as_others_are(dtype):
    example = Example((torch.tensor([1.0, 2.0, 4.0, 8.0]).to(dtype),))
    for item in (*input_sets(example, 0), *sets_near(example, 0)):
        assert item.example.args[0].dtype == dtype
        assert by_column(item, example, 0) is None
    assert leaves(input_sets(example, 0))["special"].float().isnan().any()
