"""The checkpoints of one run: when they are written, which are kept, and which one a resumed run starts from."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from megarl.errors import UserError
from megarl.policy.checkpoint import files, megatron_format
from megarl.policy.checkpoint.files import HF_SIDE_FILES, DamagedCheckpoint, FileRecord, Manifest, versions
from megarl.policy.checkpoint.training_state import load_state, save_state
from megarl.policy.hf_folder import copy_side_files
from megarl.policy.mcore import is_main_replica, nested_values
from megarl.policy.model import ModelShape

if TYPE_CHECKING:
    from megarl.policy.megatron import MegatronPolicy

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class CheckpointConfig(BaseModel):
    """When training state is saved, how much of it is kept, and what a resumed run insists on."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    every: int = Field(20, ge=1, description="Steps between checkpoints; the last step always leaves one.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints that are kept.")
    keep_every: int | None = Field(None, ge=1, description="Keep, too, the checkpoints of steps that it divides.")
    asynchronous: bool = Field(
        False,
        description="Write in the background while training goes on, from a copy of the state in host memory.",
    )
    accept_changes: list[str] = Field(
        default_factory=list,
        description="Config keys that may differ from the saved run's although they change its course.",
    )
    largest_logprob_difference: float = Field(
        0.1,
        gt=0,
        description="After a resume: largest mean |log-prob by the policy - log-prob by the rollout engine|, in nats.",
    )


@dataclass
class _Save:
    """A save under way on this rank."""

    step: int
    part: Path
    written: Future[dict[str, FileRecord]]  # this rank's shards
    conclude: Callable[[], None]  # Megatron's last words, on the main thread of all ranks
    run_state: dict[str, Any]
    training_state: dict[str, Any]


class Checkpoints:
    """The folder `checkpoints/` of a run. Every method is collective over the job."""

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        policy: MegatronPolicy,
        *,
        kind: str,
        run_config: dict[str, Any],
        parallel: dict[str, int],
    ) -> None:
        self.root, self.config, self._policy = root, config, policy
        self._kind, self._run_config, self._parallel = kind, run_config, parallel
        # The writer's collectives run beside those of training, so they need a group of their own.
        self._group = dist.new_group(backend="gloo")
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="checkpoint",
            initializer=torch.cuda.set_device,  # a new thread is on the node's first GPU, whatever its process is on
            initargs=(torch.cuda.current_device(),),
        )
        self._underway: _Save | None = None
        self._saved: set[int] = set()  # steps that this process knows to be whole on the disk

    def save(self, step: int, run_state: dict[str, Any]) -> None:
        """Nothing; the checkpoint of `step` is on the disk or, if asynchronous, on its way.

        Raises UserError when it cannot be written; then the earlier checkpoints are untouched.
        """
        self.finish()
        if step in self._saved:
            return
        state, training_state = save_state(self._policy)
        self._check_space(step, state)
        part = self._on_first_rank(step, lambda: files.begin(files.step_folder(self.root, step)))
        write, conclude = self._together(
            step,
            lambda: megatron_format.prepare_save(state, part, self._group, copies=self.config.asynchronous),
        )

        def write_and_record() -> dict[str, FileRecord]:
            write()
            return files.record_files(part, part.glob(f"__{self._rank}_*"))

        written = self._thread.submit(write_and_record)
        self._underway = _Save(step, part, written, conclude, run_state, training_state)
        if not self.config.asynchronous:
            self.finish()

    def poll(self) -> None:
        """Nothing; a background save that all ranks have written is made visible."""
        if self._underway is not None:
            # On the default group: the writer's own may be in use.
            written: list[Any] = [None] * self._ranks
            dist.all_gather_object(written, self._underway.written.done())
            if all(written):
                self.finish()

    def finish(self) -> None:
        """Nothing; no save is under way any more. Raises UserError when the last one could not be written."""
        if self._underway is None:
            return
        save, self._underway = self._underway, None
        own = self._together(save.step, save.written.result)
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, own, group=self._group)
        save.conclude()
        records = {name: record for part in everyone for name, record in part.items()}
        self._on_first_rank(save.step, lambda: self._publish(save, records))
        self._saved.add(save.step)

    def restore(self) -> Manifest | None:
        """The manifest of the newest sound checkpoint, whose state the policy now has; None where there is none.

        A damaged checkpoint is passed over with a warning and set aside. Raises UserError when all are damaged.
        """
        damaged: list[int] = []
        steps = self._on_first_rank(None, self._tidy)
        for step in reversed(steps):
            folder = files.step_folder(self.root, step)
            problem, manifest = self._examine(folder)
            if manifest is not None:
                check_model(manifest, self._policy.shape, folder)
                load_state(self._policy, folder, manifest.training_state)
                self._on_first_rank(None, lambda: self._set_aside(damaged))
                self._saved = {step for step in steps if step not in damaged}
                return manifest
            logger.warning("checkpoint %s is damaged: %s; going back to the one before", folder, problem)
            damaged.append(step)
        if damaged:
            raise UserError(
                f"{self.root}: no checkpoint is sound (newest: {problem}); training does not start from damaged "
                "weights. Restore the files, or set run.overwrite=true to begin anew"
            )
        return None

    def _examine(self, folder: Path) -> tuple[str, Manifest | None]:
        """(what is wrong, None) or ("", manifest); each rank checks the content of some files."""
        try:
            manifest = files.read_manifest(folder)
            if folder != files.step_folder(self.root, manifest.step):
                raise DamagedCheckpoint(f"{files.MANIFEST} is of step {manifest.step}: the folder has another's name")
            names = sorted(manifest.files)[self._rank :: self._ranks]
            problems = files.file_problems(folder, manifest.files, names)
        except DamagedCheckpoint as error:
            problems = [str(error)]
        everyone: list[Any] = [None] * self._ranks
        dist.all_gather_object(everyone, problems, group=self._group)
        found = [problem for own in everyone for problem in own]
        return (found[0], None) if found else ("", manifest)

    def _tidy(self) -> list[int]:
        files.remove_leftovers(self.root)
        return files.saved_steps(self.root)

    def _set_aside(self, steps: list[int]) -> None:
        for step in steps:
            files.set_aside(files.step_folder(self.root, step))

    def _check_space(self, step: int, state: dict[str, Any]) -> None:
        own = sum(
            entry.data.numel() * entry.data.element_size()
            for entry in nested_values(state)
            if torch.is_tensor(getattr(entry, "data", None)) and is_main_replica(entry.replica_id)
        )
        sizes: list[Any] = [None] * self._ranks
        dist.all_gather_object(sizes, own, group=self._group)

        def enough() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            needed, free = sum(sizes), shutil.disk_usage(self.root).free
            if free < needed:
                raise OSError(errno.ENOSPC, f"no space left: {needed >> 20} MiB are needed, {free >> 20} MiB are free")

        self._on_first_rank(step, enough)

    def _publish(self, save: _Save, records: dict[str, FileRecord]) -> None:
        """On the first rank: side files, manifest, rename, and the removal of checkpoints that are not kept."""
        copy_side_files(self._policy.folder, save.part / HF_SIDE_FILES)
        manifest = Manifest(
            kind=self._kind,
            step=save.step,
            model=self._policy.shape.identity(),
            config=self._run_config,
            parallel=self._parallel,
            run_state=save.run_state,
            training_state=save.training_state,
            versions=versions(),
            files=records | files.record_files(save.part, files.unrecorded(save.part, records)),
        )
        files.publish(files.step_folder(self.root, save.step), manifest)
        for step in files.surplus_steps(files.saved_steps(self.root), self.config.keep_last, self.config.keep_every):
            files.remove_checkpoint(self.root, step)

    def _on_first_rank(self, step: int | None, action: Callable[[], Result]) -> Result:
        """What `action` gives on rank 0, on every rank."""
        result = self._together(step, lambda: action() if self._rank == 0 else None)
        shared: list[Any] = [result]
        dist.broadcast_object_list(shared, src=0, group=self._group)
        return shared[0]

    def _together(self, step: int | None, action: Callable[[], Result]) -> Result:
        """What `action` gives on this rank; where it fails on one rank, all ranks raise."""
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:  # handed to all ranks below
            failure = error
        reports: list[Any] = [None] * self._ranks
        dist.all_gather_object(reports, None if failure is None else self._report(step, failure), group=self._group)
        first = next((report for report in reports if report is not None), None)
        if first is None:
            return result
        if step is not None:
            if self._rank == 0:
                shutil.rmtree(files.part_of(files.step_folder(self.root, step)), ignore_errors=True)
            dist.barrier(group=self._group)  # no rank goes on while the remains are still there
        is_users, message = first
        raise UserError(message) if is_users else RuntimeError(message) from failure

    def _report(self, step: int | None, error: Exception) -> tuple[bool, str]:
        """(whether it is a matter of the disk, the message)."""
        if isinstance(error, OSError):
            what = "checkpoints cannot be read" if step is None else f"the checkpoint of step {step} cannot be written"
            last = (
                f"; the last good one is {files.step_folder(self.root, max(self._saved)).name}" if self._saved else ""
            )
            return True, f"{self.root}: {what}: {error.strerror or error}{last}"
        return False, f"rank {self._rank}: {type(error).__name__}: {error}"


def check_model(manifest: Manifest, shape: ModelShape, folder: Path) -> None:
    """Nothing, or a UserError naming the first property in which the checkpoint's model is another one."""
    for name, value in shape.identity().items():
        saved = manifest.model.get(name, value)  # an earlier version wrote fewer properties
        if saved != value:
            raise UserError(f"{folder} holds a model with {name} = {saved}, but model.path has {value}")
