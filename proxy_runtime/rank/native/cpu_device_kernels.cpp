// Where torch chooses an implementation by device type, a device of kind "cpu" must choose as the CPU
// does: the kernels of the CUDA branch do not exist there, and its bits are those of a native CPU run.
#include <ATen/OpMathType.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>

#include <limits>
#include <tuple>
#include <vector>

#include "kernels.hpp"

namespace ergo::rank {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool defined(const OptionalTensor& t) { return t.has_value() && t->defined(); }

OptionalTensor additive_mask(const OptionalTensor& mask, at::ScalarType dtype) {
  if (!defined(mask) || mask->scalar_type() != at::kBool) return mask;
  Tensor zeros = at::zeros_like(*mask, mask->options().dtype(dtype));
  return zeros.masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
}

int64_t sdp_choice_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                          double dropout, bool causal, std::optional<double> scale, bool gqa) {
  return at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, causal, scale, gqa);
}

// at::native::scaled_dot_product_attention with the branches that a CPU can take.
Tensor sdpa_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                   double dropout, bool causal, std::optional<double> scale, bool gqa) {
  if (query.dim() == 3 && key.dim() == 3 && value.dim() == 3) {
    OptionalTensor mask4 = mask;
    while (defined(mask4) && mask4->dim() < 4) mask4 = mask4->unsqueeze(0);
    return sdpa_kernel(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask4, dropout, causal, scale, gqa)
        .squeeze(0);
  }
  const auto choice =
      static_cast<sdp::SDPBackend>(sdp_choice_kernel(query, key, value, mask, dropout, causal, scale, gqa));
  const OptionalTensor additive = additive_mask(mask, query.scalar_type());
  if (choice == sdp::SDPBackend::flash_attention)
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, additive, scale));
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, additive, dropout, causal, std::nullopt, scale, gqa));
}

// The CPU has no fused attention of nested tensors.
Tensor nested_sdpa_kernel(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                          double dropout, bool causal, std::optional<double> scale, bool gqa) {
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, additive_mask(mask, query.scalar_type()),
                                                            dropout, causal, std::nullopt, scale, gqa));
}

Tensor sum_of(const Tensor& a, const Tensor& b, const OptionalTensor& c, const OptionalTensor& d) {
  Tensor total = a + b;
  if (defined(c)) total = total + *c;
  if (defined(d)) total = total + *d;
  return total;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_kernel(const Tensor& input_gates, const Tensor& hidden_gates,
                                                    const Tensor& cx, const OptionalTensor& input_bias,
                                                    const OptionalTensor& hidden_bias) {
  const auto gates = sum_of(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1);
  const Tensor cy = gates[1].sigmoid() * cx + gates[0].sigmoid() * gates[2].tanh();
  const Tensor hy = gates[3].sigmoid() * cy.tanh();
  return {hy, cy, at::empty({0}, input_gates.options())};
}

std::tuple<Tensor, Tensor> gru_cell_kernel(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                           const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  const auto in = (defined(input_bias) ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto hidden = (defined(hidden_bias) ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const Tensor reset = (in[0] + hidden[0]).sigmoid();
  const Tensor update = (in[1] + hidden[1]).sigmoid();
  const Tensor candidate = (in[2] + reset * hidden[2]).tanh();
  return {(hx - candidate) * update + candidate, at::empty({0}, input_gates.options())};
}

// The decomposition that torch uses on the CPU; CUDA has a kernel of its own.
std::tuple<Tensor, Tensor> rms_norm_kernel(const Tensor& input, at::IntArrayRef normalized_shape,
                                           const OptionalTensor& weight, std::optional<double> eps) {
  std::vector<int64_t> dims;
  for (size_t i = 0; i < normalized_shape.size(); ++i) dims.push_back(input.dim() - static_cast<int64_t>(i) - 1);
  const auto type = at::toOpMathType(input.scalar_type());
  const bool single = type == at::kFloat || type == at::kComplexFloat;
  const double epsilon = single ? eps.value_or(std::numeric_limits<float>::epsilon())
                                : eps.value_or(std::numeric_limits<double>::epsilon());
  const Tensor wide = input.to(type);
  const Tensor scale = at::rsqrt(at::pow(wide, 2).mean(dims, /*keepdim=*/true).add_(epsilon));
  Tensor result = wide.mul(scale);
  if (defined(weight)) result = result.mul(*weight);
  return {result.type_as(input), scale};
}

// A CUDA tensor is multiplied by a mask and a factor that are not rounded to its dtype; a CPU tensor by noise that is.
// `functional`: as torch.func draws the noise.
template <bool functional>
Tensor dropout_kernel(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  Tensor noise;
  if constexpr (functional)
    noise = at::bernoulli(at::empty({}, input.options()).expand_symint(input.sym_sizes()), 1 - p);
  else
    noise = at::empty_like(input, input.options().dtype(c10::toRealValueType(input.scalar_type()))).bernoulli_(1 - p);
  return input.mul(noise.div_(1 - p));
}

// CUDA kernels read half precision and write float32; a CPU tensor is converted first.
template <Tensor (*function)(const Tensor&, int64_t, bool)>
Tensor softmax_kernel(const Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype) {
  return function(dtype.has_value() ? input.toType(*dtype) : input, dim, /*half_to_float=*/false);
}

template <Tensor& (*function)(Tensor&, const Tensor&, int64_t, bool)>
Tensor& softmax_out_kernel(const Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype, Tensor& out) {
  const Tensor converted = dtype.has_value() ? input.toType(*dtype) : input;
  if (out.is_contiguous()) return function(out, converted, dim, /*half_to_float=*/false);
  // The kernel writes as if its result were contiguous.
  Tensor result = at::empty(out.sizes(), out.options());
  function(result, converted, dim, /*half_to_float=*/false);
  out.resize_(result.sizes());
  return out.copy_(result);
}

bool no_cudnn_ctc(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) { return false; }
bool no_cudnn_ctc_tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; }

}  // namespace

void register_cpu_device_kernels(torch::Library& library, torch::Library& autograd) {
  // Composites are decided above autograd, so they are registered there too: their parts record gradients. Those that
  // torch.func decides again, in keys of its own, are registered there as well; a CPU tensor gets the same there.
  const auto of_key = [](c10::DispatchKey key) {
    return new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  };
  static auto* transforms = of_key(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  static auto* vmap = of_key(c10::DispatchKey::FuncTorchVmapMode);
  static auto* batched = of_key(c10::DispatchKey::FuncTorchBatched);
  transforms->impl("dropout", dropout_kernel<true>);
  vmap->impl("scaled_dot_product_attention", sdpa_kernel);
  batched->impl("softmax.int", softmax_kernel<at::_softmax>);
  batched->impl("log_softmax.int", softmax_kernel<at::_log_softmax>);
  for (torch::Library* target : {&library, &autograd}) {
    target->impl("scaled_dot_product_attention", sdpa_kernel);
    target->impl("dropout", dropout_kernel<false>);
    target->impl("softmax.int", softmax_kernel<at::_softmax>);
    target->impl("softmax.int_out", softmax_out_kernel<at::_softmax_out>);
    target->impl("log_softmax.int", softmax_kernel<at::_log_softmax>);
    target->impl("log_softmax.int_out", softmax_out_kernel<at::_log_softmax_out>);
    target->impl("_thnn_fused_lstm_cell", lstm_cell_kernel);
    target->impl("_thnn_fused_gru_cell", gru_cell_kernel);
    target->impl("_fused_rms_norm", rms_norm_kernel);
  }
  for (auto key : {c10::DispatchKey::NestedTensorCUDA, c10::DispatchKey::AutogradNestedTensor})
    (new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__))  // for ever
        ->impl("scaled_dot_product_attention", nested_sdpa_kernel);
  library.impl("_fused_sdp_choice", sdp_choice_kernel);
  library.impl("_use_cudnn_ctc_loss", no_cudnn_ctc);
  library.impl("_use_cudnn_ctc_loss.Tensor", no_cudnn_ctc_tensor);
}

}  // namespace ergo::rank
