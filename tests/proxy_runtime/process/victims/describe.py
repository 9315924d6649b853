"""Says in JSON what a rank finds around itself."""

import json
import os
from pathlib import Path

descriptors = {}
for name in os.listdir("/proc/self/fd"):
    try:
        descriptors[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        pass  # the listing's own
print(
    json.dumps(
        {
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "session": os.getsid(0),
            "cwd": os.getcwd(),
            "env": dict(os.environ),
            "descriptors": descriptors,
            "shm": os.listdir("/dev/shm"),
            "pids": [int(name) for name in os.listdir("/proc") if name.isdigit()],
            "personality": Path("/proc/self/personality").read_text().strip(),
            "interfaces": [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]],
        }
    )
)
