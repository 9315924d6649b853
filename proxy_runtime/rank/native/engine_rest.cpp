#include "engine_rest.hpp"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "tree.hpp"

namespace ergo::rank {
namespace {

struct Engine : torch::autograd::Engine {
  // Made by the first backward pass.
  static bool has_device_threads() { return !(get_default_engine().*&Engine::device_ready_queues_).empty(); }
};

// The device's thread does one task after another, so all before this one is over. What this one leaves with it is
// nothing of Python's. Views and tensors of no elements: the device executes nothing.
void pass_through() {
  const auto options = at::TensorOptions(own_device());
  const at::Tensor leaf = at::empty({0}, options).set_requires_grad(true);
  torch::autograd::grad({leaf.view({0})}, {leaf}, {at::empty({0}, options)});
}

struct Rest {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
};

}  // namespace

void rest_engine(std::chrono::milliseconds limit) {
  if (bound_device() < 0 || !Engine::has_device_threads()) return;
  auto rest = std::make_shared<Rest>();
  // In a thread of its own: a backward pass of another thread may never end.
  std::thread([rest] {
    try {
      pass_through();
    } catch (const std::exception&) {  // the device is lost: there is nothing to wait for
    }
    std::lock_guard lock(rest->mutex);
    rest->reached = true;
    rest->changed.notify_all();
  }).detach();
  std::unique_lock lock(rest->mutex);
  rest->changed.wait_for(lock, limit, [&] { return rest->reached; });
}

}  // namespace ergo::rank
