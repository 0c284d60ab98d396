"""The connections of clients: how many may be open, and how long a client may take to send a request and to read.

uvicorn itself limits only idle connections. Its `limit_concurrency` would refuse the probes of /health too: whoever
opens enough connections could have the gateway restarted, and with it all its streams ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import struct
import termios
from typing import ClassVar

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.settings import KEEP_ALIVE_S, Settings, SettingsError

#: A reader must take this many bytes within its limit, so that one byte a minute does not keep a request running.
MIN_TAKEN_BYTES = 4096
#: Most files that the gateway opens beside its clients' connections: to replicas, pipes, those of the tokenizer.
NUM_OTHER_FILES = 64

log = logging.getLogger(__name__)


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return how uvicorn serves the gateway."""
    return uvicorn.Config(
        app,
        log_level=settings.log_level,
        access_log=False,  # the middleware writes one line per request
        timeout_graceful_shutdown=settings.stop_limit_s,
        timeout_keep_alive=KEEP_ALIVE_S,
        http=type("LimitedConnection", (Connection,), {"settings": settings}),
        ws="none",
    )


def raise_file_limit(max_connections: int) -> None:
    """Let this process open as many files as the system allows; raises SettingsError if connections could need more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and max_connections > most - NUM_OTHER_FILES:
        raise SettingsError(
            f"max_connections must be at most {most - NUM_OTHER_FILES}, since this process may open {most} files "
            f"(ulimit -Hn), got {max_connections}"
        )


class Connection(H11Protocol):
    """One connection of a client, with limits. settings: hold the limits; each server has its own subclass."""

    settings: ClassVar[Settings]
    _since_s: float = 0.0  # when the connection was made, or its request began or ended, whichever was last
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    @property
    def _waits_for_client(self) -> bool:
        """True if the client has no request under way, or has not sent all of it."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin to wait for a request, and make room for the connection."""
        super().connection_made(transport)
        # Without a buffer of our own, uvicorn stops sending as soon as the kernel takes no more.
        transport.set_write_buffer_limits(0)
        self._since_s = self.loop.time()
        self._limit_head()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the limits."""
        _cancel(self._head_timer)
        _cancel(self._send_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request; outside of a running request, the next one must be complete in time."""
        request = self.cycle
        super().data_received(data)
        if self.cycle is not request:
            self._since_s = self.loop.time()
            _cancel(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None and self.cycle and self.cycle.response_complete:
            self._limit_head()  # also for the rest of a body that was refused

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._since_s = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Limit how long the client may take to read, now that it lags behind."""
        super().pause_writing()
        self._limit_sending()

    def resume_writing(self) -> None:
        """End that limit."""
        _cancel(self._send_timer)
        super().resume_writing()

    def _limit_head(self) -> None:
        self._head_timer = self.loop.call_later(self.settings.receive_limit_s, self.timeout_keep_alive_handler)

    def _limit_sending(self) -> None:
        self._send_timer = self.loop.call_later(self.settings.send_limit_s, self._check_reader, self._num_unsent())

    def _check_reader(self, num_before: int) -> None:
        """Close the connection unless the client has taken enough since `num_before` bytes waited for it."""
        if num_before - self._num_unsent() >= MIN_TAKEN_BYTES:
            self._limit_sending()
            return
        log.info("a client read nothing for %g s: its connection is closed", self.settings.send_limit_s)
        self.transport.abort()  # `close` would first wait until all is sent

    def _num_unsent(self) -> int:
        """Return the number of bytes that the client has not received yet, in our buffer and in the kernel's."""
        socket = self.transport.get_extra_info("socket")
        (in_kernel,) = struct.unpack("i", fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4)))
        return int(in_kernel) + self.transport.get_write_buffer_size()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its client if there are too many; it may be this one."""
        if len(self.connections) <= self.settings.max_connections:
            return
        waiting = [each for each in self.connections if isinstance(each, Connection) and each._waits_for_client]
        longest = min(waiting, key=lambda each: each._since_s)
        self.connections.discard(longest)  # it no longer counts, although the event loop ends it only later
        longest.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()
