"""Weights in a file, as they are in memory, and back."""

from __future__ import annotations

import pytest
import torch

from tsopt.compiler.graph.weights_file import bytes_in_memory, memory_order, read_weights, write_weights

PLAIN = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("value", "order"),
    [
        (PLAIN, [0, 1]),
        (PLAIN.t(), [1, 0]),
        (torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), [0, 2, 3, 1]),
        (PLAIN[:, ::2], [0, 1]),
        (PLAIN[:1].expand(3, 4), [0, 1]),
        (torch.tensor(1.0), []),
    ],
    ids=["contiguous", "transposed", "channels last", "with gaps", "expanded", "scalar"],
)
def test_a_weight_is_written_in_its_memory_order(tmp_path, value, order):
    assert memory_order(value) == order
    write_weights({"w": value}, tmp_path / "file")
    assert torch.equal(read_weights(tmp_path / "file")["w"], value.permute(order))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_the_bytes_of_the_file_are_those_in_memory(tmp_path, dtype):
    weights = {
        "a": PLAIN.to(dtype),
        "b": PLAIN.to(dtype).t(),
        "rows": PLAIN.to(dtype)[1:],
        "one": torch.ones((), dtype=dtype),
    }
    write_weights(weights, tmp_path / "file")
    stored = (tmp_path / "file").read_bytes()
    found = list(bytes_in_memory(weights, tmp_path / "file"))
    assert len(found) == len(weights)
    for offset, part in found:
        assert stored[offset : offset + len(part)] == part.numpy().tobytes()
    owners = {weight.data_ptr() for weight in weights.values()}
    assert {part.data_ptr() for _, part in found} == owners, "no copies"


def test_weights_that_are_not_as_they_were_written_are_left_out(tmp_path):
    write_weights({"gone": PLAIN, "larger": PLAIN, "gaps": PLAIN[:, ::2], "none": PLAIN[:0]}, tmp_path / "file")
    now = {"larger": torch.zeros(5, 4), "gaps": PLAIN[:, ::2], "none": PLAIN[:0], "new": PLAIN}
    assert list(bytes_in_memory(now, tmp_path / "file")) == []


def test_weights_that_share_memory_are_written_one_by_one(tmp_path):
    write_weights({"a": PLAIN, "b": PLAIN}, tmp_path / "file")
    found = read_weights(tmp_path / "file")
    assert torch.equal(found["a"], PLAIN)
    assert torch.equal(found["b"], PLAIN)
    assert {part.data_ptr() for _, part in bytes_in_memory({"a": PLAIN, "b": PLAIN}, tmp_path / "file")} == {
        PLAIN.data_ptr()
    }
