"""Which requests run and which wait: `max_running` sequences run, each request on its own thread; others wait."""

from __future__ import annotations

import bisect
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.slots import NO_LIMITS, Slots, TenantLimits
from orchestrator.core.errors import QueueFull, SaltQueueFull
from orchestrator.server.logs import request_name

log = logging.getLogger(__name__)

#: A request that has waited this long goes ahead of one that is one level more urgent and has just arrived.
AGING_S = 1.0
#: The service rate is measured over this many of the last requests to end.
NUM_ENDS = 64
LONGEST_HINT_S = 60
#: How often the waiting requests are checked. It is well below slots.STALE_S, because each check renews their turn.
POLL_S = 0.05
#: One poll asks for at most this many waiting requests whether their clients have gone; Triton takes 0.1 ms for each.
NUM_ASKED = 100
#: The keys of a deployment that limit what runs of one salt.
LIMITS_OF_SALTS = ("max_running_per_salt", "max_running_tokens_per_salt")


def tenant_limits(config: ServingConfig) -> TenantLimits:
    """Return a deployment's limits of one tenant: in it, a tenant is a salt."""
    return TenantLimits(*(getattr(config, key) or None for key in LIMITS_OF_SALTS))


def queue_full(config: ServingConfig, retry_after_s: int) -> QueueFull:
    """Return the refusal of a request that finds the queue full; the gateway reads the time from it.

    With a limit for each salt, a queue that is full for one salt may have room for another.
    """
    keys_of_salts = [key for key in LIMITS_OF_SALTS if getattr(config, key)]
    keys = ["max_running", "max_waiting", *keys_of_salts]
    return (SaltQueueFull if keys_of_salts else QueueFull)(
        f"{config.max_running} requests run and {config.max_waiting} wait; "
        f"try again in {retry_after_s} s ({', '.join(keys)} in the deployment file)"
    )


class RequestHandler(Protocol):
    """A request that waits or runs.

    deadline_s: when it is due, by time.monotonic(). num_slots: how many of the `max_running` slots it takes.
    num_tokens: what each of its sequences may come to, with the prompt. priority: its level; the lowest runs first.
    tenant: whose request it is. request_id: the client's name for it.
    """

    deadline_s: float
    num_slots: int
    num_tokens: int
    priority: int
    tenant: str
    request_id: str

    def run(self) -> None:
        """Serve the request to its end; must not raise."""

    def is_cancelled(self) -> bool:
        """True when the client has gone."""

    def give_up(self, reason: str) -> None:
        """Answer a request that never ran; reason: cancelled, deadline, shutdown or full; must not block."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request in the queue, and then with its slots.

    turn_s: when it arrived, plus AGING_S for each level of its priority.
    """

    request: RequestHandler
    turn_s: float
    slots: list[int] = field(default_factory=list)


class ServiceRate:
    """How fast slots become free while requests wait for them."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=NUM_ENDS)
        self.restart()

    def restart(self) -> None:
        """Start a new measurement, because requests begin to wait."""
        self._ends.clear()
        self._since_s = time.monotonic()

    def note(self, num_slots: int) -> None:
        """Note that `num_slots` slots became free."""
        if len(self._ends) == NUM_ENDS:
            self._since_s = self._ends[0][0]
        self._ends.append((time.monotonic(), num_slots))

    def seconds_for(self, num_slots: int) -> int:
        """Return how many whole seconds `num_slots` slots will take to become free, 1..LONGEST_HINT_S."""
        freed = sum(number for _, number in self._ends)
        if not freed:
            return 1
        return min(max(math.ceil(num_slots * (time.monotonic() - self._since_s) / freed), 1), LONGEST_HINT_S)


class Admission:
    """Starts requests in the order of their turns: by arrival within a priority, across priorities with aging.

    folder: the processes of a deployment that are given the same folder share their slots. limits: of one tenant. A
    tenant at its limit is passed over; when the queue is full, the tenant with the most waiting requests loses its last
    one.
    Invariant: slots taken ≤ max_running and waiting ≤ max_waiting; every request is run or given up exactly once, by
    its deadline (plus the poll) if it only ever waits. A request that needs more slots than there are is refused.
    A poll takes no longer with more requests in the queue than with NUM_ASKED: it asks that many of them, in turn.
    """

    def __init__(self, max_running: int, max_waiting: int, folder: Path, limits: TenantLimits = NO_LIMITS) -> None:
        self.max_running, self.num_running = max_running, 0
        self._max_waiting, self._limits = max_waiting, limits
        self._largest = min(max_running, limits.slots or max_running)
        self._slots = Slots(folder, max_running)
        self._waiting: list[Waiting] = []
        self._asked_until_s = -math.inf
        self._rate = ServiceRate()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._poll, name="admission", daemon=True).start()

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def would_refuse(self) -> bool:
        """Return whether a request of priority 0 would be refused now, whichever tenant sent it; cheap."""
        with self._lock:
            is_full = bool(self._waiting) and len(self._waiting) >= self._max_waiting
            return is_full and not self._limits.are_set and self._waiting[-1].turn_s <= time.monotonic()

    def retry_after_s(self) -> int:
        """Return how many seconds all requests that wait now will take to begin, by the measured service rate."""
        with self._lock:
            return self._rate.seconds_for(sum(waiting.request.num_slots for waiting in self._waiting) or 1)

    def admit(self, request: RequestHandler) -> bool:
        """Run the request now or later; return False when it is refused because the queue is full.

        It may displace another request from the queue, which is then given up as full.
        """
        with self._lock:
            if self._closed.is_set() or request.num_slots > self._largest:
                return False
            if not self._waiting:
                self._rate.restart()
            new = Waiting(request, time.monotonic() + request.priority * AGING_S)
            bisect.insort(self._waiting, new, key=lambda waiting: waiting.turn_s)
            started, refused = self._start(), None
            if len(self._waiting) > self._max_waiting:
                refused = self._pop_refused()
                started += self._start()  # requests that were behind it
        self._run(started)
        if refused and refused is not new:
            _guarded(refused.request, refused.request.give_up, "full")
        return refused is not new

    def close(self, timeout_s: float) -> bool:
        """Give up the waiting requests and wait for the running ones; return True when all have ended in time."""
        with self._lock:
            self._closed.set()
        self._give_up(dict.fromkeys(list(self._waiting), "shutdown"))
        limit_s = time.monotonic() + timeout_s
        while self.num_running and time.monotonic() < limit_s:
            time.sleep(POLL_S)
        return not self.num_running

    def _pop_refused(self) -> Waiting:
        """Remove the last request of the queue, or of the tenant with the most in it. Caller holds the lock."""
        counts = Counter(waiting.request.tenant for waiting in self._waiting if self._limits.are_set)
        refused = max(self._waiting, key=lambda waiting: (counts[waiting.request.tenant], waiting.turn_s))
        self._waiting.remove(refused)
        return refused

    def _start(self) -> list[Waiting]:
        """Remove from the queue, in order, the requests for which there are slots. Caller holds the lock."""
        started, at_limit, first_s = list[Waiting](), set[str](), math.inf
        with self._slots.alone():
            for waiting in list(self._waiting):
                request = waiting.request
                if request.tenant in at_limit:
                    continue
                if not self._is_allowed(request):
                    at_limit.add(request.tenant)
                    continue
                slots = self._slots.take(request.num_slots, request.tenant, request.num_tokens, waiting.turn_s)
                if not slots:
                    first_s = waiting.turn_s
                    break
                waiting.slots.extend(slots)
                self._waiting.remove(waiting)
                self.num_running += request.num_slots
                started.append(waiting)
            self._slots.wait_for(first_s)
        return started

    def _is_allowed(self, request: RequestHandler) -> bool:
        """Return whether a request's tenant is not at its limit. Caller holds the lock, and keeps others out."""
        if not self._limits.are_set:
            return True
        return self._limits.allow(self._slots.share_of(request.tenant), request.num_slots, request.num_tokens)

    def _run(self, started: list[Waiting]) -> None:
        for each in started:
            try:
                threading.Thread(target=self._work, args=(each,), name="request", daemon=True).start()
            except RuntimeError:  # "can't start new thread": the limit of the container, or no memory
                log.exception("no thread could be started; %s is refused", request_name(each.request.request_id))
                with self._lock:
                    self._give_back(each)
                _guarded(each.request, each.request.give_up, "full")

    def _work(self, first: Waiting) -> None:
        """Run a request; then, on the same thread, the first request for which its end has made room."""
        following: Waiting | None = first
        while following:
            _guarded(following.request, following.request.run)
            with self._lock:
                self._give_back(following)
                self._rate.note(following.request.num_slots)
                started = self._start()
            following = started[0] if started else None
            self._run(started[1:])

    def _give_back(self, ended: Waiting) -> None:
        """Give a request's slots back. Caller holds the lock."""
        self.num_running -= ended.request.num_slots
        self._slots.give_back(ended.slots)

    def _poll(self) -> None:
        """Give up requests that need not wait any longer, and start those for which other processes have made room."""
        while not self._closed.wait(POLL_S):
            if self._waiting:
                # Asked without the lock: Triton takes its time to answer, and new requests would wait.
                self._give_up(self._late() | self._cancelled())

    def _late(self) -> dict[Waiting, str]:
        """Return the waiting requests whose deadline has passed."""
        now_s = time.monotonic()
        return {waiting: "deadline" for waiting in list(self._waiting) if waiting.request.deadline_s <= now_s}

    def _cancelled(self) -> dict[Waiting, str]:
        """Return those whose clients have gone, of the NUM_ASKED that follow in the queue those asked last."""
        waiting = list(self._waiting)
        begin = bisect.bisect_right(waiting, self._asked_until_s, key=lambda waiting: waiting.turn_s)
        asked = waiting[begin : begin + NUM_ASKED]
        self._asked_until_s = asked[-1].turn_s if begin + NUM_ASKED < len(waiting) else -math.inf
        requests = {waiting: waiting.request for waiting in asked}
        return {waiting: "cancelled" for waiting, each in requests.items() if _guarded(each, each.is_cancelled)}

    def _give_up(self, reasons: Mapping[Waiting, str]) -> None:
        """Give up waiting requests for the reasons given, and start those for which there is room."""
        with self._lock:
            if given_up := [waiting for waiting in self._waiting if waiting in reasons]:
                self._waiting = [waiting for waiting in self._waiting if waiting not in reasons]
            started = self._start()  # requests that were behind one that needed more slots
        self._run(started)
        for waiting in given_up:
            _guarded(waiting.request, waiting.request.give_up, reasons[waiting])


def _guarded(request: RequestHandler, method: Callable[..., bool | None], *arguments: str) -> bool:
    """Call a method of a request; return its answer, or False if it raises: it must still free its slots."""
    try:
        return bool(method(*arguments))
    except Exception:
        log.exception("%s: %s raised", request_name(request.request_id), method.__name__)
        return False
