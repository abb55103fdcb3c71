"""Calibration data as calls of the model: what is read, cut, left out, and refused."""

from __future__ import annotations

import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tsopt
from tests.compiler.calls.calibrated import X, first, read, rows
from tests.compiler.helpers import Net
from tsopt.compiler.calls.calibration import FOR_BOTH, read_calibration
from tsopt.compiler.calls.calibration_again import readable_again
from tsopt.compiler.calls.calibration_kept import MOST
from tsopt.compiler.calls.example import as_example
from tsopt.errors import UsageError


def test_an_iterable_of_inputs():
    found = read([rows(2), rows(2, 6)])
    assert [x.tolist() for x in first(found)] == [rows(2).tolist(), rows(2, 6).tolist()]
    assert found.read == "2 inputs"


def numbers_of(calls):
    return sorted(int(call.args[0][0, 0]) for call in calls)


def test_one_of_each_two_inputs_is_held_out():
    found = read([rows(2, i) for i in range(5)])
    assert numbers_of(found.observed) == [0, 3, 4]
    assert numbers_of(found.held_out) == numbers_of(found.choosing) == numbers_of(found.judging) == [1, 2]


def test_inputs_of_two_kinds_in_turn_are_on_both_sides():
    found = read([rows(2, i % 2) for i in range(32)])
    assert numbers_of(found.observed) == numbers_of(found.held_out) == [0] * 8 + [1] * 8


@pytest.mark.parametrize(("count", "judging"), [(16, 8), (47, 23), (48, 16), (100, 42), (MOST, 56), (500, 56)])
def test_calls_that_choose_layers_do_not_judge_where_there_are_enough(count, judging):
    found = read([rows(2, i) for i in range(count)])
    choosing, judges = numbers_of(found.choosing), numbers_of(found.judging)
    assert (len(choosing), len(judges)) == (8, judging)
    assert set(choosing).isdisjoint(judges) == (count >= 48)
    assert set(choosing + judges).isdisjoint(numbers_of(found.observed))
    for some in (choosing, judges):
        assert max(b - a for a, b in zip([0, *some], [*some, count - 1], strict=True)) < 2.5 * count / len(some)


def test_a_single_input_is_for_both():
    found = read([rows(2)])
    assert found.observed == found.held_out == found.calls
    assert found.text == f"1 input; {FOR_BOTH}"
    assert read([rows(2), rows(2)]).text == "2 inputs"


def test_larger_batches_are_cut_and_their_rest_is_dropped():
    found = read([rows(5)])
    assert found.read == "2 inputs; 1 row left over"
    assert [x.tolist() for x in first(found)] == [rows(2).tolist(), rows(2, 6).tolist()]


def test_rows_that_are_left_are_the_first_of_the_next():
    found = read([rows(1), rows(4, 3), rows(1, 15)])
    assert torch.equal(torch.cat(first(found)), rows(6))


def test_too_few_rows_for_one_input_are_refused():
    with pytest.raises(UsageError, match="calibration holds 1 of the 2 rows of one input"):
        read([rows(1)])


def test_inputs_of_different_first_sizes_are_no_rows():
    model = Net(lambda self, a, b: a + b)
    with pytest.raises(UsageError, match="does not fit the model"):
        read([(rows(4), rows(2))], model, (X, X))


def test_targets_are_left_out():
    loader = DataLoader(TensorDataset(rows(8), torch.arange(8)), batch_size=4)
    found = read(loader)
    assert [tuple(x.shape) for x in first(found)] == [(2, 3)] * 4
    assert found.read == "4 inputs; read as (input, target), targets ignored"


def test_two_inputs_are_no_input_and_target():
    model = Net(lambda self, a, b: a + b)
    found = read([(rows(2), rows(2))], model, (X, X))
    assert len(found.calls[0].args) == 2
    assert found.read == "1 input"


def test_keyword_inputs_and_what_is_left_out_of_them():
    model = Net(lambda self, a, b: a + b)
    example = {"a": X, "b": X}
    found = read([{"a": rows(2), "b": rows(2), "labels": torch.arange(2)}], model, example)
    assert list(found.calls[0].kwargs) == ["a", "b"]
    assert found.read == "1 input; labels ignored"


def test_an_example_is_a_call():
    assert read([tsopt.example(rows(2))]).read == "1 input"


def test_numpy_arrays_are_inputs():
    assert torch.equal(first(read([rows(2).numpy()]))[0], rows(2))


def test_an_endless_iterable_is_read_only_so_far():
    def endless():
        while True:
            yield rows(2)

    assert len(read(endless()).calls) == MOST


def test_an_npz_file_by_the_names_of_inputs(tmp_path):
    model = Net(lambda self, a, b: a + b)
    np.savez(tmp_path / "data.npz", a=rows(4).numpy(), b=rows(4).numpy(), labels=np.arange(4))
    found = read(str(tmp_path / "data.npz"), model, {"a": torch.zeros(1, 3), "b": torch.zeros(1, 3)})
    assert [x.tolist() for x in first(found)] == [[row] for row in rows(4).tolist()]
    assert found.read == "4 inputs; labels ignored"


def test_an_npz_file_without_names_and_a_directory(tmp_path):
    np.savez(tmp_path / "a.npz", rows(2).numpy())
    np.save(tmp_path / "b.npy", rows(1, 6).numpy())
    (tmp_path / "notes.txt").write_text("not data")
    found = read(tmp_path, example=torch.zeros(1, 3))
    assert [x.tolist() for x in first(found)] == [[row] for row in rows(3).tolist()]


def test_sizes_that_may_differ_are_taken_as_they_are():
    program = tsopt.capture(nn.Linear(3, 1).eval(), X, dynamic={"input": {0: "batch"}})
    found = read_calibration([rows(5), rows(7)], program.signature, as_example(X))
    assert [len(x) for x in first(found)] == [5, 7]


class Pairs:
    """As torch's Dataset: items by number, without an end."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number % len(self.items)]


@pytest.mark.parametrize("batched", [False, True])
def test_a_dataset_is_read_by_number(batched):
    found = read(Pairs([(rows(1, 3 * i) if batched else rows(1, 3 * i)[0], i) for i in range(5)]))
    assert torch.equal(torch.cat(first(found)), rows(4))
    as_rows = "" if batched else "; read as single rows, without a batch axis"
    assert found.read == f"2 inputs; read as (input, target), targets ignored{as_rows}; 1 row left over"


def test_a_dataset_of_torch_is_read_to_its_end():
    assert torch.equal(torch.cat(first(read(TensorDataset(rows(4))))), rows(4))


def test_only_inputs_with_a_batch_axis_get_one():
    model = Net(lambda self, x, table: x @ table)
    example = (torch.zeros(1, 3), torch.zeros(3, 3))
    (call,) = read([(rows(1)[0], rows(3))], model, example).calls
    assert [tuple(x.shape) for x in call.args] == [(1, 3), (3, 3)]


class Broken:
    def __iter__(self):
        yield rows(2)
        raise RuntimeError("the disk is gone")


def pickled(path):
    np.save(path / "data.npy", np.array([{}], dtype=object), allow_pickle=True)
    return path / "data.npy"


def uneven(path):
    np.savez(path / "data.npz", a=np.zeros((2, 3)), b=np.zeros((3, 3)))
    return path / "data.npz"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "calibration is empty"),
        (rows(2), "calibration is a Tensor, not a collection of inputs"),
        (3.5, "calibration is a float, not a collection of inputs"),
        ({"a": rows(2)}, "calibration is a dict, not a collection of inputs"),
        (Broken(), "calibration raises RuntimeError after 1 item\n  where: tests.*\n  why: the disk is gone"),
        ([rows(2) * float("nan")], "calibration input 0 contains NaN"),
        ([rows(2), rows(1), rows(2) / 0], "calibration input 2 contains NaN"),
        ([rows(1) * float("nan"), rows(1)], "calibration input 0 contains NaN"),
        ([rows(2).double()], "calibration input 0 does not fit the model\n  why: .*is float64, expected float32"),
        (["a"], "calibration input 0 does not fit the model"),
        ([torch.zeros(2, 4)], r"has shape \[2, 4\], expected \[2, 3\]"),
        ([torch.tensor(1.0)], r"has shape \[\], expected \[2, 3\]"),
        ("nothing.npz", "calibration cannot be read: nothing.npz\n  why: no such file or directory"),
        (lambda path: path, "there is no .npy or .npz file in it"),
        (pickled, "calibration cannot be read: .*data.npy"),
        (uneven, "differ in the size of their first axis\n  why: a \\[2, 3\\], b \\[3, 3\\]"),
    ],
    ids=lambda value: re.sub(r"\W+", " ", value)[:30] if isinstance(value, str) else None,
)
def test_what_cannot_be_used_is_refused(tmp_path, data, message):
    data = data(tmp_path) if callable(data) else data
    with pytest.raises(UsageError, match=message) as caught:
        read(data)
    assert "\n  fix: " in str(caught.value)


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "data.npz").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(UsageError, match="calibration cannot be read"):
        read(tmp_path / "data.npz")


def test_a_damaged_header_is_refused(tmp_path):
    np.save(tmp_path / "data.npy", rows(2).numpy())
    raw = (tmp_path / "data.npy").read_bytes()
    (tmp_path / "data.npy").write_bytes(raw.replace(b"}", b" "))  # numpy's parser wants the other bracket
    with pytest.raises(UsageError, match=r"calibration cannot be read: .*data\.npy"):
        read(tmp_path / "data.npy")


def test_a_member_that_is_damaged_or_no_array_is_refused_by_its_name(tmp_path):
    np.savez(tmp_path / "data.npz", x=rows(2).numpy())
    with zipfile.ZipFile(tmp_path / "data.npz", "a") as archive:
        archive.writestr("README.txt", "my data")
    with pytest.raises(UsageError, match=r"data\.npz, member 'README\.txt'\n  why: it is not an array"):
        read(tmp_path / "data.npz")
    header = (np.lib.format.magic(1, 0), (9).to_bytes(2, "little"), b"{'descr':")
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("x.npy", b"".join(header))
    with pytest.raises(UsageError, match=r"data\.npz, member 'x'"):
        read(tmp_path / "data.npz")


def test_texts_that_the_model_does_not_take_are_ignored(tmp_path):
    np.savez(tmp_path / "data.npz", input=rows(2).numpy(), names=np.array(["cat", "dog"]))
    assert read(tmp_path / "data.npz").read == "1 input; names ignored"
    np.savez(tmp_path / "data.npz", input=np.array(["cat", "dog"]))
    with pytest.raises(UsageError, match="does not fit the model"):
        read(tmp_path / "data.npz")


def test_bytes_in_another_order_are_numbers(tmp_path):
    np.save(tmp_path / "data.npy", rows(2).numpy().astype(">f4"))
    assert torch.equal(torch.cat(first(read(tmp_path / "data.npy", example=torch.zeros(1, 3)))), rows(2))


def test_arrays_within_an_item_are_inputs():
    model = Net(lambda self, a, b: a + b)
    example = {"a": torch.zeros(1, 3), "b": torch.zeros(1, 3)}
    for item in ({"a": rows(1).numpy(), "b": rows(1, 9).numpy()}, (rows(1).numpy(), rows(1, 9).numpy())):
        (call,) = read([item], model, example).calls
        assert torch.equal(model(*call.args, **call.kwargs), rows(1) + rows(1, 9))


@pytest.mark.parametrize("together", [False, True])
def test_files_without_all_inputs_by_their_names(tmp_path, together):
    arrays = {"x": rows(2).numpy(), "y": rows(2).numpy()}
    if together:
        np.savez(tmp_path / "data.npz", **arrays)
    else:
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}.npy", array)
    one = torch.zeros(1, 3)
    with pytest.raises(UsageError, match=r"numpy.savez, under their names: a, b"):
        read(tmp_path, Difference(), (one, one))


def test_a_damaged_compressed_file_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "data.npz", x=np.random.default_rng(0).random((50, 3)))
    raw = bytearray((tmp_path / "data.npz").read_bytes())
    raw[80:200] = bytes(120)
    (tmp_path / "data.npz").write_bytes(raw)
    with pytest.raises(UsageError, match="calibration cannot be read"):
        read(tmp_path / "data.npz")


def test_what_can_be_read_once_is_read_into_a_list():
    again = readable_again(iter([1, 2]))
    assert [list(again), list(again)] == [[1, 2], [1, 2]]
    data = [1, 2]
    assert readable_again(data) is data


def drawn():
    for _ in range(3):
        yield torch.randn(2, 3)


@pytest.mark.parametrize("make", [drawn, lambda: DataLoader(TensorDataset(rows(4)), batch_size=2)])
def test_what_the_data_draws_leaves_the_random_state(make):
    model, data, once = nn.Linear(3, 1).eval(), make(), iter(make())
    torch.manual_seed(7)
    before = torch.get_rng_state()
    read(data, model)
    pickle.dumps(readable_again(once))
    assert torch.equal(torch.get_rng_state(), before)


def test_masks_may_hold_infinities_and_the_report_says_so():
    model = Net(lambda self, x, mask: (x + mask).softmax(-1))
    mask = torch.tensor([[0.0, 0.0, -torch.inf]])
    found = read([(rows(1), mask)] * 2, model, (rows(1), torch.zeros(1, 3)))
    assert found.read == "2 inputs; infinities in arg1"
    assert torch.equal(found.calls[0].args[1], mask)


class Difference(nn.Module):
    def forward(self, a, b):
        return a - b


@pytest.mark.parametrize("item", [{"b": rows(1, 9), "a": rows(1)}, {"b": rows(1, 9), "a": rows(1), "labels": X}])
def test_an_item_by_names_is_for_positional_arguments_too(item):
    one = torch.zeros(1, 3)
    for example in (tsopt.example(one, one), tsopt.example(one, b=one), tsopt.example(a=one, b=one)):
        (call,) = read([item], Difference(), example).calls
        assert (len(call.args), call.kwargs.keys()) == (len(example.args), example.kwargs.keys())
        assert torch.equal(Difference()(*call.args, **call.kwargs), rows(1) - rows(1, 9))


def test_a_tensor_that_is_passed_twice_is_two_inputs():
    model, x = Net(lambda self, a, b: a + b), rows(3)
    assert len(read([(x, x)], model, (X, X)).calls) == 1


def test_rows_of_keywords_in_another_order_are_not_mixed_up():
    items = [{"a": rows(1), "b": rows(1, 50)}, {"b": rows(1, 53), "a": rows(1, 3)}]
    (call,) = read(items, Difference(), {"a": X, "b": X}).calls
    assert torch.equal(call.kwargs["a"], rows(2))
    assert torch.equal(call.kwargs["b"], rows(2, 50))
