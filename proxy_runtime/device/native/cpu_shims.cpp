// Operators that composites choose for CUDA tensors and that have no CPU kernel. A rank sees a CUDA device
// also where the device is a CPU accelerator, so they arrive here. Registered for the CPU key of this process.
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mkldnn_rnn_layer_native.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace ergo::device {
namespace {

using at::IntArrayRef;
using at::Tensor;

bool no_library_ctc(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, int64_t) { return false; }
bool no_library_ctc_tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) { return false; }

// y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps); rstd keeps the normalised dimensions as size 1.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input, IntArrayRef normalized_shape,
                                             const Tensor& rstd, const std::optional<Tensor>& weight,
                                             std::array<bool, 2> output_mask) {
  const auto n = static_cast<int64_t>(normalized_shape.size());
  std::vector<int64_t> inner, outer;
  for (int64_t d = 0; d < input.dim(); d++) (d < input.dim() - n ? outer : inner).push_back(d);
  const bool weighted = weight.has_value() && weight->defined();
  Tensor normalised = input.mul(rstd);
  Tensor grad_normalised = weighted ? grad.mul(*weight) : grad;
  std::tuple<Tensor, Tensor> result;
  if (output_mask[0]) {
    Tensor projection = grad_normalised.mul(normalised).mean(inner, /*keepdim=*/true);
    std::get<0>(result) = grad_normalised.sub(normalised.mul(projection)).mul(rstd).to(input.scalar_type());
  }
  if (output_mask[1] && weighted) {
    Tensor product = grad.mul(normalised);
    std::get<1>(result) = (outer.empty() ? product : product.sum(outer)).to(weight->scalar_type());
  }
  return result;
}

// Matrix products whose result has another dtype than the operands: products of the widened operands.
Tensor& into(Tensor& out, const Tensor& result) {
  out.resize_(result.sizes());
  return out.copy_(result);
}

Tensor mm_to(const Tensor& self, const Tensor& other, at::ScalarType dtype) {
  return at::mm(self.to(dtype), other.to(dtype));
}

Tensor& mm_to_out(const Tensor& self, const Tensor& other, at::ScalarType dtype, Tensor& out) {
  return into(out, mm_to(self, other, dtype));
}

Tensor bmm_to(const Tensor& self, const Tensor& other, at::ScalarType dtype) {
  return at::bmm(self.to(dtype), other.to(dtype));
}

Tensor& bmm_to_out(const Tensor& self, const Tensor& other, at::ScalarType dtype, Tensor& out) {
  return into(out, bmm_to(self, other, dtype));
}

Tensor addmm_to(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                const at::Scalar& alpha) {
  return at::addmm(self.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}

Tensor& addmm_to_out(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                     const at::Scalar& alpha, Tensor& out) {
  return into(out, addmm_to(self, a, b, dtype, beta, alpha));
}

Tensor baddbmm_to(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
                  const at::Scalar& alpha) {
  return at::baddbmm(self.to(dtype), a.to(dtype), b.to(dtype), beta, alpha);
}

Tensor& baddbmm_to_out(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                       const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return into(out, baddbmm_to(self, a, b, dtype, beta, alpha));
}

// The kernel asks whether gradients are enabled, which they never are here: the rank says so in `train`
// (rank/native/cpu_device_rnn.cpp), of which the kernel makes nothing else.
std::tuple<Tensor, Tensor, Tensor, Tensor> rnn_layer(const Tensor& input, const Tensor& w0, const Tensor& w1,
                                                     const Tensor& w2, const Tensor& w3, const Tensor& hx,
                                                     const Tensor& cx, bool reverse, IntArrayRef batch_sizes,
                                                     int64_t mode, int64_t hidden_size, int64_t num_layers,
                                                     bool has_biases, bool bidirectional, bool batch_first,
                                                     bool train) {
  c10::AutoGradMode gradients(train);
  return at::native::mkldnn_rnn_layer(input, w0, w1, w2, w3, hx, cx, reverse, batch_sizes, mode, hidden_size,
                                      num_layers, has_biases, bidirectional, batch_first, train);
}

// torch announces that a kernel is overridden; here that is the point.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace
}  // namespace ergo::device

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  using namespace ergo::device;
  library.impl("_use_cudnn_ctc_loss", no_library_ctc);
  library.impl("_use_cudnn_ctc_loss.Tensor", no_library_ctc_tensor);
  library.impl("_use_miopen_ctc_loss", no_library_ctc);
  library.impl("_use_miopen_ctc_loss.Tensor", no_library_ctc_tensor);
  library.impl("_fused_rms_norm_backward", rms_norm_backward);
  library.impl("mm.dtype", mm_to);
  library.impl("mm.dtype_out", mm_to_out);
  library.impl("bmm.dtype", bmm_to);
  library.impl("bmm.dtype_out", bmm_to_out);
  library.impl("addmm.dtype", addmm_to);
  library.impl("addmm.dtype_out", addmm_to_out);
  library.impl("baddbmm.dtype", baddbmm_to);
  library.impl("baddbmm.dtype_out", baddbmm_to_out);
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  library.impl("mkldnn_rnn_layer", rnn_layer);
}
