"""Signal handlers during waits for a device that stands still: `test_signals.py` stops and continues it."""

import signal
import sys

import torch


def wait_for_test(text):
    print(text, flush=True)
    sys.stdin.readline()


def interrupted(work):
    """Runs `work` while the device stands still and SIGINT comes."""
    wait_for_test("stop")
    try:
        work()
    except KeyboardInterrupt:
        wait_for_test("interrupted")
    else:
        sys.exit("was not interrupted")


x = torch.arange(4.0, device="cuda")
x.sum().item()

interrupted(lambda: x.sum().item())  # known: waits for the bytes
assert x.sum().item() == 6

interrupted(lambda: x.mul(2).cumsum(0))  # unseen: waits for the definition, which happens all the same
assert (x * 2).cumsum(0).tolist() == [0, 2, 6, 12]
assert x.mul(2).cumsum(0).tolist() == [0, 2, 6, 12]

interrupted(torch.cuda.synchronize)  # behind torch's own C++
torch.cuda.synchronize()


def fill():
    while True:
        x.add_(1)


interrupted(fill)  # the ring is full
y = x - x[0]
assert y.tolist() == [0, 1, 2, 3]

interrupted(lambda: torch.ones(1 << 22).cuda())  # larger than the ring
assert torch.ones(1 << 22).cuda().sum().item() == 1 << 22

# A handler that uses the device in the middle of a wait, as one that saves a checkpoint does.
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(torch.ones(3, device="cuda").mul(len(seen) + 2).tolist()))
wait_for_test("terminate")
z = torch.full((5,), 7.0, device="cuda").exp().log()
assert torch.allclose(z.cpu(), torch.full((5,), 7.0))
while not seen:
    z.sum().item()
assert seen == [[2, 2, 2]], seen

# A thousand a second, handlers that enqueue and wait.
ticks = torch.zeros(1, device="cuda")
count = 0


def tick(*_):
    global count
    count += 1
    ticks.add_(1)
    if count % 50 == 0:
        assert ticks.item() >= 0  # another tick may come in the middle of this one


signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.0)
total = torch.zeros((), device="cuda")
step = 0
try:
    while count < 400 or step < 50:
        step += 1
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        total += 1
        if step % 5 == 0:
            assert total.item() == step
        torch.ones(1 + step % 40, device="cuda").cumsum(0)  # unseen now and then
finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
assert ticks.item() == count
print("ok")
