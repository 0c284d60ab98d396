"""What the processes of a replica hold while they are killed and replaced, and the rule by which none of it may grow."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from launcher import Server

CLIENTS, TRITON, SHARED_MEMORY = "clients and gateway", "tritonserver", "shared memory"


class Footprint(NamedTuple):
    """What a process holds."""

    mb: float
    threads: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Look at a process."""
        process = psutil.Process(pid)
        return cls(process.memory_info().rss / 1e6, process.num_threads(), process.num_fds())


@dataclass(frozen=True)
class Sample:
    """What was held at one moment, by kind of process.

    triton: which tritonserver it was. num_deaths: the models' processes that had died in this tritonserver.
    """

    held: dict[str, Footprint]
    triton: int | None = None
    num_deaths: int = 0


#: What each kind may hold beyond its first sample. Every process: an allocator keeps up to 5 % or 16 MB after a large
#: pass; a judged moment may be under traffic, with a thread for each of 16 requests, and as many for their calls and
#: answers; a process that replaces another inherits about 24 descriptors of tritonserver, and 14 clients each have up
#: to two connections. A leak of one thread or descriptor a request is a hundred times as much.
SHARE_MB, MORE = 0.05, Footprint(16, 48, 64)
#: tritonserver keeps, and cannot be made not to: 83 threads, 4 MB and 1 MB of shared memory for each process that dies
#: in it (docs/figures/soak_under_faults.md). Two deaths may fall between two looks and count as one.
MORE_OF = {TRITON: Footprint(24, 200, 64), SHARED_MEMORY: Footprint(4, 0, 0)}
MORE_A_DEATH = {TRITON: Footprint(6, 100, 2), SHARED_MEMORY: Footprint(1.5, 0, 0)}


def allowed(kind: str, first: Footprint, num_deaths: int) -> Footprint:
    """Return the most that a kind of process may hold so many deaths after its tritonserver was started."""
    more, a_death = MORE_OF.get(kind, MORE), MORE_A_DEATH.get(kind, Footprint(0, 0, 0))
    most = [*map(sum, zip(first, more, (each * num_deaths for each in a_death), strict=True))]
    return Footprint(most[0] + SHARE_MB * first.mb, *most[1:])


def growth(samples: Sequence[Sample]) -> list[str]:
    """Return what holds more than is allowed: right after each replacement of tritonserver, and at the end.

    The first sample is the measure: after the warm-up, at rest. What grows within the life of one tritonserver falls
    with its replacement; what does not fall then grows for good. A look between the end of one tritonserver and the start
    of the next finds the shared memory of the old one.
    """
    first, last = samples[0], samples[-1]
    fresh = [now for before, now in itertools.pairwise(samples) if now.triton not in (None, before.triton)]
    found = [line for sample in fresh for line in _too_much(first, sample, "after a replacement of tritonserver")]
    missing = [f"at the end there is no {kind}" for kind in first.held if kind not in last.held]
    return found + missing + _too_much(first, last, "at the end")


def _too_much(first: Sample, sample: Sample, when: str) -> list[str]:
    return [
        f"{kind} holds {got:.0f} {name} {when}, {before:.0f} after the warm-up, at most {most:.0f} allowed"
        for kind, now in sample.held.items()
        if kind in first.held
        for name, before, got, most in zip(
            Footprint._fields, first.held[kind], now, allowed(kind, first.held[kind], sample.num_deaths), strict=True
        )
        if got > most
    ]


def table(samples: Sequence[Sample]) -> str:
    """Return what each kind held before, at most and at the end."""
    lines = ["| before / at most / at the end | MB | threads | descriptors |", "|---|---:|---:|---:|"]
    for kind in sorted(samples[0].held.keys() & samples[-1].held.keys()):
        series = zip(*(sample.held[kind] for sample in samples if kind in sample.held), strict=True)
        lines.append(f"| {kind} | {' | '.join(map(_spread, series))} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    """Return the first value, the largest and the last."""
    return f"{values[0]:.0f} / {max(values):.0f} / {values[-1]:.0f}" if any(values) else "–"


@dataclass
class Footprints:
    """Looks at this process and at a replica's processes and shared memory, again and again."""

    server: Server
    samples: list[Sample] = field(default_factory=list)
    _pids: dict[int, str] = field(default_factory=dict)

    def look(self) -> Sample:
        """Note what they hold now."""
        pids = self.server.pids()
        held = {CLIENTS: Footprint.of(os.getpid()), **dict(_footprints(pids))}
        with contextlib.suppress(OSError):
            held[SHARED_MEMORY] = Footprint(sum(self.server.shared_memory().values()) / 1e6, 0, 0)
        triton = next((pid for pid, kind in pids.items() if kind == TRITON), None)
        is_same = bool(self.samples) and triton == self.samples[-1].triton
        num_deaths = self.samples[-1].num_deaths + len(self._pids.keys() - pids.keys()) if is_same else 0
        self._pids = pids
        self.samples.append(Sample(held, triton, num_deaths))
        return self.samples[-1]


def _footprints(pids: dict[int, str]) -> Iterator[tuple[str, Footprint]]:
    for pid, kind in pids.items():
        with contextlib.suppress(psutil.Error):  # it is just being replaced
            yield kind, Footprint.of(pid)
