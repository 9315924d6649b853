"""Holds much memory (MiB as argument), so that a dump takes a while, and says that it is alive."""

import sys
import time

block = bytearray(b"\x5a" * (int(sys.argv[1]) << 20))
number = 0
while True:
    print(number)
    number += 1
    time.sleep(0.005)
