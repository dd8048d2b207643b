"""How one SGLang server of this run is started: command line, environment, port."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.errors import UserError
from megarl.rollout.config import RolloutConfig

# What torchrun tells the trainer would make a server join the trainer's job.
JOB_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
}
SOMEWHERE_ELSE = "192.0.2.1"  # an address of no machine (RFC 5737)
ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-radix-cache", "--disable-overlap-schedule", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "32768", "--max-running-requests", "64"),
    # Without it an idle scheduler takes a whole core.
    *("--skip-server-warmup", "--sleep-on-idle"),
)


@dataclass(frozen=True)
class LaunchPlan:
    """What one server is started from. `devices`: its GPUs as CUDA_VISIBLE_DEVICES names them; empty on a CPU."""

    python: str
    model: str
    devices: tuple[str, ...]
    tensor_size: int
    dtype: str
    shares_devices: bool
    seed: int
    host: str
    arguments: tuple[str, ...]
    log: Path

    def command(self, port: int, name: str) -> list[str]:
        """The command line of a server at `port` that calls its model `name`, by which it is told from a stranger."""
        own = ["--model-path", self.model, "--served-model-name", name, "--host", self.host, "--port", str(port)]
        own += ["--tp-size", str(self.tensor_size), "--dtype", self.dtype, "--random-seed", str(self.seed)]
        if not self.devices:
            own += ON_CPU
        elif self.shares_devices:
            own += ["--enable-memory-saver"]
        return [self.python, "-m", "sglang.launch_server", *own, *self.arguments]

    def environment(self) -> dict[str, str]:
        """The environment of the server's processes."""
        return server_environment(self.python, self.devices)


def server_environment(python: str, devices: Sequence[str]) -> dict[str, str]:
    """This process's environment without what belongs to the training job, for a process of `python` on `devices`."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in JOB_VARIABLES and not name.startswith(("TORCHELASTIC_", "TORCH_NCCL_"))
    }
    # Another interpreter has packages of its own; without byte code every start would compile sglang again.
    for name in ("PYTHONDONTWRITEBYTECODE", *(("PYTHONPATH",) if python != sys.executable else ())):
        variables.pop(name, None)
    # A crashed server would otherwise dump stacks and cores for a minute before it ends.
    variables |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if devices:
        return variables | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    return variables | {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def plan_launches(
    config: RolloutConfig, model: str, *, seed: int, folder: Path
) -> list[tuple[LaunchPlan, tuple[int, ...]]]:
    """The servers that this rank starts, each with the ranks (of the job) that share its devices.

    The node's servers are dealt to its ranks in order: server i belongs to a run of neighbouring ranks, and the lowest
    of them starts it. Raises UserError when the node's GPUs do not suffice.
    """
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    devices = _devices()
    shares = config.placement == "colocated"
    count = _server_count(config, devices, local_size)
    plans = []
    for index in range(count):
        if index * local_size // count != local_rank:
            continue
        own: tuple[str, ...] = ()
        if devices:
            first = index * config.server_tensor + (0 if shares else local_size)
            own = tuple(devices[first : first + config.server_tensor])
        first_rank = rank - local_rank + (index * config.server_tensor if devices else local_rank)
        plan = LaunchPlan(
            python=interpreter(config),
            model=str(Path(model).resolve()),
            devices=own,
            tensor_size=config.server_tensor if devices else 1,
            dtype=config.dtype,
            shares_devices=shares and bool(devices),
            seed=seed,
            host=reachable_host(),
            arguments=tuple(config.server_args),
            log=folder / f"server_{os.environ.get('GROUP_RANK', '0')}_{index}.log",
        )
        plans.append((plan, tuple(range(first_rank, first_rank + config.server_tensor)) if shares else ()))
    return plans


def interpreter(config: RolloutConfig) -> str:
    """The Python that starts servers. Raises UserError when there is none at rollout.server_python."""
    python = config.server_python or sys.executable
    found = shutil.which(python)
    if found is None:
        raise UserError(f"rollout.server_python = {python} is no executable file")
    return str(Path(found).absolute())


def _server_count(config: RolloutConfig, devices: Sequence[str], local_size: int) -> int:
    """Servers of this node."""
    if not devices:
        if config.server_tensor > 1:
            raise UserError(f"rollout.server_tensor = {config.server_tensor} needs GPUs; allowed on a CPU: 1")
        return config.servers or 1
    free = local_size if config.placement == "colocated" else len(devices) - local_size
    count = config.servers or free // config.server_tensor
    if count < 1 or count * config.server_tensor > free:
        whose = "of the training ranks" if config.placement == "colocated" else "beside the training ranks"
        raise UserError(
            f"rollout.servers x rollout.server_tensor = {max(count, 1)} x {config.server_tensor}: "
            f"the node has {free} GPUs {whose} (rollout.placement = {config.placement})"
        )
    return count


def _devices() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def reachable_host() -> str:
    """This machine's address for all ranks: the loopback when they are all on it."""
    if os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1"):
        return "127.0.0.1"
    # A head node often has its own name for a loopback address; the way out of it is then the one to the others.
    towards_head = _address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return _address_towards(SOMEWHERE_ELSE, 9) if towards_head.startswith("127.") else towards_head


def _address_towards(host: str, port: int) -> str:
    """This machine's address as it is seen from there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # nothing is sent: the system only chooses the interface
        except OSError as error:
            raise UserError(f"this machine's address for the job's other nodes: no way to {host} ({error})") from error
        return str(probe.getsockname()[0])


def choose_port(host: str, first: int) -> int:
    """A port that nothing listens on at the moment: any for `first` = 0, else the lowest from `first` on.

    Raises UserError when there is none from `first` on.
    """
    for port in range(first, 65536) if first else (0,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise UserError(f"rollout.port = {first}: no port from there on is free on {host}")


def random_name() -> str:
    """A name that no other server and no other run has."""
    return f"megarl-{secrets.token_hex(8)}"
