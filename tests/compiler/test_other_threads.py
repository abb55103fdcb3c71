"""Which threads count as those of the user."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.live import _RefreshThread as Refreshes
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch._inductor.compile_worker.timer import Timer
from tqdm._monitor import TMonitor

from tsopt.compiler.other_threads import THREADS, others_run


class _RefreshThread(threading.Thread):
    """Named as that of rich."""


class Monitor(TMonitor):
    def __init__(self):  # that of tqdm starts it
        threading.Thread.__init__(self)


Monitor.__module__, Monitor.__name__ = TMonitor.__module__, TMonitor.__name__


def work():
    pass


def of(module, name):
    """A function of a library that is not installed."""

    def made():
        pass

    made.__module__, made.__name__ = module, name
    return made


@pytest.fixture
def beside(monkeypatch):
    """Has certain threads be all that run beside the one of the test."""

    def others(*threads):
        found = [threading.current_thread(), *threads]
        monkeypatch.setattr(threading, "enumerate", lambda: found)

    return others


@pytest.mark.parametrize(
    ("thread", "counts"),
    [
        (threading.Thread(target=work), True),
        (threading.Thread(target=work, name="InductorSubproc"), True),
        (threading.Thread(), True),
        (threading.Timer(1, work), True),
        (threading.Thread(target=work, name=f"{THREADS}work"), False),
        (Refreshes(None, 1), False),
        (_RefreshThread(), True),
        (Monitor(), False),
        (threading.Thread(target=SubprocPool.__new__(SubprocPool)._read_thread), False),
        (threading.Thread(target=Timer(1, work).check), False),
        (threading.Thread(target=of("ipykernel.iostream", "_thread_main"), name="IOPub"), False),
        (threading.Thread(target=of("mine", "_thread_main"), name="IOPub"), True),
        (type("Heartbeat", (threading.Thread,), {"__module__": "ipykernel.heartbeat"})(), False),
        (type("SubshellThread", (threading.Thread,), {"__module__": "ipykernel.subshell"})(), True),
    ],
)
def test_threads_that_run_nothing_of_the_users_do_not_count(beside, thread, counts):
    beside(thread)
    assert others_run() is counts


def test_the_threads_in_which_inductor_compiles_do_not_count(beside, monkeypatch):
    monkeypatch.setattr(AsyncCompile, "pool", staticmethod(functools.cache(lambda: ThreadPoolExecutor(1))))
    with ThreadPoolExecutor(1) as theirs:
        theirs.submit(work).result()
        beside(*theirs._threads)
        assert others_run()
        with AsyncCompile.pool() as pool:
            beside(*theirs._threads)
            assert others_run()
            pool.submit(work).result()
            beside(*pool._threads)
            assert not others_run()


def test_the_threads_in_which_openvino_reports_do_not_count(beside, monkeypatch):
    main = pytest.importorskip("openvino_telemetry.main")
    pytest.importorskip("openvino_telemetry.backend.backend_ga4")  # registers itself
    monkeypatch.setenv("CI", "true")  # where it sends nothing
    options = {"backend": "ga4", "enable_opt_in_dialog": False, "disable_in_ci": True}
    telemetry = main.Telemetry(tid="", app_name="tests", app_version="0", **options)
    telemetry.sender.executor.submit(work).result()
    beside(*telemetry.sender.executor._threads)
    assert not others_run()
