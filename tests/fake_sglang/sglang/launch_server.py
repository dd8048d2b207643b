"""`python -m sglang.launch_server` for fast tests: what the real server answers and dies of, on a small model.

With `tests/fake_sglang` on PYTHONPATH it is started by the same command line as the real one, and keeps its rules: the
weight-update session, silently skipped names, error bodies, aborts, pauses, what kills it. The same contract tests
(`tests/server_contract.py`) run against both. Log-probs are exact; there is no key-value cache, so every pause acts
like `retract`. `POST /misbehave` and two flags of its own make it fail on purpose.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import pickle
import subprocess
import sys
import time
import uuid
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang.misbehaviour import Misbehaviour
from sglang.requests import Refusal, Request, refusal

MAX_RUNNING = 64
SAMPLING_FIELDS = {
    *("max_new_tokens", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "min_new_tokens", "n", "ignore_eos", "sampling_seed"),
}


class Server:
    """The model, its requests and its weight-update session."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer = AutoTokenizer.from_pretrained(options.model_path)
        self.model = AutoModelForCausalLM.from_pretrained(options.model_path, dtype=torch.float32).eval()
        self.context = self.model.config.max_position_embeddings
        self.generator = torch.Generator().manual_seed(options.random_seed)
        self.version = options.weight_version
        self.running: list[Request] = []
        self.queue: list[Request] = []
        self.wake = asyncio.Event()
        self.paused = self.session_open = False
        self.released: list[str] = []
        self.groups: dict[str, Any] = {}
        self.misbehaviour = Misbehaviour()
        self.began = time.monotonic()
        self.served = 0  # responses, so that tests see who did the work

    # Generation

    async def loop(self) -> None:
        while True:
            if self.paused or not (self.running or self.queue):
                self.wake.clear()
                await self.wake.wait()
            while self.queue and len(self.running) < MAX_RUNNING:
                self.running.append(self.queue.pop(0))
            if self.running and not self.paused:
                self.step()
            await asyncio.sleep(0)

    @torch.inference_mode()
    def step(self) -> None:
        rows = [request.input_ids + request.output_ids for request in self.running]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].float()
        for request, row in zip(list(self.running), logits, strict=True):
            self.extend(request, row)
        self.running = [request for request in self.running if request.finish is None]

    def extend(self, request: Request, logits: torch.Tensor) -> None:
        temperature = request.params.get("temperature", 1.0)
        logprobs = (logits / (temperature or 1.0)).log_softmax(dim=-1)
        token = int(logits.argmax() if temperature == 0 else logprobs.exp().multinomial(1, generator=self.generator))
        request.output_ids.append(token)
        request.logprobs.append(float(logprobs[token]))
        request.versions.append(self.version)
        if token in request.end_ids:
            request.end({"type": "stop", "matched": token})
        elif len(request.output_ids) == request.params["max_new_tokens"]:
            request.end({"type": "length", "length": len(request.output_ids)})

    def begin(self, body: dict[str, Any]) -> list[Request]:
        """The requests of a generate call. A token id outside the vocabulary kills the process."""
        ids = body.get("input_ids")
        if ids is None:
            raise refusal("Either text, input_ids or input_embeds should be provided.")
        if not isinstance(ids, list):
            raise Refusal(json.dumps({"object": "error", "message": "input_ids must be list", "code": 400}))
        if not ids:
            raise refusal("input_ids cannot be empty.")
        prompts = ids if isinstance(ids[0], list) else [ids]
        params = {"max_new_tokens": 128, "n": 1, **(body.get("sampling_params") or {})}
        if unknown := set(params) - SAMPLING_FIELDS:
            raise Refusal(json.dumps({"error": f"unknown field `{sorted(unknown)[0]}`, expected one of ..."}))
        if params.get("temperature", 1.0) < 0:
            raise refusal(f"temperature must be a non-negative finite number, got {params['temperature']}.")
        single = len(prompts) == 1 and params["n"] == 1
        requests = []
        for prompt in prompts:
            if len(prompt) + params["max_new_tokens"] > self.context:
                raise refusal(
                    f"Requested token count exceeds the model's maximum context length of {self.context} tokens."
                )
            if not all(0 <= token < self.model.config.vocab_size for token in prompt):
                die("a token id outside the vocabulary")
            served = {**params, "max_new_tokens": min(params["max_new_tokens"], self.context - 2 - len(prompt))}
            for _ in range(params["n"]):
                rid = body.get("rid") if single else None
                if rid in {other.rid for other in [*self.running, *self.queue]}:
                    raise refusal(f"Duplicate request ID detected: {rid}")
                requests.append(self.request(rid or uuid.uuid4().hex, prompt, served, body))
        return requests

    def request(self, rid: str, prompt: list[int], params: dict[str, Any], body: dict[str, Any]) -> Request:
        configured = self.model.generation_config.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
        ends |= set(params.get("stop_token_ids") or [])
        start = body.get("logprob_start_len", -1) if body.get("return_logprob") else -1
        return Request(rid, prompt, params, start, set() if params.get("ignore_eos") else ends - {None})

    def abort(self, rid: str | None) -> None:
        for request in [*self.running, *self.queue]:
            if rid is None or request.rid == rid:
                request.end({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
        self.running = [request for request in self.running if request.finish is None]
        self.queue = [request for request in self.queue if request.finish is None]

    def answer(self, request: Request, return_logprob: bool) -> dict[str, Any]:
        spans, start = [], 0
        for version, tokens in groupby(request.versions):
            length = len(list(tokens))
            spans.append({"version": version, "start": start, "end": start + length})
            start += length
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(request.output_ids),
            "weight_version": self.version,
            "weight_versions": spans or [{"version": self.version, "start": 0, "end": 0}],
        }
        if return_logprob:
            pairs = zip(request.logprobs, request.output_ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            meta["input_token_logprobs"] = self.prompt_logprobs(request) if request.logprob_start == 0 else []
        text = self.tokenizer.decode(request.output_ids, skip_special_tokens=True)
        return {"text": text, "output_ids": request.output_ids, "meta_info": meta}

    @torch.inference_mode()
    def prompt_logprobs(self, request: Request) -> list[list[Any]]:
        ids = torch.tensor([request.input_ids])
        logprobs = self.model(ids).logits[0, :-1].float().log_softmax(dim=-1)
        values = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return [
            [None, request.input_ids[0], None],
            *([v, t, None] for v, t in zip(values, ids[0, 1:].tolist(), strict=True)),
        ]

    # Weights

    def load(self, name: str, value: torch.Tensor) -> str | None:
        """None; an unknown name is skipped without a word. The reason when the shape is wrong."""
        own = self.model.state_dict()
        if name not in own or (name == "lm_head.weight" and self.model.config.tie_word_embeddings):
            return None
        if own[name].shape != value.shape:
            return f"The size of {name} is {tuple(own[name].shape)}, not {tuple(value.shape)}"
        own[name].copy_(value)
        return None

    def now_holds(self, version: str | None) -> str:
        if version is None:
            return "Success"
        self.version = version
        return f"Success Weight version updated to {version}."


def die(reason: str) -> None:
    print(f"the server dies of {reason}", file=sys.stderr, flush=True)
    os._exit(1)


# Endpoints


def reported(success: bool, message: str) -> web.Response:
    return web.json_response({"success": success, "message": message}, status=200 if success else 400)


def in_session(server: Server, call: str) -> web.Response | None:
    if server.session_open:
        return None
    return reported(False, f"{call} must run between begin_weight_update() and end_weight_update()")


async def health(server: Server, request: web.Request) -> web.Response:
    if time.monotonic() - server.began < server.options.unhealthy_seconds:
        return web.Response(status=503)
    while server.paused:
        await asyncio.sleep(0.02)
    return web.Response()


async def model_info(server: Server, request: web.Request) -> web.Response:
    options = server.options
    names = {"model_path": options.model_path, "served_model_name": options.served_model_name or options.model_path}
    return web.json_response({**names, "weight_version": server.version, "is_generation": True})


async def server_info(server: Server, request: web.Request) -> web.Response:
    facts = {"tp_size": 1, "device": "cpu", "dtype": "float32", "max_req_input_len": server.context - 6}
    return web.json_response({**facts, "served": server.served, "misbehaviour": server.misbehaviour.coming})


async def loads(server: Server, request: web.Request) -> web.Response:
    load = {"num_running_reqs": len(server.running), "num_waiting_reqs": len(server.queue)}
    return web.json_response({"loads": [load]})


async def generate(server: Server, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    mischief, answer = await server.misbehaviour.before(request)
    if answer is not None:
        return answer
    requests = server.begin(body)
    server.queue += requests
    server.wake.set()
    try:
        for each in requests:
            await each.done.wait()
    except asyncio.CancelledError:  # the client hung up
        for each in requests:
            server.abort(each.rid)
        raise
    server.served += len(requests)
    answers = [server.answer(each, bool(body.get("return_logprob"))) for each in requests]
    if mischief == "nan":
        answers[0]["meta_info"]["output_token_logprobs"][0][0] = None
    if mischief == "short":
        answers[0]["output_ids"] = answers[0]["output_ids"][:-1]
    if mischief == "stale":
        answers[0]["meta_info"]["weight_versions"] = [{"version": "?", "start": 0, "end": len(requests[0].output_ids)}]
    single = len(requests) == 1 and not isinstance(body["input_ids"][0], list)
    return web.json_response(answers[0] if single else answers)


async def begin_weight_update(server: Server, request: web.Request) -> web.Response:
    if server.session_open:
        return reported(False, "a weight-update session is already open; call end_weight_update() first")
    server.session_open = True
    return reported(True, "Success")


async def end_weight_update(server: Server, request: web.Request) -> web.Response:
    if not server.session_open:
        return reported(False, "no weight-update session is open; call begin_weight_update() first")
    server.session_open = False
    return reported(True, "Success")


async def update_weights_from_tensor(server: Server, request: web.Request) -> web.Response:
    if (problem := in_session(server, "update_weights_from_tensor")) is not None:
        return problem
    body = await request.json()
    payload = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
    if body.get("load_format") == "flattened_bucket":
        flat = payload["flattened_tensor"]
        payload = [
            (part.name, flat[part.start_idx : part.end_idx].view(part.dtype).view(part.shape))
            for part in payload["metadata"]
        ]
    for name, tensor in payload:
        if problem_text := server.load(name, tensor):
            die(problem_text)
    return reported(True, server.now_holds(body.get("weight_version")))


async def init_weights_update_group(server: Server, request: web.Request) -> web.Response:
    body = await request.json()
    server.groups[body["group_name"]] = await asyncio.to_thread(join_group, body)
    return reported(True, "Succeeded to initialize custom process group.")


def join_group(body: dict[str, Any]) -> Any:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    name, size, rank = body["group_name"], body["world_size"], body["rank_offset"]
    store = dist.TCPStore(body["master_address"], body["master_port"], world_size=size, is_master=False)
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        distributed_c10d.Backend("gloo"),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=distributed_c10d.default_pg_timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


async def destroy_weights_update_group(server: Server, request: web.Request) -> web.Response:
    name = (await request.json())["group_name"]
    if name not in server.groups:
        return reported(False, "The group to be destroyed does not exist.")
    torch.distributed.destroy_process_group(server.groups.pop(name))
    return reported(True, "Succeeded to destroy custom process group.")


async def update_weights_from_distributed(server: Server, request: web.Request) -> web.Response:
    if (problem := in_session(server, "update_weights_from_distributed")) is not None:
        return problem
    body = await request.json()
    group = server.groups.get(body["group_name"])
    if group is None:
        return reported(False, f"Group {body['group_name']} not in the weights update groups.")
    received = [
        (name, torch.empty(shape, dtype=getattr(torch, dtype)))
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
    ]
    if body.get("load_format") == "flattened_bucket":
        flat = torch.empty(sum(t.numel() * t.element_size() for _, t in received), dtype=torch.uint8)
        await asyncio.to_thread(lambda: group.broadcast(flat, 0).wait())
        start = 0
        for _, tensor in received:
            end = start + tensor.numel() * tensor.element_size()
            tensor.copy_(flat[start:end].view(tensor.dtype).view(tensor.shape))
            start = end
    else:
        for _, tensor in received:
            await asyncio.to_thread(lambda tensor=tensor: group.broadcast(tensor, 0).wait())
    for name, tensor in received:
        if problem_text := server.load(name, tensor):
            return reported(False, f"Failed to update parameter online: {problem_text}.")
    return reported(True, server.now_holds(body.get("weight_version")))


async def update_weights_from_disk(server: Server, request: web.Request) -> web.Response:
    from safetensors.torch import load_file

    body = await request.json()
    files = sorted(Path(body["model_path"]).glob("*.safetensors"))
    if not files:
        return web.json_response(
            {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}, status=400
        )
    for file in files:
        for name, tensor in load_file(file).items():
            if problem := server.load(name, tensor):
                die(problem)
    server.now_holds(body.get("weight_version"))
    return reported(True, "Succeeded to update model weights.")


async def weights_checker(server: Server, request: web.Request) -> web.Response:
    from megarl.rollout.sglang.checksums import ChecksumTally

    tally = ChecksumTally()
    for name, parameter in server.model.named_parameters():
        tally.add(name, parameter)
    return web.json_response({"success": True, "message": "Success.", "ranks": [{"checksums": tally.checksums()}]})


async def update_weight_version(server: Server, request: web.Request) -> web.Response:
    body = await request.json()
    if body.get("abort_all_requests", True):
        server.abort(None)
    server.version = body["new_version"]
    return reported(True, f"Weight version updated to {server.version}")


async def pause_generation(server: Server, request: web.Request) -> web.Response:
    mode = (await request.json()).get("mode", "abort")
    if mode not in ("abort", "retract", "in_place"):
        return web.json_response({"object": "error", "message": "validation error", "code": 400}, status=400)
    if mode == "abort":
        server.abort(None)
    server.paused = True
    return web.json_response({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(server: Server, request: web.Request) -> web.Response:
    server.paused = False
    server.wake.set()
    return web.json_response({"message": "Generation continued successfully.", "status": "ok"})


async def abort_request(server: Server, request: web.Request) -> web.Response:
    body = await request.json()
    if body.get("abort_all") or body.get("rid"):
        server.abort(None if body.get("abort_all") else body["rid"])
    return web.Response()


async def flush_cache(server: Server, request: web.Request) -> web.Response:
    until = time.monotonic() + float(request.query.get("timeout", 0))
    while (server.running or server.queue) and time.monotonic() < until:
        await asyncio.sleep(0.02)
    busy = bool(server.running or server.queue)
    return web.Response(status=400 if busy else 200, text="Flush cache failed.\n" if busy else "Cache flushed.\n")


async def release_memory_occupation(server: Server, request: web.Request) -> web.Response:
    server.released += (await request.json()).get("tags") or ["kv_cache", "weights"]
    return web.json_response(None)


async def resume_memory_occupation(server: Server, request: web.Request) -> web.Response:
    for tag in (await request.json()).get("tags") or ["kv_cache", "weights"]:
        if tag not in server.released:
            die(f"resuming {tag}, which was not released")
        server.released.remove(tag)
    return web.json_response(None)


async def misbehave(server: Server, request: web.Request) -> web.Response:
    """Only of this server: how the next generate calls go wrong, one word each; what was told before is forgotten."""
    server.misbehaviour.become((await request.json())["next"])
    return web.Response()


ENDPOINTS = [
    *(generate, begin_weight_update, end_weight_update, update_weights_from_tensor, update_weights_from_disk),
    *(init_weights_update_group, destroy_weights_update_group, update_weights_from_distributed, weights_checker),
    *(update_weight_version, pause_generation, continue_generation, abort_request, flush_cache),
    *(release_memory_occupation, resume_memory_occupation, misbehave),
]


def application(server: Server) -> web.Application:
    @web.middleware
    async def refusing(request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as error:
            return web.Response(status=400, text=str(error), content_type="application/json")
        except json.JSONDecodeError as error:
            return web.json_response({"object": "error", "message": str(error), "code": 400}, status=400)
        except web.HTTPNotFound:
            return web.json_response({"detail": "Not Found"}, status=404)

    app = web.Application(middlewares=[refusing], client_max_size=1 << 30)
    asked = {"health": health, "model_info": model_info, "server_info": server_info, "v1/loads": loads}
    for name, handler in asked.items():
        app.router.add_get(f"/{name}", lambda request, handler=handler: handler(server, request))
    for handler in ENDPOINTS:
        app.router.add_post(f"/{handler.__name__}", lambda request, handler=handler: handler(server, request))
    return app


async def serve(options: argparse.Namespace) -> None:
    server = Server(options)
    runner = web.AppRunner(application(server), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    await server.loop()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--served-model-name"):
        parser.add_argument(name, default="")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--random-seed", type=int, default=1)
    parser.add_argument("--unhealthy-seconds", type=float, default=0.0, help="of this server only")
    parser.add_argument("--exit-at-once", action="store_true", help="of this server only")
    options, _ = parser.parse_known_args()
    if options.exit_at_once:
        sys.exit("this server was told to exit")
    torch.set_num_threads(1)
    # As the real one has its scheduler. It is not ended here: whoever started the server has to.
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
