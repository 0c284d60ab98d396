"""What the checks of containers ask: is it there yet, what does it answer, what does a stream say."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable

_REQUEST = {
    "prompt": "def fibonacci(n):", "max_tokens": 600, "seed": 1, "temperature": 0.8, "ignore_eos": True, "stream": True,
}  # fmt: skip


class CheckFailed(Exception):
    """An image does not do what it should."""


def succeeds(call: Callable[[], object]) -> bool:
    """Return whether a call raises none of the errors of an engine or a port that is not there yet."""
    try:
        call()
    except (CheckFailed, OSError, http.client.HTTPException):
        return False
    return True


def get(port: int, path: str, body: object = None, host: str = "127.0.0.1") -> tuple[int, str]:
    """Ask a program; return status and body."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        text = None if body is None else json.dumps(body)
        connection.request("POST" if text else "GET", path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def wait_for(condition: Callable[[], bool], what: str, limit_s: float) -> float:
    """Return after how many seconds the condition was true; raises CheckFailed when it is not in time."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > limit_s:
            raise CheckFailed(f"waited {limit_s:g} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - began_s


def streamed(host: str, port: int, at_tenth: Callable[[], object] = lambda: None) -> str:
    """Stream a text from a gateway; at_tenth: what happens at the tenth chunk."""
    connection = http.client.HTTPConnection(host, port, timeout=120)
    try:
        model = json.loads(get(port, "/v1/models", host=host)[1])["data"][0]["id"]
        body = json.dumps({**_REQUEST, "model": model})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        text = ""
        events = (line.removeprefix(b"data: ") for line in connection.getresponse() if line.startswith(b"data: {"))
        for number, event in enumerate(map(json.loads, events)):
            if number == 10:
                at_tenth()
            if "error" in event:
                raise CheckFailed(f"the gateway's stream: {event['error']}")
            text += "".join(choice.get("text") or "" for choice in event["choices"])
        return text
    finally:
        connection.close()
