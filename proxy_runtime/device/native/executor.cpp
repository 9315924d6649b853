#include "executor.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

#include <variant>

#include "failure.hpp"
#include "output_spec.hpp"

namespace ergo::device {
namespace {

// What torch warns of is for whoever called the operator, not for this process's log.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { all_.push_back(warning); }
  void write(WordWriter& spec) const {
    spec.word(all_.size());
    for (const c10::Warning& warning : all_) {
      spec.word(std::holds_alternative<c10::DeprecationWarning>(warning.type()));
      const char* file = warning.source_location().file;
      spec.word(warning.source_location().line);
      for (const std::string& text : {std::string(file != nullptr ? file : ""), warning.msg()}) {
        spec.word(text.size());
        spec.bytes(text.data(), text.size());
      }
    }
  }

 private:
  std::vector<c10::Warning> all_;
};

void bind_new(RankState& rank, uint64_t base, const std::vector<c10::Storage>& storages) {
  for (size_t i = 0; i < storages.size(); i++)
    rank.storages.bind(base + i, c10::make_intrusive<PhysicalStorage>(storages[i]));
}

}  // namespace

Executor::Executor(DeviceBackend& backend, ProcessState& process)
    : backend_(backend),
      process_(process),
      keys_(c10::computeDispatchKey(at::kFloat, c10::kStrided, backend.device())) {}

void Executor::dispatch(RankState& rank, const Template& t, CallContext& context, torch::jit::Stack& stack,
                        FlatTensors* before) {
  stack.reserve(t.arguments.size());
  try {
    for (const Value& value : t.arguments) stack.push_back(materialise(value, context));
  } catch (const std::runtime_error& e) {  // not a c10::Error: the words do not fit the template
    throw ProtocolError(t.name + ": " + e.what());
  }
  if (context.handles.left() != 0 || context.payload.left() != 0)
    throw ProtocolError(t.name + ": a call with more words than its template has room for");
  if (before)
    for (const at::Tensor& tensor : context.flat) before->push_back(snapshot(tensor));
  process_.enter(rank);
  process_.apply_globals(t.globals);
  try {
    t.op.callBoxed(&stack);
  } catch (const std::runtime_error& e) {  // of a library below ATen; everywhere else it means malformed words
    TORCH_CHECK(false, t.name, ": ", e.what());
  }
  rank.executed++;
}

void Executor::define(RankState& rank, Template& t, Call call, WordWriter& spec) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  CallContext context{rank.storages, rank.generators, call.handles, call.payload, keys_, {}};
  torch::jit::Stack stack;
  FlatTensors before;
  Warnings warnings;
  try {
    c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    dispatch(rank, t, context, stack, &before);
  } catch (const c10::NotImplementedError&) {
    // torch's words name the keys that it looked for, which the rank does not have.
    c10::DispatchKey key = keys_.highestPriorityTypeId();
    const char* layout = "";
    for (const at::Tensor& argument : context.flat)
      if (const auto kind = composition_of(argument)) {
        layout = *kind == Composition::Nested ? "nested tensors on " : "sparse tensors on ";
        key = *kind == Composition::Nested
                  ? c10::DispatchKey::NestedTensorCPU
                  : c10::computeDispatchKey(argument.scalar_type(), argument.layout(), argument.device());
      }
    TORCH_CHECK_NOT_IMPLEMENTED(t.op.hasComputedKernelForDispatchKey(key), "ergosphere: ", t.name,
                                " has no kernel for ", layout, "the device of this job, which is of kind ",
                                backend_.device().type(),
                                "; use an operator that this kind has too, or run the job on another kind of device");
    throw;
  }
  Outputs outputs = describe_outputs(t, stack, before, context.flat, backend_.device(), spec);
  warnings.write(spec);
  bind_new(rank, call.base_handle, outputs.new_storages);
  t.expected = std::move(outputs.tensors);
  t.new_storages = static_cast<uint32_t>(outputs.new_storages.size());
  rank.defined++;
}

void Executor::execute(RankState& rank, const Template& t, Call call) {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  CallContext context{rank.storages, rank.generators, call.handles, call.payload, keys_, {}};
  torch::jit::Stack stack;
  dispatch(rank, t, context, stack, nullptr);
  bind_new(rank, call.base_handle, match_outputs(t, stack, context.flat));
}

}  // namespace ergo::device
