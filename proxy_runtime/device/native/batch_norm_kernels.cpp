// The parts of a batch norm that is synchronised between ranks (torch.nn.SyncBatchNorm). torch has them for CUDA
// only; here they are sums over the CPU, in the order of its own kernels. Registered for the CPU key of this process.
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace ergo::device {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

bool defined(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

// All dimensions but the channels.
std::vector<int64_t> reduced(const Tensor& input) {
  std::vector<int64_t> dims;
  for (int64_t d = 0; d < input.dim(); d++)
    if (d != 1) dims.push_back(d);
  return dims;
}

// One value a channel, shaped to go with `input`.
Tensor per_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = input.size(1);
  return values.view(shape);
}

Tensor wide(const Tensor& tensor) { return tensor.to(at::toOpMathType(tensor.scalar_type())); }

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const Tensor x = wide(input);
  const auto dims = reduced(x);
  Tensor mean = x.mean(dims);
  Tensor variance = x.sub(per_channel(mean, x)).square().mean(dims);
  return {mean, variance.add(eps).rsqrt()};
}

// The statistics of all members from those of each; the running ones take the unbiased variance.
std::tuple<Tensor, Tensor> gather_stats_with_counts(const Tensor&, const Tensor& means, const Tensor& inverses,
                                                    const OptionalTensor& running_mean,
                                                    const OptionalTensor& running_var, double momentum, double eps,
                                                    const Tensor& counts) {
  const Tensor weights = counts.view({-1, 1}).to(means.scalar_type());
  const Tensor total = weights.sum();
  Tensor mean = means.mul(weights).sum(0).div(total);
  const Tensor variances = inverses.square().reciprocal().sub(eps);
  const Tensor squares = variances.add(means.sub(mean).square()).mul(weights).sum(0);
  Tensor inverse = squares.div(total).add(eps).rsqrt();
  if (defined(running_mean)) running_mean->mul_(1 - momentum).add_(mean, momentum);
  if (defined(running_var)) running_var->mul_(1 - momentum).add_(squares.div(total.sub(1)), momentum);
  return {mean, inverse};
}

std::tuple<Tensor, Tensor> gather_stats(const Tensor& input, const Tensor& means, const Tensor& inverses,
                                        const OptionalTensor& running_mean, const OptionalTensor& running_var,
                                        double momentum, double eps, int64_t count) {
  const Tensor counts = at::empty({means.size(0)}, means.options()).fill_(count);
  return gather_stats_with_counts(input, means, inverses, running_mean, running_var, momentum, eps, counts);
}

Tensor elementwise(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& mean,
                   const Tensor& inverse, double) {
  const Tensor x = wide(input);
  Tensor result = x.sub(per_channel(mean, x)).mul(per_channel(inverse, x));
  if (defined(weight)) result = result.mul(per_channel(*weight, x));
  if (defined(bias)) result = result.add(per_channel(*bias, x));
  return result.to(input.scalar_type());
}

Tensor& elementwise_out(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                        const Tensor& mean, const Tensor& inverse, double eps, Tensor& out) {
  out.resize_(input.sizes());
  return out.copy_(elementwise(input, weight, bias, mean, inverse, eps));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                                           const Tensor& inverse, const OptionalTensor& weight,
                                                           bool of_input, bool of_weight, bool of_bias) {
  const Tensor dy = wide(grad);
  const Tensor x = wide(input);
  const auto dims = reduced(x);
  const Tensor sum_dy = dy.sum(dims);
  const Tensor sum_dy_xmu = dy.mul(x.sub(per_channel(mean, x))).sum(dims);
  std::tuple<Tensor, Tensor, Tensor, Tensor> result;
  if (of_input) std::get<0>(result) = sum_dy, std::get<1>(result) = sum_dy_xmu;
  const auto type = defined(weight) ? weight->scalar_type() : sum_dy.scalar_type();
  if (of_weight) std::get<2>(result) = sum_dy_xmu.mul(inverse).to(type);
  if (of_bias) std::get<3>(result) = of_input ? sum_dy.clone().to(type) : sum_dy.to(type);
  return result;
}

Tensor backward_elementwise(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& inverse,
                            const OptionalTensor& weight, const Tensor& sum_dy, const Tensor& sum_dy_xmu,
                            const Tensor& counts) {
  const Tensor x = wide(input);
  const Tensor total = counts.sum().to(mean.scalar_type());
  const Tensor projection = sum_dy_xmu.div(total).mul(inverse.square());
  Tensor scale = inverse;
  if (defined(weight)) scale = scale.mul(*weight);
  return wide(grad)
      .sub(per_channel(sum_dy.div(total), x))
      .sub(x.sub(per_channel(mean, x)).mul(per_channel(projection, x)))
      .mul(per_channel(scale, x))
      .to(input.scalar_type());
}

}  // namespace
}  // namespace ergo::device

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  using namespace ergo::device;
  library.impl("batch_norm_stats", stats);
  library.impl("batch_norm_gather_stats", gather_stats);
  library.impl("batch_norm_gather_stats_with_counts", gather_stats_with_counts);
  library.impl("batch_norm_elemt", elementwise);
  library.impl("batch_norm_elemt.out", elementwise_out);
  library.impl("batch_norm_backward_reduce", backward_reduce);
  library.impl("batch_norm_backward_elemt", backward_elementwise);
}
