"""A server that this rank starts, watches, and starts again when it dies or hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.errors import StopAsked, UserError
from megarl.rollout.config import RolloutConfig
from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.errors import ServerError
from megarl.rollout.sglang.launch import LaunchPlan, choose_port, random_name
from megarl.rollout.sglang.places import ServerPlace
from megarl.rollout.sglang.process import GuardedProcess

logger = logging.getLogger(__name__)

PORTS_TO_TRY = 5
LONGEST_PAUSE = 60.0  # seconds between attempts to restart a server


class StartFailed(Exception):
    """A server did not become healthy: one line with the reason and the log file."""


class OwnedServer:
    """One server process and the thread that keeps it alive; the watching costs one health check an interval."""

    def __init__(self, plan: LaunchPlan, ranks: tuple[int, ...], config: RolloutConfig) -> None:
        """Starts the server and returns at once; `wait_until_ready` waits."""
        self._plan, self._ranks, self._config = plan, ranks, config
        self._port = choose_port(plan.host, config.port)
        self._process: GuardedProcess | None = None
        self._incarnation = 0
        self._restarts = 0
        self._failure: str | None = None  # why the very first start failed
        self._condemned: str | None = None
        self._ready, self._closing, self._woken = threading.Event(), threading.Event(), threading.Event()
        self._health_matters = threading.Event()
        self._health_matters.set()
        self._thread = threading.Thread(target=self._keep_alive, name="sglang-watch", daemon=True)
        self._thread.start()

    @property
    def place(self) -> ServerPlace:
        """Where it is now."""
        return ServerPlace(
            url=f"http://{self._plan.host}:{self._port}",
            ranks=self._ranks,
            tensor_size=self._plan.tensor_size,
            incarnation=self._incarnation,
        )

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def pid(self) -> int | None:
        """Process id of the server's main process, which leads its process group."""
        return self._process.pid if self._process is not None else None

    def wait_until_ready(self, given_up: threading.Event | None = None) -> None:
        """Nothing; the server is healthy. Raises UserError when its first start failed, StopAsked once `given_up`."""
        while not self._ready.wait(timeout=0.1):
            if given_up is not None and given_up.is_set():
                raise StopAsked("a start of servers was given up")
            works = self._thread.is_alive()  # looked at first: it says why it failed before it ends
            if self._failure is not None:
                raise UserError(self._failure)
            if self._closing.is_set() or not works:
                raise RuntimeError("waiting for a server that nobody starts any more")

    def condemn(self, reason: str) -> None:
        """Nothing; the server is restarted, because of something that a health check cannot see."""
        if self._ready.is_set():
            self._condemned = reason
            self._ready.clear()
            self._woken.set()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """While inside, a server that does not answer is left alone (one that ends is still restarted)."""
        self._health_matters.clear()
        try:
            yield
        finally:
            self._health_matters.set()

    def ignore_health(self, ignore: bool) -> None:
        """Nothing; as `unwatched`, for a time that no block encloses."""
        if ignore:
            self._health_matters.clear()
        else:
            self._health_matters.set()

    def take_restarts(self) -> int:
        """Restarts since the last call."""
        count, self._restarts = self._restarts, 0
        return count

    def close(self) -> None:
        """Nothing; the server and all its processes are gone."""
        self._closing.set()
        self._woken.set()
        if self._process is not None:
            self._process.stop()  # which ends a health check that it does not answer
        self._thread.join()
        if self._process is not None:
            self._process.stop()  # one that was being started

    def _keep_alive(self) -> None:
        pause = 1.0
        while not self._closing.is_set():
            try:
                self._start()
            except (StartFailed, UserError, OSError) as failure:
                if self._incarnation == 0:
                    self._failure = str(failure)
                    return
                logger.warning("%s; next attempt in %.0f s", failure, pause)
                self._closing.wait(timeout=pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            pause = 1.0
            self._incarnation += 1
            self._condemned = None
            self._ready.set()
            reason = self._until_it_fails()
            self._ready.clear()
            if reason is not None and not self._closing.is_set():
                logger.warning("SGLang server %s %s: restarting it (log: %s)", self.place.url, reason, self._plan.log)
                self._restarts += 1
                assert self._process is not None
                self._process.kill()

    def _start(self) -> None:
        """Nothing; the server runs and is healthy. A port that is taken meanwhile is replaced by another."""
        for attempt in range(PORTS_TO_TRY):
            name = random_name()
            try:
                process = GuardedProcess(self._plan.command(self._port, name), self._plan.environment(), self._plan.log)
            except OSError as error:
                raise StartFailed(f"an SGLang server cannot be started: {error}") from error
            self._process = process
            problem = self._wait_for_health(process, name)
            if problem is None or self._closing.is_set():
                return
            process.kill()
            if not says_port_taken(process.output()) or attempt == PORTS_TO_TRY - 1:
                raise StartFailed(problem)
            taken, self._port = self._port, choose_port(self._plan.host, self._port + 1 if self._config.port else 0)
            logger.warning("port %d was taken meanwhile; the SGLang server tries %d", taken, self._port)

    def _wait_for_health(self, process: GuardedProcess, name: str) -> str | None:
        """None once the server answers, else what is wrong in one line."""
        control = ServerControl(self.place.url, deadline=5.0)
        deadline = time.monotonic() + self._config.start_timeout
        while not self._closing.is_set():
            if (code := process.exit_code()) is not None:
                return (
                    f"an SGLang server ended with exit code {code} before it was healthy; "
                    f"the last line of {process.log}: {process.last_words()}"
                )
            # Something else may answer at this port: only the name tells that it is this server.
            if _is_served(control, name) and control.health(timeout=5.0):
                return None
            if time.monotonic() > deadline:
                return (
                    f"an SGLang server was not healthy within rollout.start_timeout = "
                    f"{self._config.start_timeout:g} s; the last line of {process.log}: {process.last_words()}"
                )
            self._closing.wait(timeout=0.25)
        return None

    def _until_it_fails(self) -> str | None:
        """Why the server has to be restarted; None when it is to be closed."""
        control = ServerControl(self.place.url)
        assert self._process is not None
        next_check = time.monotonic() + self._config.health_interval
        while not self._closing.is_set():
            if (code := self._process.exit_code()) is not None:
                return f"ended with exit code {code}"
            if self._condemned is not None:
                return self._condemned
            if time.monotonic() >= next_check:
                healthy = control.health(timeout=self._config.health_timeout)
                # The check may have begun before the time in which health says nothing.
                if not healthy and self._health_matters.is_set() and self._process.exit_code() is None:
                    return f"does not answer health checks (rollout.health_timeout = {self._config.health_timeout:g} s)"
                next_check = time.monotonic() + self._config.health_interval
            self._woken.wait(timeout=min(0.5, self._config.health_interval))
            self._woken.clear()
        return None


def _is_served(control: ServerControl, name: str) -> bool:
    try:
        return control.model_info().get("served_model_name") == name
    except ServerError:
        return False


def says_port_taken(output: str) -> bool:
    """Whether a server's output tells that it ended because its port was taken."""
    return any(
        words in output.lower() for words in ("address already in use", "port is already in use", "is not available in")
    )
