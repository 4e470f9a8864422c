"""DataLoader whose processes survive a signal to the process group, and whose rank never waits for them needlessly."""

import errno
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from typing import Any, TypeVar

from torch.utils.data import DataLoader
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.runtime.signals import waiting

_BAD_SAMPLE = "The run has ended: a sample of its data cannot be used."  # while samples are read

Batch = TypeVar("Batch", covariant=True)
_SOCKET_BYTES = 107  # of the path of a socket, on Linux
_SOCKET_NAME = "/listener-12345678"  # as multiprocessing names sockets, in a folder like the next one
_FOLDER_NAME = "/pymp-12345678"
_SHARED_MEMORY = "/dev/shm"
_NO_SHARED_MEMORY = re.compile(r"unable to \w+ shared memory|</torch_\w+>.*No space left|killed by signal: Bus error")
# torch passes on a traceback, and makes an exception of several arguments a RuntimeError
_MISTAKE = re.compile(r"^recipes\.errors\.ConfigError: (.+?): (.+); type (.+)$", re.MULTILINE)
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


class SignalProofLoader(DataLoader[Batch]):
    """A DataLoader whose processes ignore SIGUSR1 and Ctrl-C, and SIGTERM unless sent by their own rank.

    torchrun, `timeout`, systemd and a terminal signal the whole process group. torch raises an error in the rank if a
    loader process exits, and the rank could then not save its last checkpoint.

    Args:
        dataset: As for `DataLoader`.
        **arguments: As for `DataLoader`. `worker_init_fn` is replaced: Lightning, which makes some loaders anew from
            their attributes (2.6.6), passes the one of this class.
    """

    def __init__(self, dataset: Any, **arguments: Any) -> None:
        super().__init__(dataset, **arguments | {"worker_init_fn": _start_worker})

    @override
    def __iter__(self) -> Any:  # of batches; torch declares its own iterator class
        batches = super().__iter__()
        while True:
            with waiting("the next batch of data", stops=True):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                except ConfigError as mistake:
                    mistake.late = _BAD_SAMPLE
                    raise
                except RuntimeError as error:
                    raise explain(error, num_workers=self.num_workers) or error from None
            yield batch

    @override
    def _get_iterator(self) -> Any:
        """Start the processes with SIGTERM and SIGINT blocked, which they stay there (torch 2.13).

        `worker_init_fn` is too late: OpenTelemetry, which W&B runs in the rank, restarts its threads in a forked
        process, and SIGTERM kills the process if any thread does not block it.
        """
        if self.num_workers > 0:
            shorten_socket_paths()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            return super()._get_iterator()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def explain(error: RuntimeError, *, num_workers: int) -> ConfigError | None:
    """Return the mistake behind an error of a loader process: its own, or too little shared memory for its samples."""
    if found := _MISTAKE.findall(str(error)):  # the last: others are its causes
        mistake = ConfigError(*found[-1])
        mistake.late = _BAD_SAMPLE
        return mistake
    if num_workers == 0 or not _NO_SHARED_MEMORY.search(str(error)):
        return None
    size = shutil.disk_usage(_SHARED_MEMORY).total / 2**20 if os.path.isdir(_SHARED_MEMORY) else 0
    return ConfigError(
        f"loader.num_workers={num_workers}",
        f"loader processes pass samples through {_SHARED_MEMORY}, which has {size:,.3g} MiB and is full",
        "loader.num_workers=0, or in a container a larger one: docker run --shm-size=8g, or --ipc=host",
    )


def shorten_socket_paths() -> None:
    """Make multiprocessing put its sockets into a folder with a short path.

    Loader processes pass samples through sockets in the temporary folder. If their paths are too long, a thread of
    each process fails at every sample, and the rank waits for the first one (Python 3.11).

    Raises:
        ConfigError: There is no such folder.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder + _FOLDER_NAME + _SOCKET_NAME)) <= _SOCKET_BYTES:
        return
    process: Any = multiprocessing.process.current_process()
    config = process._config
    known = config.get("tempdir")
    if known is not None and len(os.fsencode(known + _SOCKET_NAME)) <= _SOCKET_BYTES:
        return
    for candidate in _SHORT_FOLDERS:
        try:
            short = tempfile.mkdtemp(prefix="pymp-", dir=candidate)
        except OSError:
            continue
        multiprocessing.util.Finalize(None, shutil.rmtree, args=(short, True), exitpriority=-100)
        config["tempdir"] = short  # read by `multiprocessing.util.get_temp_dir`; child processes inherit it
        return
    raise ConfigError(
        f"TMPDIR={folder}",
        f"paths of sockets in it are longer than {_SOCKET_BYTES} bytes, and loader processes need them",
        "TMPDIR=<a folder with a short path>, or loader.num_workers=0",
    )


def _start_worker(worker: int) -> None:
    _ignore_group_signals(worker)
    # by default, a sample that cannot be sent is dropped, and the rank waits for it
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(_exit_on_lost_sample)


def _exit_on_lost_sample(error: BaseException, sample: object) -> None:
    """End this process, which ends the rank, if the thread that sends its samples has failed."""
    print(f"A loader process cannot send a sample: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(errno.EIO)


def _ignore_group_signals(worker: int) -> None:
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_exit_on_parents_sigterm, name=f"signals_{worker}", daemon=True).start()


def _exit_on_parents_sigterm() -> None:
    # unlike a signal handler, sigwaitinfo reports the sender
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
