#include "process_state.hpp"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>

#include <cstring>
#include <mutex>

#include "failure.hpp"
#include "torch_flags.hpp"

namespace ergo::device {
namespace {

at::Tensor state_of(at::Generator& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state_of(at::Generator& generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

ProcessState::ProcessState(DeviceBackend& backend)
    : backend_(backend), default_(backend.default_generator()), initial_flags_(read_flags()) {
  initial_flags_[static_cast<size_t>(FlagWord::Threads)] = static_cast<uint64_t>(at::get_num_threads());
  initial_flags_[static_cast<size_t>(FlagWord::FlushDenormal)] = 1;
}

void ProcessState::admit(RankState& rank) {
  at::Generator fresh = backend_.make_generator();
  {
    std::lock_guard<std::mutex> lock(fresh.mutex());
    fresh.set_current_seed(c10::default_rng_seed_val);
  }
  rank.default_state = state_of(fresh);
  rank.generators[0] = default_;
}

void ProcessState::switch_to(RankState& rank) {
  if (entered_) entered_->default_state = state_of(default_);
  entered_ = nullptr;  // should the next line throw, the state of the one that left is safe
  set_state_of(default_, rank.default_state);
  apply(rank.flags);
  entered_ = &rank;
}

void ProcessState::leave(RankState& rank) {
  if (entered_ != &rank) return;
  rank.default_state = state_of(default_);
  entered_ = nullptr;
}

void ProcessState::set_globals(uint64_t globals) {
  uint64_t dtype = globals & 0xff;
  if (dtype >= static_cast<uint64_t>(at::ScalarType::NumOptions) ||
      !(c10::isFloatingType(static_cast<at::ScalarType>(dtype)) ||
        c10::isComplexType(static_cast<at::ScalarType>(dtype))))
    throw ProtocolError("a default dtype that is not floating point");
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<at::ScalarType>(dtype)));
  at::globalContext().setDeterministicAlgorithms((globals >> 8) & 1, (globals >> 9) & 1);
  globals_ = globals;
}

void ProcessState::set_flags(RankState& rank, std::vector<uint64_t> flags) {
  apply(flags);
  rank.flags = std::move(flags);
}

void ProcessState::apply(std::vector<uint64_t> flags) {
  if (flags.empty()) flags = initial_flags_;  // a rank that has said nothing: those of the one before are not its own
  // What the rank leaves open is what this process started with.
  if (flags.size() == initial_flags_.size())
    for (FlagWord word : {FlagWord::Threads, FlagWord::FlushDenormal})
      if (auto& flag = flags[static_cast<size_t>(word)]; flag == 0) flag = initial_flags_[static_cast<size_t>(word)];
  try {
    apply_flags(flags, backend_.device().is_cpu());
  } catch (const c10::Error&) {
    throw;
  } catch (const std::runtime_error& e) {
    throw ProtocolError(std::string("a flags message with ") + e.what());
  }
}

at::Generator& ProcessState::find(RankState& rank, uint64_t id) {
  auto it = rank.generators.find(id);
  if (it == rank.generators.end()) throw ProtocolError("unknown generator " + std::to_string(id));
  if (id == 0) enter(rank);
  return it->second;
}

void ProcessState::new_generator(RankState& rank, uint64_t id) {
  if (rank.generators.size() > 65536) throw ProtocolError("more than 65536 generators");
  if (!rank.generators.emplace(id, backend_.make_generator()).second)
    throw ProtocolError("generator " + std::to_string(id) + " is created a second time");
}

void ProcessState::free_generator(RankState& rank, uint64_t id) {
  if (id == 0 || rank.generators.erase(id) == 0) throw ProtocolError("unknown generator " + std::to_string(id));
}

void ProcessState::seed(RankState& rank, uint64_t id, uint64_t seed) {
  at::Generator& generator = find(rank, id);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

at::Tensor ProcessState::get_state(RankState& rank, uint64_t id) { return state_of(find(rank, id)); }

void ProcessState::set_state(RankState& rank, uint64_t id, const void* bytes, size_t n) {
  at::Generator& generator = find(rank, id);
  at::Tensor state = at::empty({static_cast<int64_t>(n)}, at::TensorOptions().dtype(at::kByte));
  if (n) std::memcpy(state.mutable_data_ptr(), bytes, n);
  set_state_of(generator, state);
}

}  // namespace ergo::device
