#include "pinned.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <map>
#include <mutex>
#include <unordered_map>

#include "channel.hpp"
#include "storage.hpp"

namespace ergo::rank {
namespace {

constexpr uint64_t kPage = 4096;
// Smaller tensors are copied through the queue and the response area anyway.
constexpr uint64_t kLeast = uint64_t{64} << 10;

// Which parts of the memory are taken. Nothing but page-aligned offsets and sizes; neighbours that are free are one.
class Ranges {
 public:
  explicit Ranges(uint64_t bytes) { free_[0] = bytes; }

  // The smallest free range that fits, of these the first: what has been used before is used again.
  std::optional<uint64_t> take(uint64_t bytes) {
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->second >= bytes && (best == free_.end() || it->second < best->second)) best = it;
    if (best == free_.end()) return std::nullopt;
    const uint64_t at = best->first, rest = best->second - bytes;
    free_.erase(best);
    if (rest != 0) free_[at + bytes] = rest;
    taken_[at] = bytes;
    return at;
  }

  // Returns the size of the range.
  uint64_t give_back(uint64_t at) {
    const auto taken = taken_.find(at);
    const uint64_t bytes = taken->second;
    taken_.erase(taken);
    auto it = free_.emplace(at, bytes).first;
    if (const auto next = std::next(it); next != free_.end() && it->first + it->second == next->first) {
      it->second += next->second;
      free_.erase(next);
    }
    if (it != free_.begin())
      if (const auto before = std::prev(it); before->first + before->second == it->first) {
        before->second += it->second;
        free_.erase(it);
      }
    return bytes;
  }

  const std::map<uint64_t, uint64_t>& unused() const { return free_; }

 private:
  std::map<uint64_t, uint64_t> free_;
  std::unordered_map<uint64_t, uint64_t> taken_;
};

class PinnedMemory final : public at::HostAllocator {
 public:
  PinnedMemory(at::HostAllocator& torchs, char* base, uint64_t bytes)
      : torchs_(torchs), base_(base), bytes_(bytes), ranges_(bytes) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes >= kLeast && bytes <= bytes_ && !Channel::instance().forked()) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (const auto at = ranges_.take((bytes + kPage - 1) / kPage * kPage)) {
        count(true, (bytes + kPage - 1) / kPage * kPage);
        return {base_ + *at, base_ + *at, &give_back, c10::Device(c10::kCPU)};
      }
    }
    return torchs_.allocate(bytes);
  }

  // Copies are complete when they return (copy_kernels.cpp): nothing on the device still needs the memory.
  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    const auto* p = static_cast<const char*>(pointer);
    return (p >= base_ && p < base_ + bytes_) || torchs_.record_event(pointer, context, stream);
  }

  void empty_cache() override {
    torchs_.empty_cache();
    if (Channel::instance().forked()) return;  // the pages are the parent's too
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [at, bytes] : ranges_.unused()) madvise(base_ + at, bytes, MADV_REMOVE);
  }

  at::HostStats get_stats() override {
    at::HostStats stats = torchs_.get_stats();
    std::lock_guard<std::mutex> lock(mutex_);
    add(stats.allocations, requests_);
    add(stats.allocated_bytes, sizes_);
    add_active(stats);
    return stats;
  }
  void reset_accumulated_stats() override {
    torchs_.reset_accumulated_stats();
    std::lock_guard<std::mutex> lock(mutex_);
    requests_.reset_accumulated();
    sizes_.reset_accumulated();
  }
  void reset_peak_stats() override {
    torchs_.reset_peak_stats();
    std::lock_guard<std::mutex> lock(mutex_);
    requests_.reset_peak();
    sizes_.reset_peak();
  }

  // A graph's own pools. Capturing is refused behind it, by name. (Not in every torch, hence no "override".)
  void begin_allocate_to_pool(c10::MempoolId_t, std::function<bool(c10::Stream)>) {}
  void end_allocate_to_pool(c10::MempoolId_t) {}
  void release_pool(c10::MempoolId_t) {}

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  static PinnedMemory* instance;

 private:
  using Stat = decltype(at::HostStats::allocations);

  static void give_back(void* pointer) {
    // A child's tensors are its parent's: the memory is not its to give. It may have been forked with the lock held.
    if (Channel::instance().forked()) return;
    PinnedMemory& memory = *instance;
    std::lock_guard<std::mutex> lock(memory.mutex_);
    const auto at = static_cast<uint64_t>(static_cast<char*>(pointer) - memory.base_);
    memory.count(false, memory.ranges_.give_back(at));
  }

  void count(bool more, uint64_t bytes) {
    if (more) {
      requests_.increase(1);
      sizes_.increase(bytes);
    } else {
      requests_.decrease(1);
      sizes_.decrease(bytes);
    }
  }
  template <class Stats>
  void add_active(Stats& stats) const {  // older versions of torch have no such counts
    if constexpr (requires { stats.active_requests; }) {
      add(stats.active_requests, requests_);
      add(stats.active_bytes, sizes_);
    }
  }
  static void add(Stat& to, const Stat& more) {
    to.current += more.current;
    to.peak += more.peak;
    to.allocated += more.allocated;
    to.freed += more.freed;
  }

  at::HostAllocator& torchs_;
  char* const base_;
  const uint64_t bytes_;
  std::mutex mutex_;
  Ranges ranges_;
  Stat requests_, sizes_;
};

PinnedMemory* PinnedMemory::instance = nullptr;

}  // namespace

void install_pinned_memory() {
  const Channel& channel = Channel::instance();
  if (channel.pinned_bytes() == 0) return;
  // Never destroyed: tensors in static storage are released after every static destructor ran.
  PinnedMemory::instance =
      new PinnedMemory(*at::getHostAllocator(kDeviceType), channel.pinned(), channel.pinned_bytes());
  at::setHostAllocator(kDeviceType, PinnedMemory::instance, 255);
  if (auto* set = reinterpret_cast<void (*)(void*, size_t)>(dlsym(RTLD_DEFAULT, "ergo_stub_set_pinned")))
    set(channel.pinned(), channel.pinned_bytes());
}

std::optional<uint64_t> pinned_offset(const void* pointer, uint64_t bytes) {
  const Channel& channel = Channel::instance();
  const auto begin = reinterpret_cast<uintptr_t>(channel.pinned()), p = reinterpret_cast<uintptr_t>(pointer);
  if (p < begin || p - begin > channel.pinned_bytes() || bytes > channel.pinned_bytes() - (p - begin))
    return std::nullopt;
  return p - begin;
}

}  // namespace ergo::rank
