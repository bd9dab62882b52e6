"""Calls of a server: so many at once, so many that wait, and none for ever."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from costmodels.errors import InputError
from planner.web.workers import Workers

pytestmark = pytest.mark.slow


def test_so_many_questions_run_at_once_and_none_for_ever() -> None:
    async def ask() -> None:
        workers = Workers(count=1, waiting=1, limit_s=1)
        try:
            calls = [asyncio.create_task(workers.made(partial(time.sleep, 600))) for _ in range(3)]
            with pytest.raises(InputError, match="busy: 2 questions"):
                await calls[2]
            with pytest.raises(InputError, match="takes more than 1 s"):
                await calls[0]
            calls[1].cancel()
        finally:
            workers.close()
        again = Workers(count=1, limit_s=600)
        try:
            assert await again.made(partial(pow, 2, 5)) == 32
            (helper,) = again._all
            helper.process.kill()
            with pytest.raises(InputError, match="ended without an answer"):
                await again.made(partial(pow, 2, 5))
            assert await again.made(partial(pow, 2, 6)) == 64
        finally:
            again.close()

    asyncio.run(ask())
