"""A rank with children: one of its own, and one whose parent has ended (a daemon)."""

import os
import time

if os.fork() == 0:
    time.sleep(1000)
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
print("up")
time.sleep(1000)
