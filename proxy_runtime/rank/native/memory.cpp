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

struct Counters {
  Counter allocated{0}, peak{0}, allocated_ever{0}, released_ever{0};
  Counter allocations{0}, releases{0}, peak_count{0}, failures{0};
  Counter total{0}, limit{0};  // 0: not known yet
  std::atomic<double> fraction{1.0};
};
Counters counters;

void raise_to(Counter& peak, uint64_t now) {
  uint64_t seen = peak.load(std::memory_order_relaxed);
  while (now > seen && !peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

uint64_t living() { return counters.allocations.load() - counters.releases.load(); }

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
  return {counters.allocated.load(),     counters.peak.load(),        counters.allocated_ever.load(),
          counters.released_ever.load(), counters.allocations.load(), counters.releases.load(),
          counters.peak_count.load(),    counters.failures.load(),    counters.total.load(),
          counters.limit.load()};
}

void reset_peak_memory() {
  counters.peak.store(counters.allocated.load());
  counters.peak_count.store(living());
}

void reset_accumulated_memory() {
  // What lives now has been allocated.
  const uint64_t bytes = counters.allocated.load(), count = living();
  counters.allocated_ever.store(bytes);
  counters.released_ever.store(0);
  counters.allocations.store(count);
  counters.releases.store(0);
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
  const uint64_t most = limit(), used = counters.allocated.load(std::memory_order_relaxed);
  return C10_LIKELY(bytes <= most && used <= most - bytes);
}

void require_memory(uint64_t bytes) {
  if (memory_fits(bytes)) return;
  const uint64_t total = device_memory(), used = counters.allocated.load();
  counters.failures.fetch_add(1);
  const double fraction = memory_fraction();
  C10_THROW_ERROR(OutOfMemoryError,
                  "CUDA out of memory. Tried to allocate " + in_units(bytes) + ". GPU 0 has a total capacity of " +
                      in_units(total) + " of which " + in_units(total > used ? total - used : 0) + " is free. " +
                      (fraction < 1.0 ? in_units(limit()) + " allowed; " : "") + "Of the allocated memory " +
                      in_units(used) + " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.");
}

void count_allocation(uint64_t bytes) {
  const uint64_t size = in_blocks(bytes);
  raise_to(counters.peak, counters.allocated.fetch_add(size, std::memory_order_relaxed) + size);
  counters.allocated_ever.fetch_add(size, std::memory_order_relaxed);
  counters.allocations.fetch_add(1, std::memory_order_relaxed);
  raise_to(counters.peak_count, living());
}

void count_release(uint64_t bytes) {
  const uint64_t size = in_blocks(bytes);
  counters.allocated.fetch_sub(size, std::memory_order_relaxed);
  counters.released_ever.fetch_add(size, std::memory_order_relaxed);
  counters.releases.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace ergo::rank
