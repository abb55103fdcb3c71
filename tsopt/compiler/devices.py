"""The devices of a call: which GPUs it uses, whether they still compute, and how tensors get where the user wants."""

from __future__ import annotations

import torch

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.structure import flatten
from tsopt.errors import BackendError, UsageError

RECORDING = "captur"  # in the messages of CUDA about streams that record a graph


def gpus_of(example: Example) -> tuple[torch.device, ...]:
    """The GPUs that tensors of a call are on."""
    leaves, _ = flatten((example.args, example.kwargs))
    return tuple(dict.fromkeys(leaf.device for leaf in leaves if leaf.is_cuda))


def is_on_gpu(example: Example) -> bool:
    """Whether any tensor of a call is on a GPU."""
    return bool(gpus_of(example))


def check_not_recording(example: Example) -> None:
    """Raises UsageError while a CUDA graph is being recorded: `optimize` cannot be part of one."""
    if gpus_of(example) and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a model on a GPU cannot be optimized while a CUDA graph is being recorded",
            fix="call optimize before the recording",
        )


def check_usable(example: Example) -> None:
    """Makes sure that the GPUs of a call still compute.

    Raises:
        BackendError: they do not. After a kernel has failed on a GPU, each later call of the process fails as well.
    """
    for device in gpus_of(example):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            if RECORDING in str(error):  # a graph is being recorded, which must not be waited for
                return
            raise BackendError(
                f"{device} can no longer be used by this process",
                why=f"a kernel has failed there: {str(error).splitlines()[0][:200]}",
                fix="start the process again; if it is a candidate that fails, choose others with `backends`",
            ) from error


def put(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on a device, itself where it is there already.

    Raises:
        UsageError: there is no such device here, it is full, or it keeps no values.
    """
    try:
        if torch.device(device).type == "meta" and not tensor.is_meta:
            raise UsageError(
                "the device 'meta' cannot be used", why="its tensors have no values", fix="use cpu or cuda"
            )
        return tensor.to(device)
    except (RuntimeError, AssertionError) as error:  # a torch that was built without CUDA asserts that it has it
        raise UsageError(
            f"the device {device!r} cannot be used",
            why=str(error).splitlines()[0][:200],
            fix="run `tsopt doctor` to check the GPU",
        ) from error
