// A call on its way and the stack that it is encoded from, kept by each thread for their capacity.
#pragma once

#include <ATen/core/stack.h>

#include <memory>
#include <optional>

#include "encoder.hpp"

namespace ergo::rank {

struct CallBuffers {
  torch::jit::Stack stack;
  EncodedCall call;
  bool in_use = false;

  static CallBuffers& of_thread() {
    thread_local CallBuffers* kept = nullptr;  // without a constructor, so that using it costs no check
    if (C10_UNLIKELY(kept == nullptr)) kept = make();
    return *kept;
  }

 private:
  static CallBuffers* make() {
    thread_local std::unique_ptr<CallBuffers> made = std::make_unique<CallBuffers>();
    return made.get();
  }
};

// The thread's buffers, for the time of one call. A call within a call has its own: one that encodes another (a CPU
// tensor that is not contiguous), or of a signal handler that runs while this one waits.
class BuffersInUse {
 public:
  BuffersInUse() : buffers_(CallBuffers::of_thread()) {
    if (C10_UNLIKELY(buffers_.in_use)) own_.emplace();
    buffers_.in_use = true;
  }
  ~BuffersInUse() {
    if (C10_UNLIKELY(own_.has_value())) return;
    // They would keep device memory alive until this thread's next call.
    if (C10_UNLIKELY(!buffers_.call.components.empty())) buffers_.call.components.clear();
    buffers_.in_use = false;
  }
  BuffersInUse(const BuffersInUse&) = delete;
  BuffersInUse& operator=(const BuffersInUse&) = delete;
  CallBuffers* operator->() { return C10_UNLIKELY(own_.has_value()) ? &*own_ : &buffers_; }

 private:
  CallBuffers& buffers_;
  std::optional<CallBuffers> own_;
};

}  // namespace ergo::rank
