// What torch keeps process-wide and what changes the results of operators, as words: read in a rank, applied in
// its device proxy. Both sides are built against one torch version, so the enumerations need no translation.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "wire.hpp"

namespace ergo {

using FlagWords = std::vector<uint64_t>;
inline constexpr size_t kFlagCount = static_cast<size_t>(FlagWord::Count);

// torch's getters of these fields throw where a script has mixed its older and newer interfaces, or ask for
// libraries that are not here; their setters change each other. An explicit instantiation may name private members.
namespace context_fields {
auto& fp32(at::Context&);
auto& matmul(at::Context&);
auto& tf32_cudnn(at::Context&);
auto& tf32_onednn(at::Context&);
auto& blas(at::Context&);
template <auto Fp32, auto Matmul, auto Tf32Cudnn, auto Tf32Onednn, auto Blas>
struct Access {
  friend auto& fp32(at::Context& c) { return c.*Fp32; }
  friend auto& matmul(at::Context& c) { return c.*Matmul; }
  friend auto& tf32_cudnn(at::Context& c) { return c.*Tf32Cudnn; }
  friend auto& tf32_onednn(at::Context& c) { return c.*Tf32Onednn; }
  friend auto& blas(at::Context& c) { return c.*Blas; }
};
template struct Access<&at::Context::fp32_precision, &at::Context::float32_matmul_precision,
                       &at::Context::allow_tf32_cudnn, &at::Context::allow_tf32_onednn,
                       &at::Context::blas_preferred_backend>;
}  // namespace context_fields

// The order in which FlagWord::Float32Precision packs the table of precisions, 4 bits each.
inline constexpr std::array<std::pair<at::Float32Backend, at::Float32Op>, 9> kFloat32Keys{{
    {at::Float32Backend::GENERIC, at::Float32Op::ALL},
    {at::Float32Backend::MKLDNN, at::Float32Op::ALL},
    {at::Float32Backend::MKLDNN, at::Float32Op::CONV},
    {at::Float32Backend::MKLDNN, at::Float32Op::RNN},
    {at::Float32Backend::MKLDNN, at::Float32Op::MATMUL},
    {at::Float32Backend::CUDA, at::Float32Op::ALL},
    {at::Float32Backend::CUDA, at::Float32Op::CONV},
    {at::Float32Backend::CUDA, at::Float32Op::RNN},
    {at::Float32Backend::CUDA, at::Float32Op::MATMUL},
}};
inline constexpr uint64_t kNoPrecision = 15;  // this torch has no such entry

// The flags of this process. Threads and FlushDenormal are 0: they are what somebody asked for, not what is.
inline FlagWords read_flags() {
  auto& c = at::globalContext();
  FlagWords words(kFlagCount, 0);
  auto set = [&](FlagWord word, auto value) { words[static_cast<size_t>(word)] = static_cast<uint64_t>(value); };
  uint64_t precisions = 0;
  const auto& table = context_fields::fp32(c);
  for (size_t i = 0; i < kFloat32Keys.size(); i++) {
    const auto found = table.find(kFloat32Keys[i]);
    const uint64_t value = found == table.end() ? kNoPrecision : static_cast<uint64_t>(found->second);
    precisions |= (value & 15) << (4 * i);
  }
  uint64_t priorities = 0;
  const auto order = c.sDPPriorityOrder();
  for (size_t i = 0; i < order.size(); i++) priorities |= (static_cast<uint64_t>(order[i]) & 15) << (4 * i);
  set(FlagWord::Float32Precision, precisions);
  set(FlagWord::MatmulPrecision, context_fields::matmul(c));
  set(FlagWord::AllowTf32Cudnn, context_fields::tf32_cudnn(c));
  set(FlagWord::AllowTf32Onednn, context_fields::tf32_onednn(c));
  set(FlagWord::CudnnEnabled, c.userEnabledCuDNN());
  set(FlagWord::CudnnBenchmark, c.benchmarkCuDNN());
  set(FlagWord::CudnnBenchmarkLimit, static_cast<uint32_t>(c.benchmarkLimitCuDNN()));
  set(FlagWord::CudnnDeterministic, c.deterministicCuDNN());
  set(FlagWord::MkldnnEnabled, c.userEnabledMkldnn());
  set(FlagWord::MkldnnDeterministic, c.deterministicMkldnn());
  set(FlagWord::NnpackEnabled, c.userEnabledNNPACK());
  set(FlagWord::FlashSdp, c.userEnabledFlashSDP());
  set(FlagWord::MemEfficientSdp, c.userEnabledMemEfficientSDP());
  set(FlagWord::MathSdp, c.userEnabledMathSDP());
  set(FlagWord::CudnnSdp, c.userEnabledCuDNNSDP());
  set(FlagWord::OverrideableSdp, c.userEnabledOverrideableSDP());
  set(FlagWord::MathSdpReduction, c.allowFP16BF16ReductionMathSDP());
  set(FlagWord::SdpPriorities, priorities);
  set(FlagWord::LinalgBackend, c.linalgPreferredBackend());
  set(FlagWord::BlasBackend, context_fields::blas(c));
  set(FlagWord::Fp16ReductionCublas, c.allowFP16ReductionCuBLAS());
  set(FlagWord::Bf16ReductionCublas, c.allowBF16ReductionCuBLAS());
  set(FlagWord::Fp16AccumulationCublas, c.allowFP16AccumulationCuBLAS());
  set(FlagWord::Fp16ReductionCpu, c.allowFP16ReductionCPU());
  set(FlagWord::FillUninitialized, c.deterministicFillUninitializedMemory());
  return words;
}

// Makes `words` the flags of this process. What belongs to the libraries of a GPU is left alone where the device is
// the CPU. Throws std::runtime_error if they are none.
inline void apply_flags(const FlagWords& words, bool cpu) {
  if (words.size() != kFlagCount) throw std::runtime_error("flags of " + std::to_string(words.size()) + " words");
  auto get = [&](FlagWord word) { return words[static_cast<size_t>(word)]; };
  auto on = [&](FlagWord word) { return get(word) != 0; };
  auto within = [&](uint64_t value, uint64_t limit) {
    if (value >= limit) throw std::runtime_error("a flag of value " + std::to_string(value));
    return value;
  };
  auto& c = at::globalContext();
  auto& table = context_fields::fp32(c);
  for (size_t i = 0; i < kFloat32Keys.size(); i++) {
    const uint64_t value = (get(FlagWord::Float32Precision) >> (4 * i)) & 15;
    const auto found = table.find(kFloat32Keys[i]);
    if (value == kNoPrecision || found == table.end()) continue;
    found->second = static_cast<at::Float32Precision>(within(value, 6));
  }
  context_fields::matmul(c) = static_cast<at::Float32MatmulPrecision>(within(get(FlagWord::MatmulPrecision), 3));
  context_fields::tf32_onednn(c) = on(FlagWord::AllowTf32Onednn);
  c.setUserEnabledMkldnn(on(FlagWord::MkldnnEnabled));
  c.setDeterministicMkldnn(on(FlagWord::MkldnnDeterministic));
  c.setUserEnabledNNPACK(on(FlagWord::NnpackEnabled));
  c.setSDPUseFlash(on(FlagWord::FlashSdp));
  c.setSDPUseMemEfficient(on(FlagWord::MemEfficientSdp));
  c.setSDPUseMath(on(FlagWord::MathSdp));
  c.setSDPUseCuDNN(on(FlagWord::CudnnSdp));
  c.setSDPUseOverrideable(on(FlagWord::OverrideableSdp));
  c.setAllowFP16BF16ReductionMathSDP(on(FlagWord::MathSdpReduction));
  std::vector<int64_t> order;
  for (size_t i = 0; i < at::num_sdp_backends; i++)
    order.push_back(static_cast<int64_t>(within((get(FlagWord::SdpPriorities) >> (4 * i)) & 15, at::num_sdp_backends)));
  c.setSDPPriorityOrder(order);
  c.setAllowFP16ReductionCPU(on(FlagWord::Fp16ReductionCpu));
  c.setDeterministicFillUninitializedMemory(on(FlagWord::FillUninitialized));
  if (get(FlagWord::FlushDenormal) != 0) at::Context::setFlushDenormal(get(FlagWord::FlushDenormal) == 2);
  if (cpu) {
    const auto threads = static_cast<int>(std::min<uint64_t>(get(FlagWord::Threads), 1024));
    if (threads != 0 && threads != at::get_num_threads()) at::set_num_threads(threads);
    return;
  }
  context_fields::tf32_cudnn(c) = on(FlagWord::AllowTf32Cudnn);
  c.setUserEnabledCuDNN(on(FlagWord::CudnnEnabled));
  c.setBenchmarkCuDNN(on(FlagWord::CudnnBenchmark));
  c.setBenchmarkLimitCuDNN(static_cast<int>(get(FlagWord::CudnnBenchmarkLimit)));
  c.setDeterministicCuDNN(on(FlagWord::CudnnDeterministic));
  c.setLinalgPreferredBackend(static_cast<at::LinalgBackend>(get(FlagWord::LinalgBackend)));
  context_fields::blas(c) = static_cast<at::BlasBackend>(get(FlagWord::BlasBackend));
  auto reduction = [&](FlagWord word, auto setter) {
    const uint64_t option = within(get(word), 3);
    (c.*setter)(option == 0, option != 2);
  };
  reduction(FlagWord::Fp16ReductionCublas, &at::Context::setAllowFP16ReductionCuBLAS);
  reduction(FlagWord::Bf16ReductionCublas, &at::Context::setAllowBF16ReductionCuBLAS);
  c.setAllowFP16AccumulationCuBLAS(on(FlagWord::Fp16AccumulationCublas));
}

}  // namespace ergo
