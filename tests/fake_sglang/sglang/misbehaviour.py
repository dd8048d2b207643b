"""How the stand-in's next generate calls go wrong on purpose, and calls that wait until a test lets them go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web


class Misbehaviour:
    """What is to go wrong next, one word a generate call."""

    def __init__(self) -> None:
        self.coming: list[str] = []
        self._changed = asyncio.Event()

    def become(self, kinds: Sequence[str]) -> None:
        """Nothing; the next generate calls go wrong like this and no other way, and a call that is held goes on."""
        self.coming = list(kinds)
        self._changed.set()
        self._changed = asyncio.Event()

    async def before(self, request: web.Request) -> tuple[str, web.Response | None]:
        """(the word for this call, the answer that it gets in place of a response if any)."""
        kind = self.coming.pop(0) if self.coming else ""
        if kind == "reset":
            assert request.transport is not None
            request.transport.abort()
        if kind == "error":
            return kind, web.Response(status=500, text="Internal Server Error")
        if kind == "no json":
            return kind, web.Response(text="<html>")
        if kind == "hang":
            await asyncio.sleep(3600)
        if kind == "hold":
            await self._changed.wait()
        return kind, None
