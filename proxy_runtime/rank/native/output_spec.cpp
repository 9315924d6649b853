#include "output_spec.hpp"

#include <cstring>
#include <mutex>
#include <set>

#include "memory.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

std::string parse_text(WordReader& in) {
  const uint64_t n = in.word();
  return std::string(in.bytes(n), n);
}

// Warnings point to the name of a file, and may be looked at after the call.
const char* kept_name(std::string name) {
  static std::mutex mutex;
  static auto* names = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return names->insert(std::move(name)).first->c_str();
}

OutputTensor parse_tensor(WordReader& in, size_t n_arguments, size_t n_new, bool may_be_composed = true) {
  OutputTensor out;
  const uint64_t header = in.word();
  out.kind = static_cast<OutKind>(header & 0xff);
  if (out.kind == OutKind::Undefined) return out;
  out.dtype = static_cast<c10::ScalarType>((header >> 8) & 0xff);
  const size_t dims = (header >> 16) & 0xff;
  out.flags = static_cast<uint8_t>((header >> 24) & 0xff);
  out.reference = static_cast<uint32_t>(header >> 32);
  if (out.kind == OutKind::Composed) {
    TORCH_CHECK(may_be_composed && dims <= static_cast<uint8_t>(Composition::Nested),
                "ergosphere: malformed output specification");
    Composed& composed = out.composed.emplace();
    composed.kind = static_cast<Composition>(dims);
    composed.coalesced = (out.flags & 1) != 0;
    composed.sparse_dim = static_cast<uint8_t>(out.reference);
    const uint64_t n = in.word();
    const uint64_t* geometry = in.words(n);
    composed.geometry.assign(geometry, geometry + n);
    for (size_t i = 0; i < components_of(composed.kind); ++i)
      out.components.push_back(parse_tensor(in, n_arguments, n_new, false));
    return out;
  }
  out.offset = static_cast<int64_t>(in.word());
  const uint64_t* sizes = in.words(dims);
  const uint64_t* strides = in.words(dims);
  out.sizes.assign(sizes, sizes + dims);
  out.strides.assign(strides, strides + dims);
  const size_t limit = out.kind == OutKind::New ? n_new : n_arguments;
  TORCH_CHECK(out.kind <= OutKind::New && out.reference < limit, "ergosphere: malformed output specification");
  return out;
}

using Storages = c10::ArrayRef<c10::Storage>;
using NewStorages = c10::SmallVector<c10::Storage, 2>;

OutputValue parse_value(WordReader& in, size_t n_arguments, size_t n_new) {
  OutputValue value;
  switch (in.word()) {
    case 'T':
      value.kind = OutputValue::Kind::Tensor;
      value.tensors.push_back(parse_tensor(in, n_arguments, n_new));
      break;
    case 'L': {
      value.kind = OutputValue::Kind::TensorList;
      const uint64_t n = in.word();
      TORCH_CHECK(n <= in.left(), "ergosphere: malformed output specification");
      for (uint64_t i = 0; i < n; ++i) value.tensors.push_back(parse_tensor(in, n_arguments, n_new));
      break;
    }
    case 'I':
      value.constant = static_cast<int64_t>(in.word());
      break;
    case 'B':
      value.constant = in.word() != 0;
      break;
    case 'D':
      value.constant = in.real();
      break;
    case 'N':
      break;
    default:
      TORCH_CHECK(false, "ergosphere: malformed output specification");
  }
  return value;
}

at::Tensor make_output(const OutputTensor& out, const EncodedCall& call, Storages storages);

Composed with_components(const OutputTensor& out, const EncodedCall& call, Storages storages) {
  Composed composed = *out.composed;
  for (const auto& component : out.components) composed.components.push_back(make_output(component, call, storages));
  return composed;
}

at::Tensor make_output(const OutputTensor& out, const EncodedCall& call, Storages storages) {
  if (out.kind == OutKind::Undefined) return {};
  if (out.kind == OutKind::SameAsArgument) return *call.tensors[out.reference];
  const auto type = c10::scalarTypeToTypeMeta(out.dtype);
  if (out.kind == OutKind::Composed) return compose(with_components(out, call, storages));
  at::Tensor tensor;
  if (out.kind == OutKind::AliasOfArgument) {
    // The view constructor takes the key set literally: without the base's autograd keys the alias would be
    // an inference tensor.
    const at::Tensor& base = *call.tensors[out.reference];
    const auto keys =
        base.unsafeGetTensorImpl()->key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
    tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), keys, type);
  } else {
    tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storages[out.reference]),
                                                      c10::DispatchKeySet(kDeviceKey), type);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(out.sizes, out.strides, out.offset);
  if ((out.flags & Conj) != 0) tensor._set_conj(true);
  if ((out.flags & Neg) != 0) tensor._set_neg(true);
  return tensor;
}

void apply_update(const ArgumentUpdate& update, const EncodedCall& call, Storages storages) {
  const OutputTensor& out = update.geometry;
  if (out.kind == OutKind::Composed)
    return become(*call.tensors[update.argument], with_components(out, call, storages));
  auto* impl = call.tensors[update.argument]->unsafeGetTensorImpl();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (update.storage_bytes != storage->nbytes()) adopt_size(*storage, update.storage_bytes);
  impl->set_sizes_and_strides(out.sizes, out.strides, out.offset);
  const at::Tensor& tensor = *call.tensors[update.argument];
  tensor._set_conj((out.flags & Conj) != 0);
  tensor._set_neg((out.flags & Neg) != 0);
}

// The storages that a call has made; and what it did to its arguments is done to them here.
NewStorages take_effect(const OutputSpec& spec, const EncodedCall& call, uint64_t base_handle) {
  NewStorages storages;
  for (size_t i = 0; i < spec.new_bytes.size(); ++i)
    storages.push_back(make_storage(base_handle + i, spec.new_bytes[i]));
  for (const auto& update : spec.updates) apply_update(update, call, storages);
  return storages;
}

}  // namespace

OutputSpec parse_output_spec(const char* data, size_t length, size_t n_arguments) {
  TORCH_CHECK(length % 8 == 0, "ergosphere: malformed output specification");
  WordReader in(reinterpret_cast<const uint64_t*>(data), length / 8);
  OutputSpec spec;
  const uint64_t n_new = in.word();
  const uint64_t* bytes = in.words(n_new);
  spec.new_bytes.assign(bytes, bytes + n_new);
  for (uint64_t size : spec.new_bytes) spec.new_memory += in_blocks(size);
  const uint64_t n_returns = in.word();
  for (uint64_t i = 0; i < n_returns; ++i) spec.returns.push_back(parse_value(in, n_arguments, n_new));
  const uint64_t n_updates = in.word();
  for (uint64_t i = 0; i < n_updates; ++i) {
    ArgumentUpdate update;
    update.argument = static_cast<uint32_t>(in.word());
    update.storage_bytes = in.word();
    update.geometry = parse_tensor(in, n_arguments, n_new);
    TORCH_CHECK(update.argument < n_arguments, "ergosphere: malformed output specification");
    spec.updates.push_back(std::move(update));
  }
  for (uint64_t i = 0, n = in.word(); i < n; ++i) {
    CallWarning warning;
    warning.deprecation = in.word() != 0;
    warning.line = static_cast<uint32_t>(in.word());
    warning.file = kept_name(parse_text(in));
    warning.text = parse_text(in);
    spec.warnings.push_back(std::move(warning));
  }
  return spec;
}

void OutputSpec::keep_repeated_warnings() {
  std::erase_if(warnings, [](const CallWarning& warning) {
    return warning.text.find("does not have a deterministic implementation") == std::string::npos;
  });
}

void OutputSpec::warn() const {
  for (const CallWarning& warning : warnings) {
    c10::Warning::warning_variant_t type = c10::UserWarning();
    if (warning.deprecation) type = c10::DeprecationWarning();
    c10::warn(c10::Warning(type, {"", warning.file, warning.line}, warning.text, /*verbatim=*/false));
  }
}

void push_outputs(const OutputSpec& spec, const EncodedCall& call, uint64_t base_handle, torch::jit::Stack& stack,
                  size_t n_arguments) {
  const NewStorages storages = take_effect(spec, call, base_handle);
  // The results are made while the arguments, to which the call points, are still on the stack.
  c10::SmallVector<c10::IValue, 4> results;
  for (const auto& value : spec.returns) {
    switch (value.kind) {
      case OutputValue::Kind::Tensor:
        results.emplace_back(make_output(value.tensors[0], call, storages));
        break;
      case OutputValue::Kind::TensorList: {
        c10::List<at::Tensor> list;
        list.reserve(value.tensors.size());
        for (const auto& tensor : value.tensors) list.push_back(make_output(tensor, call, storages));
        results.emplace_back(std::move(list));
        break;
      }
      case OutputValue::Kind::Constant:
        results.emplace_back(value.constant);
        break;
    }
  }
  torch::jit::drop(stack, n_arguments);
  for (auto& result : results) stack.emplace_back(std::move(result));
}

at::Tensor only_output(const OutputSpec& spec, const EncodedCall& call, uint64_t base_handle) {
  const NewStorages storages = take_effect(spec, call, base_handle);
  return make_output(spec.returns[0].tensors[0], call, storages);
}

}  // namespace ergo::rank
