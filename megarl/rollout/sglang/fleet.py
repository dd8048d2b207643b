"""The servers of a run as one rank knows them: those it started, those that others did, those that ran before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megarl.errors import RunStopped, StopAsked, UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.job import gather, rank_and_size
from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.errors import ServerError
from megarl.rollout.sglang.launch import plan_launches
from megarl.rollout.sglang.places import ServerPlace
from megarl.rollout.sglang.server import OwnedServer

logger = logging.getLogger(__name__)

SECONDS_OF_SILENCE = 5.0  # before a wait is told
MEMORY = ("kv_cache", "weights")


class RunServers:
    """Starts this rank's servers and tells all ranks which servers can be used. Methods marked so are collective."""

    def __init__(self, config: RolloutConfig, model_folder: str, *, seed: int, folder: Path) -> None:
        """Starts servers and returns at once. Raises UserError when they cannot be started."""
        self._config = config
        self.owned: list[OwnedServer] = []
        if not config.urls:
            plans = plan_launches(config, model_folder, seed=seed, folder=folder)
            self.owned = [OwnedServer(plan, ranks, config) for plan, ranks in plans]
        self.longest_sequence = 0  # prompt and response, that every server of the run serves; known by `usable`
        self._longest: dict[ServerPlace, int] = {}
        self._released: set[ServerPlace] = set()
        self._started = False
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Nothing; nobody waits for servers any more: `usable` raises StopAsked where it would. Any thread."""
        self._given_up.set()

    def usable(self) -> list[ServerPlace]:
        """The healthy servers of the run, in the same order on every rank; collective.

        Waits for all at the first call, later for one. Raises UserError when one does not start, RunStopped when none
        is healthy within rollout.outage_timeout, StopAsked when the wait is given up on any rank.
        """
        if not self._started:
            self._wait_for_first_start()
        began = time.monotonic()
        deadline = began + self._config.outage_timeout
        told = False
        while True:
            found = [each for share in gather(self._own_usable()) for each in share]
            if found:
                places = [place for place, _ in found]
                self._check_number(places)
                self._started = True
                self.longest_sequence = min(longest for _, longest in found)
                return places
            late = gather((time.monotonic() > deadline, self._given_up.is_set()))
            if any(given_up for _, given_up in late):
                raise StopAsked("a wait for servers was given up")
            if any(is_late for is_late, _ in late):
                raise RunStopped(
                    f"no rollout server was healthy within rollout.outage_timeout = {self._config.outage_timeout:g} s "
                    f"({self._names()})"
                )
            if not told and time.monotonic() - began > SECONDS_OF_SILENCE:
                logger.warning("waiting for a rollout server that answers (%s)", self._names())
                told = True
            time.sleep(0.5)

    def restart(self, condemned: dict[str, str]) -> None:
        """Nothing; servers of this rank among the condemned (URL -> reason) are being restarted."""
        for server in self.owned:
            if server.place.url in condemned:
                server.condemn(condemned[server.place.url])

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """While inside, a server of this rank that does not answer is left alone."""
        with ExitStack() as stack:
            for server in self.owned:
                stack.enter_context(server.unwatched())
            yield

    def release_memory(self) -> None:
        """Nothing; servers of this rank that share the training devices hold neither weights nor a cache."""
        for server in self.owned:
            place = server.place
            if place.ranks and server.ready and place not in self._released:
                server.ignore_health(True)
                try:
                    control = ServerControl(place.url)
                    control.flush_cache(wait=30.0)
                    control.release_memory(MEMORY)
                    self._released.add(place)
                except ServerError as error:
                    server.condemn(f"does not release its memory ({error})")

    def resume_memory(self, tag: str) -> None:
        """Nothing; servers of this rank that gave memory back have it again: `weights` to load, then `kv_cache`."""
        for server in self.owned:
            place = server.place
            # A server restarted meanwhile has released nothing, and would die of resuming.
            if place in self._released and server.ready:
                try:
                    ServerControl(place.url).resume_memory([tag])
                except ServerError as error:
                    server.condemn(f"does not resume its memory ({error})")
        if tag == MEMORY[0]:
            self._released.clear()
            for server in self.owned:
                server.ignore_health(False)

    def take_restarts(self) -> int:
        """Restarts of this rank's servers since the last call."""
        return sum(server.take_restarts() for server in self.owned)

    def close(self) -> None:
        """Nothing; no server of this rank is left."""
        if self.owned:
            with ThreadPoolExecutor(max_workers=len(self.owned)) as pool:
                list(pool.map(OwnedServer.close, self.owned))
        self.owned = []

    def _names(self) -> str:
        return ", ".join(self._config.urls) or "servers of this run, see their logs"

    def _wait_for_first_start(self) -> None:
        failure: UserError | None = None
        try:
            for server in self.owned:
                server.wait_until_ready(self._given_up)
        except UserError as error:
            failure = error
        for each in gather(failure):
            if each is not None:
                raise each

    def _own_usable(self) -> list[tuple[ServerPlace, int]]:
        """(server, tokens of the longest sequence that it serves) of those that this rank speaks for."""
        if not self._config.urls:
            places = [server.place for server in self.owned if server.ready]
        elif rank_and_size()[0] == 0:
            with ThreadPoolExecutor(max_workers=len(self._config.urls)) as pool:
                places = [place for place in pool.map(self._external, self._config.urls) if place is not None]
        else:
            places = []
        known = [(place, self._longest_sequence(place)) for place in places]
        return [(place, longest) for place, longest in known if longest is not None]

    def _longest_sequence(self, place: ServerPlace) -> int | None:
        """None when the server does not answer, after all."""
        if place not in self._longest:
            try:
                self._longest[place] = ServerControl(place.url, deadline=self._config.health_timeout).longest_sequence()
            except ServerError:
                return None
        return self._longest[place]

    def _external(self, url: str) -> ServerPlace | None:
        """The server at `url`, or None when it does not answer."""
        control = ServerControl(url, deadline=self._config.health_timeout)
        if not control.health(timeout=self._config.health_timeout):
            return None
        try:
            return ServerPlace(url=url, tensor_size=control.tensor_parallel_size())
        except ServerError as error:
            logger.warning("%s", error)
            return None

    def _check_number(self, places: Sequence[ServerPlace]) -> None:
        """Nothing, or a UserError: at the start every server that the config names has to be there."""
        if not self._started and self._config.urls and len(places) < len(self._config.urls):
            missing = sorted(set(self._config.urls) - {place.url for place in places})
            raise UserError(
                f"rollout.urls: {', '.join(missing)} does not answer its health check as an SGLang server does"
            )


def version_at(place: ServerPlace) -> str | None:
    """The weight version that the server reports, or None when it does not answer."""
    try:
        return ServerControl(place.url, deadline=10.0).weight_version()
    except ServerError:
        return None
