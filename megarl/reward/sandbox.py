"""Where programs to be judged run: bubblewrap with seccomp, a bare process by explicit choice, or a remote sandbox.

Under bubblewrap a program sees a read-only system without network, home directories or other processes, with a small
temporary folder; it has limits on memory, processor time, processes, file size and output, and an unprivileged user of
its own. Started by root, every concurrent job of the machine has its own pair of user ids, since RLIMIT_NPROC counts
by user.
"""

from __future__ import annotations

import compileall
import contextlib
import errno
import marshal
import os
import queue
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from megarl.errors import UserError

FIRST_USER, LAST_USER = 61_000, 65_000  # of the user ids that jobs of root get, two a slot
LARGEST_REPORT = 4 * 2**20  # bytes that the sandbox may say
START_SECONDS = 20.0  # that a sandbox may need to start, on top of the job's own time

# What a judged program has no use for: other machines, other processes, other namespaces, the kernel's newest doors.
FORBIDDEN_CALLS = (
    *("socket", "connect", "bind", "listen", "accept", "accept4", "ptrace", "process_vm_readv", "process_vm_writev"),
    *("pidfd_getfd", "kcmp", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen"),
    *("unshare", "setns", "clone3", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "keyctl", "add_key"),
    *("request_key", "kexec_load", "init_module", "finit_module", "delete_module", "reboot", "swapon", "swapoff"),
    # Memory that no limit of a process counts.
    *("memfd_create", "shmget", "shmat", "msgget", "semget", "mq_open"),
    *("syslog", "acct", "quotactl", "open_by_handle_at", "name_to_handle_at", "personality", "memfd_secret"),
)
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW* flags of clone()


class SandboxConfig(BaseModel):
    """Limits on a program that is judged."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["bubblewrap", "process", "remote"] = Field(
        "bubblewrap",
        description="bubblewrap isolates (needs bwrap and libseccomp); process only sets limits, for trusted programs; "
        "remote sends programs to a server with SandboxFusion's interface.",
    )
    url: str | None = Field(None, description="Address of the remote sandbox, such as http://host:8080.")
    concurrency: int | None = Field(None, ge=1, le=1024, description="Programs at once; null: this rank's cores.")
    test_seconds: float = Field(6.0, gt=0, description="Wall seconds of one stdin/stdout test.")
    total_seconds: float = Field(30.0, gt=0, description="Wall seconds of all tests of a program together.")
    memory_mib: int = Field(
        1024,
        ge=64,
        description="Address space of each of the program's processes and, under bubblewrap, memory of all of them "
        "together (looked at 20 times a second), in MiB.",
    )
    processes: int = Field(32, ge=1, description="Processes and threads of a program at once.")
    file_mib: int = Field(16, ge=1, description="Largest file that it may write, in MiB; all together four times that.")
    output_mib: int = Field(4, ge=1, description="Output that is taken from it, in MiB; more fails the test.")
    import_folders: list[str] = Field(
        default_factory=list, description="Folders of Python packages that programs may import, mounted read-only."
    )


@dataclass(frozen=True)
class SandboxReport:
    """What came of a job: results of its tests, or what went wrong with running them."""

    results: list[tuple[bool, str]]  # (passed, detail) of the tests that ran
    problem: str = ""  # why there are no results
    timed_out: bool = False


@dataclass(frozen=True)
class _Slot:
    """A place for one job at a time, with its own users when root starts it."""

    program_user: int | None
    judge_user: int | None


@dataclass
class LocalSandbox:
    """Runs jobs on this machine. Threads may share it; as many jobs run at once as it has slots."""

    config: SandboxConfig
    cores: int
    _folder: Path = field(init=False)
    _slots: queue.Queue[_Slot] = field(init=False)
    _claims: list[socket.socket] = field(init=False)  # on the slots' users

    def __post_init__(self) -> None:
        """Raises UserError when bubblewrap or libseccomp is missing or does not work here."""
        self._isolated = self.config.kind == "bubblewrap"
        if self._isolated and shutil.which("bwrap") is None:
            raise UserError(
                "reward.sandbox.kind = bubblewrap, but there is no bwrap on this machine: install the package "
                "bubblewrap, or set reward.sandbox.kind to remote, or to process if you trust the programs"
            )
        self._filter = _seccomp_filter() if self._isolated else b""
        self._temporary = tempfile.TemporaryDirectory(prefix="megarl-sandbox-")
        self._folder = Path(self._temporary.name)
        self._folder.chmod(0o755)
        for source in (Path(__file__).parent / "inside").glob("*.py"):
            shutil.copy(source, self._folder / source.name)
        compileall.compile_dir(self._folder, quiet=2)
        as_root = self._isolated and os.geteuid() == 0
        self._slots, self._claims = queue.Queue(), []
        try:
            for slot in self._slots_with_users() if as_root else [_Slot(None, None)] * self._count:
                self._slots.put(slot)
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        """Nothing, or a UserError when a program that is right does not pass here."""
        report = self.run({"kind": "stdin", "program": "print(6*7)", "inputs": [""], "outputs": ["42\n"]})
        if not report.results or not report.results[0][0]:
            problem = report.problem or report.results[0][1]
            raise UserError(f"reward.sandbox.kind = {self.config.kind} does not work on this machine: {problem}")

    @property
    def _count(self) -> int:
        return self.config.concurrency or self.cores

    def run(self, job: dict[str, Any]) -> SandboxReport:
        """The report of one job (`megarl.reward.code.job_of`); waits for a free slot."""
        slot = self._slots.get()
        try:
            return self._run(job, slot)
        finally:
            self._slots.put(slot)

    def close(self) -> None:
        """Nothing; the helper files are gone, and others may have the users."""
        for claim in self._claims:
            claim.close()
        self._temporary.cleanup()

    def _slots_with_users(self) -> list[_Slot]:
        """Slots of two users each that no other sandbox of this machine has, in whichever process and run.

        Were they shared, one's processes would count against another's limit. Raises UserError when too few are left.
        """
        slots: list[_Slot] = []
        for user in range(FIRST_USER, LAST_USER, 2):
            if len(slots) < self._count and self._claims_user(user):
                slots.append(_Slot(user, user + 1))
        if len(slots) < self._count:
            raise UserError(
                f"reward.sandbox.concurrency = {self._count}, but of the {(LAST_USER - FIRST_USER) // 2} pairs of "
                f"users for programs on this machine only {len(slots)} are not in use"
            )
        return slots

    def _claims_user(self, user: int) -> bool:
        """Whether the user is this sandbox's from now on; else it is another's."""
        try:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._claims.append(claim)
            # A name that only one socket has, and that is free again when its process ends, however that comes.
            claim.bind(f"\0megarl-sandbox-user-{user}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"reward.sandbox.concurrency = {self._count}: no user can be claimed ({error.strerror})"
                ) from error
            self._claims.pop().close()
            return False
        return True

    def _run(self, job: dict[str, Any], slot: _Slot) -> SandboxReport:
        config = self.config
        nonce = secrets.token_bytes(16)
        scratch = None if self._isolated else tempfile.mkdtemp(prefix="megarl-program-")
        body = marshal.dumps(
            {"all": False}
            | job
            | {
                "nonce": nonce,
                "folder": scratch,
                "test_seconds": config.test_seconds,
                "total_seconds": min(config.total_seconds, config.test_seconds * _tests_of(job)),
                "output_bytes": config.output_mib * 2**20,
            }
        )
        try:
            with self._seccomp_file() as seccomp:
                text, problem = _communicate(
                    self._command(slot, seccomp, calls=job["kind"] != "stdin"),
                    body,
                    (seccomp,) if seccomp >= 0 else (),
                    config.total_seconds,
                )
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        return _report(text, nonce, problem)

    @contextlib.contextmanager
    def _seccomp_file(self) -> Any:
        """A file descriptor of the filter for bwrap to read, or -1."""
        if not self._filter:
            yield -1
            return
        number = os.memfd_create("seccomp")
        try:
            os.write(number, self._filter)
            os.lseek(number, 0, os.SEEK_SET)
            yield number
        finally:
            os.close(number)

    def _command(self, slot: _Slot, seccomp: int, *, calls: bool) -> list[str]:
        inside = "/judge" if self._isolated else str(self._folder)
        settings = {
            "program_user": slot.program_user,
            "judge_user": slot.judge_user,
            "alone": self._isolated,
            "calls": calls,
            "limits": {
                "memory_bytes": self.config.memory_mib * 2**20,
                "cpu_seconds": max(1, round(self.config.total_seconds)),
                "file_bytes": self.config.file_mib * 2**20,
                # Without users of their own, programs share the count with everything else that this user runs.
                "processes": self.config.processes if self._isolated else None,
            },
        }
        python = os.path.realpath(sys.executable)
        program = [python, "-I", "-S", "-B", f"{inside}/supervisor.py", inside, marshal.dumps(settings).hex()]
        if not self._isolated:
            return program
        return [*self._wrapper(slot, seccomp), "--", *program]

    def _wrapper(self, slot: _Slot, seccomp: int) -> list[str]:
        options = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
        options += ["--setenv", "LANG", "C.UTF-8", "--setenv", "HOME", "/tmp"]
        # Numerical libraries would start a thread a core, and threads count as processes.
        options += ["--setenv", "OMP_NUM_THREADS", "1", "--setenv", "OPENBLAS_NUM_THREADS", "1"]
        if slot.program_user is None:
            options += ["--unshare-user"]
        else:
            # The supervisor needs to hand out users and to end their processes; programs start without any of it.
            options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
            options += ["--cap-add", "CAP_KILL"]
        for folder in self._readable():
            # Folders on the way, such as a closed home, must let the program through.
            for parent in reversed(Path(folder).parents[:-1]):
                options += ["--perms", "0755", "--dir", str(parent)]
            options += ["--ro-bind", folder, folder]
        for link in ("bin", "sbin", "lib", "lib64"):
            path = Path("/") / link
            if path.is_symlink():
                options += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                options += ["--ro-bind", str(path), str(path)]
        options += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
        options += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", str(self._folder), "/judge"]
        options += ["--perms", "1777", "--size", str(4 * self.config.file_mib * 2**20), "--tmpfs", "/tmp"]
        return [*options, "--remount-ro", "/dev", "--chdir", "/tmp", "--seccomp", str(seccomp)]

    def _readable(self) -> list[str]:
        folders = ["/usr", sys.base_prefix, *self.config.import_folders]
        return [folder for folder in dict.fromkeys(folders) if folder == "/usr" or not folder.startswith("/usr/")]


def _tests_of(job: dict[str, Any]) -> int:
    """How many tests a job has, as far as its form tells: a file of tests counts as many."""
    return len(job.get("inputs") or job.get("asserts") or range(1000))


def _communicate(command: Sequence[str], body: bytes, files: Sequence[int], seconds: float) -> tuple[bytes, str]:
    """(standard output, problem); the process group is gone when it returns, by the deadline at the latest."""
    until = time.monotonic() + seconds + START_SECONDS
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=files,
        start_new_session=True,
        bufsize=0,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output, errors, problem = bytearray(), bytearray(), ""
    reading = {process.stdout.fileno(): output, process.stderr.fileno(): errors}
    os.set_blocking(process.stdin.fileno(), False)
    writing, offset = {process.stdin.fileno()}, 0
    try:
        while process.stdout.fileno() in reading and not problem:
            left = until - time.monotonic()
            if left <= 0:
                problem = f"took more than {seconds:g} s"
                break
            readable, writable, _ = select.select(list(reading), list(writing), [], left)
            for number in writable:
                with contextlib.suppress(BrokenPipeError):
                    offset += os.write(number, body[offset : offset + (1 << 20)])
                if offset >= len(body) or process.poll() is not None:
                    process.stdin.close()
                    writing.clear()
            for number in readable:
                piece = os.read(number, 65536)
                if not piece:
                    del reading[number]
                reading.get(number, bytearray()).extend(piece)
                if len(output) > LARGEST_REPORT or len(errors) > LARGEST_REPORT:
                    problem = "the sandbox said too much"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
    if not output and not problem:
        lines = errors.decode(errors="replace").strip().splitlines()
        problem = lines[-1][:300] if lines else "the sandbox ended without a word"
    return bytes(output), problem


def _report(text: bytes, nonce: bytes, problem: str) -> SandboxReport:
    """The report, believed only when it carries the job's nonce."""
    if problem:
        return SandboxReport([], problem, timed_out=problem.startswith("took more than"))
    if not secrets.compare_digest(text[: len(nonce)], nonce):
        return SandboxReport([], "the sandbox's report is not signed by its nonce")
    results = [(passed is True, str(detail)) for passed, detail in marshal.loads(text[len(nonce) :])]
    return SandboxReport(results)


def _seccomp_filter() -> bytes:
    """The BPF program of the forbidden calls. Raises UserError when libseccomp is missing."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            "reward.sandbox.kind = bubblewrap needs pyseccomp and libseccomp: pip install 'megarl[code]' and the "
            f"system package libseccomp2 ({error})"
        ) from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in FORBIDDEN_CALLS:
        # clone3 hides its flags from filters; libraries fall back to clone when it does not exist.
        action = pyseccomp.ERRNO(38 if name == "clone3" else 1)
        with contextlib.suppress(ValueError, OSError):  # a call that this libseccomp does not know
            rules.add_rule(action, name)
    for flag in (1 << bit for bit in range(32) if NEW_NAMESPACES >> bit & 1):
        rules.add_rule(pyseccomp.ERRNO(1), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
