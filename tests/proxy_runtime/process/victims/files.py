"""Works with files of the job directory: one open since before the cut, a mapped one, new ones, a lock."""

import fcntl
import mmap
import os
import time

journal = open("journal", "a")  # noqa: SIM115  open over the cut
fcntl.flock(journal, fcntl.LOCK_EX)
with open("lower.bin", "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
os.rename("old-directory", "new-directory")
number = 0
while True:
    journal.write(f"{number}\n")
    journal.flush()
    mapped[0] = number % 256
    with open(f"file-{number % 8}", "w") as file:
        file.write(str(number))
    print(number)
    number += 1
    time.sleep(0.005)
