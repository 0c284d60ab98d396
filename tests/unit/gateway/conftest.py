"""A stand-in replica and a target's folder, for tests of the whole application."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.standin_replica import StandInReplica
from tests.unit.gateway.test_tokenizer import write

LIMIT_S = 20


@pytest.fixture(scope="module")
def replica() -> Iterator[StandInReplica]:
    """One stand-in on an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def made() -> StandInReplica:
        return await StandInReplica().__aenter__()

    standin = asyncio.run_coroutine_threadsafe(made(), loop).result(LIMIT_S)
    yield standin
    asyncio.run_coroutine_threadsafe(standin.__aexit__(None, None, None), loop).result(LIMIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LIMIT_S)
    loop.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("target"), chat_template="{{ messages[0].content }}")
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    return folder
