"""A bare device proxy for the tests of the rank side: no zygote, no shim, no control socket.

python device_process.py DEVICE_DIR SPEC      SPEC: JSON, see `launcher.py`
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import traceback

DEADLINE_S = 60.0


def main() -> None:
    spec = json.loads(sys.argv[2])
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[1])
    import _ergo_device

    proxy = _ergo_device.Proxy("cpu")

    def control() -> None:
        try:
            if spec["shared"]:
                shared = [tuple(pair) for pair in spec["shared"]]
                everybody = list(range(max(spec["table"]) + 1))
                proxy.connect(spec["self"], spec["table"], "token", shared, [], DEADLINE_S, spec["board"], everybody)
            for rank, descriptor in spec["rings"]:
                proxy.attach(rank, descriptor, DEADLINE_S)
            proxy.run(DEADLINE_S)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        print("ready", flush=True)
        for line in sys.stdin:  # the launcher closes its end when it is done, or dies
            if line == "trim\n":
                ctypes.CDLL(None).malloc_trim(0)
                print("trimmed", flush=True)
        os._exit(0)

    threading.Thread(target=control, daemon=True).start()
    proxy.serve()


main()
