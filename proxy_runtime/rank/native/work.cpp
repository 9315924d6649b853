#include "work.hpp"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "channel.hpp"
#include "gil.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using std::chrono::milliseconds;

constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::microseconds(2000);

void copy_back(const HostResults& results) {
  at::NoGradGuard no_grad;
  for (const auto& [host, staged] : results) Tensor(host).copy_(staged);
}

bool arrived(const HostResults& results) {
  Tensors staged;
  for (const auto& pair : results) staged.push_back(pair.second);
  return collectives_done(staged);
}

// Results of works that were dropped before they had arrived.
struct Forgotten {
  std::mutex mutex;
  std::vector<HostResults> results;
};
Forgotten& forgotten() {
  static auto* list = new Forgotten;  // never destroyed: works die after static destructors
  return *list;
}

class DoneWork : public c10d::Work {
 public:
  DoneWork(int rank, Tensors outputs, c10d::OpType type) : Work(rank, type), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(milliseconds) override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  Tensors result() override {
    wait(kNoTimeout);
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (!future_) {
      std::vector<c10::Device> devices;
      if (std::any_of(outputs_.begin(), outputs_.end(),
                      [](const Tensor& t) { return t.device().type() == kDeviceType; }))
        devices.push_back(own_device());
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
      future_->markCompleted(c10::IValue(outputs_));
    }
    return future_;
  }

 private:
  Tensors outputs_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class HostWork final : public DoneWork {
 public:
  HostWork(int rank, Tensors outputs, c10d::OpType type, HostResults results)
      : DoneWork(rank, std::move(outputs), type), results_(std::move(results)) {}
  ~HostWork() override {
    if (results_.empty() || !Channel::instance().open()) return;
    std::lock_guard<std::mutex> lock(forgotten().mutex);
    forgotten().results.push_back(std::move(results_));
  }
  bool isCompleted() override {
    GilRelease gil;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!results_.empty() && arrived(results_)) finish();
    return results_.empty();
  }
  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return results_.empty();
  }
  bool wait(milliseconds timeout) override {
    GilRelease gil;  // before the lock: whoever holds it must be able to end
    std::lock_guard<std::mutex> lock(mutex_);
    if (results_.empty()) return true;
    if (timeout != kNoTimeout && timeout != c10d::kUnsetTimeout) {
      const auto until = std::chrono::steady_clock::now() + timeout;
      for (auto pause = kFirstPause; !arrived(results_); pause = std::min(2 * pause, kLongestPause)) {
        TORCH_CHECK_WITH(DistBackendError, std::chrono::steady_clock::now() < until, "Timed out waiting ",
                         timeout.count(), " ms for a collective of host tensors to complete: not all ranks have come.");
        std::this_thread::sleep_for(pause);
      }
    }
    finish();
    return true;
  }

 private:
  void finish() {
    copy_back(results_);
    results_.clear();
  }
  mutable std::mutex mutex_;
  HostResults results_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> make_work(int rank, Tensors outputs, c10d::OpType type, HostResults results) {
  if (results.empty()) return c10::make_intrusive<DoneWork>(rank, std::move(outputs), type);
  return c10::make_intrusive<HostWork>(rank, std::move(outputs), type, std::move(results));
}

void settle_forgotten_works() {
  std::vector<HostResults> left;
  {
    std::lock_guard<std::mutex> lock(forgotten().mutex);
    left.swap(forgotten().results);
  }
  for (HostResults& results : left) {
    if (arrived(results)) {
      copy_back(results);
    } else {
      std::lock_guard<std::mutex> lock(forgotten().mutex);
      forgotten().results.push_back(std::move(results));
    }
  }
}

}  // namespace ergo::rank
