// Runs operators through torch's dispatcher on the storages of a rank.
#pragma once

#include "backend.hpp"
#include "process_state.hpp"
#include "rank_state.hpp"
#include "wire.hpp"

namespace ergo::device {

// The per-call part of a Define or Exec message.
struct Call {
  WordReader handles;
  WordReader payload;
  uint64_t base_handle = 0;
};

class Executor {
 public:
  Executor(DeviceBackend& backend, ProcessState& process);

  // First execution: binds the new storages, fills the template's expectations and writes the OutputSpec.
  void define(RankState& rank, Template& t, Call call, WordWriter& spec);
  // Later executions: binds new storages, checks that the results have the shapes that the rank assumes.
  void execute(RankState& rank, const Template& t, Call call);

  c10::DispatchKeySet keys() const { return keys_; }

 private:
  void dispatch(RankState& rank, const Template& t, CallContext& context, torch::jit::Stack& stack,
                FlatTensors* before);

  DeviceBackend& backend_;
  ProcessState& process_;
  c10::DispatchKeySet keys_;
};

}  // namespace ergo::device
