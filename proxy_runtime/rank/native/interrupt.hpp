// Python's signal handlers during a wait for the device.
#pragma once

namespace ergo::rank {

// Whether this is the thread in which Python runs signal handlers.
bool runs_signal_handlers();

// Runs the handlers of signals that have arrived, in the thread that may. The caller holds neither the GIL nor the
// channel lock: a handler may use the device. Throws python_error if a handler raised (KeyboardInterrupt).
void run_signal_handlers();

}  // namespace ergo::rank
