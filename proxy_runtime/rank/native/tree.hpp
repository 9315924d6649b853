// A process of a tree that starts its own ranks: it sees several devices, and gets a channel to the one that it uses
// when it first does (docs/design/0003).
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/Device.h>

#include <functional>
#include <optional>

namespace ergo::rank {

// Makes this process one of a tree: `connect(index)` is called, with the GIL, when a device is first used; it claims a
// channel and hands it to `bind_device`.
void join_tree(std::function<void(int)> connect);

// Index of the device that this process uses; -1: none yet. Outside of a tree always 0.
int bound_device();
// The device itself; the first one where there is none yet.
c10::Device own_device();
void bind_device(void* base, int index);

// Called with the device that an operation names; none, or one without an index, is the current one. Connects a process
// that has no channel yet. Throws if it uses another device already. Nothing outside of a tree.
void use_device(std::optional<c10::Device> named);
// The same for the devices among the arguments of a call.
void use_device_of(const torch::jit::Stack& stack);
bool in_tree();

}  // namespace ergo::rank
