"""What megarl relies on of a server; each check takes (URL, model folder) and leaves the server serving.

The same checks run against the real SGLang (`tests/sglang`) and the stand-in for fast tests (`tests/servers`).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import pickle
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

from megarl.rollout.sglang.control import ServerControl
from megarl.rollout.sglang.errors import ServerError
from tests.server_processes import POSITIONS

# Tokens of a response that is still being generated when the check goes on: to its end, or until it is ended.
LONG, LASTING = 400, 900


def post(url: str, call: str, body: Any, timeout: float = 60.0) -> tuple[int, str]:
    """(status, text) of a call, whatever the status."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{call}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(url: str, ids: Any, *, rid: str | None = None, **params: Any) -> Any:
    """The parsed answer to a generate call that must succeed."""
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, **({"rid": rid} if rid else {})}
    status, text = post(url, "generate", body)
    assert status == 200, text
    return json.loads(text)


def load_of(url: str) -> tuple[int, int]:
    """(requests for which the server is generating tokens, those that wait for their first)."""
    with urllib.request.urlopen(f"{url}/v1/loads", timeout=60) as response:
        (load,) = json.load(response)["loads"]
    return load["num_running_reqs"], load["num_waiting_reqs"]


def wait_for_load(url: str, enough: Callable[[int, int], bool], seconds: float = 120.0) -> None:
    """Nothing; the server has become as busy as wanted: `enough(running, waiting)`."""
    deadline = time.monotonic() + seconds
    while not enough(*(load := load_of(url))):
        assert time.monotonic() < deadline, f"{load} requests run and wait"
        time.sleep(0.005)


def in_background(pool: ThreadPoolExecutor, url: str, rid: str, tokens: int) -> Any:
    """A generate call on its way; returns once the server generates its tokens."""
    before, _ = load_of(url)
    call = pool.submit(generate, url, [3, 4], rid=rid, max_new_tokens=tokens, temperature=1.0, ignore_eos=True)
    wait_for_load(url, lambda running, waiting: running > before)
    return call


def by_value(tensors: dict[str, torch.Tensor], **options: Any) -> dict[str, Any]:
    blob = base64.b64encode(pickle.dumps(list(tensors.items()))).decode()
    return {"serialized_named_tensors": [blob], **options}


def logprobs_by_transformers(model: Path, ids: list[int], output: list[int], temperature: float) -> torch.Tensor:
    """[output] log-probs of the output tokens at the temperature."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = hf(torch.tensor([ids + output])).logits[0, len(ids) - 1 : -1] / temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(output)[:, None])[:, 0]


def one_answer_for_one_prompt_a_flat_list_for_several(url: str, model: Path) -> None:
    one = generate(url, [3, 4, 5], max_new_tokens=4, temperature=1.0)
    assert isinstance(one, dict) and 1 <= len(one["output_ids"]) <= 4
    assert len(generate(url, [[3], [4, 5]], max_new_tokens=2, n=3)) == 6


def logprobs_are_those_of_the_sampling_temperature(url: str, model: Path) -> None:
    for temperature, reported_at in ((1.0, 1.0), (0.6, 0.6), (0.0, 1.0)):
        answer = generate(url, [3, 4, 5], max_new_tokens=12, temperature=temperature, ignore_eos=True)
        entries = answer["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in entries] == answer["output_ids"]
        wanted = logprobs_by_transformers(model, [3, 4, 5], answer["output_ids"], reported_at)
        assert float((torch.tensor([entry[0] for entry in entries]) - wanted).abs().max()) < 1e-4


def the_reason_of_the_end_is_told(url: str, model: Path) -> None:
    cut = generate(url, [3, 4], max_new_tokens=5, ignore_eos=True)
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    everything = list(range(500))
    ended = generate(url, [3, 4], max_new_tokens=5, stop_token_ids=everything)
    assert ended["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(ended["output_ids"]) == 1 == len(ended["meta_info"]["output_token_logprobs"])


def what_cannot_be_served_is_refused_with_status_400(url: str, model: Path) -> None:
    refused = [
        {"input_ids": []},
        {},
        {"input_ids": "abc"},
        {"input_ids": [3] * 100, "sampling_params": {"max_new_tokens": POSITIONS - 99}},
        {"input_ids": [3], "sampling_params": {"temperature": -1}},
        {"input_ids": [3], "sampling_params": {"no_such_parameter": 1}},
        b"{",
    ]
    for body in refused:
        status, text = post(url, "generate", body)
        assert status == 400 and json.loads(text), body
    assert "error" in json.loads(post(url, "generate", {"input_ids": []})[1])


def a_response_that_just_fits_is_shortened_in_silence(url: str, model: Path) -> None:
    longest = ServerControl(url).longest_sequence()
    assert longest == POSITIONS - 2
    for beyond in (0, 1, 2):
        answer = generate(url, [3] * (longest - 20), max_new_tokens=20 + beyond, ignore_eos=True)
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


def unknown_top_level_fields_are_ignored(url: str, model: Path) -> None:
    body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}, "no_such_field": 1}
    assert post(url, "generate", body)[0] == 200


def unknown_endpoints_answer_404(url: str, model: Path) -> None:
    assert post(url, "no_such_endpoint", {})[0] == 404


def a_request_id_serves_once_at_a_time(url: str, model: Path) -> None:
    with ThreadPoolExecutor() as pool:
        first = in_background(pool, url, "same", LASTING)
        status, text = post(
            url, "generate", {"rid": "same", "input_ids": [3], "sampling_params": {"max_new_tokens": 1}}
        )
        assert status == 400 and "Duplicate" in text
        ServerControl(url).abort_all()
        first.result()


def abort_ends_one_request_with_what_it_has(url: str, model: Path) -> None:
    with ThreadPoolExecutor() as pool:
        one, other = in_background(pool, url, "one", LASTING), in_background(pool, url, "other", LONG)
        assert post(url, "abort_request", {"rid": "one"}) == (200, "")
        answer = one.result()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < LASTING
        assert other.result()["meta_info"]["finish_reason"]["type"] == "length"
    assert post(url, "abort_request", {"rid": "nobody"}) == (200, "")


def abort_all_ends_running_and_waiting_requests(url: str, model: Path) -> None:
    with ThreadPoolExecutor(max_workers=80) as pool:
        calls = [
            pool.submit(generate, url, [3, 4], rid=f"all-{k}", max_new_tokens=LASTING, ignore_eos=True)
            for k in range(80)
        ]
        wait_for_load(url, lambda running, waiting: running and waiting and running + waiting == len(calls))
        ServerControl(url).abort_all()
        reasons = [call.result()["meta_info"]["finish_reason"]["type"] for call in calls]
    assert reasons.count("abort") == len(calls), reasons


def weight_updates_need_a_session(url: str, model: Path) -> None:
    body = by_value({"model.norm.weight": torch.ones(64)})
    status, text = post(url, "update_weights_from_tensor", body)
    assert status == 400 and "begin_weight_update" in json.loads(text)["message"]
    assert post(url, "end_weight_update", {})[0] == 400
    assert post(url, "begin_weight_update", {})[0] == 200
    assert post(url, "begin_weight_update", {})[0] == 400
    assert json.loads(post(url, "end_weight_update", {})[1]) == {"success": True, "message": "Success"}


def an_unknown_weight_name_is_skipped_in_silence(url: str, model: Path) -> None:
    control = ServerControl(url)
    before = control.checksums()
    control.begin_weight_update()
    status, text = post(url, "update_weights_from_tensor", by_value({"model.nowhere.weight": torch.ones(3)}))
    control.end_weight_update()
    assert status == 200 and json.loads(text)["success"] is True
    assert control.checksums() == before


def weights_change_outputs_and_carry_their_version(url: str, model: Path) -> None:
    control = ServerControl(url)
    probe = [3, 5, 8, 13]
    before, checksums = control.prompt_logprobs(probe), control.checksums()
    hf = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    norm = hf.state_dict()["model.norm.weight"]
    for value, version in ((2 * norm, "contract-2"), (norm, "contract-1")):
        control.begin_weight_update()
        body = by_value({"model.norm.weight": value.clone()}, weight_version=version, flush_cache=True)
        assert post(url, "update_weights_from_tensor", body)[0] == 200
        control.end_weight_update()
        answer = generate(url, probe, max_new_tokens=3, ignore_eos=True)
        assert control.weight_version() == answer["meta_info"]["weight_version"] == version
        assert answer["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 3}]
        moved = float((torch.tensor(control.prompt_logprobs(probe)) - torch.tensor(before)).abs().max())
        assert (moved > 0.1) == (version == "contract-2")
    assert control.checksums() == checksums


def a_pause_with_retract_lets_requests_go_on_under_new_weights(url: str, model: Path) -> None:
    control = ServerControl(url)
    post(url, "update_weight_version", {"new_version": "before", "abort_all_requests": False})
    with ThreadPoolExecutor() as pool:
        call = in_background(pool, url, "paused", LONG)
        control.pause("retract")
        assert not control.health(timeout=1.0), "a paused server does not answer health checks"
        post(url, "update_weight_version", {"new_version": "after", "abort_all_requests": False})
        control.resume()
        answer = call.result()
    assert control.health()
    first, second = answer["meta_info"]["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("before", 0, "after", LONG)
    assert first["end"] == second["start"] > 0


def a_pause_with_abort_returns_what_there_is(url: str, model: Path) -> None:
    control = ServerControl(url)
    with ThreadPoolExecutor() as pool:
        call = in_background(pool, url, "aborted by a pause", LASTING)
        control.pause("abort")
        answer = call.result()
    control.resume()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort" and len(answer["output_ids"]) < LASTING


def a_missing_weight_folder_is_refused(url: str, model: Path) -> None:
    status, text = post(url, "update_weights_from_disk", {"model_path": "/no/such/folder", "weight_version": "x"})
    assert status == 400 and json.loads(text)["success"] is False
    control = ServerControl(url)
    control.update_weights_from_disk(str(model), version="from disk")
    assert control.weight_version() == "from disk"


def a_missing_process_group_is_refused(url: str, model: Path) -> None:
    assert post(url, "destroy_weights_update_group", {"group_name": "nowhere"})[0] == 400


def the_cache_is_flushed_only_when_idle(url: str, model: Path) -> None:
    control = ServerControl(url)
    control.flush_cache()
    with ThreadPoolExecutor() as pool:
        call = in_background(pool, url, "busy", LONG)
        try:
            control.flush_cache()
        except ServerError as error:
            assert error.status == 400
        else:
            raise AssertionError("flushed while a request ran")
        control.flush_cache(wait=120.0)
        call.result()


def memory_is_released_and_resumed_in_parts(url: str, model: Path) -> None:
    control = ServerControl(url)
    control.release_memory(["kv_cache", "weights"])
    control.resume_memory(["weights"])
    control.resume_memory(["kv_cache"])
    assert control.health()


def clients_that_hang_up_free_their_requests(url: str, model: Path) -> None:
    # So many, and so long, that the server would be busy with them for far longer than is waited.
    params = {"max_new_tokens": LASTING, "ignore_eos": True}
    body = json.dumps({"input_ids": [3], "sampling_params": params})
    clients = [http.client.HTTPConnection(url.removeprefix("http://"), timeout=60) for _ in range(64)]
    for client in clients:
        client.request("POST", "/generate", body, {"Content-Type": "application/json"})
    wait_for_load(url, lambda running, waiting: running and running + waiting == len(clients))
    for client in clients:
        client.close()
    ServerControl(url).flush_cache(wait=15.0)


CONTRACT: list[Callable[[str, Path], None]] = [
    one_answer_for_one_prompt_a_flat_list_for_several,
    logprobs_are_those_of_the_sampling_temperature,
    the_reason_of_the_end_is_told,
    what_cannot_be_served_is_refused_with_status_400,
    a_response_that_just_fits_is_shortened_in_silence,
    unknown_top_level_fields_are_ignored,
    unknown_endpoints_answer_404,
    a_request_id_serves_once_at_a_time,
    abort_ends_one_request_with_what_it_has,
    abort_all_ends_running_and_waiting_requests,
    weight_updates_need_a_session,
    an_unknown_weight_name_is_skipped_in_silence,
    weights_change_outputs_and_carry_their_version,
    a_pause_with_retract_lets_requests_go_on_under_new_weights,
    a_pause_with_abort_returns_what_there_is,
    a_missing_weight_folder_is_refused,
    a_missing_process_group_is_refused,
    the_cache_is_flushed_only_when_idle,
    memory_is_released_and_resumed_in_parts,
    clients_that_hang_up_free_their_requests,
]

# What ends the server process: (call, body).
LETHAL: dict[str, tuple[str, dict[str, Any]]] = {
    "a token id outside the vocabulary": (
        "generate",
        {"input_ids": [3, 1_000_000], "sampling_params": {"max_new_tokens": 1}},
    ),
    "a tensor of a wrong shape": ("update_weights_from_tensor", by_value({"model.norm.weight": torch.ones(65)})),
    "resuming memory that was not released": ("resume_memory_occupation", {"tags": ["kv_cache"]}),
}


def dies_of(url: str, cause: str) -> bool:
    """Whether the server no longer answers within two minutes after the call that kills it."""
    call, body = LETHAL[cause]
    control = ServerControl(url)
    if call == "update_weights_from_tensor":
        control.begin_weight_update()
    with contextlib.suppress(OSError, urllib.error.URLError):  # it hangs up, or never answers
        post(url, call, body, timeout=20.0)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            control.model_info()
        except ServerError:
            return True
        time.sleep(0.2)
    return False
