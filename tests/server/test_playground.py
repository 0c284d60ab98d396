"""The playground in headless Chromium over a real server: what a person sees with mouse, keyboard and phone."""

import asyncio
import os
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import Server
from tests.support.chromium import BINARY, Page, browser_page
from tests.support.clients import ask
from tests.support.gateway import RunningGateway, running_gateway

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(240),
    pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"),
]
PROMPT = "abcabcabcabc"
#: A folder for screenshots, if set.
PICTURES = os.environ.get("PLAYGROUND_PICTURES")


@pytest.fixture(scope="module")
def gateway(server: Server, checkpoints: Path) -> Iterator[RunningGateway]:
    with running_gateway(server.grpc_url, checkpoints / "target") as running:
        yield running


def on_page(gateway: RunningGateway, test: Callable[[Page], Awaitable[Any]], **options: Any) -> None:
    """Run a test on the page, whose console must be empty afterwards."""
    values = {"prompt": PROMPT, "max_tokens": 60} | options.pop("fields", {})

    async def run() -> None:
        async with browser_page() as page:
            await page.open(f"{gateway.url}/?{urllib.parse.urlencode(values)}", **options)
            await test(page)
            assert not page.messages, page.messages
            if PICTURES:
                await page.screenshot(Path(PICTURES) / f"{test.__name__}.png")

    asyncio.run(run())


DONE = "document.body.dataset.state === 'done'"
TEXT = "[...document.querySelectorAll('.text')].map((e) => e.textContent)"


def test_generates_and_shows_the_servers_text(gateway: RunningGateway, server: Server) -> None:
    async def generates(page: Page) -> None:
        await page.until(DONE)
        wanted = ask(server.grpc_url, text_input=PROMPT, max_tokens=60, return_stats=True, seed=0).stats
        assert await page.value(TEXT) == [ask(server.grpc_url, text_input=PROMPT, max_tokens=60, seed=0).text]
        figures = await page.value("[...document.querySelectorAll('.figures dd')].map((e) => e.textContent)")
        assert figures[0] == str(len(ask(server.grpc_url, text_input=PROMPT, max_tokens=60, seed=0).ids))
        assert (
            figures[3] == str(wanted["num_steps"]) == str(await page.value("document.querySelectorAll('.step').length"))
        )
        bars = await page.value("[...document.querySelectorAll('.histogram .bar')].length")
        assert bars == 1 + await page.value(
            "Math.max(...[...document.querySelectorAll('.step')].map((e) => e.children.length)) - 1"
        )

    on_page(gateway, generates, fields={"run": 1})


def test_pings_between_the_chunks_are_skipped(server: Server, checkpoints: Path) -> None:
    async def generates(page: Page) -> None:
        await page.until(DONE)
        assert await page.value(TEXT) == [ask(server.grpc_url, text_input=PROMPT, max_tokens=60, seed=0).text]

    with running_gateway(server.grpc_url, checkpoints / "target", ping_interval_s=0.0001) as pinging:
        on_page(pinging, generates, fields={"run": 1})


def test_two_methods_race_and_the_text_is_the_same(gateway: RunningGateway) -> None:
    async def races(page: Page) -> None:
        await page.until(DONE)
        first, second = await page.value(TEXT)
        assert first == second and len(first) > 20
        assert "The same text" in await page.value("document.getElementById('verdict').textContent")
        assert await page.value("document.querySelectorAll('.badge').length") == 1

    on_page(gateway, races, fields={"run": 1, "method": "suffix", "rival": "none"})


def test_hovering_a_draft_tells_source_depth_and_log_probability(gateway: RunningGateway, server: Server) -> None:
    expected = ask(server.grpc_url, text_input=PROMPT, max_tokens=60, seed=0).text

    async def hovers(page: Page) -> None:
        await page.until(DONE)
        await page.hover(".drafted")
        await page.until("!document.getElementById('tip').hidden")
        tip = await page.value("document.getElementById('tip').textContent")
        assert "drafted by predicted, depth 1" in tip and "log-probability -" in tip and "most probable:" in tip

    on_page(gateway, hovers, fields={"run": 1, "method": "predicted", "prediction": expected}, dark=True)


def test_keyboard_alone_generates_and_walks_the_steps(gateway: RunningGateway) -> None:
    async def walks(page: Page) -> None:
        await page.value("document.getElementById('prompt').focus()")
        await page.press("Enter", modifiers=2)
        await page.until(DONE)
        await page.value("document.querySelector('.step[tabindex=\"0\"]').focus()")
        await page.press("Home")
        seen = [await page.value("document.querySelector('figcaption').textContent")]
        await page.press("ArrowRight")
        seen.append(await page.value("document.querySelector('figcaption').textContent"))
        assert seen[0].startswith("Step 1 ") and seen[1].startswith("Step 2 ")
        assert await page.value("document.activeElement.getAttribute('aria-pressed')") == "true"
        await page.press("End")
        drawn = await page.value("document.querySelectorAll('.tree .node').length")
        drafted = await page.value("document.querySelector('.tree figcaption').textContent")
        assert f": {drawn - 1} tokens drafted" in drafted

    on_page(gateway, walks)


def test_fits_a_phone(gateway: RunningGateway) -> None:
    async def fits(page: Page) -> None:
        await page.until(DONE)
        assert await page.value("document.documentElement.scrollWidth <= innerWidth")
        tops = await page.value("[...document.querySelectorAll('.lane')].map((e) => e.getBoundingClientRect().top)")
        assert tops[0] < tops[1]  # one below the other

    on_page(gateway, fits, fields={"run": 1, "rival": "none"}, width=380, height=800)


def test_a_refusal_is_shown_where_the_text_would_be(gateway: RunningGateway) -> None:
    async def refused(page: Page) -> None:
        await page.until(DONE)
        assert "temperature must be" in await page.value("document.querySelector('.error').textContent")
        page.messages.clear()  # the browser itself notes the status 400

    on_page(gateway, refused, fields={"run": 1, "temperature": "-1"})


def test_nothing_comes_from_outside(gateway: RunningGateway) -> None:
    async def stays(page: Page) -> None:
        await page.until(DONE)
        loaded = await page.value("performance.getEntriesByType('resource').map((e) => e.name)")
        assert len(loaded) >= 6 and all(name.startswith(gateway.url) for name in loaded)

    on_page(gateway, stays, fields={"run": 1})
