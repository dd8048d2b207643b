"""Control calls to one SGLang server: weights, pausing, caches, memory. They block, each with a deadline."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from megarl.rollout.sglang.errors import ServerError

Value = TypeVar("Value")
PauseMode = Literal["abort", "in_place", "retract"]


@dataclass(frozen=True)
class GroupMembership:
    """What a server needs to join the process group over which weights are broadcast."""

    name: str
    address: str
    port: int
    rank: int  # of the server's first tensor-parallel rank
    size: int
    backend: Literal["gloo", "nccl"]


class ServerControl:
    """One SGLang server's control endpoints. Every call raises ServerError unless the server reports success."""

    def __init__(self, url: str, *, deadline: float = 300.0, tensor_size: int = 1, api_key: str | None = None) -> None:
        """`deadline`: seconds that a call may wait for its answer; `tensor_size`: tensor-parallel ranks."""
        self.url = url.rstrip("/")
        self.deadline, self.tensor_size = deadline, tensor_size
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Servers are on this machine or in this cluster, never behind the proxy that downloads may need.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __repr__(self) -> str:
        return f"ServerControl({self.url})"

    def health(self, timeout: float = 30.0) -> bool:
        """Whether the server answers its health check, for which it generates a token when idle."""
        try:
            self._call("health", deadline=timeout)
        except ServerError:
            return False
        return True

    def model_info(self) -> dict[str, Any]:
        """model_path, weight_version, architectures and more of what is served."""
        return self._object("model_info")

    def server_info(self) -> dict[str, Any]:
        """The server's resolved arguments: tp_size, device, dtype and more."""
        return self._object("server_info")

    def longest_sequence(self) -> int:
        """Tokens of prompt and response that the server serves; it shortens longer responses without a word.

        Fewer than the model's positions, and fewer still where its cache is small.
        """
        # Of its positions the server keeps one back in each of three places; it reports the last.
        return self._read("server_info", self.server_info(), lambda info: int(info["max_req_input_len"])) + 4

    def tensor_parallel_size(self) -> int:
        """The server's own tensor-parallel ranks."""
        return self._read("server_info", self.server_info(), lambda info: int(info["tp_size"]))

    def device(self) -> str:
        """The kind of device that the server runs on: cpu, cuda."""
        return self._read("server_info", self.server_info(), lambda info: str(info["device"]))

    def weight_version(self) -> str:
        """The version that the server gives its present weights."""
        return self._read("model_info", self.model_info(), lambda info: str(info["weight_version"]))

    def begin_weight_update(self) -> None:
        """Nothing; opens the session that tensors must be sent in. Refused while one is open."""
        self._succeed("begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Nothing; closes the session. Refused while none is open."""
        self._succeed("end_weight_update", {})

    def update_weights_from_tensor(
        self, payloads: Sequence[bytes], *, load_format: str | None, version: str | None, flush_cache: bool
    ) -> None:
        """Nothing; loads what the base64 `payloads` (one per tensor-parallel rank) hold. A wrong shape kills it.

        With a `version` the weights are called so from now on. `flush_cache` drops what the old weights computed; the
        server refuses that while requests run.
        """
        options = {"load_format": load_format, "weight_version": version, "flush_cache": flush_cache}
        # The payloads hold most of the model and need no escaping: joined by hand, they are copied once.
        head = json.dumps(options)[:-1].encode() + b', "serialized_named_tensors": ["'
        self._succeed("update_weights_from_tensor", b"".join([head, b'", "'.join(payloads), b'"]}']))

    def init_weights_update_group(self, membership: GroupMembership) -> None:
        """Nothing; returns when all members of the process group have joined."""
        self._succeed(
            "init_weights_update_group",
            {
                "master_address": membership.address,
                "master_port": membership.port,
                "rank_offset": membership.rank,
                "world_size": membership.size,
                "group_name": membership.name,
                "backend": membership.backend,
            },
        )

    def destroy_weights_update_group(self, name: str, deadline: float | None = None) -> None:
        """Nothing; the server leaves the group."""
        self._succeed("destroy_weights_update_group", {"group_name": name}, deadline)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: str | None,
        flush_cache: bool,
    ) -> None:
        """Nothing; loads tensors that the group's rank 0 broadcasts meanwhile, as one flat run of bytes."""
        self._succeed(
            "update_weights_from_distributed",
            {
                "names": list(names),
                "dtypes": list(dtypes),
                "shapes": [list(shape) for shape in shapes],
                "group_name": group,
                "load_format": "flattened_bucket",
                "weight_version": version,
                "flush_cache": flush_cache,
            },
        )

    def update_weights_from_disk(self, folder: str, *, version: str) -> None:
        """Nothing; loads an HF folder that the server's machine can read. Wrong shapes in it kill the server."""
        self._succeed("update_weights_from_disk", {"model_path": folder, "weight_version": version})

    def pause(self, mode: PauseMode = "retract") -> None:
        """Nothing; requests wait. `retract` drops what they computed: on `resume` it is computed by the new weights.

        `in_place` keeps it (later log-probs are then of neither version), `abort` ends the requests as they are.
        """
        self._call("pause_generation", {"mode": mode})

    def resume(self, deadline: float | None = None) -> None:
        """Nothing; paused requests go on."""
        self._call("continue_generation", {}, deadline=deadline)

    def flush_cache(self, wait: float = 0.0) -> None:
        """Nothing; cached prefixes are gone. Refused when requests still run after `wait` seconds."""
        self._call(f"flush_cache?timeout={wait}", {}, deadline=self.deadline + wait)

    def abort_all(self) -> None:
        """Nothing; every request ends with what it has."""
        self._call("abort_request", {"abort_all": True})

    def release_memory(self, tags: Sequence[str]) -> None:
        """Nothing; gives back GPU memory (`weights`, `kv_cache`, `cuda_graph`). Only while no request runs."""
        self._call("release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Nothing; takes back what `release_memory` gave; without a release before it, it kills the server."""
        self._call("resume_memory_occupation", {"tags": list(tags)})

    def checksums(self) -> list[dict[str, str]]:
        """For each tensor-parallel rank, each of its (fused) parameters' checksum."""
        answer = self._object("weights_checker", {"action": "checksum"})
        if not answer.get("success") or not answer.get("ranks"):
            raise ServerError(self.url, "weights_checker", 200, str(answer.get("message", answer)))
        return self._read("weights_checker", answer, lambda found: [dict(rank["checksums"]) for rank in found["ranks"]])

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of all tokens but the first, each given those before it."""
        answer = self._object(
            "generate",
            {
                "input_ids": list(token_ids),
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        )
        found = self._read(
            "generate",
            answer,
            lambda answer: [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]],
        )
        if len(found) != len(token_ids) - 1:
            raise ServerError(
                self.url, "generate", 200, f"{len(found)} log-probs of a prompt of {len(token_ids)} tokens"
            )
        return found

    def _read(self, call: str, answer: dict[str, Any], value: Callable[[dict[str, Any]], Value]) -> Value:
        """What `value` takes from the answer, which may be anything."""
        try:
            return value(answer)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            shown = _shortened(json.dumps(answer).encode())
            raise ServerError(
                self.url, call, 200, f"the answer lacks or garbles a field ({type(error).__name__}: {error}): {shown}"
            ) from error

    def _succeed(self, call: str, body: Mapping[str, Any] | bytes, deadline: float | None = None) -> None:
        answer = self._object(call, body, deadline)
        if not answer.get("success"):
            raise ServerError(self.url, call, 200, str(answer.get("message", answer)))

    def _object(
        self, call: str, body: Mapping[str, Any] | bytes | None = None, deadline: float | None = None
    ) -> dict[str, Any]:
        text = self._call(call, body, deadline)
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise ServerError(self.url, call, 200, f"the answer is no JSON: {_shortened(text)}") from error
        if not isinstance(answer, dict):
            raise ServerError(self.url, call, 200, f"the answer is no JSON object: {_shortened(text)}")
        return answer

    def _call(self, call: str, body: Mapping[str, Any] | bytes | None = None, deadline: float | None = None) -> bytes:
        """The answer's body: to a GET without a request body, else to a POST."""
        seconds = self.deadline if deadline is None else deadline
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{call}", data=data, headers=self._headers)
        try:
            with self._opener.open(request, timeout=seconds) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            with error:
                answer = _shortened(error.read())
            raise ServerError(self.url, call, error.code, answer) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise ServerError(self.url, call, None, f"no answer within {seconds:g} s") from error
            raise ServerError(self.url, call, None, f"{type(reason).__name__}: {reason}") from error


class Fleet:
    """The servers of one hand-over: each call goes to all at once, and one that fails it leaves, with the reason."""

    def __init__(self, servers: Sequence[ServerControl]) -> None:
        self.servers = list(servers)  # those that no call has failed on
        self.failed: dict[str, str] = {}  # url -> reason

    def each(self, call: Callable[[ServerControl], None]) -> None:
        """Nothing; waits until every server has answered."""
        if not self.servers:
            return
        with ThreadPoolExecutor(max_workers=len(self.servers)) as pool:
            self.gather({server: pool.submit(call, server) for server in self.servers})

    def gather(self, calls: Mapping[ServerControl, Future[None]]) -> None:
        """Nothing; waits for calls that were begun before."""
        for server, call in calls.items():
            try:
                call.result()
            except ServerError as error:
                self.drop(server, str(error))

    def drop(self, server: ServerControl, reason: str) -> None:
        """Nothing; the server takes no further part."""
        self.failed.setdefault(server.url, reason)
        self.servers = [other for other in self.servers if other is not server]


@contextmanager
def weight_update(fleet: Fleet) -> Iterator[None]:
    """A session on every server of the fleet, closed at the end however that comes."""
    fleet.each(ServerControl.begin_weight_update)
    try:
        yield
    finally:
        fleet.each(ServerControl.end_weight_update)


def _shortened(text: bytes, limit: int = 300) -> str:
    line = " ".join(text.decode(errors="replace").split())
    return line if len(line) <= limit else line[:limit] + " ..."
