from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from tsopt.compiler.calls.example import Example
from tsopt.errors import BackendError
from tsopt.runtime.racing import timing, tournament
from tsopt.runtime.racing.speedup import ENOUGH, Timing, speedup
from tsopt.runtime.racing.tournament import is_decided, measure, still_in

INPUTS = [Example((n,), {"k": n}) for n in range(3)]


def test_who_is_next_waits_until_the_threads_of_the_last_one_have_stopped(clock):
    late: list[float] = []

    def spinning(*args, **kwargs):
        clock.now += 2e-3
        clock.spins_until = clock.now + 0.06

    def after(*args, **kwargs):
        late.append(clock.spins_until - clock.now)
        clock.now += 2e-3

    measure({"eager": after, "spinning": spinning}, INPUTS, seconds=1e-9, known={"eager": 2e-3, "spinning": 2e-3})
    assert max(late) <= 0


def test_calls_settle_before_each_sample(clock, monkeypatch):
    monkeypatch.setattr(tournament, "SETTLE", 20e-3)
    monkeypatch.setattr(tournament, "SAMPLE", 5e-3)
    log: list = []
    measure({"short": clock.taking(6e-3, log, "short"), "long": clock.taking(50e-3, log, "long")}, INPUTS, seconds=1e-9)
    calls = [name for name, *_ in log][2 * (1 + tournament.WARM_UP) :]
    assert calls[:8] == ["short"] * (3 + 3) + ["long"] * 2


def test_threads_that_never_stop_are_waited_for_no_longer_than_the_longest_rest(clock):
    clock.spins_until = 1e9
    measure({"a": clock.taking(6e-3)}, INPUTS, seconds=1e-9)
    assert clock.now < tournament.MIN_ROUNDS * (timing.LONGEST_REST + 0.05) + 1


def test_each_candidate_gets_its_own_time(clock):
    found = measure({"eager": clock.taking(8e-3), "fast": clock.taking(6e-3)}, INPUTS, seconds=0.1)
    assert found["eager"].p50 == pytest.approx(8.0)
    assert found["fast"].p50 == found["fast"].p90 == pytest.approx(6.0)
    assert found["fast"].std_percent == pytest.approx(0.0, abs=1e-6)


def test_the_candidates_take_turns_in_an_order_that_rotates_and_turns_round(clock):
    log: list = []
    measure({n: clock.taking(25e-3, log, n) for n in "abc"}, INPUTS, seconds=1e-9)
    timed = [name for name, *_ in log][3 * 6 :]
    rounds = ["".join(timed[i : i + 6 : 2]) for i in range(0, len(timed), 6)]
    assert rounds == ["abc", "cba", "bca", "acb", "cab", "bac", "abc"]


def test_of_two_candidates_each_is_the_first_in_every_other_round(clock):
    log: list = []
    measure({n: clock.taking(25e-3, log, n) for n in "ab"}, INPUTS, seconds=1e-9)
    timed = [name for name, *_ in log][2 * 6 :]
    assert "".join(timed[::2]) == "abbaabbaabbaab"


def test_a_candidate_that_is_next_again_is_not_left_to_rest(clock, monkeypatch):
    rests: list = []
    monkeypatch.setattr(tournament, "rest", lambda: rests.append(clock.now))
    measure({"a": clock.taking(6e-3), "b": clock.taking(6e-3)}, INPUTS, seconds=1e-9)
    assert len(rests) == 1 + 7  # before the first round, and within each round; none between rounds


def test_every_round_takes_the_next_input_so_that_a_cache_gains_nothing(clock):
    log: list = []
    measure({"a": clock.taking(25e-3, log, "a")}, INPUTS, seconds=1e-9)
    warm, timed = log[: 1 + tournament.WARM_UP], log[1 + tournament.WARM_UP :: 2]
    assert {args for _, args, _ in warm} == {(0,), (1,), (2,)}
    assert [args[0] for _, args, _ in timed] == [0, 1, 2, 0, 1, 2, 0]
    assert all(kwargs == {"k": args[0]} for _, args, kwargs in log)


@pytest.mark.parametrize("seconds", [1e-4, 2e-3, 0.5])
def test_no_timed_call_is_on_the_input_of_the_call_before(clock, monkeypatch, seconds):
    log: list = []
    monkeypatch.setattr(tournament, "SETTLE", 0.0)
    found = measure({"a": clock.taking(seconds, log, "a")}, INPUTS, seconds=1e-9, known={"a": seconds})["a"]
    calls = [args[0] for _, args, _ in log]
    in_a_row = 1 if seconds > tournament.SAMPLE else tournament.IN_A_ROW
    size = (0 if seconds > tournament.LONG else 1) + in_a_row * found.calls_per_sample
    rounds = [calls[i : i + size] for i in range(0, len(calls), size)]
    assert len(rounds) == tournament.MIN_ROUNDS
    assert all(one != other for turn in rounds for one, other in itertools.pairwise(turn))
    assert size > 1 or all(one != other for one, other in itertools.pairwise(calls))


def test_short_calls_are_timed_in_groups(clock):
    found = measure({"a": clock.taking(1e-5), "b": clock.taking(6e-3)}, INPUTS, seconds=1e-9)
    assert found["a"].calls_per_sample == pytest.approx(tournament.SAMPLE / 1e-5, rel=0.1)
    assert found["b"].calls_per_sample == 1
    assert found["a"].p50 == pytest.approx(1e-2)


def test_what_holds_up_one_short_sample_does_not_count(clock):
    turns = iter(range(10**9))

    def call(*args, **kwargs):
        clock.now += 2e-3 if next(turns) % 16 else 0.5

    found = measure({"a": clock.taking(2e-3), "b": call}, INPUTS, seconds=1e-9)["b"]
    assert found.samples == pytest.approx([2.0] * tournament.MIN_ROUNDS)


def test_a_hopeless_candidate_gets_no_more_samples_but_the_baseline_does(clock):
    calls = {"eager": clock.taking(10e-3), "fast": clock.taking(1e-3), "slow": clock.taking(4e-3)}
    found = measure(calls, INPUTS, seconds=5)
    assert len(found["slow"].samples) == tournament.MIN_ROUNDS
    assert len(found["fast"].samples) == len(found["eager"].samples) == tournament.MAX_ROUNDS


def test_samples_that_scatter_are_followed_by_more_for_as_long_as_there_is_time(clock):
    turns = iter(range(10**9))

    def uneven(*args, **kwargs):
        clock.now += 25e-3 if next(turns) % 3 else 110e-3

    busy = measure({"eager": clock.taking(25e-3), "uneven": uneven}, INPUTS, seconds=1e9)
    assert len(busy["eager"].samples) == len(busy["uneven"].samples) == tournament.MAX_BUSY_ROUNDS
    short = measure({"eager": clock.taking(25e-3), "uneven": uneven}, INPUTS, seconds=16.0)
    assert tournament.MAX_ROUNDS < len(short["eager"].samples) < tournament.MAX_BUSY_ROUNDS


def test_there_are_at_least_the_fewest_rounds_however_little_time_there_is(clock):
    found = measure({"a": clock.taking(0.4)}, INPUTS, seconds=1e-9)
    assert len(found["a"].samples) == tournament.MIN_ROUNDS


def test_of_calls_that_take_long_there_are_as_many_as_an_interval_needs(clock):
    log: list = []
    (timing,) = measure({"a": clock.taking(0.6, log)}, INPUTS, seconds=1e-9).values()
    assert timing.samples == pytest.approx([600.0] * ENOUGH)
    assert len(log) == 1 + tournament.WARM_UP_IF_LONG + ENOUGH
    assert speedup(timing, Timing((1200.0,) * ENOUGH)).verdict == "faster"


def test_a_short_call_is_warmed_up_even_if_its_first_one_took_long(clock):
    calls = itertools.chain([0.6], itertools.repeat(1e-3))
    log: list = []

    def call(*args, **kwargs):
        log.append(args)
        clock.now += next(calls)

    measure({"a": call}, INPUTS, seconds=1e-9)
    assert sum(clock.now < 0.6 for _ in log) == 0
    warm = tournament.WARM_UP
    assert [args[0] for args in log[: 1 + warm]] == [2, *(n % 3 for n in range(tournament.WARM_UP_IF_LONG)), *range(3)]


def test_the_time_given_is_about_the_time_taken(clock):
    measure({"a": clock.taking(10e-3)}, INPUTS, seconds=0.5)
    assert 0.4 < clock.now < 0.7


def test_progress_names_warm_up_and_rounds(clock):
    told: list[str] = []
    measure({"a": clock.taking(1e-3)}, INPUTS, seconds=90, progress=told.append)
    assert told[:2] == ["warm-up a", "round 1, at most 90 s left"]
    told.clear()
    measure({"a": clock.taking(1e-3)}, INPUTS, seconds=0.0, progress=told.append)
    assert told[1] == "round 1, until it is decided"


def test_progress_says_who_is_ahead(clock):
    told: list[str] = []
    calls = {"eager": clock.taking(8e-3), "fast": clock.taking(6e-3), "slow": clock.taking(9e-3)}
    measure(calls, INPUTS, seconds=2.0, progress=told.append)
    rounds = [text for text in told if text.startswith("round")]
    assert not any("ahead" in text for text in rounds[: tournament.MIN_ROUNDS])
    assert re.fullmatch(r"round 8, fast ahead of 2 others, at most \d+ s left", rounds[tournament.MIN_ROUNDS])


@pytest.mark.parametrize("broken", [0.0, -1.0, math.nan])
def test_a_candidate_whose_clock_is_broken_is_out_and_a_hiccup_is_timed_again(clock, broken):
    class Broken:
        def __init__(self, *seconds):
            self.answers = iter(seconds)

        def timed(self, how, inputs, times, untimed, samples):
            return [next(self.answers)] * samples

    calls = {
        "eager": clock.taking(6e-3),
        "hiccup": Broken(broken, *[2e-3] * tournament.MIN_ROUNDS),
        "broken": Broken(*[broken] * 100),
    }
    found = measure(calls, INPUTS, seconds=1e-9, known=dict.fromkeys(calls, 6e-3))
    assert len(found["hiccup"].samples) == tournament.MIN_ROUNDS
    assert "the clock measured" in found["broken"].error


def test_a_baseline_without_a_time_is_an_error_that_says_so(clock):
    with pytest.raises(BackendError, match="timing failed"):
        measure({"eager": clock.taking(-1e-3)}, INPUTS, seconds=1e-9, known={"eager": 1e-3})


def test_what_is_undecided_is_timed_for_longer_and_no_longer_than_that(clock, monkeypatch):
    monkeypatch.setattr(tournament, "MAX_ROUNDS", 8)

    def spent(call, **options):
        start = clock.now
        known = {"eager": 6e-3, "other": 6e-3}
        measure({"eager": clock.taking(6e-3), "other": call}, INPUTS, seconds=1.0, known=known, **options)
        return clock.now - start

    decided, undecided = (1e-3, 1.4e-3, 1.8e-3), (1e-6, 9e-3)
    assert 1.0 < spent(Says(clock, *decided)) < 1.2
    assert 2.0 < spent(Says(clock, *undecided)) < 2.2
    assert 1.5 < spent(Says(clock, *undecided), extra=0.5) < 1.7


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


def test_a_race_ends_when_it_is_known_who_wins(clock):
    calls = {"eager": clock.taking(10e-3), "fast": clock.taking(6e-3), "slow": clock.taking(9e-3)}
    left: list[str] = []
    found = measure(calls, INPUTS, seconds=60, until_decided=True, out=left.append)
    assert {len(timing.samples) for timing in found.values()} == {tournament.MIN_ROUNDS}
    assert left == []  # the race was over as well


class Says:
    """Takes the clock 10 ms a sample, and says what the test says."""

    def __init__(self, clock, *seconds):
        self.clock, self.answers = clock, itertools.cycle(seconds)

    def timed(self, how, inputs, times, untimed, samples):
        self.clock.now += 10e-3
        return [next(self.answers) * times] * samples


def test_one_that_cannot_win_leaves_and_the_others_go_on(clock):
    calls = {
        "eager": clock.taking(60e-3),
        "a": Says(clock, 6e-3, 12e-3, 9e-3, 7e-3, 11e-3),
        "slow": Says(clock, 20e-3, 21e-3),
        "b": Says(clock, 11e-3, 6e-3, 7e-3, 12e-3, 9e-3, 10e-3, 8e-3),
    }
    left: list[str] = []
    known = dict.fromkeys(calls, 10e-3)
    found = measure(calls, INPUTS, seconds=3.0, until_decided=True, out=left.append, known=known)
    assert left == ["slow"]
    assert len(found["slow"].samples) < len(found["a"].samples) == len(found["eager"].samples)


def test_without_being_asked_it_does_not_end_early(clock):
    found = measure({"eager": clock.taking(10e-3), "fast": clock.taking(6e-3)}, INPUTS, seconds=60)
    assert len(found["fast"].samples) == tournament.MAX_ROUNDS


def _around(center: float, *, scatter: float, rounds: int = 9) -> Timing:
    return Timing(tuple(center * (1 + scatter * (-1) ** i * (i % 4) / 3) for i in range(rounds)))


def test_who_is_certainly_slower_is_out_and_who_may_be_as_fast_is_in():
    timings = {
        "eager": _around(30.0, scatter=0.05),
        "best": _around(10.0, scatter=0.05),
        "near": Timing(tuple(reversed(_around(10.3, scatter=0.05).samples))),
        "far": _around(13.0, scatter=0.05),
    }
    assert still_in(timings) == ["eager", "best", "near"]
    assert still_in({"eager": _around(1.0, scatter=0.0), "slow": _around(2.0, scatter=0.0)}) == ["eager"]


@pytest.mark.parametrize(
    ("best", "other", "decided"),
    [
        ((10.0, 0.01), (10.05, 0.01), True),  # level
        ((10.0, 0.01), (11.0, 0.01), True),  # clearly ahead
        ((10.0, 0.08), (10.05, 0.08), True),  # the other is not faster by much, most likely
        ((10.0, 0.30), (10.1, 0.30), False),  # either may be faster by much
        ((19.0, 0.30), (30.0, 0.01), False),  # whether it beats eager is open
        ((20.0, 0.001), (30.0, 0.01), True),  # as fast as eager, and that is certain
    ],
)
def test_it_is_decided_when_no_choice_would_be_better_by_much(best, other, decided):
    timings = {
        "eager": _around(20.0, scatter=0.005),
        "best": _around(best[0], scatter=best[1]),
        "other": Timing(tuple(reversed(_around(other[0], scatter=other[1]).samples))),
    }
    assert is_decided(timings) is decided


@pytest.mark.parametrize(
    ("scatter", "options", "share"),
    [(0.1, {}, tournament.SHARE_FOR_LEVEL), (0.6, {}, 2.0), (0.6, {"extra": 10.0}, 1.5)],
)
def test_beside_other_processes_there_is_more_time_to_tell_two_apart(clock, monkeypatch, scatter, options, share):
    monkeypatch.setattr(tournament, "LEVEL", 1.0)

    def uneven(*tenths: int) -> Says:
        return Says(clock, *(6e-3 * (1 + scatter * tenth / 10) for tenth in tenths))

    calls = {"eager": clock.taking(60e-3), "a": uneven(0, 2, 5, 7, 9), "b": uneven(9, 1, 6, 3, 8, 0, 5)}
    start = clock.now
    measure(calls, INPUTS, seconds=20.0, until_decided=True, known=dict.fromkeys(calls, 10e-3), **options)
    assert clock.now - start == pytest.approx(share * 20.0, rel=0.2)


def test_how_sure_it_must_be_is_told():
    timings = {
        "eager": _around(20.0, scatter=0.005),
        "best": _around(10.0, scatter=0.13),
        "other": Timing(tuple(reversed(_around(10.4, scatter=0.13).samples))),
    }
    assert is_decided(timings, sure=80.0)
    assert not is_decided(timings, sure=99.0)


def test_it_is_decided_when_only_the_baseline_is_left():
    assert is_decided({"eager": _around(1.0, scatter=0.5)})


def test_a_long_call_is_not_made_untimed_before_each_sample(clock):
    log: list = []
    measure({"a": clock.taking(0.2, log, "a")}, INPUTS, seconds=1e-9)
    assert len(log) == 1 + tournament.WARM_UP + tournament.MIN_ROUNDS


def test_those_whose_calls_are_known_are_not_warmed_up_again(clock):
    log: list = []
    told: list[str] = []
    calls = {"a": clock.taking(0.2, log, "a"), "b": clock.taking(0.2)}
    measure(calls, INPUTS, seconds=1e-9, known={"a": 0.2}, progress=told.append)
    assert len(log) == tournament.MIN_ROUNDS
    assert told[0] == "warm-up b"


def test_how_many_calls_make_a_sample_does_not_follow_from_cold_ones(clock):
    """The first calls of a tiny model take twenty times as long as those in a row."""
    calls = iter(range(10**9))

    def warming_up(*args, **kwargs):
        clock.now += 2e-4 if next(calls) < 10 else 1e-5

    found = measure({"a": warming_up}, INPUTS, seconds=1e-9)["a"]
    assert found.calls_per_sample == pytest.approx(tournament.SAMPLE / 1e-5, rel=0.1)
