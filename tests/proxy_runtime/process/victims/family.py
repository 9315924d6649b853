"""A rank with children: one of its own, and daemons, whose parents have ended: one now, one more at each SIGUSR2."""

import os
import signal
import time


def daemon(*_: object) -> None:
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.wait()


if os.fork() == 0:
    time.sleep(1000)
daemon()
signal.signal(signal.SIGUSR2, daemon)
print("up")
while True:
    time.sleep(0.1)  # a signal that comes before a restored process is back in its sleep does not wake it
