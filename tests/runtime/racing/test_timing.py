from __future__ import annotations

import itertools
import math

import pytest
import torch

from tsopt.compiler.calls.example import Example
from tsopt.errors import BackendError
from tsopt.runtime.racing import timing
from tsopt.runtime.racing.timing import Speedup, Timing, cold_start, measure, speedup


class Clock:
    """A clock that only the callables move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spins_until = 0.0  # threads that nobody waits for use a core until then

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return min(self.now, self.spins_until)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def taking(self, seconds: float, log: list | None = None, name: str = ""):
        def call(*args, **kwargs):
            self.now += seconds
            if log is not None:
                log.append((name, args, kwargs))

        return call


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


INPUTS = [Example((n,), {"k": n}) for n in range(3)]


def test_who_is_next_waits_until_the_threads_of_the_last_one_have_stopped(clock):
    late: list[float] = []

    def spinning(*args, **kwargs):
        clock.now += 2e-3
        clock.spins_until = clock.now + 0.06

    def after(*args, **kwargs):
        late.append(clock.spins_until - clock.now)
        clock.now += 2e-3

    measure({"eager": after, "spinning": spinning}, INPUTS, seconds=1e-9)
    assert max(late[1 + timing.WARM_UP :]) <= 0


def test_calls_settle_before_each_sample(clock, monkeypatch):
    monkeypatch.setattr(timing, "SETTLE", 20e-3)
    log: list = []
    measure({"short": clock.taking(2e-3, log, "short"), "long": clock.taking(50e-3, log, "long")}, INPUTS, seconds=1e-9)
    calls = [name for name, *_ in log][2 * (1 + timing.WARM_UP) :]
    assert calls[:13] == ["short"] * 11 + ["long"] * 2


def test_threads_that_never_stop_are_waited_for_no_longer_than_the_longest_rest(clock):
    clock.spins_until = 1e9
    measure({"a": clock.taking(2e-3)}, INPUTS, seconds=1e-9)
    assert clock.now < timing.MIN_ROUNDS * (timing.LONGEST_REST + 0.05) + 1


def test_each_candidate_gets_its_own_time(clock):
    found = measure({"eager": clock.taking(4e-3), "fast": clock.taking(2e-3)}, INPUTS, seconds=0.1)
    assert found["eager"].p50 == pytest.approx(4.0)
    assert found["fast"].p50 == found["fast"].p90 == pytest.approx(2.0)
    assert found["fast"].std_percent == pytest.approx(0.0, abs=1e-6)


def test_the_candidates_take_turns_in_an_order_that_rotates_and_turns_round(clock):
    log: list = []
    measure({n: clock.taking(2e-3, log, n) for n in "abc"}, INPUTS, seconds=1e-9)
    timed = [name for name, *_ in log][3 * 6 :]
    rounds = ["".join(timed[i : i + 6 : 2]) for i in range(0, len(timed), 6)]
    assert rounds == ["abc", "acb", "cab", "cba", "bca", "bac", "abc"]


def test_every_round_takes_the_next_input_so_that_a_cache_gains_nothing(clock):
    log: list = []
    measure({"a": clock.taking(2e-3, log, "a")}, INPUTS, seconds=1e-9)
    warm, timed = log[: 1 + timing.WARM_UP], log[1 + timing.WARM_UP :: 2]
    assert {args for _, args, _ in warm} == {(0,), (1,), (2,)}
    assert [args[0] for _, args, _ in timed] == [0, 1, 2, 0, 1, 2, 0]
    assert all(kwargs == {"k": args[0]} for _, args, kwargs in log)


@pytest.mark.parametrize("seconds", [1e-4, 2e-3, 0.5])
def test_no_timed_call_is_on_the_input_of_the_call_before(clock, seconds):
    log: list = []
    found = measure({"a": clock.taking(seconds, log, "a")}, INPUTS, seconds=1e-9)["a"]
    calls = [args[0] for _, args, _ in log][1 + timing.WARM_UP :]
    size = 1 + found.calls_per_sample
    rounds = [calls[i : i + size] for i in range(0, len(calls), size)]
    assert len(rounds) == timing.MIN_ROUNDS
    assert all(one != other for turn in rounds for one, other in itertools.pairwise(turn))


def test_short_calls_are_timed_in_groups(clock):
    found = measure({"a": clock.taking(1e-5), "b": clock.taking(2e-3)}, INPUTS, seconds=1e-9)
    assert 90 <= found["a"].calls_per_sample <= 100
    assert found["b"].calls_per_sample == 1
    assert found["a"].p50 == pytest.approx(1e-2)


def test_a_hopeless_candidate_gets_no_more_samples_but_the_baseline_does(clock):
    calls = {"eager": clock.taking(10e-3), "fast": clock.taking(1e-3), "slow": clock.taking(4e-3)}
    found = measure(calls, INPUTS, seconds=5)
    assert len(found["slow"].samples) == timing.MIN_ROUNDS
    assert len(found["fast"].samples) == len(found["eager"].samples) == timing.MAX_ROUNDS


def test_samples_that_scatter_are_followed_by_more_for_as_long_as_there_is_time(clock):
    turns = iter(range(10**9))

    def uneven(*args, **kwargs):
        clock.now += 2e-3 if next(turns) % 3 else 9e-3

    busy = measure({"eager": clock.taking(2e-3), "uneven": uneven}, INPUTS, seconds=1e9)
    assert len(busy["eager"].samples) == len(busy["uneven"].samples) == timing.MAX_BUSY_ROUNDS
    short = measure({"eager": clock.taking(2e-3), "uneven": uneven}, INPUTS, seconds=2.0)
    assert timing.MAX_ROUNDS < len(short["eager"].samples) < timing.MAX_BUSY_ROUNDS


def test_there_are_at_least_the_fewest_rounds_however_little_time_there_is(clock):
    found = measure({"a": clock.taking(1.0)}, INPUTS, seconds=1e-9)
    assert len(found["a"].samples) == timing.MIN_ROUNDS


def test_the_time_given_is_about_the_time_taken(clock):
    measure({"a": clock.taking(10e-3)}, INPUTS, seconds=0.5)
    assert 0.4 < clock.now < 0.7


def test_progress_names_warm_up_and_rounds(clock):
    told: list[str] = []
    measure({"a": clock.taking(1e-3)}, INPUTS, seconds=90, progress=told.append)
    assert told[:2] == ["warm-up a", "round 1, 90 s left"]
    told.clear()
    measure({"a": clock.taking(1e-3)}, INPUTS, seconds=0.0, progress=told.append)
    assert told[1] == "round 1, until it is decided"


def _timing(*samples: float) -> Timing:
    return Timing(samples)


BASE = [10.0, 10.2, 9.9, 10.1, 10.0, 9.8, 10.3, 10.1, 9.9]


@pytest.mark.parametrize(("factor", "verdict"), [(0.5, "faster"), (2.0, "slower")])
def test_a_clear_difference_is_a_verdict(factor, verdict):
    found = speedup(_timing(*[factor * value for value in BASE]), _timing(*BASE))
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(1 / factor)
    assert found.low <= found.ratio <= found.high


def test_noise_is_the_same():
    found = speedup(_timing(*reversed(BASE)), _timing(*BASE))
    assert found.verdict == "same"
    assert found.low < 1 < found.high


def test_equal_samples_are_the_same():
    assert speedup(_timing(*BASE), _timing(*BASE)).verdict == "same"


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [
        (40.0, 2.51, 1171.0, "undecided"),
        (1.5, 1.1, 3.4, "undecided"),
        (1.5, 1.1, 3.2, "faster"),
        (1.0, 0.2, 5.0, "undecided"),  # `same` would be as bold as `faster`
        (0.3, 0.001, 0.9, "undecided"),
        (0.02, 0.01, 0.05, "slower"),
        (50.0, 20.0, 110.0, "faster"),  # wide, but at least 20 times
        (1.0, 0.9, 1.1, "same"),
        (1.3, 1.1, 1.2, "undecided"),  # outside its own interval
        (1.0, 1.1, 1.2, "undecided"),
        (1.2, 1.3, 1.1, "undecided"),
        (math.nan, math.nan, math.nan, "undecided"),
        (2.0, 1.5, math.inf, "undecided"),
        (2.0, 0.0, 2.5, "undecided"),
        (-2.0, -3.0, -1.0, "undecided"),
    ],
)
def test_an_interval_that_is_no_ground_for_a_verdict_is_undecided(ratio, low, high, verdict):
    found = Speedup(ratio, low, high)
    assert found.verdict == verdict
    assert bool(found.why_undecided) == (verdict == "undecided")


@pytest.mark.parametrize(("rounds", "verdict"), [(1, "undecided"), (5, "undecided"), (6, "faster")])
def test_few_rounds_decide_nothing_however_equal_they_are(rounds, verdict):
    assert speedup(_timing(*[1.0] * rounds), _timing(*[2.0] * rounds)).verdict == verdict


@pytest.mark.parametrize("broken", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_round_without_a_time_does_not_count(broken):
    found = speedup(_timing(5.0, broken, *[5.0] * 6), _timing(*[10.0] * 7, broken))
    assert (found.ratio, found.low, found.high, found.rounds) == (2.0, 2.0, 2.0, 6)
    none = speedup(_timing(*[broken] * 9), _timing(*[10.0] * 9))
    assert (none.rounds, none.verdict) == (0, "undecided")
    assert speedup(_timing(), _timing(1.0)).verdict == "undecided"


@pytest.mark.parametrize("broken", [0.0, -1.0, math.nan])
def test_a_candidate_whose_clock_is_broken_is_out_and_a_hiccup_is_timed_again(clock, broken):
    class Broken:
        def __init__(self, *seconds):
            self.answers = itertools.chain([2e-3] * 6, seconds)

        def seconds(self, inputs, times, untimed=0):
            return next(self.answers)

    calls = {
        "eager": clock.taking(2e-3),
        "hiccup": Broken(broken, *[2e-3] * timing.MIN_ROUNDS),
        "broken": Broken(*[broken] * 100),
    }
    found = measure(calls, INPUTS, seconds=1e-9)
    assert len(found["hiccup"].samples) == timing.MIN_ROUNDS
    assert "the clock measured" in found["broken"].error


def test_a_baseline_without_a_time_is_an_error_that_says_so(clock):
    calls = iter(range(10**6))

    def backwards(*args, **kwargs):
        clock.now += 1e-3 if next(calls) < 10 else -1e-3

    with pytest.raises(BackendError, match="timing failed"):
        measure({"eager": backwards}, INPUTS, seconds=1e-9)


def test_what_is_undecided_is_timed_for_longer_and_no_longer_than_that(clock, monkeypatch):
    monkeypatch.setattr(timing, "MAX_ROUNDS", 8)

    class Uneven:
        """Takes the clock 10 ms a sample, and says what the test says."""

        def __init__(self, *seconds):
            self.answers = itertools.chain([2e-3] * 6, itertools.cycle(seconds))

        def seconds(self, inputs, times, untimed=0):
            clock.now += 10e-3
            return next(self.answers) * times

    def spent(call, **options):
        start = clock.now
        measure({"eager": clock.taking(2e-3), "other": call}, INPUTS, seconds=1.0, **options)
        return clock.now - start

    decided, undecided = (1e-3, 1.4e-3, 1.8e-3), (1e-6, 9e-3)
    assert 1.0 < spent(Uneven(*decided)) < 1.2
    assert 2.0 < spent(Uneven(*undecided)) < 2.2
    assert 1.5 < spent(Uneven(*undecided), extra=0.5) < 1.7


def test_what_slows_the_whole_round_slows_both():
    disturbed = [value * (5 if i % 2 else 1) for i, value in enumerate(BASE)]
    found = speedup(_timing(*[value / 2 for value in disturbed]), _timing(*disturbed))
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)


def test_only_the_rounds_that_both_had_are_compared():
    found = speedup(_timing(5.0, 5.0, 5.0), _timing(10.0, 10.0, 10.0, 1000.0, 1000.0, 1000.0, 1000.0))
    assert found.ratio == pytest.approx(2.0)


def test_the_interval_is_the_same_each_time():
    mine, base = _timing(*[v * 0.9 for v in reversed(BASE)]), _timing(*BASE)
    assert speedup(mine, base) == speedup(mine, base)
    assert str(speedup(mine, base)).count("x [") == 1


# ---- the first calls --------------------------------------------------------------------------------------------


def in_turn(clock, *seconds):
    """A callable that takes these times, and the last of them from then on."""
    left = list(seconds)

    def call(*args, **kwargs):
        clock.now += left.pop(0) if len(left) > 1 else left[0]

    return call


@pytest.mark.parametrize(
    ("seconds", "first", "slow"),
    [((0.2, 0.01), 200.0, 1), ((0.01,), 10.0, 0), ((0.3, 0.2, 0.1, 0.01), 300.0, 3), ((0.012, 0.01), 12.0, 0)],
)
def test_first_calls_are_slow_until_they_are_as_all_others(clock, seconds, first, slow):
    found = cold_start(in_turn(clock, *seconds), INPUTS)
    assert found.first == pytest.approx(first)
    assert found.slow_calls == slow


def test_first_calls_are_not_watched_for_long(clock):
    cold_start(clock.taking(10.0), INPUTS)
    assert clock.now == pytest.approx(10.0 * timing.MIN_COLD)
    start = clock.now
    cold_start(clock.taking(1e-6), INPUTS)
    assert clock.now - start == pytest.approx(1e-6 * timing.MAX_COLD)


def test_first_calls_rotate_the_inputs(clock):
    log: list = []
    cold_start(clock.taking(1e-3, log, "a"), INPUTS)
    assert [args[0] for _, args, _ in log[:4]] == [0, 1, 2, 0]


# ---- calls that change what they are given --------------------------------------------------------------------------


def test_every_call_gets_the_objects_as_they_were_at_first(clock):
    seen: list[tuple[int, int]] = []

    def call(items, cache):
        clock.now += 1e-3
        seen.append((len(items), len(cache)))
        items.append(1)
        cache["new"] = 1

    measure({"eager": call, "other": call}, [Example(([],), {"cache": {}})], seconds=1e-9)
    assert set(seen) == {(0, 0)}


def test_every_call_gets_written_tensors_as_they_were_at_first(clock):
    seen: list[float] = []

    def call(x):
        clock.now += 1e-3
        seen.append(float(x))
        x += 1

    measure({"eager": call, "other": call}, [Example((torch.zeros(()),), written=True)], seconds=1e-9)
    assert set(seen) == {0.0}


def test_the_time_to_make_them_anew_does_not_count(clock, monkeypatch):
    def slowly(self):
        clock.now += 0.1
        return Example(([],))

    monkeypatch.setattr(Example, "renewed", slowly)
    timings = measure({"eager": clock.taking(1e-3)}, [Example(([],))], seconds=1e-9)
    assert timings["eager"].samples == pytest.approx([1.0] * len(timings["eager"].samples))
