"""Memory of a device that is the CPU: what is freed is used again, the last first, and not kept without end."""

from __future__ import annotations

import os
import subprocess
import sys

from proxy_runtime.device.client import NativeBuild

SCRIPT = """
import torch, _ergo_device
_ergo_device.keep_freed_memory()
first, second = torch.empty(40000), torch.empty(40000)
was = [second.data_ptr(), first.data_ptr()]
del first, second
between = torch.empty(30000)
print(torch.empty(40000).data_ptr() in was, torch.empty(0).numel(), torch.ones(3).sum().item())
held = [torch.empty(40000) for _ in range(2)]
print(sorted(each.data_ptr() for each in held) == sorted(was), all(p % 64 == 0 for p in was))
del held
for n in range(2000):  # 2,000 sizes of a MB and more
    torch.zeros((1 << 18) + 64 * n)
# Not ru_maxrss, which begins with what the process had that forked this one.
most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(most.split()[1]) < (1 << 20))
conv = torch.nn.Conv2d(3, 8, 3)
print(torch.equal(conv(torch.ones(2, 3, 16, 16)), conv(torch.ones(2, 3, 16, 16))))
"""


def test_freed_memory_is_used_again_and_not_kept_without_end(device_build: NativeBuild) -> None:
    made = device_build.device_dir  # type: ignore[attr-defined]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": str(made)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["True", "0", "3.0", "True", "True", "True", "True"]
