"""DataLoader whose processes survive a signal to the process group, so that their rank can still save."""

import os
import signal
import threading
from typing import Any, TypeVar

from torch.utils.data import DataLoader
from typing_extensions import override

Batch = TypeVar("Batch", covariant=True)


class SignalProofLoader(DataLoader[Batch]):
    """A DataLoader whose processes ignore SIGUSR1, and SIGTERM unless sent by their own rank.

    torchrun, `timeout` and systemd signal the whole process group. torch raises an error in the rank if a loader
    process exits, and the rank could then not save its last checkpoint.

    Args:
        dataset: As for `DataLoader`.
        **arguments: As for `DataLoader`, without `worker_init_fn`.
    """

    def __init__(self, dataset: Any, **arguments: Any) -> None:
        super().__init__(dataset, worker_init_fn=_ignore_group_signals, **arguments)

    @override
    def _get_iterator(self) -> Any:
        """Start the processes with SIGTERM blocked (torch 2.13).

        `worker_init_fn` is too late: OpenTelemetry, which W&B runs in the rank, restarts its threads in a forked
        process, and SIGTERM kills the process if any thread does not block it.
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
    # unlike a signal handler, sigwaitinfo reports the sender
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
