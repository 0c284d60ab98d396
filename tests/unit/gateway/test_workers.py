"""The threads of slow work: few, and none of those that asyncio looks up names with."""

import asyncio
import threading

import pytest

from gateway.workers import NUM_THREADS, off_loop

pytestmark = pytest.mark.unit
LIMIT_S = 20


def test_names_are_looked_up_while_all_threads_are_busy() -> None:
    may_end, begun = threading.Event(), []

    def work() -> bool:
        begun.append(threading.current_thread())
        return may_end.wait(LIMIT_S)

    async def test() -> None:
        busy = [asyncio.create_task(off_loop(work)) for _ in range(40)]  # as many as asyncio's own pool has at most
        try:
            loop = asyncio.get_running_loop()
            assert await asyncio.wait_for(loop.getaddrinfo("127.0.0.1", 1), LIMIT_S / 2)
            async with asyncio.timeout(LIMIT_S / 2):
                while len(begun) < NUM_THREADS:  # a loaded machine starts threads late
                    await asyncio.sleep(0.01)
            assert len(begun) == NUM_THREADS
        finally:
            may_end.set()
        assert all(await asyncio.gather(*busy))
        assert len(set(begun)) == NUM_THREADS

    asyncio.run(test())
