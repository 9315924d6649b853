// Says in one sentence why a rank that dereferenced a device address dies.
#pragma once

namespace ergo::rank {

// Chains to the handler that was installed before.
void install_fault_handler();

}  // namespace ergo::rank
