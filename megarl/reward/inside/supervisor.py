"""The sandbox's first process: takes the job, has the program run, and signs the verdict with the job's nonce.

Started as `python -I supervisor.py FOLDER SETTINGS`; the job comes on standard input, the verdict, behind the nonce,
goes to standard output, both as `marshal` writes them. The process that forks the programs is made before the job is
read. Modules that take long to import (json, re, enum and what needs them) are left out where they can be.
"""

import os
import sys

sys.path.insert(0, sys.argv[1])

import _socket
import marshal
import select
import time

import compare
import runner
import usage

MOST_ERROR_TEXT = 2000  # bytes of a program's standard error that are kept


class Forks:
    """The supervisor's end of the process that forks programs."""

    def __init__(self, socket, process):
        self._socket, self.process = socket, process

    def start(self, order, files):
        """The process id of a new run; `files` (input, output, errors) are closed here."""
        body = marshal.dumps(order)
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(n.to_bytes(4, sys.byteorder) for n in files))]
        self._socket.sendmsg([runner.number_bytes(len(body))], rights)
        self._socket.sendall(body)
        for number in files:
            os.close(number)
        return self._number()

    def status(self):
        """The wait status of the run, once it and all that it started have ended."""
        return self._number()

    def _number(self):
        data = b""
        while len(data) < 4:
            piece = self._socket.recv(4 - len(data))
            if not piece:
                raise EOFError("the process that forks programs is gone")
            data += piece
        return int.from_bytes(data, "little")


class Watch:
    """Looks now and then at what all of the program's processes hold together."""

    def __init__(self, job, settings, spared):
        self._spared = {1, os.getpid(), *spared}
        self._most = settings["limits"]["memory_bytes"]
        self._alone = settings["alone"]
        self._next = time.monotonic() + usage.EVERY

    def wait(self, reading, writing, until):
        """(ready to read, ready to write, None or what is wrong) as soon as there is any, or after a moment."""
        left = until - time.monotonic()
        ready = select.select(list(reading), list(writing), [], max(0, min(left, usage.EVERY)))
        problem = None
        if self._alone and time.monotonic() >= self._next:
            problem = usage.excess(self._spared, self._most)
            self._next = time.monotonic() + usage.EVERY
        return ready[0], ready[1], problem


def program_pipe(user):
    """A pipe that belongs to the program's user, who may so open /dev/stdin and /dev/stdout."""
    if user is None:
        return os.pipe()
    os.seteuid(user)
    try:
        return os.pipe()
    finally:
        os.seteuid(0)


def run_scripts(forks, job, settings):
    """[[passed, detail], ...] of stdin/stdout tests."""
    results = []
    until = time.monotonic() + job["total_seconds"]
    for given, expected in zip(job["inputs"], job["outputs"]):
        seconds = min(job["test_seconds"], until - time.monotonic())
        output, problem = _run_script(forks, job, settings, given.encode(), max(0.0, seconds))
        if problem is None and not compare.same_output(expected, output.decode(errors="replace")):
            problem = "wrong output"
        results.append([problem is None, problem or ""])
        if problem is not None and not job["all"]:
            break
    return results


def _run_script(forks, job, settings, given, seconds):
    """(output, None or what went wrong) of one run."""
    in_read, in_write = program_pipe(settings["program_user"])
    out_read, out_write = program_pipe(settings["program_user"])
    err_read, err_write = program_pipe(settings["program_user"])
    order = {"kind": "script", "source": job["program"], "folder": job["folder"]}
    process = forks.start(order, [in_read, out_write, err_write])
    for number in (in_write, out_read, err_read):
        os.set_blocking(number, False)
    watch = Watch(job, settings, [forks.process])
    output, errors, problem = _exchange(job, watch, given, seconds, in_write, out_read, err_read)
    if problem is not None:
        _kill(process)
    status = forks.status()
    if problem is None and status != 0:
        code = os.waitstatus_to_exitcode(status)
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        problem = how + (f": {last[0][:200]}" if last else "")
    return output, problem


def _exchange(job, watch, given, seconds, in_write, out_read, err_read):
    """(output, errors, problem): feeds the input and gathers what comes, until both outputs are closed."""
    output, errors, offset = bytearray(), bytearray(), 0
    until = time.monotonic() + seconds
    reading, writing, problem = {out_read, err_read}, {in_write}, None
    while reading and problem is None:
        readable, writable, problem = watch.wait(reading, writing, until)
        if time.monotonic() >= until:
            problem = f"took more than {seconds:.3g} s"
        for number in writable:
            try:
                offset += os.write(number, given[offset : offset + 65536])
            except BlockingIOError:
                continue
            except OSError:
                offset = len(given)  # the program does not read on
            if offset >= len(given):
                os.close(number)
                writing.clear()
        for number in readable:
            piece = os.read(number, 65536)
            if not piece:
                reading.discard(number)
            elif number == out_read:
                output += piece
                if len(output) > job["output_bytes"]:
                    problem = f"wrote more than {job['output_bytes']} bytes"
            elif len(errors) < MOST_ERROR_TEXT * 10:
                errors += piece
    for number in (*writing, out_read, err_read):
        os.close(number)
    return bytes(output), bytes(errors[-MOST_ERROR_TEXT:]), problem


def run_judge(forks, job, settings):
    """[[passed, detail], ...] of tests that call into the program; they run in a process of their own."""
    to_program, from_judge = os.pipe()
    from_program, to_judge = os.pipe()
    results_read, results_write = os.pipe()
    err_read, err_write = os.pipe()
    order = {"kind": "module", "source": job["program"], "folder": job["folder"]}
    process = forks.start(order, [to_program, to_judge, err_write])
    judge = os.fork()
    if judge == 0:
        os.close(results_read)
        os.close(err_read)
        _judge(job, settings, from_judge, from_program, results_write)
    for number in (from_judge, from_program, results_write):
        os.close(number)
    watch = Watch(job, settings, [forks.process, judge])
    until = time.monotonic() + job["total_seconds"]
    report, problem = _gather(watch, results_read, err_read, until, job["output_bytes"])
    _kill(judge)
    os.waitpid(judge, 0)
    _kill(process)
    forks.status()
    if problem is not None:
        return [[False, problem]]
    # Written by the judge, which no program reaches into; empty when something ended it.
    return marshal.loads(report) if report else [[False, "the tests were ended"]]


def _judge(job, settings, requests, answers, results):
    """Never returns; runs the tests and writes their results."""
    status = 1
    try:
        os.setsid()
        runner.become(settings["judge_user"])
        runner.limit({**settings["limits"], "cpu_seconds": None})
        if settings["judge_user"] is None:
            hide()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        import judge

        program = judge.Program(os.fdopen(requests, "wb"), os.fdopen(answers, "rb"))
        try:
            found = judge.run_tests(program, job)
        except judge.ProgramEnded:
            found = [[False, "the program ended before its tests"]]
        except BaseException as error:
            found = [[False, f"{type(error).__name__}: {error}"[:300]]]
        with os.fdopen(results, "wb") as stream:
            stream.write(marshal.dumps(found))
        status = 0
    finally:
        os._exit(status)


def hide():
    """Nothing; processes of the same user can no longer look into this one (PR_SET_DUMPABLE)."""
    import ctypes

    if ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE) failed")


def _gather(watch, results, errors, until, most):
    """(what came on `results` until its end, None or a problem); drains `errors` meanwhile."""
    report, reading = bytearray(), {results, errors}
    while results in reading:
        readable, _, problem = watch.wait(reading, (), until)
        if problem is not None:
            return b"", problem
        if time.monotonic() >= until:
            return b"", "took too long"
        for number in readable:
            piece = os.read(number, 65536)
            if not piece:
                reading.discard(number)
            elif number == results:
                report += piece
                if len(report) > most:
                    return b"", "the tests reported too much"
    return bytes(report), None


def _kill(process):
    for kill in (os.killpg, os.kill):
        try:
            kill(process, runner.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def main():
    """Nothing; one job, one verdict."""
    settings = marshal.loads(bytes.fromhex(sys.argv[2]))
    # `_socket` itself: importing `socket` would take longer than most programs run.
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    if settings["calls"]:
        import values  # noqa: F401 - both sides of the calls need it: imported once, before they part
    forking = os.fork()
    if forking == 0:
        ours.close()
        os.close(0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        runner.serve_forks(theirs, settings["program_user"], settings["limits"], settings["alone"])
    theirs.close()
    if settings["judge_user"] is None:
        hide()
    job = marshal.loads(sys.stdin.buffer.read())
    forks = Forks(ours, forking)
    results = run_scripts(forks, job, settings) if job["kind"] == "stdin" else run_judge(forks, job, settings)
    sys.stdout.buffer.write(job["nonce"] + marshal.dumps(results))
    sys.stdout.buffer.flush()
    os._exit(0)


main()
