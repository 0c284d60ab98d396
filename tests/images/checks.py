"""What the container checks have in common: waiting, requests, and streams that must survive a killed server."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Mapping

#: Long enough, and with drafts slow enough, for the server that runs it to be found and killed meanwhile.
_REQUEST = {
    "prompt": "def fibonacci(n):", "max_tokens": 1000, "seed": 1, "temperature": 0.8, "ignore_eos": True,
    "speculation": "lookahead", "stream": True,
}  # fmt: skip
_FAILOVERS = re.compile(r"^spec_gateway_failovers_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_RUNS = re.compile(r"^spec_num_requests_running\{[^}]*\} [1-9]", re.MULTILINE)


class CheckFailed(Exception):
    """A container does not do what it should."""


def succeeds(call: Callable[[], object]) -> bool:
    """Return whether a call succeeds; False for the errors of an engine or a port that is not there yet."""
    try:
        call()
    except (CheckFailed, OSError, http.client.HTTPException):
        return False
    return True


def get(port: int, path: str, body: object = None, host: str = "127.0.0.1") -> tuple[int, str]:
    """Send a request to a port; return status and body. body: sent as JSON by POST; None = GET."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        text = None if body is None else json.dumps(body)
        connection.request("POST" if text else "GET", path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def wait_for(condition: Callable[[], bool], what: str, limit_s: float) -> float:
    """Return how many seconds it took for the condition to hold; raises CheckFailed after `limit_s`."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > limit_s:
            raise CheckFailed(f"waited {limit_s:g} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - began_s


def streamed(host: str, port: int, at_tenth: Callable[[], object] = lambda: None) -> str:
    """Stream a text from a gateway and return it; raises CheckFailed unless it is complete.

    at_tenth: called at the tenth chunk.
    """
    connection = http.client.HTTPConnection(host, port, timeout=120)
    try:
        model = json.loads(get(port, "/v1/models", host=host)[1])["data"][0]["id"]
        body = json.dumps({**_REQUEST, "model": model})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response, text, num_chunks = connection.getresponse(), "", 0
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                text += "".join(choice.get("text") or "" for choice in event.get("choices", ()))
                num_chunks += 1
                if num_chunks == 10:
                    at_tenth()
            elif line.startswith(b"data: [DONE]") and num_chunks > 10:
                return text
        raise CheckFailed(f"the gateway's stream ended with status {response.status} after {text!r}")
    finally:
        connection.close()


def num_usable(host: str, port: int) -> int:
    """Return how many servers a gateway has; 0 before it answers."""
    try:
        return int(json.loads(get(port, "/ready", host=host)[1]).get("num_usable", 0))
    except (OSError, http.client.HTTPException):
        return 0


def check_same(undisturbed: str, text: str, server: str) -> None:
    """Raise CheckFailed if the text of a stream, run by `server`, differs from that of an undisturbed one."""
    if text != undisturbed:
        raise CheckFailed(f"the text of a stream on {server} is {text!r}, undisturbed {undisturbed!r}")


def check_kill(
    host: str, port: int, servers: Mapping[str, str], kill: Callable[[str], object], undisturbed: str
) -> str:
    """Kill the server that runs a stream of the gateway at host and port; return its name.

    servers: addresses by name. kill: called with the name. undisturbed: the text that the stream must have all the
    same. Raises CheckFailed if the text differs or the gateway has not moved the stream.
    """
    killed: list[str] = []

    def kill_running() -> None:
        killed.append(_running_on(servers))
        kill(killed[0])

    num_before = _num_failovers(host)
    check_same(undisturbed, streamed(host, port, kill_running), "a server that was killed")
    if _num_failovers(host) <= num_before:
        raise CheckFailed("the gateway has moved no stream")
    return killed[0]


def _running_on(addresses: Mapping[str, str]) -> str:
    """Wait until a server runs a request; return its name. addresses: of the servers, by name."""
    found: list[str] = []

    def is_found() -> bool:
        found[:] = [name for name, host in addresses.items() if _RUNS.search(get(8002, "/metrics", host=host)[1])]
        return len(found) == 1

    wait_for(is_found, f"one of {', '.join(addresses)} to run the stream", 5)
    return found[0]


def _num_failovers(address: str) -> float:
    """Return how many streams a gateway has moved."""
    return sum(float(count) for count in _FAILOVERS.findall(get(9001, "/metrics", host=address)[1]))
