"""Calls of an op with arguments that it must not believe, each in a child process that may die.

The tensors of a call lie against pages that nobody may touch, once with their end and once with their beginning, so
that a read or a write outside of them is a signal. Two processes with other leftovers in their memory must agree.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import mmap
import os
import resource
import signal
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

PAGE = mmap.PAGESIZE
NUMBERS = (-1, 0, 7, -(2**31), 2**31 - 1, 2**40, -(2**40), 2**62)
REALS = (float("nan"), float("inf"), -1.5, 1e30, 0.0)
MEMORY = 2 << 30
SECONDS = 4  # for one call
MOST = 400  # calls of one op
LIMITS = (signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL)  # those of time and memory are not what this is about

Call = tuple[Sequence[Any], dict[str, Any]]


def mutations(call: Call) -> Iterator[Call]:
    """The call, and others like it with one argument changed."""
    args, kwargs = call
    yield call
    for i, arg in enumerate(args):
        for other in _others(arg):
            yield (*args[:i], other, *args[i + 1 :]), kwargs
    for name, arg in kwargs.items():
        for other in _others(arg):
            yield args, {**kwargs, name: other}


def _others(arg: Any) -> Iterator[Any]:
    if isinstance(arg, torch.Tensor):
        yield from _tensors_like(arg)
    elif isinstance(arg, bool):
        yield not arg
    elif isinstance(arg, int):
        yield from NUMBERS
    elif isinstance(arg, float):
        yield from REALS
    elif isinstance(arg, str):
        yield from ("", "nonsense")
    elif isinstance(arg, (list, tuple)):
        yield type(arg)()
        yield type(arg)([*arg, *arg])
        yield type(arg)(arg[:-1])
        for i, part in enumerate(arg):
            for other in _others(part):
                yield type(arg)([*arg[:i], other, *arg[i + 1 :]])


def _tensors_like(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for axis in range(tensor.dim()):
        yield tensor.narrow(axis, 0, 0)
        if tensor.shape[axis] > 1:
            yield tensor.narrow(axis, 0, tensor.shape[axis] - 1)
        yield torch.cat([tensor, tensor, tensor], axis)
    yield tensor.unsqueeze(0)
    yield tensor.flatten()
    if tensor.dim():
        yield tensor.select(0, 0) if tensor.shape[0] else tensor.new_zeros(())
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64):
        if dtype != tensor.dtype:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield tensor.to(dtype)
    if tensor.dtype == torch.bool:
        yield ~tensor
    elif tensor.is_floating_point() or tensor.is_complex():
        yield from (torch.full_like(tensor, value) for value in REALS)
    else:
        info = torch.iinfo(tensor.dtype)
        for value in (*NUMBERS, *{n + more for n in (*tensor.shape, 2, 5) for more in (0, 1)}):
            if info.min <= value <= info.max and tensor.numel():
                yield torch.full_like(tensor, value)
                one = tensor.clone()
                one.view(-1)[-1] = value
                yield one


class Fenced:
    """Copies of tensors right before, or right behind, pages that may not be touched."""

    def __init__(self, *, at_end: bool) -> None:
        self.at_end = at_end
        self.libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._fenced(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self, value))
        return value

    def _fenced(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        size = tensor.numel() * tensor.itemsize
        inside = max(1, -(-size // PAGE)) * PAGE
        area = mmap.mmap(-1, inside + 2 * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(area))
        for fence in (base, base + PAGE + inside):
            assert self.libc.mprotect(ctypes.c_void_p(fence), PAGE, 0) == 0
        start = PAGE + (inside - size if self.at_end else 0)
        if not size:
            return tensor
        made = torch.frombuffer(area, dtype=torch.uint8, count=size, offset=start).view(tensor.dtype)
        return made.view(tensor.shape).copy_(tensor)


def outcomes(op: Callable[..., Any], calls: Sequence[Call], compare: bool = True) -> list[str]:
    """What is wrong with calls: the signal that ended their process, or an answer that depends on leftovers."""
    wrong = []
    # NOTE: the first two lie alike: kernels go through what is aligned otherwise in another order.
    results = [_run(op, calls, at_end, fill) for at_end, fill in ((True, 1), (True, 77), (False, 1))]
    for number, found in enumerate(zip(*results, strict=True)):
        ends = [end for end in dict.fromkeys(found) if isinstance(end, int) and end not in LIMITS]
        wrong += [f"call {number}: {signal.Signals(end).name}" for end in ends]
        if compare and isinstance(found[0], bytes) and isinstance(found[1], bytes) and found[0] != found[1]:
            wrong.append(f"call {number}: its answer depends on what was in memory")
    return wrong


def _run(op: Callable[..., Any], calls: Sequence[Call], at_end: bool, fill: int) -> list[bytes | int]:
    """For each call what it answered, in short, or the signal that it died of."""
    found: list[bytes | int] = []
    while len(found) < len(calls):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            _serve(op, calls[len(found) :], at_end, fill, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            raw = pipe.read()
        _, status = os.waitpid(child, 0)
        found += [raw[i : i + 16] for i in range(0, len(raw), 16)]
        if len(found) < len(calls):
            found.append(os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGABRT)
    return found


def _serve(op: Callable[..., Any], calls: Sequence[Call], at_end: bool, fill: int, writer: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * PAGE + MEMORY, -1))
    ctypes.CDLL(None).mallopt(-6, fill)  # M_PERTURB: what is allocated and what is freed is filled
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fenced = Fenced(at_end=at_end)
    for args, kwargs in calls:
        signal.alarm(SECONDS)
        answer = b"refused".ljust(16)
        with contextlib.suppress(Exception), torch.no_grad():
            torch.manual_seed(0)
            given = [fenced(arg) for arg in args]
            answer = _digest(op(*given, **{name: fenced(arg) for name, arg in kwargs.items()}))
        os.write(writer, answer)
    os._exit(0)


def _digest(value: Any) -> bytes:
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            plain = item.detach().resolve_conj().resolve_neg().contiguous()
            found.update(struct.pack("q", plain.numel()))
            if plain.numel() < 1 << 20:
                if plain.is_floating_point():
                    plain = torch.nan_to_num(plain)  # NaN has many patterns
                found.update(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        elif isinstance(item, (list, tuple)):
            for part in item:
                add(part)

    add(value)
    return found.digest()[:16]


def tried(call: Call) -> list[Call]:
    return list(itertools.islice(mutations(call), MOST))
