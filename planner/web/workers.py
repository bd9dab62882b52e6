"""Calls of a server, with limits on concurrent calls, waiting calls and seconds.

Each call runs in a helper process (`planner.processes.Helper`), which can be ended during the call.
"""

from __future__ import annotations

import asyncio
import pickle
from functools import partial
from typing import Any

from costmodels.errors import InputError
from planner.processes import Helper


class Workers:
    """Processes that make calls for a server."""

    def __init__(self, count: int = 2, waiting: int = 16, limit_s: float = 60.0) -> None:
        """`count` calls run at once, `waiting` more may wait, and each may take `limit_s` seconds."""
        self.limit_s, self.most = limit_s, count + waiting
        self._slots = asyncio.Semaphore(count)
        self._asked = 0
        self._idle: list[Helper] = []
        self._all: set[Helper] = set()

    async def made(self, call: partial[Any]) -> Any:
        """The result of a call; raises `InputError` where too many wait, or the call takes too long."""
        if self._asked >= self.most:
            raise InputError(f"busy: {self.most} questions are being answered; ask again in a moment")
        self._asked += 1
        try:
            async with self._slots:
                return await self._made(call)
        finally:
            self._asked -= 1

    async def _made(self, call: partial[Any]) -> Any:
        packed = pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)
        helper = self._idle.pop() if self._idle else Helper()
        self._all.add(helper)
        try:
            done, result = await asyncio.wait_for(asyncio.to_thread(helper.made, packed), self.limit_s)
        except asyncio.TimeoutError:
            self._end(helper)
            raise InputError(
                f"the answer takes more than {self.limit_s:g} s; ask for fewer devices or sizes, or at the "
                "command line"
            ) from None
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            self._end(helper)
            raise InputError("the planner ended without an answer, as where memory runs out") from None
        except BaseException:
            self._end(helper)
            raise
        self._idle.append(helper)
        if not done:
            raise InputError("the planner failed on this question")
        return result

    def _end(self, helper: Helper) -> None:
        self._all.discard(helper)
        helper.end()

    def close(self) -> None:
        """End all processes at once."""
        for helper in list(self._all):
            self._end(helper)
        self._idle.clear()
