"""What cannot be done raises what torch raises, or one sentence that says what to do."""

import io
import os
import sys

import torch
from expect import raises

x = torch.ones(3, 4, device="cuda")
raises(RuntimeError, "shape", lambda: x @ x)
raises(RuntimeError, "size", lambda: x + torch.ones(5, device="cuda"))
raises(IndexError, "out of range", lambda: x.sum(7))
raises(TypeError, "", lambda: x.numpy())
raises(RuntimeError, "same device", lambda: x + torch.ones(3, 4))
raises(RuntimeError, "same device", lambda: torch.ones(4).add_(x[0]))
raises(RuntimeError, "dlpack", lambda: torch.utils.dlpack.to_dlpack(x))
raises(RuntimeError, "device proxy", lambda: x.__dlpack__())
raises(RuntimeError, "device proxy", lambda: x.__cuda_array_interface__)
raises(RuntimeError, "process", lambda: x.untyped_storage()._share_cuda_())
raises(NotImplementedError, "quantize on the CPU", lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8))
raises(RuntimeError, "invalid device ordinal", lambda: torch.Generator(device="cuda:1"))
raises(torch.linalg.LinAlgError, "singular", lambda: torch.linalg.inv(torch.zeros(2, 2, device="cuda")))

# After an error the channel is as good as before: a new template works.
assert (x * 1.5).sum().item() == 18.0

# A child has no device, and cannot free or change its parent's tensors.
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    try:
        x.add_(1)
    except RuntimeError as error:
        os.write(writer, str(error).encode())
    with open("/proc/self/maps") as maps:  # the ring begins its file; the pinned memory behind it is the child's too
        rings = [line for line in maps if "memfd:" in line and int(line.split()[2], 16) == 0]
    os.write(writer, b" inherited" if rings else b" clean")
    del x
    sys.stdout = io.StringIO()
    os._exit(0)
os.close(writer)
said = b""
while part := os.read(reader, 4096):
    said += part
assert os.waitpid(child, 0)[1] == 0
assert b"forked" in said and b"clean" in said, said
assert x.sum().item() == 12.0

doubled = torch.compile(lambda t: t * 2)(x)
assert doubled.sum().item() == 24.0
print("ok")
