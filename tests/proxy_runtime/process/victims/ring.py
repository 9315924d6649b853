"""Maps a memfd that it gets as a descriptor, closes the descriptor, then adds 1 to its first word on demand.

Words (64 bit): 0 counter, 1 go-ahead, last a pattern. With `leak-fd` or `leak-map`, does what a rank must not.
With `pinned`, a child has all but the first page, as it has a rank's pinned memory.
It maps by hand: Python's mmap keeps a duplicate of the descriptor.
"""

import ctypes
import mmap
import os
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
leak = sys.argv[2] if len(sys.argv) > 2 else ""

fd = int(sys.argv[1])
size = os.fstat(fd).st_size
address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
if leak != "leak-map":
    assert libc.madvise(address, 4096 if leak == "pinned" else size, mmap.MADV_DONTFORK) == 0
if leak != "leak-fd":
    os.close(fd)
words = (ctypes.c_uint64 * (size // 8)).from_address(address)
words[size // 8 - 1] = 0xC0FFEE
if os.fork() == 0:
    time.sleep(1000)
print("up")
while True:
    if words[1]:
        words[1] -= 1
        words[0] += 1
    time.sleep(0.001)
