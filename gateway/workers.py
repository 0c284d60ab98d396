"""The threads for work that would hold up the event loop: parsing, tokenizing, templates, long responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

#: They share the processors with the event loop, and each may hold a parsed body many times as large as its text.
NUM_THREADS = 4
#: Not asyncio's default pool, which also resolves host names: if requests filled it, no replica could be found.
_POOL = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="gateway-work")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def off_loop(
    function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
) -> Result:
    """Run a function on one of the threads, as soon as one is free, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_POOL, lambda: function(*arguments, **named))
