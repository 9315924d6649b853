// What CUDA's streams and events are to a rank: places in the channel, which is one queue in order.
#pragma once

namespace ergo::rank {

// Gives the stub of the CUDA runtime (stubs/bodies/queue.h) the channel's queue.
void connect_queue();

}  // namespace ergo::rank
