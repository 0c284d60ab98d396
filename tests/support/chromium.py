"""Headless Chromium through its DevTools protocol, as far as the playground's test needs it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMIT_S = 300.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-port=0", "--no-first-run", "--disable-extensions",
)  # fmt: skip


class Page:
    """One tab. messages: what the page wrote to its console, and its uncaught errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.messages: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], LIMIT_S)
        assert "error" not in answer, answer
        return answer["result"]

    async def value(self, expression: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        end_s = asyncio.get_running_loop().time() + LIMIT_S
        while not await self.value(expression):
            assert asyncio.get_running_loop().time() < end_s, f"waited for {expression}; console: {self.messages}"
            await asyncio.sleep(0.05)

    async def open(self, url: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size; wait until its script has started."""
        is_phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call("Page.navigate", url=url)
        await self.until("document.body?.dataset.state !== undefined")

    async def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key; modifiers: 2 = Ctrl."""
        codes = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "End": 35, "Home": 36}
        for kind in ("rawKeyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                modifiers=modifiers,
                windowsVirtualKeyCode=codes[key],
            )

    async def hover(self, selector: str) -> None:
        """Move the mouse over the first element that a selector finds."""
        box = await self.value(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}}); "
            "const b = e.getClientRects()[0]; return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    async def screenshot(self, file: Path) -> None:
        """Save a picture of the whole page."""
        picture = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(picture["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            elif found["method"] == "Runtime.exceptionThrown":
                self.messages.append(str(found["params"]["exceptionDetails"]))
            elif found["method"] == "Log.entryAdded":
                self.messages.append(found["params"]["entry"]["text"])


@contextlib.asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """Start Chromium and yield a page; end it with the block."""
    assert BINARY
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BINARY, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    url = next(tab["webSocketDebuggerUrl"] for tab in await answer.json() if tab["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            process.terminate()
            process.wait(30)


async def _port(file: Path) -> int:
    end_s = asyncio.get_running_loop().time() + LIMIT_S
    while not (file.exists() and (text := file.read_text()).count("\n")):
        assert asyncio.get_running_loop().time() < end_s, "Chromium did not start"
        await asyncio.sleep(0.05)
    return int(text.splitlines()[0])
