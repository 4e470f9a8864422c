"""A process that ends with the one that started it, however that one dies; signals come through the same pipe."""

import os
import threading


def end_with_parent() -> None:
    """End this process when the parent's end of our standard input closes.

    What the parent writes there is the number of a signal: a cluster that signals both of us asks once.
    """
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while told := os.read(pipe, 1):
            os.kill(os.getpid(), told[0])  # wakes the main thread, where `raise_signal` would not
        os._exit(1)

    threading.Thread(target=wait, name="end_with_parent", daemon=True).start()
