"""`python -m tests.overload`: ten times the capacity of the shipped deployment is offered; what is refused, how soon, and
what becomes of the requests that are admitted.

Capacity is what the server ends a second while as many clients as it has places and seats in its queue each send one
request after the other: it is full, and refuses nothing. Then ten times as many requests come a second, whatever is
answered. Each text is compared with that of the same request alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.deployment import CONFIG
from launcher import Server
from orchestrator.core.deployment.config import load_config
from tests.support.doors import Door, GrpcDoor, HttpDoor, Said

DOORS: Mapping[str, Callable[[Server, Sequence[Mapping[str, Any]]], Door]] = {
    "grpc": lambda server, requests: GrpcDoor(server.grpc_url, requests),
    "http": lambda server, requests: HttpDoor(server.http_url, requests),
}
#: What a refusal says, over both doors.
REFUSAL = "try again in"
LIMIT_S = 120.0
NUM_PROMPTS = 16
#: The acceptance run's limits: refusals by this time, and admitted requests by this much of those of a full server.
REFUSED_WITHIN_MS, SLOWER_AT_MOST = 50.0, 1.5


@dataclass
class Load:
    """What became of the requests of one load: their times in seconds from sending to the answer, by outcome."""

    name: str
    seconds: float = 0.0
    times: dict[str, list[float]] = field(default_factory=lambda: {"ended": [], "refused": []})
    faults: list[str] = field(default_factory=list)

    def quantile(self, outcome: str, share: float) -> float:
        """Return the time in ms by which this share of the requests with an outcome had their answer; 0 for none."""
        times = sorted(self.times[outcome])
        return times[min(int(share * len(times)), len(times) - 1)] * 1000 if times else 0.0

    def row(self) -> str:
        """Return a row of the table."""
        cells = [self.name]
        for outcome in ("ended", "refused"):
            figures = (self.quantile(outcome, share) for share in (0.5, 0.95, 1.0))
            cells += [str(len(self.times[outcome])), *(f"{value:,.0f}" if value else "–" for value in figures)]
        return f"| {' | '.join(cells)} |"


HEADER = """| load | ended | p50, ms | p95, ms | max, ms | refused | p50, ms | p95, ms | max, ms |
|---|---:|---:|---:|---:|---:|---:|---:|---:|"""


@dataclass
class Overload:
    """Offers loads to a server through one of its doors.

    texts: {request number modulo NUM_PROMPTS: its text, as the idle server gave it}.
    """

    door: Door
    loads: list[Load] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    _number: int = 0

    async def alone(self, name: str) -> Load:
        """Send the requests one after the other."""
        load = self._begin(name)
        for _ in range(NUM_PROMPTS):
            await self._ask(load)
        return self._end(load)

    async def closed(self, name: str, num_clients: int, seconds: float) -> Load:
        """Let so many clients send one request after the other."""
        load, end_s = self._begin(name), time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end_s:
                await self._ask(load)

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return self._end(load)

    async def opened(self, name: str, per_second: float, seconds: float) -> Load:
        """Send so many requests a second, whatever becomes of the earlier ones; those that are late are sent at once."""
        load, began_s, asked = self._begin(name), time.monotonic(), []
        for number in range(int(per_second * seconds)):
            await asyncio.sleep(max(began_s + number / per_second - time.monotonic(), 0.0))
            asked.append(asyncio.create_task(self._ask(load)))
        await asyncio.gather(*asked)
        return self._end(load)

    async def at_once(self, name: str, number: int) -> Load:
        """Send so many requests at once."""
        await self.door.open(number)
        load = self._begin(name)
        await asyncio.gather(*(self._ask(load) for _ in range(number)))
        return self._end(load)

    def _begin(self, name: str) -> Load:
        load = Load(name, time.monotonic())
        self.loads.append(load)
        return load

    def _end(self, load: Load) -> Load:
        load.seconds = time.monotonic() - load.seconds
        return load

    async def _ask(self, load: Load) -> None:
        number = self._number = (self._number + 1) % NUM_PROMPTS
        sent_s = time.monotonic()
        try:
            said = await asyncio.wait_for(self.door.ask(number), LIMIT_S)
        except (OSError, TimeoutError) as error:
            load.faults.append(f"request {number} was lost: {error!r}")
            return
        taken_s = time.monotonic() - sent_s
        if REFUSAL in said.error:
            load.times["refused"].append(taken_s)
        elif said == Said(self.texts.setdefault(number, said.text)):
            load.times["ended"].append(taken_s)
        else:
            load.faults.append(f"request {number}: {said}, wanted {self.texts[number]!r}")


def make_requests(max_tokens: int) -> list[dict[str, Any]]:
    """Return the requests, half of them greedy, half sampled."""
    return [
        {
            "text_input": f"def function_{number}(value):\n",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.8 * (number % 2),
            "seed": number,
            "timeout_ms": int(LIMIT_S * 1000),
        }
        for number in range(NUM_PROMPTS)
    ]


@dataclass(frozen=True)
class Result:
    """The loads of one door. capacity: requests a second that the full server ends."""

    door: str
    loads: Sequence[Load]
    capacity: float

    @property
    def by_name(self) -> Mapping[str, Load]:
        """The loads by their names."""
        return {load.name: load for load in self.loads}

    @property
    def faults(self) -> list[str]:
        """Requests that were lost, wrong texts, and refusals where none may be."""
        found = [fault for load in self.loads for fault in load.faults]
        for name in ("alone", "alone again"):
            if refused := len(self.by_name[name].times["refused"]):
                found.append(f"{refused} requests were refused: {name}")
        return found

    @property
    def slower(self) -> float:
        """The median time of the admitted requests, as a multiple of that on the full server."""
        return self.by_name["overload"].quantile("ended", 0.5) / self.by_name["full"].quantile("ended", 0.5)

    def misses(self) -> list[str]:
        """Return the limits of the acceptance run that were exceeded."""
        found = []
        if (late := self.by_name["overload"].quantile("refused", 0.95)) > REFUSED_WITHIN_MS:
            found.append(f"{self.door}: 95 % of the refusals took up to {late:.0f} ms, not {REFUSED_WITHIN_MS:g}")
        if self.slower > SLOWER_AT_MOST:
            found.append(f"{self.door}: admitted requests took {self.slower:.2f} x, not {SLOWER_AT_MOST:g} x")
        return found

    def page(self) -> str:
        """Return the tables of docs/figures/overload.md."""
        rows = "\n".join(load.row() for load in self.loads)
        return (
            f"## {self.door}\n\nCapacity: {self.capacity:.1f} requests a second. Admitted requests took "
            f"{self.slower:.2f} × the median of the full server.\n\n{HEADER}\n{rows}\n"
        )


async def overload(
    server: Server, door: str, seats: int, seconds: float, max_tokens: int, at_once: int, times: float
) -> Result:
    """Offer all loads to a server through a door. seats: requests that it runs and lets wait together."""
    async with DOORS[door](server, make_requests(max_tokens)) as opened:
        run = Overload(opened)
        await run.alone("warm-up")
        await run.alone("alone")
        await run.closed("full", seats, seconds)
        full = run.loads[-1]
        capacity = len(full.times["ended"]) / full.seconds
        await run.opened("overload", times * capacity, seconds)
        await run.alone("alone again")
        await run.at_once(f"{at_once} at once", at_once)
        return Result(door, run.loads[1:], capacity)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the acceptance test; return 1 for a fault or a limit that is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="of each load (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="length of a text (%(default)s)")
    parser.add_argument("--at-once", type=int, default=300, help="requests of the last load (%(default)s)")
    parser.add_argument("--times", type=float, default=10, help="the capacity, offered (%(default)s)")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS))
    options = parser.parse_args(arguments)
    config = load_config(CONFIG)
    with Server(CONFIG) as server:
        results = [
            asyncio.run(
                overload(
                    server, door, config.max_running + config.max_waiting,
                    options.seconds, options.max_tokens, options.at_once, options.times,
                )
            )
            for door in options.doors
        ]  # fmt: skip
    print("\n".join(result.page() for result in results))
    faults = [fault for result in results for fault in result.faults]
    for kind, found in (("FAULT", faults), ("MISSED", [miss for result in results for miss in result.misses()])):
        for line in found[:10]:
            print(f"{kind}: {line[:500]}")
    return int(bool(faults or any(result.misses() for result in results)))


if __name__ == "__main__":
    sys.exit(main())
