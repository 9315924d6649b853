"""Streams and events: one queue in order, with the device's own times."""

import torch
from expect import raises

cuda = torch.cuda
x = torch.ones(4, device="cuda")
side = cuda.Stream(priority=-1)
assert side != cuda.current_stream() and cuda.current_stream() == cuda.default_stream() and side.priority == -1
with cuda.stream(side):
    assert cuda.current_stream() == side
    y = x * 2
done = side.record_event()
cuda.current_stream().wait_event(done)
cuda.current_stream().wait_stream(side)
y.record_stream(cuda.current_stream())
assert (y + 1).sum().item() == 12.0
done.synchronize()
assert done.query() and side.query()
side.synchronize()

# Work that takes a while: its event is not done when it is recorded, and is when it has been waited for.
big = torch.randn(1200, 1200, device="cuda")
start, middle, end = (cuda.Event(enable_timing=True) for _ in range(3))
plain = cuda.Event()
cuda.synchronize()
start.record()
for _ in range(10):
    big = (big @ big).clamp_(-1, 1)
middle.record()
end.record()
plain.record()
asked_early = (end.query(), plain.query(), cuda.current_stream().query())
assert asked_early == (False, False, False), asked_early
raises(RuntimeError, "completed", lambda: start.elapsed_time(end))
plain.synchronize()
assert end.query() and plain.query()
took, nothing = start.elapsed_time(end), middle.elapsed_time(end)
assert 0 <= nothing < took, (took, nothing)
assert abs(start.elapsed_time(middle) + nothing - took) < 0.01
start.record()
start.synchronize()
assert 0 < end.elapsed_time(start) < 60_000

# Ten products of 1200 x 1200 are no less than ten times one of them is at the clock's best rate: not host times.
assert took > 10.0, took

raises((RuntimeError, ValueError), "", lambda: cuda.Event(enable_timing=True).elapsed_time(end))
raises((RuntimeError, ValueError), "", lambda: start.elapsed_time(plain))
raises(RuntimeError, "stream", lambda: cuda.ExternalStream(0x1234))
for _ in range(3000):
    cuda.Event(enable_timing=True).record()  # events that are gone are forgotten
print("ok")
