#include "op_info.hpp"

#include <ATen/core/jit_type.h>
#include <c10/util/flat_hash_map.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>

namespace ergo::rank {
namespace {

using c10::TypeKind;

// Their shapes depend on the value of a Scalar argument.
constexpr std::array<std::string_view, 4> kShapeFromScalar{"aten::arange", "aten::range", "aten::linspace",
                                                           "aten::logspace"};
// Their shapes depend on tensor contents although no tag says so.
constexpr std::array<std::string_view, 5> kShapeFromContents{"aten::_ctc_loss.Tensor", "aten::_cudnn_ctc_loss.Tensor",
                                                             "aten::_padded_dense_to_jagged_forward",
                                                             "aten::segment_reduce", "aten::bincount"};

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  for (auto candidate : names)
    if (candidate == name) return true;
  return false;
}

ArgumentKind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case TypeKind::OptionalType:
      return kind_of(type->castRaw<c10::OptionalType>()->getElementType());
    case TypeKind::NumberType:
    case TypeKind::FloatType:
      return ArgumentKind::Number;
    case TypeKind::ListType:
      return type->castRaw<c10::ListType>()->getElementType()->kind() == TypeKind::NumberType ? ArgumentKind::Number
                                                                                              : ArgumentKind::Plain;
    default:
      return ArgumentKind::Plain;
  }
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  for (const auto& r : schema.returns()) {
    const auto kind = r.type()->kind();
    if (kind == TypeKind::TensorType || kind == TypeKind::ListType || kind == TypeKind::OptionalType) return true;
  }
  return false;
}

std::unique_ptr<OpInfo> make_info(const c10::OperatorHandle& op) {
  auto info = std::make_unique<OpInfo>();
  const auto& schema = op.schema();
  info->name = schema.name();
  if (!schema.overload_name().empty()) info->name += "." + schema.overload_name();
  const bool shape_from_scalar = contains(kShapeFromScalar, schema.name());
  for (const auto& argument : schema.arguments()) {
    ArgumentKind kind = kind_of(argument.type());
    if (kind == ArgumentKind::Number && shape_from_scalar) kind = ArgumentKind::NumberKey;
    info->kinds.push_back(kind);
    info->writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }
  info->one_off = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
                  // Nobody says of an operator that is not torch's whether its shapes depend on contents (nms): no
                  // answer is known before it has run.
                  schema.name().rfind("aten::", 0) != 0 || (!schema.returns().empty() && !returns_tensors(schema)) ||
                  contains(kShapeFromContents, info->name) || schema.name().rfind("aten::_to_sparse", 0) == 0 ||
                  schema.name() == "aten::_validate_sparse_coo_tensor_args";  // how many values are not zero
  info->one_off_with_mask = schema.name() == "aten::index" || schema.name() == "aten::_unsafe_index";
  // What is indexed by numbers has sizes that metadata decide, though torch's tag is for masks and numbers alike. So
  // it is with the choice of an attention kernel.
  if (info->one_off_with_mask || schema.name() == "aten::_fused_sdp_choice") info->one_off = false;
  return info;
}

std::atomic<uint64_t> generation{1};

}  // namespace

void forget_op_infos() { generation.fetch_add(1); }

const OpInfo& op_info(const c10::OperatorHandle& op) {
  using Map = ska::flat_hash_map<const void*, const OpInfo*>;
  thread_local Map cache;
  thread_local uint64_t cache_generation = 0;
  const uint64_t current = generation.load(std::memory_order_relaxed);
  if (C10_UNLIKELY(cache_generation != current)) {
    cache.clear();
    cache_generation = current;
  }
  const void* key = &op.schema();
  auto found = cache.find(key);
  if (C10_LIKELY(found != cache.end())) return *found->second;

  // Infos are shared by name and live for ever: templates point to them.
  static std::mutex mutex;
  static ska::flat_hash_map<std::string, std::unique_ptr<OpInfo>> all;
  auto info = make_info(op);
  std::lock_guard<std::mutex> lock(mutex);
  auto& shared = all[info->name];
  const bool same = shared && shared->kinds == info->kinds && shared->writes == info->writes;
  if (!same) {
    // An operator of the same name with another schema: a new identity, the old one stays for its templates.
    if (shared) (void)shared.release();
    shared = std::move(info);
  }
  cache[key] = shared.get();
  return *shared;
}

}  // namespace ergo::rank
