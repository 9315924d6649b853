// What torch keeps once per process and every rank must have for itself: the default generator, the
// default dtype, determinism and precision flags. `enter` makes a rank's the process's.
#pragma once

#include "backend.hpp"
#include "rank_state.hpp"

namespace ergo::device {

class ProcessState {
 public:
  explicit ProcessState(DeviceBackend& backend);

  // Gives a new rank its default generator, seeded as torch seeds an accelerator's.
  void admit(RankState& rank);
  // Called before anything of this rank runs; free when it is entered already.
  void enter(RankState& rank) {
    if (entered_ != &rank) switch_to(rank);
  }
  void leave(RankState& rank);
  void set_flags(RankState& rank, std::vector<uint64_t> flags);
  void apply_globals(uint64_t globals) {
    if (globals != globals_) set_globals(globals);
  }

  void new_generator(RankState& rank, uint64_t id);
  void free_generator(RankState& rank, uint64_t id);
  void seed(RankState& rank, uint64_t id, uint64_t seed);
  // State bytes as torch's get_state gives them. Throws ProtocolError for an unknown id.
  at::Tensor get_state(RankState& rank, uint64_t id);
  void set_state(RankState& rank, uint64_t id, const void* bytes, size_t n);

 private:
  void switch_to(RankState& rank);
  void set_globals(uint64_t globals);
  void apply(std::vector<uint64_t> flags);
  at::Generator& find(RankState& rank, uint64_t id);

  DeviceBackend& backend_;
  at::Generator default_;
  RankState* entered_ = nullptr;
  std::vector<uint64_t> initial_flags_;
  uint64_t globals_ = ~uint64_t{0};
};

}  // namespace ergo::device
