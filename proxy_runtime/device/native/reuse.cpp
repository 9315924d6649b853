// Memory of a device that is the CPU: a block that is freed goes to whoever next asks for as much, the last one first.
//
// malloc cuts and joins blocks, so that a step's tensors lie elsewhere in every step (some hundred MB of addresses for
// a model that needs ten), and those of a second rank elsewhere than what the first has just given up. What lies where
// something has just been is in the caches.
#include "reuse.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "buffer.hpp"

namespace ergo::device {
namespace {

// Smaller blocks are malloc's, which has bins of them.
constexpr size_t kLeast = 4096;
// What is kept beyond the most that has been in use: sizes that are not needed when most is.
constexpr size_t kSlack = 64 << 20;
constexpr size_t kHeader = kBufferAlign;

class Reuse final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    void* data = n < kLeast ? fresh(n) : take(align_up(n));
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

 private:
  static void give_back(void* data);
  void* take(size_t n) {
    const std::lock_guard lock(mutex_);
    void* data = nullptr;
    if (auto found = free_.find(n); found != free_.end() && !found->second.empty()) {
      data = found->second.back();
      found->second.pop_back();
      kept_ -= n;
    } else {
      if (in_use_ + n + kept_ > std::max(most_, in_use_ + n) + kSlack) drop_all();
      data = fresh(n);
    }
    in_use_ += n;
    most_ = std::max(most_, in_use_);
    return data;
  }
  static void* fresh(size_t n) {
    auto* block = static_cast<std::byte*>(c10::alloc_cpu(kHeader + n));
    std::memcpy(block, &n, sizeof n);
    return block + kHeader;
  }
  void keep(void* data) {
    if (!data) return;
    size_t n = 0;
    std::memcpy(&n, static_cast<std::byte*>(data) - kHeader, sizeof n);
    if (n < kLeast) return c10::free_cpu(static_cast<std::byte*>(data) - kHeader);
    const std::lock_guard lock(mutex_);
    in_use_ -= n;
    kept_ += n;
    free_[n].push_back(data);
  }
  void drop_all() {
    for (auto& [n, blocks] : free_)
      for (void* data : blocks) c10::free_cpu(static_cast<std::byte*>(data) - kHeader);
    free_.clear();
    kept_ = 0;
  }

  std::mutex mutex_;
  size_t in_use_ = 0, kept_ = 0, most_ = 0;
  ska::flat_hash_map<size_t, std::vector<void*>> free_;
};

Reuse& reuse() {
  static auto* const instance = new Reuse;  // blocks may be freed while the process ends
  return *instance;
}

void Reuse::give_back(void* data) { reuse().keep(data); }

}  // namespace

void reuse_freed_memory() {
#ifndef __SANITIZE_ADDRESS__  // which could not tell that a block is used after it was freed
  c10::SetCPUAllocator(&reuse(), 1);
#endif
}

}  // namespace ergo::device
