"""The replicas: where they are, whether they are healthy, how busy each is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from gateway.errors import Busy
from gateway.routing import choose
from gateway.settings import Settings, SettingsError
from gateway.triton import ReplicaDraining, ReplicaError, ReplicaFull, ReplicaLost, StreamStalled, TritonClient

DNS = "dns://"
#: The longest time for which a replica is left alone: a text that only it can continue waits for it.
MAX_BACK_OFF_S = 10.0
#: How long a full replica is left alone.
FULL_PAUSE_S = 0.5
POLL_S = 0.05
#: The level that goes first; no request is more urgent, whatever its field says.
MOST_URGENT = -10

log = logging.getLogger(__name__)


@dataclass(eq=False)
class InFlight:
    """A request in flight on a replica: when it was sent, its first and its latest response, by time.monotonic()."""

    sent_s: float = field(default_factory=time.monotonic)
    first_response_s: float = math.inf
    last_response_s: float = -math.inf


@dataclass(eq=False)
class Replica:
    """One Triton server.

    in_flight: requests that the gateway has on it. is_ready: as of the last health check.
    num_failures: outages in a row; each doubles how long the replica is ejected. ejected_s: when it last was ejected.
    is_full: it rests because its queue was full, for requests that are no more urgent than `full_from`.
    retry_after_s: by its own account, the seconds until it has room.
    last_response_s: when the latest response to any request came.
    outage_s: when it last was ejected, or not ready: what it had been sent before may be lost.
    """

    address: str
    client: TritonClient
    in_flight: set[InFlight] = field(default_factory=set)
    is_ready: bool = False
    num_failures: int = 0
    resting_until_s: float = 0.0
    ejected_s: float = -math.inf
    is_full: bool = False
    full_from: int = 0
    retry_after_s: int = 1
    last_response_s: float = -math.inf
    outage_s: float = -math.inf

    @property
    def num_running(self) -> int:
        """Number of requests that the gateway has on it."""
        return len(self.in_flight)

    @property
    def is_usable(self) -> bool:
        """True if requests may be sent to it now."""
        return self.is_ready and time.monotonic() >= self.resting_until_s

    def takes(self, priority: int) -> bool:
        """Return whether a request of this priority may be sent to it now: in a full queue it may displace another."""
        is_more_urgent = self.is_full and max(priority, MOST_URGENT) < self.full_from
        return self.is_usable or (self.is_ready and is_more_urgent)

    @contextlib.contextmanager
    def running(self) -> Iterator[InFlight]:
        """Count one request as in flight while it runs, and yield it."""
        request = InFlight()
        self.in_flight.add(request)
        try:
            yield request
        finally:
            self.in_flight.remove(request)

    def note_response(self, request: InFlight) -> None:
        """Note a response to a request."""
        request.last_response_s = self.last_response_s = time.monotonic()
        request.first_response_s = min(request.first_response_s, request.last_response_s)

    def last_sign_s(self, request: InFlight) -> float:
        """Return when the process that serves a request last sent a response, to any request.

        Requests first answered before this one fell silent run on the same process; others may run on a new one.
        """
        ours = (other for other in self.in_flight if other.first_response_s <= request.last_response_s)
        return max(other.last_response_s for other in ours)

    def eject(self, began_s: float) -> None:
        """Leave it alone for 0.5 s, twice as long after each new outage, and until a health check says it is ready.

        began_s: when the failed request began. All streams of a replica report its end; those that began before it was
        ejected report the same outage again.
        """
        if began_s < self.ejected_s:
            return
        self.ejected_s = self.outage_s = time.monotonic()
        pause_s = min(0.5 * 2 ** min(self.num_failures, 10), MAX_BACK_OFF_S)
        self.resting_until_s = self.ejected_s + pause_s
        self.num_failures += 1
        self.is_ready = self.is_full = False

    def rest(self, retry_after_s: int, priority: int = 0) -> None:
        """Send a replica that is full nothing less urgent than what it has refused, which had this priority.

        So requests that are all urgent are refused as cheaply as others. retry_after_s: as it says, until it has room.
        """
        is_resting = self.is_full and not self.is_usable
        self.full_from = max(min(priority, self.full_from) if is_resting else priority, MOST_URGENT)
        self.resting_until_s = max(self.resting_until_s, time.monotonic() + FULL_PAUSE_S)
        self.is_full, self.retry_after_s = True, retry_after_s

    async def check(self) -> None:
        """Check readiness, even during a back-off."""
        was_ready, self.is_ready = self.is_ready, await self.client.is_ready()
        if not self.is_ready:
            self.outage_s = time.monotonic()
        if was_ready != self.is_ready:
            log.info("replica %s is %s", self.address, "ready" if self.is_ready else "not ready")


@dataclass(eq=False)
class Replicas:
    """All replicas; `watch` keeps the list and its state up to date while requests choose from it.

    addresses: where they are, as in the setting `replicas`.
    """

    settings: Settings
    connect: Callable[[str], TritonClient] = TritonClient
    all: dict[str, Replica] = field(default_factory=dict)
    addresses: str = ""

    def __post_init__(self) -> None:
        self.addresses = self.addresses or self.settings.replicas
        name = self.addresses.removeprefix(DNS)
        for address in name.split(","):
            host, _, port = address.strip().rpartition(":")
            is_port = port.isdecimal() and 1 <= int(port) <= 65535
            if not host or "/" in host or not is_port or (self._is_dns and "," in name):  # "/" as in http://
                raise _wrong("must be host:port,host:port… or dns://name:port", self.addresses)
            try:
                host.encode("idna")
            except UnicodeError as error:
                raise _wrong(f"must be names that can be looked up ({error})", self.addresses) from None

    @property
    def _is_dns(self) -> bool:
        return self.addresses.startswith(DNS)

    @property
    def is_ready(self) -> bool:
        """True if any replica can take a request."""
        return any(replica.is_ready for replica in self.all.values())

    def check_room(self, priority: int = 0) -> None:
        """Raise Busy if every replica that is ready has just said that it is full for requests of this priority."""
        ready = [replica for replica in self.all.values() if replica.is_ready]
        if ready and all(replica.is_full and not replica.takes(priority) for replica in ready):
            retry_after_s = min(replica.retry_after_s for replica in ready)
            raise Busy("all replicas have just said that they are full", retry_after_s=retry_after_s)

    async def watch(self) -> None:
        """Look up and check the replicas forever."""
        resolved_s = -self.settings.resolve_interval_s
        while True:
            try:
                if not self.all or (self._is_dns and time.monotonic() - resolved_s >= self.settings.resolve_interval_s):
                    resolved_s = time.monotonic()
                    await self._update(await self._resolve())
                await asyncio.gather(*(replica.check() for replica in list(self.all.values())))
            except Exception:  # the next round must come, whatever happens
                log.exception("cannot look up or check the replicas")
            pause_s = self.settings.health_interval_s
            if not all(replica.is_ready for replica in self.all.values()) or not self.all:
                pause_s = min(pause_s, 0.25)
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """Close all channels."""
        await self._update([])

    async def choose(self, key: bytes, tried: Sequence[Replica], limit_s: float, priority: int = 0) -> Replica | None:
        """Return a replica that takes requests: one not yet tried, else one that was not tried last, else any.

        Waits for one up to the limit; returns None if none comes.
        """
        end_s = time.monotonic() + limit_s
        while True:
            usable = [replica for replica in self.all.values() if replica.takes(priority)]
            fresh = [replica for replica in usable if replica not in tried]
            others = [replica for replica in usable if replica not in tried[-1:]]
            if chosen := choose(fresh or others or usable, key, self.settings.affinity_slack):
                return chosen
            if time.monotonic() >= end_s:
                return None
            await asyncio.sleep(POLL_S)

    def last_sign_s(self, replica: Replica, request: InFlight, tried: Collection[Replica], priority: int) -> float:
        """Return when there last was a reason to leave a request where it is, by time.monotonic().

        Once it was answered, that is a sign of life of its process. Before, it may be waiting in the replica's queue,
        and would lose its place: it stays, unless a replica that it has not tried takes it or this one had an outage.
        """
        if request.last_response_s > -math.inf:
            return replica.last_sign_s(request)
        others = (other for other in self.all.values() if other is not replica and other not in tried)
        is_lost = replica.outage_s > request.sent_s
        return -math.inf if is_lost or any(other.takes(priority) for other in others) else time.monotonic()

    def report(
        self,
        replica: Replica,
        error: ReplicaError | None,
        began_s: float,
        priority: int = 0,
        *,
        waits_for_room: bool = False,
    ) -> None:
        """Note how a request that began at `began_s` ended; a replica that failed only on this request stays usable.

        waits_for_room: the replica had refused the request before; it asks twice a second, and once is enough to log.
        """
        if error is None:
            replica.num_failures = 0
            return
        level = logging.DEBUG if waits_for_room and isinstance(error, ReplicaFull) else logging.WARNING
        log.log(level, "replica %s: %s", replica.address, error)
        if isinstance(error, ReplicaFull):
            if error.is_for_all:  # otherwise one client could keep out all others
                replica.rest(error.retry_after_s, priority)
        elif isinstance(error, ReplicaLost | ReplicaDraining) or (
            isinstance(error, StreamStalled) and self._is_silent(replica)
        ):
            replica.eject(began_s)

    def _is_silent(self, replica: Replica) -> bool:
        """Return whether a replica answers none of its requests, rather than just failing to answer one of them."""
        return time.monotonic() - replica.last_response_s >= self.settings.silence_limit_s

    async def _update(self, addresses: Collection[str]) -> None:
        for address in set(self.all) - set(addresses):
            # Streams that still run continue; the channel closes with the last of them.
            replica = self.all.pop(address)
            log.info("replica %s has left", address)
            if not replica.num_running:
                await replica.client.close()
        for address in addresses:
            if address not in self.all:
                self.all[address] = Replica(address, self.connect(address))

    async def _resolve(self) -> list[str]:
        """Return the addresses that the setting stands for; if its name cannot be resolved now, those of before."""
        if not self._is_dns:
            return [address.strip() for address in self.addresses.split(",")]
        host, _, port = self.addresses.removeprefix(DNS).rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            log.warning("cannot resolve %s: %s", host, error)
            return list(self.all)
        return sorted({_numeric(info[4][0], port) for info in found})


def _wrong(allowed: str, got: str) -> SettingsError:
    return SettingsError(f"replicas {allowed}, got {got!r} (--replicas or GATEWAY_REPLICAS)")


def _numeric(host: str | int, port: str) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
