#include "memory.hpp"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdio>
#include <string>

#include "channel.hpp"
#include "wire.hpp"

namespace ergo::rank {
namespace {

using Counter = std::atomic<uint64_t>;

// As few as there can be: each that a call changes costs it some nanoseconds.
struct Counters {
  Counter allocated{0}, released{0};    // bytes, since the start
  Counter allocations{0}, releases{0};  // storages, since the start
  Counter peak{0}, peak_count{0}, failures{0};
  Counter released_before{0}, releases_before{0};  // what is not told any more
  Counter total{0}, limit{0};                      // 0: not known yet
  std::atomic<double> fraction{1.0};
};
Counters counters;

void raise_to(Counter& peak, uint64_t now) {
  uint64_t seen = peak.load(std::memory_order_relaxed);
  while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

// What is released has been allocated: read first, it is never more.
uint64_t living(const Counter& come, const Counter& gone) {
  const uint64_t left = gone.load();
  return come.load() - left;
}
uint64_t living_bytes() { return living(counters.allocated, counters.released); }
uint64_t living_count() { return living(counters.allocations, counters.releases); }

void set_limit() { counters.limit.store(static_cast<uint64_t>(counters.fraction.load() * counters.total.load())); }

uint64_t ask_device() {
  uint64_t bytes = 0;
  Channel::instance().call(
      Message::DeviceInfo, 0, [](uint64_t*) {},
      [&](const char* data, size_t n) { bytes = WordReader(reinterpret_cast<const uint64_t*>(data), n / 8).word(); },
      /*raise_asynchronous=*/false);
  return bytes != 0 ? bytes : uint64_t{1} << 48;
}

uint64_t limit() {
  const uint64_t known = counters.limit.load(std::memory_order_relaxed);
  if (C10_LIKELY(known != 0)) return known;
  if (counters.total.load() == 0) set_device_memory(ask_device());
  return counters.limit.load();
}

std::string in_units(uint64_t bytes) {
  static const char* const kUnits[] = {"bytes", "KiB", "MiB", "GiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; unit < 3 && value >= 1024; ++unit) value /= 1024;
  char text[32];
  snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text;
}

}  // namespace

MemoryStats memory_stats() {
  const uint64_t bytes = counters.released_before.load(), count = counters.releases_before.load();
  MemoryStats stats;
  stats.released_ever = counters.released.load() - bytes;
  stats.allocated_ever = counters.allocated.load() - bytes;
  stats.allocated = stats.allocated_ever - stats.released_ever;
  stats.peak = counters.peak.load();
  stats.releases = counters.releases.load() - count;
  stats.allocations = counters.allocations.load() - count;
  stats.peak_count = counters.peak_count.load();
  stats.failures = counters.failures.load();
  stats.total = counters.total.load();
  stats.limit = counters.limit.load();
  return stats;
}

void reset_peak_memory() {
  counters.peak.store(living_bytes());
  counters.peak_count.store(living_count());
}

void reset_accumulated_memory() {
  // What lives now has been allocated.
  counters.released_before.store(counters.released.load());
  counters.releases_before.store(counters.releases.load());
  counters.failures.store(0);
}

void set_device_memory(uint64_t bytes) {
  counters.total.store(bytes);
  set_limit();
}

uint64_t device_memory() {
  limit();
  return counters.total.load();
}

bool device_memory_known() { return counters.total.load() != 0; }

void set_memory_fraction(double fraction) {
  device_memory();
  counters.fraction.store(fraction);
  set_limit();
}

double memory_fraction() { return counters.fraction.load(); }

bool memory_fits(uint64_t bytes) {
  const uint64_t most = limit(), used = living_bytes();
  return C10_LIKELY(bytes <= most && used <= most - bytes);
}

void require_memory(uint64_t bytes) {
  if (memory_fits(bytes)) return;
  const uint64_t total = device_memory(), used = living_bytes();
  counters.failures.fetch_add(1);
  const double fraction = memory_fraction();
  C10_THROW_ERROR(OutOfMemoryError,
                  "CUDA out of memory. Tried to allocate " + in_units(bytes) + ". GPU 0 has a total capacity of " +
                      in_units(total) + " of which " + in_units(total > used ? total - used : 0) + " is free. " +
                      (fraction < 1.0 ? in_units(limit()) + " allowed; " : "") + "Of the allocated memory " +
                      in_units(used) + " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.");
}

uint64_t count_allocation(uint64_t bytes) {
  const uint64_t before = counters.allocated.fetch_add(in_blocks(bytes), std::memory_order_relaxed);
  counters.allocations.fetch_add(1, std::memory_order_relaxed);
  raise_to(counters.peak, living_bytes());
  raise_to(counters.peak_count, living_count());
  return before;
}

void count_release(uint64_t bytes) {
  counters.released.fetch_add(in_blocks(bytes), std::memory_order_release);
  counters.releases.fetch_add(1, std::memory_order_release);
}

}  // namespace ergo::rank
