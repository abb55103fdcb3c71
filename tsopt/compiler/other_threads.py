"""Whether other threads may run code of the user's: what they change meanwhile is not to be put back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from typing import Any

THREADS = "tsopt: "  # begins the names of threads that tsopt starts

# Which classes and functions of a module are threads that run no code of the user's: they draw, read what compilers
# answer, or carry the messages of a notebook. Most of them live as long as the process.
# NOTE: not subshells of ipykernel, which run cells.
HARMLESS = {
    "tqdm._monitor": ("TMonitor",),
    "rich.live": ("_RefreshThread",),
    "torch._inductor.compile_worker.subproc_pool": ("_read_thread",),
    "torch._inductor.compile_worker.timer": ("check",),
    "ipykernel.iostream": ("_thread_main", "_watch_pipe_fd"),
    "ipykernel.heartbeat": ("Heartbeat",),
    "ipykernel.control": ("ControlThread",),
    "ipykernel.shellchannel": ("ShellChannelThread",),
    "ipykernel.parentpoller": ("ParentPollerUnix", "ParentPollerWindows"),
    "IPython.core.history": ("HistorySavingThread",),
    "zmq.utils.garbage": ("GarbageCollectorThread",),
}


def others_run() -> bool:
    """Whether a thread beside this one may run code of the user's."""
    return any(map(_is_other, threading.enumerate()))


def _is_other(thread: threading.Thread) -> bool:
    if thread is threading.current_thread() or thread.name.startswith(THREADS):
        return False
    # What it runs: the function that it was given, or the method of its class.
    runs = getattr(thread, "_target", None) if type(thread) is threading.Thread else type(thread)
    module, name = (getattr(runs, attribute, "") for attribute in ("__module__", "__name__"))
    if name in HARMLESS.get(module, ()):
        return False
    return thread not in _in_which_inductor_compiles() and thread not in _in_which_openvino_reports()


def _in_which_inductor_compiles() -> Collection[threading.Thread]:
    """Threads of a pool that it makes for its first kernel in C++, and keeps; named as those of any other pool."""
    pool: Any = getattr(getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None), "pool", None)
    if not hasattr(pool, "cache_info") or not pool.cache_info().currsize:
        return ()
    return getattr(pool(), "_threads", ())


def _in_which_openvino_reports() -> Collection[threading.Thread]:
    """Threads of a pool that it makes for its telemetry as it is imported, whether it sends any or not, and keeps."""
    telemetry = getattr(sys.modules.get("openvino_telemetry.main"), "Telemetry", None)
    sender = getattr(getattr(telemetry, "_SingletonMetaClass__single_instance", None), "sender", None)
    return getattr(getattr(sender, "executor", None), "_threads", ())
