#include "value.hpp"

#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>

#include <cstring>
#include <optional>
#include <string>

#include "failure.hpp"

namespace ergo::device {
namespace {

constexpr int kMaxDepth = 4;

uint64_t bits(uint64_t word, int from, int count) { return (word >> from) & ((uint64_t{1} << count) - 1); }

bool flag(uint8_t flags, TensorFlag f) { return (flags & f) != 0; }

at::ScalarType checked_dtype(uint64_t value) {
  if (value >= static_cast<uint64_t>(at::ScalarType::NumOptions) ||
      value == static_cast<uint64_t>(at::ScalarType::Undefined))
    throw ProtocolError("a tensor of unknown dtype " + std::to_string(value));
  return static_cast<at::ScalarType>(value);
}

uint64_t checked_multiply(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product) || product > (uint64_t{1} << 62))
    throw ProtocolError("a tensor of impossible size");
  return product;
}

uint64_t checked_add(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum) || sum > (uint64_t{1} << 62))
    throw ProtocolError("a tensor of impossible size");
  return sum;
}

int64_t checked_size(uint64_t word) {
  if (word > (uint64_t{1} << 62)) throw ProtocolError("a tensor with a negative size, stride or offset");
  return static_cast<int64_t>(word);
}

size_t checked_count(uint64_t word, const WordReader& key) {
  uint64_t n = bits(word, 8, 32);
  if (n > key.left()) throw ProtocolError("a list longer than its message");
  return n;
}

template <typename T, typename Convert>
c10::IValue parse_list(uint64_t word, WordReader& key, Convert convert) {
  size_t n = checked_count(word, key);
  c10::List<T> list;
  list.reserve(n);
  for (size_t i = 0; i < n; i++) list.push_back(convert(key));
  return list;
}

bool is_tensor(Tag tag) {
  return tag == Tag::Tensor || tag == Tag::CpuTensor || tag == Tag::UndefinedTensor || tag == Tag::Composed ||
         tag == Tag::SameTensor;
}
bool is_number(Tag tag) {
  return tag == Tag::Float || tag == Tag::FloatKey || tag == Tag::ScalarInt || tag == Tag::ScalarBool ||
         tag == Tag::Complex || tag == Tag::Int || tag == Tag::Bool;
}

bool fits(const c10::Type& type, const Value& value) {
  using Kind = c10::TypeKind;
  switch (type.kind()) {
    case Kind::OptionalType:
      return value.tag == Tag::None || value.tag == Tag::UndefinedTensor ||
             fits(*type.castRaw<c10::OptionalType>()->getElementType(), value);
    case Kind::TensorType:
      return is_tensor(value.tag);
    case Kind::IntType:
    case Kind::SymIntType:
      return value.tag == Tag::Int || value.tag == Tag::Layout || value.tag == Tag::DType ||
             value.tag == Tag::MemoryFormat;
    case Kind::LayoutType:
      return value.tag == Tag::Int || value.tag == Tag::Layout;
    case Kind::ScalarTypeType:
      return value.tag == Tag::Int || value.tag == Tag::DType;
    case Kind::MemoryFormatType:
      return value.tag == Tag::Int || value.tag == Tag::MemoryFormat;
    case Kind::FloatType:
    case Kind::SymFloatType:
      return value.tag == Tag::Float || value.tag == Tag::FloatKey;
    case Kind::BoolType:
    case Kind::SymBoolType:
      return value.tag == Tag::Bool;
    case Kind::NumberType:
      return is_number(value.tag);
    case Kind::ComplexType:
      return value.tag == Tag::Complex;
    case Kind::StringType:
      return value.tag == Tag::String;
    case Kind::DeviceObjType:
      return value.tag == Tag::Device;
    case Kind::GeneratorType:
      return value.tag == Tag::Generator;
    case Kind::ListType: {
      const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
      if (value.tag == Tag::IntList) return element.kind() == Kind::IntType || element.kind() == Kind::SymIntType;
      if (value.tag == Tag::BoolList) return element.kind() == Kind::BoolType;
      if (value.tag == Tag::FloatList) return element.kind() == Kind::FloatType;
      if (value.tag != Tag::List) return false;
      ListElement expected = ListElement::Other;
      if (element.kind() == Kind::TensorType) expected = ListElement::Tensor;
      if (element.kind() == Kind::NumberType) expected = ListElement::Number;
      if (element.kind() == Kind::OptionalType) expected = ListElement::OptionalTensor;
      if (expected == ListElement::Other || value.element != expected) return false;
      for (const Value& child : value.children)
        if (!fits(element, child)) return false;
      return true;
    }
    default:
      return false;
  }
}

// Types that fits() can ever accept. An operator with another argument type is not malformed, but not supported.
bool supported(const c10::Type& type) {
  using Kind = c10::TypeKind;
  switch (type.kind()) {
    case Kind::OptionalType:
      return supported(*type.castRaw<c10::OptionalType>()->getElementType());
    case Kind::ListType: {
      const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
      if (element.kind() == Kind::OptionalType)
        return element.castRaw<c10::OptionalType>()->getElementType()->kind() == Kind::TensorType;
      return element.kind() == Kind::TensorType || element.kind() == Kind::NumberType ||
             element.kind() == Kind::IntType || element.kind() == Kind::SymIntType ||
             element.kind() == Kind::BoolType || element.kind() == Kind::FloatType;
    }
    case Kind::TensorType:
    case Kind::IntType:
    case Kind::SymIntType:
    case Kind::LayoutType:
    case Kind::ScalarTypeType:
    case Kind::MemoryFormatType:
    case Kind::FloatType:
    case Kind::SymFloatType:
    case Kind::BoolType:
    case Kind::SymBoolType:
    case Kind::NumberType:
    case Kind::ComplexType:
    case Kind::StringType:
    case Kind::DeviceObjType:
    case Kind::GeneratorType:
      return true;
    default:
      return false;
  }
}

at::Tensor cpu_tensor(const TensorMeta& meta, WordReader& payload) {
  const char* data = payload.bytes(meta.bytes);
  at::Tensor t = at::empty(meta.sizes, at::TensorOptions().dtype(meta.dtype));
  if (meta.bytes) std::memcpy(t.mutable_data_ptr(), data, meta.bytes);
  if (flag(meta.flags, Conj)) t._set_conj(true);
  if (flag(meta.flags, Neg)) t._set_neg(true);
  if (flag(meta.flags, WrappedNumber)) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

Value parse_composed(uint64_t word, WordReader& key, c10::Device device, int depth) {
  if (depth >= kMaxDepth) throw ProtocolError("a composed tensor nested too deeply");
  Value value;
  value.tag = Tag::Composed;
  auto composed = std::make_shared<Composed>();
  const uint64_t kind = bits(word, 8, 8);
  if (kind > static_cast<uint64_t>(Composition::Nested)) throw ProtocolError("a tensor of unknown composition");
  composed->kind = static_cast<Composition>(kind);
  composed->sparse_dim = static_cast<uint8_t>(bits(word, 16, 8));
  composed->coalesced = bits(word, 24, 1) != 0;
  const uint64_t n = key.word();
  if (n > key.left()) throw ProtocolError("a geometry longer than its message");
  for (uint64_t i = 0; i < n; i++) composed->geometry.push_back(checked_size(key.word()));
  if (composed->kind != Composition::Nested && (n > UINT8_MAX || composed->sparse_dim > n))
    throw ProtocolError("a sparse tensor of " + std::to_string(n) + " dims");
  for (size_t i = 0; i < components_of(composed->kind); i++) {
    value.children.push_back(parse_value(key, device, depth + 1));
    if (value.children.back().tag != Tag::Tensor) throw ProtocolError("a composed tensor without components");
  }
  value.composed = std::move(composed);
  return value;
}

at::Tensor composed_tensor(const Value& value, CallContext& call) {
  Composed parts = *value.composed;
  for (const Value& child : value.children) parts.components.push_back(materialise(child, call).toTensor());
  call.flat.push_back(compose(parts));
  return call.flat.back();
}

c10::IValue materialise_list(const Value& value, CallContext& call) {
  switch (value.element) {
    case ListElement::Tensor: {
      c10::List<at::Tensor> list;
      list.reserve(value.children.size());
      for (const Value& child : value.children) list.push_back(materialise(child, call).toTensor());
      return list;
    }
    case ListElement::OptionalTensor: {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(value.children.size());
      for (const Value& child : value.children) {
        c10::IValue v = materialise(child, call);
        list.push_back(v.isNone() ? std::optional<at::Tensor>() : std::optional<at::Tensor>(v.toTensor()));
      }
      return list;
    }
    default: {
      c10::impl::GenericList list(c10::NumberType::get());
      list.reserve(value.children.size());
      for (const Value& child : value.children) list.push_back(materialise(child, call));
      return list;
    }
  }
}

}  // namespace

TensorMeta parse_tensor(uint64_t header, WordReader& key, bool may_have_strides) {
  TensorMeta meta;
  meta.dtype = checked_dtype(bits(header, 8, 8));
  meta.flags = static_cast<uint8_t>(bits(header, 24, 8));
  if (flag(meta.flags, Conj) && !c10::isComplexType(meta.dtype))
    throw ProtocolError("a conjugated tensor that is not complex");
  size_t n = bits(header, 16, 8);
  meta.sizes.reserve(n);
  for (size_t i = 0; i < n; i++) meta.sizes.push_back(checked_size(key.word()));
  meta.strides.resize(n);
  uint64_t item = c10::elementSize(meta.dtype), numel = 1, dense = 1;
  for (size_t i = n; i-- > 0;) {
    auto size = static_cast<uint64_t>(meta.sizes[i]);
    meta.strides[i] = static_cast<int64_t>(dense);
    numel = checked_multiply(numel, size);
    dense = checked_multiply(dense, size > 1 ? size : 1);
  }
  if (may_have_strides && !flag(meta.flags, Canonical)) {
    for (size_t i = 0; i < n; i++) meta.strides[i] = checked_size(key.word());
    meta.offset = checked_size(key.word());
  }
  meta.bytes = checked_multiply(numel, item);
  if (numel != 0) {
    uint64_t last = static_cast<uint64_t>(meta.offset);
    for (size_t i = 0; i < n; i++)
      last = checked_add(
          last, checked_multiply(static_cast<uint64_t>(meta.sizes[i] - 1), static_cast<uint64_t>(meta.strides[i])));
    meta.extent = checked_multiply(checked_add(last, 1), item);
  }
  return meta;
}

Value parse_value(WordReader& key, c10::Device device, int depth) {
  Value value;
  uint64_t word = key.word();
  value.tag = static_cast<Tag>(word & 0xff);
  switch (value.tag) {
    case Tag::None:
    case Tag::Float:
    case Tag::ScalarInt:
    case Tag::ScalarBool:
    case Tag::Generator:
    case Tag::Complex:
      break;
    case Tag::UndefinedTensor:
      value.constant = at::Tensor();
      break;
    case Tag::Tensor:
      value.tensor = parse_tensor(word, key, true);
      break;
    case Tag::Composed:
      return parse_composed(word, key, device, depth);
    case Tag::SameTensor:
      value.same_as = bits(word, 8, 32);
      break;
    case Tag::CpuTensor:
      value.tensor = parse_tensor(word, key, false);
      if (!value.tensor.sizes.empty()) key.word();  // the content hash only tells templates apart
      break;
    case Tag::Int:
      value.constant = static_cast<int64_t>(key.word());
      break;
    case Tag::Bool:
      value.constant = bits(word, 8, 1) != 0;
      break;
    case Tag::FloatKey:
      value.constant = key.real();
      break;
    case Tag::Layout:
    case Tag::DType:
    case Tag::MemoryFormat:
      value.constant = static_cast<int64_t>(bits(word, 8, 8));
      break;
    case Tag::String: {
      size_t n = bits(word, 8, 32);
      value.constant = std::string(key.bytes(n), n);
      break;
    }
    case Tag::Device:
      value.constant = bits(word, 8, 1) ? c10::Device(c10::kCPU) : device;
      break;
    case Tag::IntList:
      value.constant = parse_list<int64_t>(word, key, [](WordReader& k) { return static_cast<int64_t>(k.word()); });
      break;
    case Tag::BoolList:
      value.constant = parse_list<bool>(word, key, [](WordReader& k) { return k.word() != 0; });
      break;
    case Tag::FloatList:
      value.constant = parse_list<double>(word, key, [](WordReader& k) { return k.real(); });
      break;
    case Tag::List: {
      if (depth >= kMaxDepth) throw ProtocolError("lists nested too deeply");
      size_t n = checked_count(word, key);
      uint64_t element = bits(word, 40, 8);
      if (element > static_cast<uint64_t>(ListElement::Number)) throw ProtocolError("a list of unknown elements");
      value.element = static_cast<ListElement>(element);
      value.children.reserve(n);
      for (size_t i = 0; i < n; i++) value.children.push_back(parse_value(key, device, depth + 1));
      break;
    }
    default:
      throw ProtocolError("unknown argument tag " + std::to_string(word & 0xff));
  }
  return value;
}

void check_type(const c10::Type& type, const Value& value, const c10::Argument& argument) {
  TORCH_CHECK_NOT_IMPLEMENTED(supported(type) || value.tag == Tag::None, "an argument '", argument.name(), "' of type ",
                              type.str(), " cannot be sent to a proxied device");
  if (!fits(type, value))
    throw ProtocolError("argument '" + argument.name() + "' of type " + type.str() + " was sent with tag " +
                        std::to_string(static_cast<int>(value.tag)));
}

at::Tensor tensor_on(const TensorMeta& meta, const c10::Storage& storage, c10::DispatchKeySet keys) {
  TORCH_CHECK(meta.extent <= storage.nbytes(), "ergosphere: a tensor reaches ", meta.extent,
              " bytes into a device storage of ", storage.nbytes(), " bytes");
  at::Tensor t =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, c10::scalarTypeToTypeMeta(meta.dtype));
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(meta.sizes, meta.strides, meta.offset);
  if (flag(meta.flags, Conj)) t._set_conj(true);
  if (flag(meta.flags, Neg)) t._set_neg(true);
  if (flag(meta.flags, WrappedNumber)) impl->set_wrapped_number(true);
  return t;
}

c10::IValue materialise(const Value& value, CallContext& call) {
  switch (value.tag) {
    case Tag::Tensor: {
      at::Tensor t = tensor_on(value.tensor, call.storages.find(call.handles.word())->storage, call.keys);
      call.flat.push_back(t);
      return t;
    }
    case Tag::Composed:
      return composed_tensor(value, call);
    case Tag::SameTensor:
      if (value.same_as >= call.flat.size()) throw std::runtime_error("the same tensor as one that is not there");
      return call.flat[value.same_as];
    case Tag::CpuTensor:
      return cpu_tensor(value.tensor, call.payload);
    case Tag::Float:
      return call.payload.real();
    case Tag::ScalarInt:
      return static_cast<int64_t>(call.payload.word());
    case Tag::ScalarBool:
      return call.payload.word() != 0;
    case Tag::Complex: {
      double real = call.payload.real();
      return c10::complex<double>(real, call.payload.real());
    }
    case Tag::Generator: {
      uint64_t id = call.payload.word();
      auto it = call.generators.find(id);
      if (it == call.generators.end()) throw ProtocolError("unknown generator " + std::to_string(id));
      return it->second;
    }
    case Tag::List:
      return materialise_list(value, call);
    default:
      return value.constant;
  }
}

}  // namespace ergo::device
