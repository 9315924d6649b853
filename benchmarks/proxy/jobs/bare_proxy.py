"""A device proxy in a process that forks nothing, so that a simulator of the processor can run it.

bare_proxy.py FOLDER RING: prints a line when it serves the ring behind the descriptor, ends with its standard input.
"""

from __future__ import annotations

import sys
import threading

import torch

_DEADLINE_S = 300.0


def main() -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[1])
    import _ergo_device

    proxy = _ergo_device.Proxy("cpu")

    def control() -> None:
        proxy.attach(0, int(sys.argv[2]), _DEADLINE_S)
        proxy.run(_DEADLINE_S)
        print("serving", flush=True)
        sys.stdin.read()
        proxy.shut_down()

    threading.Thread(target=control).start()
    proxy.serve()


main()
