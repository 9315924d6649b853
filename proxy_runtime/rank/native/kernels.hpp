// Operators that the rank handles itself: memory, views (metadata only), copies to and from the host.
// Everything else is forwarded by the fallback.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>

namespace ergo::rank {

// memory_kernels.cpp: empty, empty_strided, resize_, set_, views.
void register_memory_kernels(torch::Library& library);
// copy_kernels.cpp: copy_, _to_copy, _local_scalar_dense, item, record_stream. `library` is the device key, `autograd`
// its autograd key.
void register_copy_kernels(torch::Library& library, torch::Library& autograd);
// cpu_device_kernels.cpp: choices that torch makes by device type and that a device of kind "cpu" must
// make as the CPU does.
void register_cpu_device_kernels(torch::Library& library, torch::Library& autograd);
// cpu_device_rnn.cpp: the same for LSTM, GRU and RNN.
void register_cpu_device_rnn(torch::Library& library, torch::Library& autograd);

// Reads `bytes` of a storage into host memory; waits for the device.
void read_storage(uint64_t handle, uint64_t offset, void* destination, uint64_t bytes);
// Sends `bytes` of host memory to a storage; returns when they are in the channel.
void write_storage(uint64_t handle, uint64_t offset, const void* source, uint64_t bytes);

}  // namespace ergo::rank
