// The autograd engine's threads at the end of a process.
#pragma once

#include <chrono>

namespace ergo::rank {

// Waits until the engine's device thread has let go of what the last backward pass left with it: it destroys graphs
// and gradients after backward() has returned. Once the interpreter is finalizing, Python ends a thread that asks for
// its lock, and if a destructor asks, that ends the process ("terminate called without an active exception"). The
// caller does not hold the GIL.
void rest_engine(std::chrono::milliseconds limit);

}  // namespace ergo::rank
