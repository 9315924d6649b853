// What this rank has allocated on its device, and how much it may. Logical bytes: the same at every placement,
// known without asking, and part of this process's image.
#pragma once

#include <cstdint>

namespace ergo::rank {

// Sizes count in blocks of 512 bytes, as torch's CUDA allocator counts them.
inline constexpr uint64_t kMemoryBlock = 512;
inline uint64_t in_blocks(uint64_t bytes) { return (bytes + kMemoryBlock - 1) & ~(kMemoryBlock - 1); }

struct MemoryStats {
  uint64_t allocated = 0, peak = 0;                        // bytes now, and most at any time
  uint64_t allocated_ever = 0, released_ever = 0;          // bytes
  uint64_t allocations = 0, releases = 0, peak_count = 0;  // storages
  uint64_t failures = 0;                                   // allocations that did not fit
  uint64_t total = 0, limit = 0;                           // bytes of the device, and of them this process may use
};
MemoryStats memory_stats();
void reset_peak_memory();
void reset_accumulated_memory();

// Bytes of the device, 0: what the device itself has, which is asked for at the first need.
void set_device_memory(uint64_t bytes);
uint64_t device_memory();
// Whether it can be said without asking the device.
bool device_memory_known();
void set_memory_fraction(double fraction);
double memory_fraction();

// Throws c10::OutOfMemoryError if `bytes` more, in blocks, are more than this process may use. Counts nothing.
void require_memory(uint64_t bytes);
bool memory_fits(uint64_t bytes);
// Returns what had been allocated before, in blocks: it never comes twice unless nothing is allocated.
uint64_t count_allocation(uint64_t bytes);
void count_release(uint64_t bytes);

}  // namespace ergo::rank
