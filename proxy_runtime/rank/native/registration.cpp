#include "registration.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <memory>
#include <string_view>

#include "autocast.hpp"
#include "fallback.hpp"
#include "kernels.hpp"
#include "op_info.hpp"
#include "storage.hpp"
#include "unboxed.hpp"

namespace ergo::rank {
namespace {

// Composites that are forwarded whole: fewer messages, and the device chooses their parts. The last five
// launch kernels from a composite, which in a rank would be native CUDA code on memory it does not have.
constexpr std::array<std::string_view, 27> kWholeComposites{"aten::clone",
                                                            "aten::_validate_sparse_coo_tensor_args",
                                                            "aten::convolution",
                                                            "aten::convolution_backward",
                                                            "aten::embedding",
                                                            "aten::zeros_like",
                                                            "aten::ones_like",
                                                            "aten::full_like",
                                                            "aten::masked_fill.Scalar",
                                                            "aten::masked_fill.Tensor",
                                                            "aten::native_dropout_backward",
                                                            "aten::repeat",
                                                            "aten::stack",
                                                            "aten::cat",
                                                            "aten::logsumexp",
                                                            "aten::mean",
                                                            "aten::select_backward",
                                                            "aten::slice_backward",
                                                            "aten::bernoulli.p",
                                                            "aten::mv",
                                                            "aten::rand_like",
                                                            "aten::randn_like",
                                                            "aten::ldexp.Tensor",
                                                            "aten::ldexp.out",
                                                            "aten::ldexp_",
                                                            "aten::mode.values",
                                                            "aten::conj_physical_"};

// Answered in the rank, by our kernels or by torch's (pinning is the host's business).
constexpr std::array<std::string_view, 21> kLocal{"aten::empty.memory_format",
                                                  "aten::empty_strided",
                                                  "aten::_efficientzerotensor",
                                                  "aten::as_strided",
                                                  "aten::view",
                                                  "aten::_reshape_alias",
                                                  "aten::unfold",
                                                  "aten::view_as_real",
                                                  "aten::view_as_complex",
                                                  "aten::resize_",
                                                  "aten::set_.source_Storage",
                                                  "aten::set_.source_Storage_storage_offset",
                                                  "aten::set_.source_Tensor",
                                                  "aten::set_",
                                                  "aten::copy_",
                                                  "aten::_to_copy",
                                                  "aten::_local_scalar_dense",
                                                  "aten::record_stream",
                                                  "aten::is_pinned",
                                                  "aten::_pin_memory",
                                                  "aten::scaled_dot_product_attention"};
constexpr std::array<std::string_view, 23> kLocalOnCpuDevice{"aten::dropout",
                                                             "aten::softmax.int",
                                                             "aten::softmax.int_out",
                                                             "aten::log_softmax.int",
                                                             "aten::log_softmax.int_out",
                                                             "aten::_fused_sdp_choice",
                                                             "aten::_use_cudnn_ctc_loss",
                                                             "aten::_use_cudnn_ctc_loss.Tensor",
                                                             "aten::_thnn_fused_lstm_cell",
                                                             "aten::_thnn_fused_gru_cell",
                                                             "aten::_fused_rms_norm",
                                                             "aten::lstm.input",
                                                             "aten::lstm.data",
                                                             "aten::gru.input",
                                                             "aten::gru.data",
                                                             "aten::rnn_tanh.input",
                                                             "aten::rnn_tanh.data",
                                                             "aten::rnn_relu.input",
                                                             "aten::rnn_relu.data",
                                                             "aten::lstm_cell",
                                                             "aten::gru_cell",
                                                             "aten::rnn_tanh_cell",
                                                             "aten::rnn_relu_cell"};

// Collectives reach our process group by torch's own kernels.
constexpr std::array<std::string_view, 4> kTorchsNamespaces{"c10d", "_c10d_functional", "_c10d_functional_autograd",
                                                            "profiler"};

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  for (auto candidate : names)
    if (candidate == name) return true;
  return false;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

std::string_view namespace_of(const c10::OperatorName& name) {
  return std::string_view(name.name).substr(0, name.name.find("::"));
}

// torch announces overridden kernels once per process; here that is the point.
class QuietWarnings {
 public:
  QuietWarnings() : guard_(&handler_) {}

 private:
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Silent handler_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

// Registrations live for ever; one library object per namespace.
torch::Library& library_of(std::string_view ns) {
  static auto* libraries = new std::map<std::string, std::unique_ptr<torch::Library>, std::less<>>;
  auto found = libraries->find(ns);
  if (found == libraries->end())
    found = libraries
                ->emplace(std::string(ns), std::make_unique<torch::Library>(torch::Library::IMPL, std::string(ns),
                                                                            kDeviceKey, __FILE__, __LINE__))
                .first;
  return *found->second;
}

DeviceKind device_kind = DeviceKind::Cpu;
bool swept = false;

std::vector<std::string>& overridden() {
  static auto* names = new std::vector<std::string>;
  return *names;
}

// What the dispatcher says of a kernel of ours.
constexpr const char* kForwarded = "forwarded to the device proxy";

torch::CppFunction forwarding() {
  return torch::CppFunction::makeFromBoxedFunction<&forward_operator>().debug(kForwarded);
}

// Whether a kernel tells what it was registered with.
template <class Kernel>
constexpr bool has_words = requires(const Kernel& kernel) { kernel.debug(); };

using Computed =
    std::remove_cvref_t<decltype(std::declval<c10::OperatorHandle>().getComputedKernelForDispatchKey(kDeviceKey))>;

torch::CppFunction forwarding(const std::string& name) {
  if constexpr (has_words<Computed>)  // else an unboxed one could not be told from another's
    if (auto kernel = unboxed_kernel(name)) return std::move(*kernel).debug(kForwarded);
  return forwarding();
}

// Whether a kernel is ours. Newer torch versions hand it out in a wrapper, which tells what it was registered with.
template <class Kernel>
bool is_ours(const Kernel& kernel) {
  if constexpr (has_words<Kernel>)
    return kernel.debug() == kForwarded;
  else
    return kernel._equalsBoxedAndUnboxed(c10::KernelFunction::makeFromBoxedFunction<&forward_operator>());
}

bool is_forwarded(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(kDeviceKey) && is_ours(op.getComputedKernelForDispatchKey(kDeviceKey));
}

bool wanted(const c10::OperatorHandle& op, const std::string& name) {
  const auto ns = namespace_of(op.operator_name());
  if (contains(kTorchsNamespaces, ns) || contains(kLocal, name)) return false;
  if (device_kind == DeviceKind::Cpu && contains(kLocalOnCpuDevice, name)) return false;
  if (op.hasKernelForDispatchKey(kDeviceKey)) return true;
  if (ns != "aten") return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || name.rfind("aten::_foreach_", 0) == 0 ||
         contains(kWholeComposites, name);
}

class Listener final : public c10::OpRegistrationListener {
 public:
  explicit Listener(void (*notify)()) : notify_(notify) {}
  void onOperatorRegistered(const c10::OperatorHandle&) override {
    if (armed) notify_();
  }
  void onOperatorDeregistered(const c10::OperatorHandle&) override { forget_op_infos(); }
  bool armed = false;

 private:
  void (*notify_)();
};

}  // namespace

size_t sweep_operators(const std::unordered_set<std::string>& python_kernels) {
  QuietWarnings quiet;
  size_t n = 0;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value()) continue;
    const std::string full = full_name(name);
    if (!wanted(*op, full) || is_forwarded(*op) || python_kernels.count(full) != 0) continue;
    const auto ns = namespace_of(name);
    if (swept && ns == "aten") overridden().push_back(full);
    library_of(ns).impl(full.substr(ns.size() + 2).c_str(), forwarding(full));
    ++n;
  }
  swept = true;
  return n;
}

const std::vector<std::string>& overridden_operators() { return overridden(); }

void register_operators(DeviceKind kind) {
  device_kind = kind;
  {
    QuietWarnings quiet;
    static auto* fallback = new torch::Library(torch::Library::IMPL, "_", kDeviceKey, __FILE__, __LINE__);
    fallback->fallback(forwarding());
    torch::Library& aten = library_of("aten");
    register_memory_kernels(aten);
    static auto* autograd =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__);
    register_copy_kernels(aten, *autograd);
    if (kind == DeviceKind::Cpu) {
      register_cpu_device_kernels(aten, *autograd);
      register_cpu_device_rnn(aten, *autograd);
      register_cpu_autocast();
    }
  }
  sweep_operators({});
}

void watch_registrations(void (*on_new_operators)()) {
  auto listener = std::make_unique<Listener>(on_new_operators);
  Listener* raw = listener.get();
  // Never removed: libraries may come until the process ends.
  static auto* handle =
      new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::move(listener)));
  (void)handle;
  // Adding a listener announces every operator that exists already.
  raw->armed = true;
}

}  // namespace ergo::rank
