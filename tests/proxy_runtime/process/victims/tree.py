"""Two processes that count in words of shared rings, which only the keeper holds open."""

import mmap
import os
import subprocess
import sys
import time


def count(path: str, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    words = memoryview(mmap.mmap(fd, os.fstat(fd).st_size)).cast("Q")
    os.close(fd)
    while True:
        words[offset] += 1
        time.sleep(0.002)


if len(sys.argv) > 2:
    count(sys.argv[1], int(sys.argv[2]))
first, second = os.environ["RINGS"].split(",")
subprocess.Popen([sys.executable, __file__, f"/proc/999/fd/{second}", "1100"])
print("started", flush=True)
count(f"/proc/999/fd/{first}", 1100)
