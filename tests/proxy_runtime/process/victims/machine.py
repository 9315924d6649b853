"""Prints again and again what a script can tell of its machine: how memory is laid out, where its threads may run."""

import os
import subprocess
import threading
import time

first = min(os.sched_getaffinity(0))
ready, never = threading.Event(), threading.Event()
threads = []


def other() -> None:
    threads.append(threading.get_native_id())
    os.sched_setaffinity(0, {first})
    ready.set()
    never.wait()


threading.Thread(target=other, daemon=True).start()
ready.wait()
while True:
    child = subprocess.run(["cat", "/proc/self/personality"], capture_output=True, text=True, check=True).stdout.strip()
    with open("/proc/self/personality") as own:
        personality = own.read().strip()
    print(personality, child, *(sorted(os.sched_getaffinity(thread)) for thread in (os.getpid(), *threads)))
    time.sleep(0.01)
