"""Reorders calls to lower peak memory. EXACT: the calls stay the same.

Finding the best order is NP-complete (Sethi 1975, doi:10.1137/0204020), so a few heuristics are tried, and the best
order, including the original one, is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from tsopt.compiler.analysis.liveness import Lives
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass

ROUNDS = 10  # an order found from a better order may be better still; each round must gain, so few are needed


@dataclass(frozen=True, slots=True)
class MemoryOrder(Pass):
    """Reorders calls where that lowers the peak; random calls and calls with effects keep their order."""

    name: str = "order"

    def run(self, program: Program, limits: Limits) -> Changes:
        given = list(program.calls())
        lives, needs = Lives.of(program), _needs(given)
        before = lives.peak(given)
        best, least = given, before
        for _ in range(ROUNDS):
            found = [heuristic(best, lives, needs) for heuristic in HEURISTICS]
            peaks = [lives.peak(order) for order in found]
            if min(peaks, default=least) >= least:
                break
            least = min(peaks)
            best = found[peaks.index(least)]
        if least >= before or not limits.take():
            return Changes()
        for node in best:
            program.output_node.prepend(node)
        return Changes((Done("memory_order", f"peak {before:,} -> {least:,} bytes"),))


def _needs(calls: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The calls that must come before each: its arguments, and for what draws or checks the one before it."""
    needs: dict[fx.Node, list[fx.Node]] = {}
    last: fx.Node | None = None
    for node in calls:
        needs[node] = [source for source in node.all_input_nodes if ops.is_call(source)]
        if ops.is_random(node) or ops.has_effect(node):
            if last is not None and last not in needs[node]:
                needs[node].append(last)
            last = node
    return needs


def last_first(calls: Sequence[fx.Node], lives: Lives, needs: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    """From the end: always the call before which the fewest bytes are alive; the given order breaks ties.

    Seen from the end, a call begins what it reads and ends what it makes, so values are made right before they are
    needed, and what is returned is made late.
    """
    place = {node: -i for i, node in enumerate(calls)}
    followers: dict[fx.Node, int] = dict.fromkeys(calls, 0)
    for source in (source for sources in needs.values() for source in sources):
        followers[source] += 1
    alive = set(lives.kept)

    def growth(node: fx.Node) -> int:
        begun = sum(lives.size[memory] for memory in lives.used[node] if memory not in alive)
        return begun - sum(lives.size[memory] for memory in lives.made[node] if memory in alive)

    ready = {node for node in calls if not followers[node]}
    heap = [(growth(node), place[node], node) for node in ready]
    heapq.heapify(heap)
    order: list[fx.Node] = []
    while heap:
        score, _, node = heapq.heappop(heap)
        if node not in ready or score != growth(node):
            continue  # taken already, or pushed again with its score of now
        ready.discard(node)
        order.append(node)
        changed: set[fx.Node] = set()
        for memory in lives.used[node]:
            if memory not in alive:
                alive.add(memory)
                changed |= {memory[0], *lives.users[memory]}
        for source in needs[node]:
            followers[source] -= 1
            if not followers[source]:
                ready.add(source)
                changed.add(source)
        for other in changed & ready:
            heapq.heappush(heap, (growth(other), place[other], other))
    return order[::-1]


def depth_first(calls: Sequence[fx.Node], lives: Lives, needs: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
    """Each value right before its first use, the argument that needs the most memory first (Sethi and Ullman 1970)."""
    need: dict[fx.Node, int] = {}
    result = {node: sum(lives.size[memory] for memory in lives.made[node]) for node in calls}
    for node in calls:
        held = most = 0
        for source in sorted(needs[node], key=lambda n: need[n] - result[n], reverse=True):
            most = max(most, held + need[source])
            held += result[source]
        need[node] = max(most, held + result[node])
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    for end in calls:
        if any(ops.is_call(user) for user in end.users):
            continue
        todo = [(end, False)]
        while todo:
            node, entered = todo.pop()
            if entered:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                todo.append((node, True))
                # The last one pushed is made first.
                sources = sorted(needs[node], key=lambda n: need[n] - result[n])
                todo += [(source, False) for source in sources if source not in seen]
    return order


HEURISTICS: tuple[Callable[..., list[fx.Node]], ...] = (last_first, depth_first)
