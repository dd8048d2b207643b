"""Many generation requests to several servers at once: balanced, watched, retried, each answered exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Literal

import aiohttp

from megarl.errors import RunStopped, StopAsked, UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.engine import GenerationRequest
from megarl.rollout.sglang.wire import Answer, Model, Nonsense, StaleWeights, generate_body, parse_answer

logger = logging.getLogger(__name__)

OnAnswer = Callable[[int, Answer], None]  # (place of the request, its answer)

FAILURES_TO_CONDEMN = 3  # in a row, at one server
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds before a server that failed is asked again
ABORT_TIMEOUT, SECONDS_BETWEEN_ABORTS = 10.0, 2.0
SECONDS_TO_SETTLE = 1.0
NOTHING_YET = Answer([], [], "abort", [])


class Condition(Enum):
    """What a client knows about a server."""

    USABLE = "usable"
    UNKNOWN = "unknown"  # not asked yet, or a connection broke
    STALE = "stale"  # healthy, but without the current weights
    DOWN = "down"  # refuses, or does not answer in time
    CONDEMNED = "condemned"  # healthy, but its answers are errors or nonsense


@dataclass
class Counts:
    """What happened beyond the plain course of requests."""

    retries: int = 0  # responses asked for once more
    nonsense: int = 0  # answers that could not be right
    stale: int = 0  # answers by other weights than the current ones
    aborted: int = 0  # responses cut by the cap on long tails
    server_failures: int = 0  # times that a server stopped answering


@dataclass
class _Server:
    """One server as one round sees it."""

    url: str
    order: int  # decides ties, differently on each rank
    condition: Condition = Condition.UNKNOWN
    outstanding: int = 0  # tokens that its open requests may still need
    open: dict[asyncio.Task[None], str] = field(default_factory=dict)  # request tasks and the names they sent
    failures: int = 0  # in a row
    reason: str = "not asked yet"
    kicked: asyncio.Event = field(default_factory=asyncio.Event)


class Client:
    """Talks to the servers of one run for one rank; `generate` may run in any thread, one call at a time."""

    def __init__(self, config: RolloutConfig, model: Model, *, rank: int = 0) -> None:
        self.config, self.model, self.rank = config, model, rank
        self.urls: list[str] = []  # where requests go: workers, or one router
        self.workers: list[str] = []  # where control calls go
        self.versions: Mapping[str, int] = {}  # labels of the weights that answers may come from
        self.stopped = False  # nobody wants answers any more
        self.switching = False  # weights are being handed over: servers may be silent
        self.counts = Counts()
        self.condemned: dict[str, str] = {}  # servers whose answers were wrong, with the reason

    def take_counts(self) -> Counts:
        """What was counted since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    def generate(self, requests: Sequence[GenerationRequest], on_answer: OnAnswer) -> None:
        """Nothing; `on_answer` was called once for each request, or for fewer: no server with current weights is left.

        It is called in the order in which answers arrive, with finish reason `abort` for what the cap on long tails
        cut. Raises UserError for a request that the servers refuse, RunStopped when no server answers for
        `outage_timeout` or one response fails `max_attempts` times, StopAsked once `stopped` is set.
        """
        if requests:
            asyncio.run(_Round(self, requests, on_answer).run())


class _Round:
    """One `generate` call, inside its event loop."""

    def __init__(self, client: Client, requests: Sequence[GenerationRequest], on_answer: OnAnswer) -> None:
        self._client, self._config, self._requests, self._on_answer = client, client.config, requests, on_answer
        count = len(client.urls)
        self._servers = [_Server(url, (order - client.rank) % count) for order, url in enumerate(client.urls)]
        # Equal prompts side by side, longest first: what takes longest does not begin last.
        self._waiting = deque(sorted(range(len(requests)), key=self._need, reverse=True))
        self._attempts = [0] * len(requests)
        self._carriers: dict[int, asyncio.Task[None]] = {}  # who still owes an answer to the request at a place
        self._unanswered = len(requests)
        cap = client.config.tail_cap if all(request.may_be_cut for request in requests) else None
        self._cut_at = None if cap is None else len(requests) - math.ceil(cap * len(requests))
        self._cutting = False
        self._aborts: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as self._http:
            watchers = [asyncio.create_task(self._watch(server)) for server in self._servers]
            try:
                await self._serve()
            finally:
                tasks = [*watchers, *self._aborts, *(task for server in self._servers for task in server.open)]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self) -> None:
        """Nothing; every request is answered, or nobody is left that could."""
        outage_began: float | None = None
        await self._settle()
        while self._unanswered and self._failure is None:
            if self._client.stopped:
                raise StopAsked("generation was given up")
            self._dispatch()
            conditions = {server.condition for server in self._servers}
            busy = any(server.open for server in self._servers)
            if not busy and not conditions & {Condition.USABLE, Condition.UNKNOWN}:
                if conditions & {Condition.STALE, Condition.CONDEMNED}:
                    return  # the weights have to be handed over again
                outage_began = outage_began or time.monotonic()
                if time.monotonic() - outage_began > self._config.outage_timeout:
                    raise RunStopped(self._outage())
            else:
                outage_began = None
            await self._wait_for_change(1.0)
        if self._failure is not None:
            raise self._failure

    async def _settle(self) -> None:
        """Nothing; all servers are known, or the time is up: whoever is known first must not get all the work."""
        until = time.monotonic() + SECONDS_TO_SETTLE
        while any(server.condition is Condition.UNKNOWN for server in self._servers) and time.monotonic() < until:
            await self._wait_for_change(until - time.monotonic())

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout=seconds)
        except TimeoutError:
            return  # deadlines are looked at now and then even when nothing happens
        self._changed.clear()

    def _outage(self) -> str:
        reasons = "; ".join(f"{server.url}: {server.reason}" for server in self._servers)
        return (
            f"no rollout server answered for rollout.outage_timeout = {self._config.outage_timeout:g} s, with "
            f"{self._unanswered} responses still to come ({reasons})"
        )

    # Dispatch

    def _need(self, place: int) -> int:
        """Tokens that the request may still cost."""
        request = self._requests[place]
        return len(request.prompt.token_ids) + request.max_response_length

    def _dispatch(self) -> None:
        """Nothing; as many waiting requests as the servers may have open are on their way."""
        while self._waiting and not self._cutting:
            able = [
                server
                for server in self._servers
                if server.condition is Condition.USABLE and len(server.open) < self._config.concurrency
            ]
            if not able:
                return
            server = min(able, key=lambda server: (server.outstanding, server.order))
            place = self._waiting.popleft()
            name = uuid.uuid4().hex
            need = self._need(place)
            server.outstanding += need
            task = asyncio.create_task(self._request(place, server, name))
            server.open[task] = name
            self._carriers[place] = task
            task.add_done_callback(partial(self._ended, server, place, need))

    def _ended(self, server: _Server, place: int, need: int, task: asyncio.Task[None]) -> None:
        del server.open[task]
        server.outstanding -= need
        self._changed.set()
        if task.cancelled():
            # One that was only pausing after a failure has given its request back already.
            if self._failure is None and self._carriers.get(place) is task:
                self._again(place)
        elif (failure := task.exception()) is not None:
            self._failure = failure

    def _again(self, place: int) -> None:
        """Nothing; the request waits once more, or is given up where responses are being cut anyway."""
        self._carriers.pop(place, None)
        if self._cutting:
            self._answered(place, NOTHING_YET)
            return
        self._client.counts.retries += 1
        self._waiting.appendleft(place)

    # One request

    async def _request(self, place: int, server: _Server, name: str) -> None:
        """Nothing; the request is answered or waits again, and the server is judged by what it did."""
        request = self._requests[place]
        limit = request.max_response_length - (len(request.begun.response_ids) if request.begun else 0)
        self._attempts[place] += 1
        try:
            body = await self._post(server, generate_body(request, self._client.model, name))
            answer = parse_answer(body, limit, self._client.model, self._client.versions)
        except _Refused as refusal:
            prompt = request.prompt
            raise UserError(
                f"prompt {prompt.index} ({prompt.data_source}): {server.url} refuses it: {refusal}"
            ) from None
        except StaleWeights as error:
            self._client.counts.stale += 1
            server.condition, server.reason = Condition.STALE, str(error)
            self._failed_attempt(place, server)
        except (Nonsense, _ServerFault) as error:
            self._client.counts.nonsense += isinstance(error, Nonsense)
            server.failures += 1
            server.reason = str(error)
            if server.failures >= FAILURES_TO_CONDEMN:
                self._condemn(server)
            self._failed_attempt(place, server)
            await asyncio.sleep(_pause(server.failures))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._lost(server, f"{type(error).__name__}: {error}".rstrip(": "))
            self._failed_attempt(place, server)
        else:
            server.failures = 0
            if answer.finish_reason == "abort" and not self._cutting:
                server.reason = "someone else aborted it"
                self._failed_attempt(place, server)
            else:
                self._answered(place, answer)

    async def _post(self, server: _Server, body: dict[str, Any]) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout)
        async with self._http.post(f"{server.url}/generate", json=body, timeout=timeout) as response:
            if response.status == 400:
                raise _Refused(_message(await response.text()))
            if response.status != 200:
                raise _ServerFault(f"HTTP {response.status}: {_message(await response.text())}")
            try:
                return await response.json(content_type=None)
            except ValueError as error:
                raise Nonsense(f"the answer is no JSON: {error}") from error

    def _failed_attempt(self, place: int, server: _Server) -> None:
        if self._attempts[place] >= self._config.max_attempts:
            raise RunStopped(
                f"a response to prompt {self._requests[place].prompt.index} failed rollout.max_attempts = "
                f"{self._config.max_attempts} times, at last at {server.url}: {server.reason}"
            )
        self._again(place)

    def _answered(self, place: int, answer: Answer) -> None:
        self._carriers.pop(place, None)
        self._unanswered -= 1
        self._client.counts.aborted += answer.finish_reason == "abort"
        self._on_answer(place, answer)
        if self._cut_at is not None and self._unanswered <= self._cut_at and not self._cutting:
            self._cut()

    # The cap on long tails

    def _cut(self) -> None:
        """Nothing; open requests are being aborted, and those that wait count as aborted before their first token."""
        self._cutting = True
        while self._waiting:
            self._answered(self._waiting.popleft(), NOTHING_YET)
        for server in self._servers:
            # A router does not pass aborts on, nor tell which worker has the request.
            urls = self._client.workers if self._config.router else [server.url]
            for request, name in server.open.items():
                for url in urls:
                    task = asyncio.create_task(self._abort(url, name, request))
                    self._aborts.add(task)
                    task.add_done_callback(self._aborts.discard)

    async def _abort(self, url: str, name: str, request: asyncio.Task[None]) -> None:
        """Nothing; the request has ended. An abort that overtakes it on its way to the server has no effect there."""
        while not request.done():
            await self._ask_to_abort(url, name)
            await asyncio.wait([request], timeout=SECONDS_BETWEEN_ABORTS)

    async def _ask_to_abort(self, url: str, name: str) -> None:
        timeout = aiohttp.ClientTimeout(total=ABORT_TIMEOUT)
        try:
            async with self._http.post(f"{url}/abort_request", json={"rid": name}, timeout=timeout) as response:
                if response.status != 200:
                    logger.warning("%s does not abort a request: HTTP %d", url, response.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            logger.warning("%s does not abort a request: %s: %s", url, type(error).__name__, error)

    # The servers' health

    def _lost(self, server: _Server, reason: str) -> None:
        """Nothing; the server gets no more requests until it has answered a health check."""
        server.reason = reason
        if server.condition is Condition.USABLE:
            server.condition = Condition.UNKNOWN
            server.kicked.set()

    def _condemn(self, server: _Server) -> None:
        logger.warning(
            "SGLang server %s is left out until the next hand-over of weights: %s", server.url, server.reason
        )
        server.condition = Condition.CONDEMNED
        self._client.condemned[server.url] = server.reason

    async def _watch(self, server: _Server) -> None:
        """Never returns; keeps the server's condition up to date."""
        failures = 0
        # The server's health check takes a second when it is idle; that it answers at all is enough to begin with.
        found, reason = await self._probe(server, "model_info")
        while True:
            self._judge(server, found, reason)
            failures = failures + 1 if found is Condition.DOWN else 0
            wait = _pause(failures) if failures else self._config.health_interval
            server.kicked.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.kicked.wait(), timeout=wait)
            found, reason = await self._probe(server, "health")

    def _judge(self, server: _Server, found: Condition, reason: str) -> None:
        before = server.condition
        if found is Condition.DOWN and self._client.switching:
            return
        if found is Condition.DOWN:
            server.reason = reason
            if before in (Condition.USABLE, Condition.UNKNOWN):
                self._client.counts.server_failures += 1
                logger.warning("SGLang server %s does not answer: %s", server.url, reason)
            for task in list(server.open):
                task.cancel()
        if before is Condition.CONDEMNED:
            return
        server.condition = found
        if found is not before:
            self._changed.set()

    async def _probe(self, server: _Server, call: Literal["health", "model_info"]) -> tuple[Condition, str]:
        """What the server is, with the reason when it is down."""
        timeout = aiohttp.ClientTimeout(total=self._config.health_timeout)
        try:
            if call == "health" or self._config.router:
                async with self._http.get(f"{server.url}/health", timeout=timeout) as response:
                    if response.status != 200:
                        return Condition.DOWN, f"its health check answers HTTP {response.status}"
            if self._config.router:
                return Condition.USABLE, ""  # a router knows no weights; each answer tells its own
            async with self._http.get(f"{server.url}/model_info", timeout=timeout) as response:
                info = await response.json(content_type=None)
                current = info["weight_version"] in self._client.versions
                return (Condition.USABLE if current else Condition.STALE), ""
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Condition.DOWN, f"{type(error).__name__}: {error}".rstrip(": ")
        except (ValueError, KeyError, TypeError) as error:
            return Condition.DOWN, f"its answer to model_info is none: {error}"


class _Refused(Exception):
    """Status 400: the request itself is wrong."""


class _ServerFault(Exception):
    """Any other status than 200 and 400."""


def _pause(failures: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1))


def _message(text: str) -> str:
    return " ".join(text.split())[:300]
