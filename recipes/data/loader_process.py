"""Loader processes that outlive a signal to the whole process group, so that their rank can still save."""

import os
import signal
import threading
from typing import Any, TypeVar

from torch.utils.data import DataLoader
from typing_extensions import override

Batch = TypeVar("Batch", covariant=True)


class SignalProofLoader(DataLoader[Batch]):
    """A DataLoader whose processes ignore SIGUSR1, and SIGTERM unless it comes from the rank itself.

    torchrun, `timeout` and systemd signal the whole process group. torch treats a loader process that ends as a crash
    of the run, which could then not save its last checkpoint.

    Args:
        dataset: As of DataLoader.
        **arguments: As of DataLoader, without `worker_init_fn`.
    """

    def __init__(self, dataset: Any, **arguments: Any) -> None:
        super().__init__(dataset, worker_init_fn=_ignore_group_signals, **arguments)

    @override
    def _get_iterator(self) -> Any:
        """Start the processes with SIGTERM blocked (torch 2.13).

        `worker_init_fn` is too late: OpenTelemetry, which W&B runs in the rank, starts its threads again in a forked
        process. SIGTERM is delivered to any thread that does not block it, and then ends the process.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return super()._get_iterator()  # type: ignore[no-untyped-call]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore_group_signals(worker: int) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_exit_on_parents_sigterm, name=f"signals_{worker}", daemon=True).start()


def _exit_on_parents_sigterm() -> None:
    # sigwaitinfo names the sender, which a signal handler does not
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
