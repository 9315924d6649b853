// Libraries of the rank that register operators: the device proxy needs them too, for their kernels.
#pragma once

#include <string>

namespace ergo::rank {

// Once, before user code: what is loaded now, the device has as well.
void start_watching_libraries();

// Whether the process has loaded a library since the last call. Cheap: a counter of the loader's.
bool libraries_changed();

// Tells the device proxy of every library that registers operators and that it has not been told of, together
// with the libraries that those need. One that cannot be loaded there is no error yet: see library_failure.
void announce_libraries();

// For the path of an unseen operation: announces what has been loaded by ways that nobody watches.
void take_note_of_libraries();

// Why a library is not on the device, one sentence; empty if all are.
std::string library_failure();

}  // namespace ergo::rank
