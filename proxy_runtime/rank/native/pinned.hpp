// Pinned host memory, which the device proxy has mapped too: copies between it and the device are made once.
#pragma once

#include <cstdint>
#include <optional>

namespace ergo::rank {

// Gives torch's pinned tensors memory of the channel, as long as there is some; then torch's own. Once, after the
// channel is attached. A process of a tree keeps torch's: others have the channel after it.
void install_pinned_memory();

// Where [pointer, pointer + bytes) lies in the memory that the proxy reaches; nothing if it does not.
std::optional<uint64_t> pinned_offset(const void* pointer, uint64_t bytes);

}  // namespace ergo::rank
