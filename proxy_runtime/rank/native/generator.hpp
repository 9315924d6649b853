// Random generators of the device: their state lives in the proxy, the rank holds an id.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <string>

namespace ergo::rank {

// The device's default generator, id 0; in a tree, of the device with this index.
const at::Generator& default_generator(int index = 0);
// A tree's process has got its device: what it has been seeded with before is sent.
void seed_on_device(int index);
// A generator of its own, as torch.Generator(device="cuda") makes one.
at::Generator new_generator();

// The id of a generator argument. Throws for a generator that native CUDA code made: the device has no
// state for it.
uint64_t generator_id(const at::Generator& generator, const std::string& op);

}  // namespace ergo::rank
