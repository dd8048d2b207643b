"""The program's side: runs it as a script, or loads it as a module and answers the judge's calls.

Each run is a fork of a process that was made before the job was read: nothing in its memory tells what is expected.
"""

import marshal
import os
import sys

SIGKILL = 9  # importing `signal` takes as long as a short program


def number_bytes(number):
    """Four bytes for a length, a process id or a wait status."""
    return number.to_bytes(4, "little")


def limit(limits):
    """Nothing; this process and its children are bounded from here on."""
    import resource

    for name, amount in (
        ("RLIMIT_AS", limits["memory_bytes"]),
        ("RLIMIT_CPU", limits["cpu_seconds"]),
        ("RLIMIT_FSIZE", limits["file_bytes"]),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_NOFILE", 128),
        ("RLIMIT_CORE", 0),
    ):
        if amount is not None:
            which = getattr(resource, name)
            hard = resource.getrlimit(which)[1]
            amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
            resource.setrlimit(which, (amount, amount))


def become(user):
    """Nothing; gives up root for good. A `user` of None stays what it is."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def run_script(source):
    """The exit status of the program as `__main__`, with everything that a script's end involves."""
    import atexit
    import io

    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8", errors="replace")
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="utf-8", errors="replace")
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout
    sys.argv = ["program.py"]
    status = 0
    names = fresh_module("__main__").__dict__
    try:
        exec(compile(source, "program.py", "exec"), names)
    except SystemExit as stopped:
        status = 0 if stopped.code is None else stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        _flush()
        names.clear()  # files that the program left open write what they hold
        _flush()
    except BaseException:
        status = status or 1
    return status


def _flush():
    """Nothing; what was printed is out, also from before the program put another stream in its place."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _exit(code=None):
    """Never returns; `exit` and `quit` of the built-ins, which the module `site` would bring."""
    raise SystemExit(code)


def fresh_module(name):
    """A new module that takes the place of any other of this name."""
    import builtins

    builtins.exit = builtins.quit = _exit
    module = type(sys)(name)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[name] = module
    return module


class ProgramServer:
    """Answers calls into the loaded program until the judge hangs up."""

    def __init__(self, requests, answers):
        import values

        self._values = values
        self._requests, self._answers = requests, answers
        self._objects = {}

    def serve(self, source):
        """Nothing; loads the program as module `solution`, reports how that went, then answers."""
        module = fresh_module("solution")
        self._reply(lambda: exec(compile(source, "solution.py", "exec"), module.__dict__))
        self._module = module
        while True:
            try:
                request = self._values.receive(self._requests)
            except EOFError:
                return
            self._reply(lambda request=request: self._act(request))

    def _reply(self, act):
        try:
            message = {"value": self._values.encode(act(), self._handle)}
        except self._values.TooLarge as error:
            message = {"raised": ["OverflowError"], "text": str(error)}
        except SystemExit:
            message = {"raised": ["SystemExit"], "text": ""}
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            message = {"raised": names, "text": str(error)[:500]}
        self._values.send(self._answers, message)

    def _act(self, request):
        action, target = request["action"], self._target(request.get("target"))
        if action == "names":
            public = getattr(target, "__all__", None) or [name for name in dir(target) if not name.startswith("_")]
            return list(public)
        if action == "get":
            return getattr(target, request["name"])
        if action == "set":
            return setattr(target, request["name"], self._decode(request["value"]))
        arguments = [self._decode(form) for form in request["arguments"]]
        named = {name: self._decode(form) for name, form in request.get("named", {}).items()}
        if action == "list":
            return list(target)
        if action == "call":
            return self._call(target, arguments, named, request["arguments"])
        import operator

        if action not in ALLOWED_OPERATORS:
            raise AttributeError(action)
        functions = {"len": len, "str": str, "repr": repr, "bool": bool, "hash": hash, "next": next}
        functions["isinstance"] = isinstance
        return (functions.get(action) or getattr(operator, action))(target, *arguments)

    def _call(self, target, arguments, named, forms):
        """[result, changed arguments]: what the program does to a list is seen by the judge, too."""
        result = target(*arguments, **named)
        changed = {}
        for place, (argument, form) in enumerate(zip(arguments, forms)):
            if isinstance(argument, (list, dict, set)) and self._values.encode(argument, self._handle) != form:
                changed[str(place)] = argument
        return [result, changed]

    def _target(self, number):
        return self._module if number is None else self._objects[number]

    def _handle(self, value):
        number = id(value)
        self._objects[number] = value
        return {"h": [number, type(value).__name__, callable(value)]}

    def _decode(self, form):
        return self._values.decode(form, self._from_handle)

    def _from_handle(self, form):
        if "h" in form:
            return self._objects[form["h"][0]]
        number = form["judge"]

        def ask_judge(*arguments):
            self._values.send(
                self._answers,
                {
                    "callback": number,
                    "arguments": [self._values.encode(one, self._handle) for one in arguments],
                },
            )
            return self._decode(self._values.receive(self._requests)["value"])

        return ask_judge


ALLOWED_OPERATORS = {
    *("len", "str", "repr", "bool", "hash", "next", "eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv"),
    *("isinstance", "getitem", "setitem", "delitem", "contains", "neg", "matmul", "floordiv", "mod", "pow"),
}


def serve_forks(orders, user, limits, alone):
    """Never returns; forks one run after another, as the supervisor orders on the Unix socket `orders`.

    An order comes with three open files: input, output, errors. `alone`: no process of another program is in sight, so
    that whatever is left over when a run ends can be killed.
    """
    supervisor = os.getppid()
    while True:
        head, attached, _, _ = orders.recvmsg(4, 1024)
        if not head:
            os._exit(0)
        files = [number for _, _, data in attached for number in memoryview(data).cast("i")]
        order = _rest_of_message(orders, int.from_bytes(head, "little"))
        child = os.fork()
        if child == 0:
            orders.close()
            _run(order, files, user, limits)
        for number in files:
            os.close(number)
        orders.sendall(number_bytes(child))
        _, status = os.waitpid(child, 0)
        _kill_group(child)
        if alone:
            _kill_all_but({1, supervisor, os.getpid()})
        orders.sendall(number_bytes(status))


def _rest_of_message(orders, size):
    body = bytearray()
    while len(body) < size:
        piece = orders.recv(min(size - len(body), 1 << 20))
        if not piece:
            os._exit(0)
        body += piece
    return marshal.loads(bytes(body))


def _kill_group(leader):
    try:
        os.killpg(leader, SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill_all_but(spared):
    """Nothing; no other process of this PID namespace is left (a bomb that forks meanwhile needs several passes)."""
    for _ in range(1000):
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in spared]
        alive = False
        for process in others:
            try:
                os.kill(process, SIGKILL)
                with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as stat:
                    alive = alive or stat.read().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                continue
        if not alive:
            return


def _run(order, files, user, limits):
    """Never returns; the program runs on the given files."""
    status = 1
    try:
        os.dup2(files[2], 2)
        os.setsid()
        become(user)
        os.chdir("/tmp" if order["folder"] is None else order["folder"])
        limit(limits)
        incoming, outgoing = (os.dup2(number, 60 + place) for place, number in enumerate(files[:2]))
        os.closerange(3, 60)
        if order["kind"] == "script":
            os.dup2(incoming, 0)
            os.dup2(outgoing, 1)
            os.closerange(60, 64)
            status = run_script(order["source"])
        else:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, 0)
            os.dup2(nowhere, 1)
            ProgramServer(os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb")).serve(order["source"])
            status = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        os._exit(status & 0xFF)
