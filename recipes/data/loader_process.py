"""A process that loads data ends when its rank ends it, not when a cluster's signal reaches it as well."""

import os
import signal
import threading


def outlive_signals(worker: int) -> None:
    """For `DataLoader(worker_init_fn=…)`: heed SIGTERM from the rank alone; SIGUSR1 means nothing here.

    torchrun, `timeout` and systemd signal the whole process group. torch takes a loader process that ends for a crash
    of the run, which then could not save.

    Args:
        worker: Its number.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_for_parent, name=f"signals_{worker}", daemon=True).start()


def _end_for_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
