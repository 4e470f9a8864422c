"""`subprocess.Popen([sys.executable, …])` without seconds of imports: forked from a process that has imported torch.

`patch()` replaces `subprocess.Popen` in this process. Scripts, torchrun and modules of recipes/ are then forked by a
server that has imported torch, Lightning, DeepSpeed and the rest once, and behave as the command line says: own
process id, environment and standard streams, real signals, real exit status. Their child processes are forked by the
same server. Everything else is started as usual: other programs, `-c`, other modules, other options.

A fork is not a new interpreter: modules are already imported, the interpreter does not finalize at exit, and
/proc/<pid>/environ is the server's. Tests that depend on these are marked with `@pytest.mark.fresh_python`.
"""

import array
import atexit
import contextlib
import gc
import importlib
import itertools
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parent.parent
MARK_FOLDER = Path(tempfile.gettempdir()) / "warm_python_marks"  # see `started.living`
_REAL = subprocess.Popen
# imported by most runs eventually; some may not exist in other versions
_MODULES = (
    "recipes",  # first, as in conftest.py
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "hydra",
    "lightning.pytorch",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "multiprocessing.popen_fork",
    "multiprocessing.synchronize",
    "optuna",
    "rich.live",
    "safetensors.torch",
    "tokenizers",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "wandb",
    "callbacks",
)
_ONE_OF_OURS = ("recipes", "callbacks")
# composed once by the server, so that forks have Hydra's trees and these signatures in their caches
_STRATEGIES = ("single", "ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3")
_COMPOSED = (
    "tokenizer=bytes data=text_files ~callbacks.report ~callbacks.sample_text",
    "data=random_tokens model=gpt2_nano callbacks=[grad_norm,loss_scale]",
)


class State:
    """State of this process: the server's address, and whether the server is used."""

    address: str | None = None
    is_on = True
    server: subprocess.Popen[bytes] | None = None


def patch() -> None:
    """Start Python processes warm from now on, in this process and in those started this way."""
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    torchrun = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    if torchrun in sys.modules:  # torchrun has already imported the class
        sys.modules[torchrun].Popen = WarmPopen  # type: ignore[attr-defined]


def start() -> str:
    """Start the server and return its address; do not wait, because it imports while tests are collected."""
    State.address = f"{tempfile.mkdtemp(prefix='warm_')}/socket"
    environ = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", __file__, State.address]
    State.server = _REAL(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    return State.address


def stop() -> None:
    """Kill the remaining processes and the server."""
    if State.server is not None and State.server.stdin is not None:
        State.server.stdin.close()
        State.server.wait()
        shutil.rmtree(Path(str(State.address)).parent)
        State.server = State.address = None


class WarmPopen(_REAL):  # type: ignore[type-arg, misc, valid-type]
    """A `subprocess.Popen` that forks Python from the server if possible."""

    _connection: socket.socket | None = None

    def _execute_child(self, *arguments: Any) -> None:
        names = _REAL._execute_child.__code__.co_varnames[1 : 1 + len(arguments)]  # type: ignore[attr-defined]
        given = dict(zip(names, arguments, strict=True))
        request = _request(given)
        if request is None:
            super()._execute_child(*arguments)
            return
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        fds = [standard if fd == -1 else fd for standard, fd in enumerate(streams)]
        self._connection = _connect()
        message = json.dumps(request).encode()
        socket.send_fds(self._connection, [len(message).to_bytes(8, "big")], fds)
        self._connection.sendall(message)
        self.pid = int.from_bytes(_receive(self._connection, 8), "big")
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in names if name in _PIPES))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        if wait_flags and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        status = int.from_bytes(_receive(self._connection, 8), "big")
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, *arguments: Any, **more: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*arguments, **more)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _request(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request for the server; None if the command is not Python or needs a new interpreter."""
    command = given["args"]
    if isinstance(command, (str, bytes, os.PathLike)) or given["shell"]:
        return None
    words = [os.fsdecode(word) for word in command]
    path = (given["env"] or os.environ).get("PATH")
    if words[0] == "/usr/bin/env" and shutil.which(words[1], path=path) == sys.executable:
        words = [sys.executable, *words[2:]]  # how W&B's agent starts a trial
    other = ("executable", "preexec_fn", "pass_fds", "gid", "gids", "uid")
    if not State.is_on or words[0] != sys.executable or any(given.get(name) for name in other):
        return None
    parsed = _parse(words[1:])
    if parsed is None:
        return None
    environ = os.environ if given["env"] is None else given["env"]
    return parsed | {
        "environ": {os.fsdecode(key): os.fsdecode(value) for key, value in environ.items()},
        "folder": os.fsdecode(given["cwd"] or os.getcwd()),
        "session": bool(given["start_new_session"]),
        "parent": os.getpid(),
        "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "group": given.get("process_group", -1),
        "orig_argv": words,
    }


def _parse(words: list[str]) -> dict[str, Any] | None:
    """Parse `[-P] [-u] (-m module | script) …` into kind, what, arguments; None if it must be started as usual."""
    safe = False
    while words and words[0] in ("-P", "-u"):
        safe |= words.pop(0) == "-P"
    if len(words) >= 2 and words[0] == "-m":
        is_ours = words[1] in ("torch.distributed.run", "wandb") or words[1].startswith("recipes.")
        module = {"kind": "-m", "what": words[1], "rest": words[2:], "safe": safe}
        return module if is_ours else None
    if words and not words[0].startswith("-"):
        return {"kind": "script", "what": words[0], "rest": words[1:], "safe": safe}
    return None


def _connect() -> socket.socket:
    address = State.address or start()
    ends = time.monotonic() + 120  # fifteen seconds of imports, under any other load
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > ends or (State.server is not None and State.server.poll() is not None):
                raise
        time.sleep(0.05)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the server of warm Pythons has ended")
        data += more
    return data


class Server:
    """Forks processes, and reports to each client how its process ended."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._clients: dict[int, socket.socket] = {}  # by process id
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen(128)
        self._wakeup, theirs = os.pipe()
        os.set_blocking(theirs, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(theirs)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal

    def serve(self) -> None:
        """Serve until standard input closes."""
        while True:
            ready, _, _ = select.select([self._listening, self._wakeup, 0], [], [])
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if 0 in ready and not os.read(0, 1):
                self._end()
                return
            if self._listening in ready:
                self._accept()

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_LEN(3 * 4))
        fds = array.array("i", ancillary[0][2]).tolist()
        request = json.loads(_receive(connection, int.from_bytes(size, "big")))
        gc.disable()
        pid = os.fork()
        if not pid:
            _become(request, fds, self._address)
        gc.enable()
        for fd in fds:
            os.close(fd)
        self._clients[pid] = connection
        connection.sendall(pid.to_bytes(8, "big"))

    def _reap(self) -> None:
        while self._clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if (client := self._clients.pop(pid, None)) is not None:
                with contextlib.suppress(OSError):  # the client is no longer waiting
                    client.sendall(status.to_bytes(8, "big"))
                client.close()

    def _end(self) -> None:
        for pid in self._clients:
            os.kill(pid, signal.SIGKILL)
        os.unlink(self._address)


def _become(request: dict[str, Any], fds: list[int], address: str) -> NoReturn:
    """Turn this process into the one that the command line describes."""
    exit_code = 70  # the code below prints the error
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the server's: it still needs its folders
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])  # as inherited by a child
        if request["session"]:
            os.setsid()
        elif request["group"] >= 0:
            os.setpgid(0, request["group"])
        for standard, fd in enumerate(fds):
            os.dup2(fd, standard)
        os.closerange(3, 4096)
        # Python's originals remember the kind of file they were opened on: a file can seek, a pipe cannot
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        _take_environ(request["environ"])
        # where W&B writes a table before copying it: the first process to exit would delete the server's folder
        sys.modules["wandb.sdk.data_types._private"].MEDIA_TMP.name = tempfile.mkdtemp(dir=Path(address).parent)
        os.chdir(request["folder"])
        State.address, State.server = address, None
        _take_parent(request["parent"])
        patch()
        exit_code = _run(request)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(exit_code)


def _take_environ(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    if mark := environ.get("STARTED_BY_A_TEST"):
        MARK_FOLDER.mkdir(exist_ok=True)
        # all forks of this process inherit an open file with this name
        fd = os.open(MARK_FOLDER / mark.replace("/", "|"), os.O_RDWR | os.O_CREAT)
        os.set_inheritable(fd, True)
    import torch

    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


def _take_parent(parent: int) -> None:
    """Report the requesting process as the parent; forks of this process have it as their parent."""
    pid, real = os.getpid(), os.getppid
    os.getppid = lambda: parent if os.getpid() == pid else real()


def _run(request: dict[str, Any]) -> int:
    kind, what = request["kind"], request["what"]
    first = request["folder"] if kind == "-m" else str(Path(what).resolve().parent)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    base = [path for path in sys.path if path not in (str(ROOT), str(ROOT / "tests"))]
    sys.path[:] = [*([] if request["safe"] else [first]), *paths, *base]
    sys.orig_argv = request["orig_argv"]
    if not _finds_ours():
        for name in [name for name in sys.modules if name.partition(".")[0] in _ONE_OF_OURS]:
            del sys.modules[name]
    importlib.invalidate_caches()
    try:
        if kind == "-m":
            sys.argv = [what, *request["rest"]]
            sys.modules.pop("__main__", None)
            sys.modules["__main__"] = types.ModuleType("__main__")
            if what != "wandb":
                sys.modules.pop(what, None)  # it is executed again, as `__main__`
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [what, *request["rest"]]
            _run_script(what)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return int(ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _run_script(path: str) -> None:
    """Run a script like `runpy.run_path`, but keep its `__main__`: callbacks may be defined in it."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def _finds_ours() -> bool:
    """Return whether the path leads to the project already imported; otherwise it must be imported from there."""
    for entry in sys.path:
        for name in _ONE_OF_OURS:
            candidate = Path(entry or ".", name)
            if candidate.is_dir() or candidate.with_suffix(".py").is_file():
                return candidate.resolve() == ROOT / name
    return True


def _leave(exit_code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


def main(arguments: Sequence[str]) -> None:
    """Import, then serve."""
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            if name.startswith(_ONE_OF_OURS):
                raise
    _import_ours()
    _remember_the_processor()
    atexit.unregister(sys.modules["wandb.sdk.data_types._private"].MEDIA_TMP.cleanup)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    assert num_threads == 1, f"{num_threads} threads where processes are forked"
    gc.collect()
    gc.freeze()  # so that the child's garbage collector leaves these pages shared
    sys.modules["warm_python"] = sys.modules["__main__"]
    Server(arguments[0]).serve()


def _import_ours() -> None:
    import recipes
    from recipes.config import compose_and_check

    for module in pkgutil.walk_packages(recipes.__path__, "recipes."):
        importlib.import_module(module.name)
    for overrides, strategy in itertools.product(_COMPOSED, _STRATEGIES):
        compose_and_check([*overrides.split(), f"strategy={strategy}", "trainer.accelerator=cpu"])


def _remember_the_processor() -> None:
    """Cache the processor lookup: DeepSpeed repeats it three times, 1.2 s each, before loading DeepSpeedCPUAdam."""
    import cpuinfo

    found = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: dict(found)


if __name__ == "__main__":
    main(sys.argv[1:])
