"""How responses are generated: every `rollout.*` key."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# Arguments of sglang.launch_server that the run itself must know, and the key that says the same.
GIVEN_BY_THE_RUN = {
    "--host": "none",
    "--port": "rollout.port",
    "--served-model-name": "none",
    "--model-path": "model.path",
    "--model": "model.path",
    "--tp-size": "rollout.server_tensor",
    "--tensor-parallel-size": "rollout.server_tensor",
    "--tp": "rollout.server_tensor",
    "--dtype": "rollout.dtype",
    "--weight-version": "none",
    "--api-key": "none",
}


class RolloutConfig(BaseModel):
    """How responses are generated."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    engine: Literal["in_process", "sglang"] = Field(
        "in_process",
        description="What generates: in_process is transformers in the training process, sglang is SGLang servers.",
    )
    samples_per_prompt: int = Field(8, ge=1, description="Responses to each prompt; they form one group.")
    temperature: float = Field(
        1.0, ge=0, le=100, description="Sampling temperature; 0 is greedy, with log-probs reported at temperature 1."
    )
    max_response_length: int = Field(1024, ge=1, description="Tokens of a response at most, its end token included.")
    batch_size: int = Field(256, ge=1, description="Sequences generated at once by one rank (in_process).")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number format of weights and activations in generation."
    )

    # Servers that the run starts
    servers: int | None = Field(
        None,
        ge=1,
        description="Servers that each node starts. None: one per server_tensor GPUs (colocated: of the training "
        "ranks; separate: of the other GPUs); one on a CPU.",
    )
    server_tensor: int = Field(1, ge=1, description="GPUs of one server (its --tp-size).")
    placement: Literal["colocated", "separate"] = Field(
        "colocated",
        description="colocated: servers share the training ranks' GPUs and give their memory back during updates; "
        "separate: they have the node's other GPUs.",
    )
    server_python: str | None = Field(
        None, description="Python interpreter that has sglang; None: the one that trains."
    )
    server_args: list[str] = Field(
        default_factory=list,
        description="More arguments of sglang.launch_server; they win over megarl's own. What the run must know is "
        "refused: port, tensor-parallel size, number format and the like have keys of their own.",
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="First port to try for a server of this run; 0: any free one. Taken ones are skipped.",
    )
    start_timeout: float = Field(600.0, gt=0, description="Seconds within which a started server must be healthy.")

    # Servers that already run
    urls: list[str] = Field(
        default_factory=list,
        description="Addresses (http://host:port) of running SGLang servers of this model; then none is started.",
    )
    router: bool = Field(
        False,
        description="Put sglang-router in front of the servers: it picks the server of each request; control calls "
        "still go to each server.",
    )

    # Requests
    concurrency: int = Field(256, ge=1, description="Requests that one rank has open at one server at a time.")
    request_timeout: float = Field(1800.0, gt=0, description="Seconds that one response may take.")
    max_attempts: int = Field(10, ge=1, description="Times that one response is tried before the run stops.")
    health_interval: float = Field(5.0, gt=0, description="Seconds between health checks of a server.")
    health_timeout: float = Field(
        30.0, gt=0, description="Seconds without an answer to a health check after which a server counts as hung."
    )
    outage_timeout: float = Field(
        600.0, gt=0, description="Seconds without any server that answers after which the run stops."
    )
    tail_cap: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of a round's responses after which the unfinished rest is aborted; None: waits for all.",
    )
    tail: Literal["keep", "drop"] = Field(
        "keep",
        description="Aborted responses: keep goes on with them in the next step, and their groups wait; drop leaves "
        "them out of their groups.",
    )

    # New weights to the servers
    sync: Literal["auto", "ipc", "group", "http", "disk"] = Field(
        "auto",
        description="How new weights reach the servers: ipc lends GPU memory (servers on the training GPUs), group "
        "broadcasts (NCCL on GPUs, else gloo), http sends values, disk writes HF folders that all can read. auto: ipc "
        "where servers share the GPUs, else group.",
    )
    sync_bucket_mib: int = Field(
        512, ge=1, description="Weights are gathered and sent in buckets of at most this many MiB (or one tensor)."
    )
    sync_timeout: float = Field(300.0, gt=0, description="Seconds that one step of a weight hand-over may take.")
    sync_folder: str | None = Field(
        None, description="Where sync = disk writes weights; unset: rollout_weights in the run folder."
    )
    verify_sync: Literal["off", "probe", "checksum"] = Field(
        "probe",
        description="After each hand-over: probe compares the server's log-probs of fixed tokens with the policy's; "
        "checksum compares every parameter (servers on a CPU); a server that fails is restarted.",
    )
    lag: int = Field(
        0,
        ge=0,
        description="Rollout batches generated ahead, while the policy trains: their weights may be this many updates "
        "of the servers old. 0 generates and trains in turn.",
    )
    max_logprob_diff: float | None = Field(
        None,
        gt=0,
        description="Stop the run when |log-prob by the policy - by the engine| of a token exceeds this, nats; unset: "
        "only report it. The worst tokens are written to the run folder.",
    )

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} must begin with http:// or https://")
        if len({url.rstrip("/") for url in urls}) != len(urls):
            raise ValueError("the addresses must differ")
        return [url.rstrip("/") for url in urls]

    @field_validator("server_args")
    @classmethod
    def _leave_what_the_run_says(cls, arguments: list[str]) -> list[str]:
        given = {argument.partition("=")[0] for argument in arguments}
        for own, instead in GIVEN_BY_THE_RUN.items():
            if own in given:
                raise ValueError(f"{own} is given by the run; allowed instead: {instead}")
        return arguments

    @model_validator(mode="after")
    def _lent_memory_is_on_the_same_devices(self) -> RolloutConfig:
        if self.sync == "ipc" and (self.urls or self.placement == "separate"):
            where = "rollout.urls" if self.urls else "placement = separate"
            raise ValueError(
                f"sync = ipc lends memory to servers on the training GPUs; with {where}: group, http, disk"
            )
        return self

    @model_validator(mode="after")
    def _tail_needs_servers(self) -> RolloutConfig:
        if self.tail_cap is not None and self.engine != "sglang":
            raise ValueError("tail_cap needs engine = sglang")
        return self

    @model_validator(mode="after")
    def _lag_needs_servers(self) -> RolloutConfig:
        if self.lag and self.engine != "sglang":
            raise ValueError(
                f"lag = {self.lag} needs engine = sglang: in_process generates with the trainer's own time"
            )
        return self
