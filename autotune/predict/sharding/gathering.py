"""DeepSpeed's ZeRO-3 gathering: which parameters are whole at which moment, module by module.

Follows deepspeed/runtime/zero/partitioned_param_coordinator.py: the order of modules is learnt in one pass; from the next on
parameters are fetched ahead, and kept where they are used again soon.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from autotune.predict.sharding.book import Writer
from autotune.trace import Usage

NEVER = -1


@dataclass
class Gather:
    """One all-gather under way: one parameter into its own place, or several into one buffer that is then copied apart."""

    parameters: list[int]
    buffer: int | None
    complete: bool = False
    waiting: set[int] = field(default_factory=set)


class Gathering:
    """What the coordinator does, on the book instead of a device."""

    def __init__(
        self, usage: Usage, book: Writer, *, ranks: int, widths: list[int], persistent: frozenset[int], prefetch: int,
        max_live: int, max_reuse: int, offloaded: bool, through_gloo: bool,
    ) -> None:  # fmt: skip
        self._usage, self._book, self._ranks, self._widths = usage, book, ranks, widths
        self._persistent, self._prefetch, self._max_live, self._max_reuse = persistent, prefetch, max_live, max_reuse
        self._offloaded, self._through_gloo = offloaded, through_gloo
        self._held: dict[int, int] = {}
        """Where a gathered parameter lies."""
        self._flying: dict[int, Gather] = {}
        self._users: dict[int, set[int]] = defaultdict(set)
        self._recomputed: dict[int, set[int]] = defaultdict(set)
        self._awaited: dict[int, set[int]] = defaultdict(set)
        """Of a parameter, the modules that were computed again with it and whose backward is not over."""
        self._saved: list[tuple[int, set[int]]] = []
        """Gathered weights that are let go and yet stay: checkpointing put them away for the backward of these modules."""
        self._running: list[int] = []
        """Modules whose forward has begun, the innermost last."""
        self._others: dict[int, set[int]] = defaultdict(set)
        """Parameters that a module was seen to look at and does not hold: they count as its own from then on."""
        self._in_backward: dict[int, None] = {}
        self._mode = "unknown"
        self._order: list[int] = []
        self._parameter_order: list[tuple[int, int]] = []
        self._queue: deque[tuple[int, int]] = deque()
        self._fetched_for: dict[int, int] = {}
        self._at = self._live = 0
        self._release_plans: dict[tuple[int, int], frozenset[int]] = {}

    # A pass and its modules.

    def begin_pass(self) -> None:
        self._land_all()
        if self._mode == "recording":
            self._parameter_order = [(held, at) for at, module in enumerate(self._order) for held in self._of(module)]
            self._mode = "known"
        elif self._mode == "unknown":
            self._mode = "recording"
        self._queue = deque(self._parameter_order if self._mode == "known" else ())
        self._fetched_for.clear()
        self._at = self._live = 0

    def fetch(self, module: int, *, forward: bool, recomputing: bool = False) -> None:
        self._check_order(module)
        if forward:
            self._running.append(module)
        else:
            self._in_backward[module] = None
        wanted = self._of(module)
        self._gather([held for held in wanted if self._is_apart(held)])
        for held in wanted:
            self._users[held].add(module)
            if recomputing and self._in_backward and not self._usage.parameters[held].trains:
                owner = next(reversed(self._in_backward))  # until its backward is over, the frozen ones stay
                self._recomputed[owner].add(held)
                self._users[held].add(owner)
            if recomputing and self._is_put_away(held, module):
                self._awaited[held].add(module)
            if held in self._flying:
                self._land(held)
        if self._mode == "known":
            self._look_ahead(wanted)
        self._at += 1

    def read(self, held: int) -> None:
        """The module that runs looks at another one's parameter. Where it is in parts it is gathered at once, uncounted."""
        if self._running and self._is_apart(held):
            self._others[self._running[-1]].add(held)
            self._gather_alone(held)

    def release(self, module: int, *, forward: bool) -> None:
        while forward and self._running and self._running.pop() != module:
            pass  # recomputation ends early: what was inside of it is never told to be over
        touched = set(self._of(module))
        plan = set(self._plan(module, self._at) if self._mode == "known" else touched)
        if not forward:
            self._backward_is_over(module)
            again = self._recomputed.pop(module, set())
            plan |= again - self._persistent
            touched |= again
            self._in_backward.pop(module, None)
        for held in sorted(touched):
            self._users[held].discard(module)
            if held in plan:
                self._let_go(held)

    def end_backward(self) -> None:
        """Modules whose inputs need no gradient are never told that their backward is over."""
        while self._in_backward:
            module, _ = self._in_backward.popitem()
            for held in sorted({*self._of(module), *self._recomputed.pop(module, set())}):
                self._users[held].discard(module)
                if held not in self._persistent:
                    self._let_go(held)
        for module in set().union(*self._awaited.values()):
            self._backward_is_over(module)

    def release_all(self) -> None:
        self._users.clear()
        for held in list(self._flying):
            self._land(held)
        for held in list(self._held):
            self._let_go(held)

    def gather_persistent(self) -> None:
        """After each step, to stay."""
        for held in sorted(self._persistent):
            if self._is_apart(held):
                self._gather_alone(held)

    # The order of modules.

    def _check_order(self, module: int) -> None:
        if self._mode == "known" and (self._at >= len(self._order) or self._order[self._at] != module):
            self._mode = "unknown"
            self._order, self._parameter_order = [], []
            self._fetched_for.clear()
            self._queue.clear()
            self._land_all()
        elif self._mode == "recording":
            self._order.append(module)

    def _look_ahead(self, wanted: list[int]) -> None:
        """Strike what this module needs off the queue, and fetch what comes next."""
        due = {held for held in wanted if self._fetched_for.get(held, NEVER) < self._at}
        struck: set[int] = set()
        while self._queue and len(struck) < len(due):
            held, last_used = self._queue.popleft()
            self._fetched_for[held] = last_used
            struck.add(held)
        room = min(self._max_live - self._live, self._prefetch)
        ahead: list[int] = []
        count = 0
        while self._queue and count < room:
            held, last_used = self._queue.popleft()
            fetch = self._is_apart(held) and held not in ahead
            self._fetched_for[held] = max(self._fetched_for.get(held, NEVER), last_used)
            if fetch:
                ahead.append(held)
                count += self._usage.parameters[held].count
        self._gather(ahead)

    def _plan(self, module: int, at: int) -> frozenset[int]:
        """What may go: not what is fetched for later, nor what comes again within the reuse distance. Decided once per place."""
        known = self._release_plans.get((module, at))
        if known is not None:
            return known
        plan = {held for held in self._of(module) if held not in self._persistent and self._fetched_for.get(held, NEVER) <= at}
        distance = 0
        for later in self._order[at:]:
            if distance >= self._max_reuse:
                break
            for held in self._of(later):
                plan.discard(held)
                distance += self._usage.parameters[held].count
        self._release_plans[module, at] = frozenset(plan)
        return self._release_plans[module, at]

    # Memory.

    def _of(self, module: int) -> list[int]:
        return sorted({*self._usage.modules[module], *self._others[module]})

    def _is_apart(self, held: int) -> bool:
        return held not in self._held and held not in self._flying

    def _is_put_away(self, held: int, module: int) -> bool:
        """Checkpointing detaches what needs a gradient and keeps its memory; of the frozen it has the parameter itself."""
        own = held in self._usage.modules[module]
        return own and self._usage.keeps_recomputed and self._usage.parameters[held].trains

    def _padded(self, held: int) -> int:
        return -(-self._usage.parameters[held].count // self._ranks) * self._ranks * self._widths[held]

    def _gather(self, wanted: list[int]) -> None:
        if not wanted:
            return
        self._live += sum(self._usage.parameters[held].count for held in wanted)
        if self._offloaded:  # the shards come up from the host first
            self._book.passing(sum(self._padded(held) for held in wanted) // self._ranks, "communication")
        size = sum(self._padded(held) for held in wanted)
        number = self._book.allocate(size, "communication")
        if self._through_gloo:
            self._book.passing(size, "communication")
        self._flying.update(dict.fromkeys(wanted, Gather(parameters=wanted, buffer=number, waiting=set(wanted))))

    def _gather_alone(self, held: int) -> None:
        """Not of the coordinator's doing, and not counted by it."""
        self._held[held] = self._book.allocate(self._padded(held), "communication")
        if self._through_gloo:
            self._book.passing(self._padded(held), "communication")

    def _land(self, held: int) -> None:
        gather = self._flying.pop(held)
        gather.waiting.discard(held)
        if len(gather.parameters) == 1:
            assert gather.buffer is not None
            self._held[held] = gather.buffer
            return
        if not gather.complete:
            gather.complete = True
            for each in gather.parameters:
                size = self._usage.parameters[each].count * self._widths[each]
                self._held[each] = self._book.allocate(size, "communication")
        if not gather.waiting:
            self._book.free(gather.buffer)

    def _land_all(self) -> None:
        for held in list(self._flying):
            self._land(held)
            self._let_go(held)

    def _let_go(self, held: int) -> None:
        if held in self._held and held not in self._flying and not self._users.get(held):
            number = self._held.pop(held)
            if self._awaited.get(held):
                self._saved.append((number, self._awaited.pop(held)))
            else:
                self._book.free(number)
            self._live -= self._usage.parameters[held].count

    def _backward_is_over(self, module: int) -> None:
        """What was put away for it is free, too."""
        for awaiting in self._awaited.values():
            awaiting.discard(module)
        for number, awaiting in self._saved:
            awaiting.discard(module)
            if not awaiting:
                self._book.free(number)
        self._saved = [one for one in self._saved if one[1]]
