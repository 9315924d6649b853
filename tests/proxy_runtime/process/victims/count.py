"""Prints numbers from 0, one line each, for ever or up to an argument; then ends with code 7."""

import sys
import time

for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 60):
    print(number)
    time.sleep(0.005)
sys.exit(7)
