// Memory of a device that is the CPU: what is freed is used again, the last first.
#pragma once

namespace ergo::device {

// From now on tensors of this process are made so.
void reuse_freed_memory();

}  // namespace ergo::device
