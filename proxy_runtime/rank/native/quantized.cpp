// Quantized tensors. torch's native kernels for them would run CUDA code in the rank, on memory that is not there: each
// raises instead, by its name.
#include "layouts.hpp"
#include "registration.hpp"

namespace ergo::rank {
namespace {

constexpr std::array<std::string_view, 3> kMetadataOnly{"aten::q_scale", "aten::q_zero_point", "aten::qscheme"};

void raise_unsupported(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "ergosphere: ", op.operator_name(),
                              " on a quantized CUDA tensor is not forwarded to the device proxy; do this part on the "
                              "CPU");
}

}  // namespace

void register_quantized_layout() {
  take_layout<&raise_unsupported, &raise_unsupported>(
      c10::DispatchKey::QuantizedCUDA, [](std::string_view name, std::string_view full) {
        return any_is(kOfComponents, full) || any_is(kMetadataOnly, name);
      });
}

}  // namespace ergo::rank
