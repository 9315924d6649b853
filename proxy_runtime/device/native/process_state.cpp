#include "process_state.hpp"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>

#include <cstring>
#include <mutex>

#include "failure.hpp"
#include "wire.hpp"

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
  apply_flags(rank.flags);
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
  if (flags.size() != static_cast<size_t>(FlagWord::Count))
    throw ProtocolError("a flags message of " + std::to_string(flags.size()) + " words");
  rank.flags = std::move(flags);
  apply_flags(rank.flags);
}

void ProcessState::apply_flags(const std::vector<uint64_t>& flags) {
  if (flags.empty()) return;
  auto get = [&](FlagWord word) { return flags[static_cast<size_t>(word)]; };
  auto& context = at::globalContext();
  static const char* const kPrecision[] = {"highest", "high", "medium"};
  uint64_t precision = get(FlagWord::MatmulPrecision);
  if (precision > 2) throw ProtocolError("an unknown matmul precision");
  context.setFloat32MatmulPrecision(kPrecision[precision]);
  if (!backend_.device().is_cpu()) {
    context.setAllowTF32CuBLAS(get(FlagWord::AllowTf32Matmul) != 0);
    context.setAllowTF32CuDNN(get(FlagWord::AllowTf32Cudnn) != 0);
    context.setUserEnabledCuDNN(get(FlagWord::CudnnEnabled) != 0);
    context.setBenchmarkCuDNN(get(FlagWord::CudnnBenchmark) != 0);
    context.setDeterministicCuDNN(get(FlagWord::CudnnDeterministic) != 0);
  }
  context.setSDPUseFlash(get(FlagWord::FlashSdp) != 0);
  context.setSDPUseMemEfficient(get(FlagWord::MemEfficientSdp) != 0);
  context.setSDPUseMath(get(FlagWord::MathSdp) != 0);
  context.setSDPUseCuDNN(get(FlagWord::CudnnSdp) != 0);
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
