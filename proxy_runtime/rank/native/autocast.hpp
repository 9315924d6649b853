// Mixed precision on a device of kind "cpu".
#pragma once

namespace ergo::rank {

// Makes autocast("cuda") choose types as autocast("cpu") does: the kernels are the CPU's, so the same
// script with device type "cpu" computes the same bits. A device of kind "cuda" keeps torch's CUDA rules.
void register_cpu_autocast();

}  // namespace ergo::rank
