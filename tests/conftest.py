"""Fixtures that several rooms of the tests share."""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what the programs are now")


def pytest_collection_finish() -> None:
    """Collections of garbage walk all of torch again and again: a sixth of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack, for devices without a GPU too


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is right wins, and nothing is left out because its first calls were slow."""
    from tsopt.runtime.racing import preparation, race
    from tsopt.runtime.racing.speedup import Speedup

    monkeypatch.setattr(preparation, "HOPELESS", math.inf)
    monkeypatch.setattr(preparation, "HOPELESS_IF_LONG", math.inf)
    monkeypatch.setattr(race, "speedup", lambda *_: Speedup(2.0, 1.9, 2.1))


@pytest.fixture
def another_thread() -> Iterator[None]:
    """One that runs for as long as a test does."""
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    yield
    go.set()
    thread.join()


@pytest.fixture
def single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other threads, such as those of whatever runs the tests."""
    from tsopt.compiler import other_threads

    monkeypatch.setattr(other_threads, "_is_other", lambda thread: False)


@pytest.fixture
def in_a_thread() -> Callable[[Callable[[], object]], None]:
    """Does something in another thread, and waits for it."""

    def run(work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    return run


@pytest.fixture
def meanwhile() -> Iterator[Callable[[AbstractContextManager[object]], None]]:
    """Has another thread enter a block, in which it stays for as long as a test runs."""
    done, threads = threading.Event(), []

    def stay(block: AbstractContextManager[object]) -> None:
        entered = threading.Event()

        def run() -> None:
            with block:
                entered.set()
                done.wait(60)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        assert entered.wait(60)

    yield stay
    done.set()
    for thread in threads:
        thread.join(60)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an entry in the list of users and without a home directory, as in `docker run --user 12345`."""
    pwd = pytest.importorskip("pwd")

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("TSOPT_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torch_threads():
    """Sets torch's number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def default_dtype():
    """Sets torch's default dtype for a test."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that torch.compile keeps from another test, or for the next one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch):
    """The graphs of TorchDynamo that are made, in order."""
    from tsopt.runtime.calling import graph_parts

    graphs: list[graph_parts.Graph] = []
    real = graph_parts.Graph.__init__

    def init(self, *args, **options):
        real(self, *args, **options)
        graphs.append(self)

    monkeypatch.setattr(graph_parts.Graph, "__init__", init)
    return graphs


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compares a text with tests/golden/NAME.txt; `--update-golden` writes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"no golden {path.name}: run pytest --update-golden and read what it wrote"
        assert text == path.read_text()

    return check


@pytest.fixture(scope="session")
def fuzz_factor() -> int:
    """How many times more examples the slow campaigns run."""
    return 40 if os.environ.get("TSOPT_FUZZ") else 1
