#include "tree.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>

#include "channel.hpp"
#include "generator.hpp"
#include "storage.hpp"

namespace ergo::rank {
namespace {

std::function<void(int)>* connector = nullptr;
std::atomic<int> bound{-1};

int current_device() { return c10::impl::VirtualGuardImpl(kDeviceType).getDevice().index(); }

}  // namespace

void join_tree(std::function<void(int)> connect) { connector = new std::function<void(int)>(std::move(connect)); }

bool in_tree() { return connector != nullptr; }

int bound_device() { return in_tree() ? bound.load(std::memory_order_relaxed) : 0; }

c10::Device own_device() { return {kDeviceType, static_cast<c10::DeviceIndex>(std::max(bound_device(), 0))}; }

void bind_device(void* base, int index) {
  Channel::instance().attach(base);
  bound.store(index);
  seed_on_device(index);
}

void use_device(std::optional<c10::Device> named) {
  if (C10_LIKELY(!in_tree())) return;
  if (named.has_value() && named->type() != kDeviceType) return;
  const int wanted = named.has_value() && named->has_index() ? named->index() : current_device();
  if (C10_UNLIKELY(bound.load(std::memory_order_relaxed) < 0) && !Channel::instance().forked()) {
    pybind11::gil_scoped_acquire gil;
    (*connector)(wanted);
  }
  const int mine = bound.load();
  TORCH_CHECK(mine < 0 || mine == wanted, "ergosphere: this process uses cuda:", mine, ", and now also cuda:", wanted,
              ". Under Ergosphere a process uses one device for life; start a process for each (torchrun, "
              "torch.multiprocessing.spawn), and choose its device by torch.cuda.set_device before the first use");
}

void connect_current_device() { use_device(std::nullopt); }

void use_device_of(const torch::jit::Stack& stack) {
  for (const c10::IValue& value : stack)
    if (value.isDevice()) use_device(value.toDevice());
}

}  // namespace ergo::rank
