"""Watches a server's stub processes: Triton calls a dead stub ready for ever and starts no other (triton#8604)."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path

from launcher import process
from launcher.admin import Admin, AdminError
from launcher.triton import STUB

_POLL_S = 0.5
_WINDOW_S = 60.0
#: Within the window: so many reloads may fail, and so often may one model die.
_FAILURES, _DEATHS = 2, 4


class Watch(threading.Thread):
    """Reloads models whose stub has died; gives up when that does not help.

    Attributes:
        failure: why it gave up, in one line; None while all is well.
    """

    def __init__(
        self,
        server: int,
        repository: Path,
        models: Iterable[str],
        admin: Admin,
        *,
        say: Callable[[str], None],
        load_limit_s: float,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.failure: str | None = None
        self._server, self._repository, self._admin, self._say = server, repository, admin, say
        self._python_models = {name for name in models if any((repository / name).glob("*/model.py"))}
        self._load_limit_s = load_limit_s
        self._ended = threading.Event()
        self._deaths: dict[str, deque[float]] = defaultdict(deque)
        self._failures: deque[float] = deque()
        self.stubs = stubs(server, repository)

    def end(self) -> None:
        """Stop watching; a reload under way is not waited for."""
        self._ended.set()

    def run(self) -> None:
        """Poll until `end` or a failure."""
        while self.failure is None and not self._ended.wait(_POLL_S):
            for model in sorted(self._dead_models()):
                self._heal(model)

    def _dead_models(self) -> set[str]:
        living = {pid for pid in self.stubs if _lives(pid, self._server)}
        died = {model for pid, model in self.stubs.items() if pid not in living}
        return died | (self._python_models - set(self.stubs.values()))  # the latter: died before it was seen

    def _heal(self, model: str) -> None:
        if _count(self._deaths[model]) > _DEATHS:
            self.failure = f"model {model} died {_DEATHS + 1} times within a minute"
        if self.failure or self._ended.is_set():
            return
        self._say(f"model {model}: its process died, reloading")
        started = time.monotonic()
        try:
            self._admin.reload(model, self._load_limit_s)
            self._say(f"model {model}: reloaded in {time.monotonic() - started:.1f} s")
        except AdminError as error:
            self._failed(f"model {model} could not be reloaded: {error}")
        self.stubs = stubs(self._server, self._repository)

    def _failed(self, what: str) -> None:
        if self._ended.is_set():  # the server is being stopped: of course it refuses
            return
        if _count(self._failures) >= _FAILURES:
            self.failure = what
        else:
            self._say(f"{what}; trying once more")


def stubs(server: int, repository: Path) -> dict[int, str]:
    """Return {pid: model} of a server's living stub processes; a stub's first argument is the path of its model.py."""
    found = {}
    for member in process.group_members(server):
        command = process.arguments(member.pid)
        if member.parent == server and len(command) > 1 and command[0].endswith(STUB):
            found[member.pid] = Path(command[1]).relative_to(repository).parts[0]
    return found


def _lives(pid: int, server: int) -> bool:
    """Tell whether `pid` runs; Triton does not reap its stubs, so a dead one is a zombie and its id is not reused."""
    seen = process.stat(pid)
    return seen is not None and seen.parent == server and seen.state not in "ZX"


def _count(times: deque[float]) -> int:
    """Note that it happened now; return how often it did within the window."""
    now = time.monotonic()
    times.append(now)
    while now - times[0] > _WINDOW_S:
        times.popleft()
    return len(times)
