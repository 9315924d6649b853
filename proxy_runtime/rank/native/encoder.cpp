#include "encoder.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "flags.hpp"
#include "generator.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

using c10::IValue;
using c10::TypeKind;

// CPU tensors beyond this many bytes (index lists, mostly) are sent as storages instead of as payload.
constexpr size_t kInlineBytes = 64 * 1024;

// Arguments are compared with as many earlier ones; lists can be long.
constexpr size_t kFirstTensors = 6;

// As many as the field of the wire format holds.
constexpr int64_t kMaxDimensions = 255;

uint64_t bits(double value) {
  uint64_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

uint64_t content_hash(const void* data, size_t n) {
  uint64_t h = 1469598103934665603ull;
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < n; ++i) h = (h ^ p[i]) * 1099511628211ull;
  return h;
}

void append_bytes(std::vector<uint64_t>& words, const void* data, size_t n) {
  const size_t at = words.size();
  words.resize(at + (n + 7) / 8, 0);
  if (n != 0) std::memcpy(&words[at], data, n);
}

uint64_t metadata_header(const c10::TensorImpl& t, Tag tag, uint64_t flags) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.dim() <= kMaxDimensions, "ergosphere: a tensor of ", t.dim(),
                              " dimensions is not forwarded to the device proxy; reshape it to at most ",
                              kMaxDimensions);
  return key_word(tag, uint64_t{static_cast<uint8_t>(c10::typeMetaToScalarType(t.dtype()))} |
                           (static_cast<uint64_t>(t.dim()) << 8) | (flags << 16));
}

// Offset 0 and exactly the strides that a fresh contiguous tensor has, size-1 dimensions included: a
// normalised stride would change which kernel the device chooses later.
bool canonical(const c10::TensorImpl& t) {
  if (t.storage_offset() != 0) return false;
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != expected) return false;
    expected *= std::max<int64_t>(sizes[i], 1);
  }
  return true;
}

class Encoder {
 public:
  Encoder(const OpInfo& info, EncodedCall& call) : info_(info), call_(call) {}

  void value(const IValue& v, ArgumentKind kind, bool written) {
    if (v.isTensor()) return tensor(v.toTensor(), written);
    if (v.isNone()) return word(Tag::None);
    if (v.isInt()) return integer(v.toInt(), kind);
    if (v.isBool()) return boolean(v.toBool(), kind);
    if (v.isDouble()) return real(v.toDouble(), kind);
    if (v.isIntList()) return int_list(v);
    if (v.isBoolList()) return bool_list(v);
    if (v.isDoubleList()) return double_list(v);
    if (v.isSymInt()) return integer(v.toSymInt().guard_int(__FILE__, __LINE__), ArgumentKind::Plain);
    if (v.isSymIntList()) return sym_int_list(v);
    if (v.isList()) return list(v, kind, written);
    if (v.isString()) return string(v.toStringRef());
    if (v.isDevice()) return device(v.toDevice());
    if (v.isGenerator()) return generator(v.toGenerator());
    if (v.isComplexDouble()) return complex(v.toComplexDouble());
    TORCH_CHECK_NOT_IMPLEMENTED(false, "ergosphere: ", info_.name, " takes an argument of kind ", v.tagKind(),
                                ", which cannot be forwarded to the device proxy");
  }

 private:
  void word(Tag tag, uint64_t fields = 0) { call_.key.push_back(key_word(tag, fields)); }

  void tensor(const at::Tensor& t, bool written) {
    if (!t.defined()) return word(Tag::UndefinedTensor);
    if (t.device().type() == kDeviceType) {
      if (is_earlier(t)) return;
      if (C10_UNLIKELY(is_composed(*t.unsafeGetTensorImpl()))) return composed_tensor(t);
      device_tensor(t);
      return;
    }
    cpu_tensor(t, written);
  }

  // Whether it is the very tensor of an earlier argument; then that is all that is sent.
  bool is_earlier(const at::Tensor& t) {
    const size_t n = std::min(call_.tensors.size(), kFirstTensors);
    for (size_t i = 0; i < n; ++i)
      if (C10_UNLIKELY(call_.tensors[i]->unsafeGetTensorImpl() == t.unsafeGetTensorImpl())) {
        word(Tag::SameTensor, i);
        call_.has_mask = call_.has_mask || is_mask(t);
        return true;
      }
    return false;
  }

  static bool is_mask(const at::Tensor& t) { return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; }

  void device_tensor(const at::Tensor& t) {
    encode_tensor_metadata(t, call_.key);
    call_.handles.push_back(handle_of(t));
    if (!call_.tensors.empty() && is_mask(t)) call_.has_mask = true;
    call_.tensors.push_back(&t);
  }

  void composed_tensor(const at::Tensor& t) {
    const auto kind = composition_of(t);
    TORCH_CHECK_NOT_IMPLEMENTED(kind.has_value() && !t.is_quantized(), "ergosphere: ", info_.name, " got a ",
                                t.is_quantized() ? "quantized tensor" : "tensor of layout ", t.layout(),
                                "; only dense, sparse and nested tensors are forwarded to the device proxy: use one of "
                                "these, or do this part on the CPU");
    Composed parts = decompose(t, *kind);
    word(Tag::Composed,
         uint64_t{static_cast<uint8_t>(*kind)} | uint64_t{parts.sparse_dim} << 8 | uint64_t{parts.coalesced} << 16);
    call_.key.push_back(parts.geometry.size());
    for (auto number : parts.geometry) call_.key.push_back(static_cast<uint64_t>(number));
    call_.has_composed = true;
    for (at::Tensor& component : parts.components) {
      call_.components.push_back(std::move(component));
      device_tensor(call_.components.back());
    }
    call_.tensors.push_back(&t);
  }

  void cpu_tensor(const at::Tensor& t, bool written) {
    const bool is_float = at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type());
    // A number may live on the host, and so may an index; everything else is torch's own error.
    TORCH_CHECK(t.device().is_cpu() && t.layout() == c10::kStrided && !written && (t.dim() == 0 || !is_float),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
                t.device(), "! (in a call of ", info_.name, ")");
    call_.has_mask = true;  // or an index that is another with every call: no template is worth keeping
    const at::Tensor contiguous = t.contiguous();
    const auto* impl = contiguous.unsafeGetTensorImpl();
    const uint64_t flags = t.unsafeGetTensorImpl()->is_wrapped_number() ? WrappedNumber : 0;
    call_.key.push_back(metadata_header(*impl, Tag::CpuTensor, flags));
    for (auto size : impl->sizes()) call_.key.push_back(static_cast<uint64_t>(size));
    // Contents of integral tensors may decide shapes (lengths of packed sequences): they are part of the key.
    if (t.dim() > 0) call_.key.push_back(is_float ? 0 : content_hash(contiguous.const_data_ptr(), contiguous.nbytes()));
    append_bytes(call_.payload, contiguous.const_data_ptr(), contiguous.nbytes());
  }

  void integer(int64_t v, ArgumentKind kind) {
    if (kind == ArgumentKind::Number) {
      word(Tag::ScalarInt, range_of(static_cast<double>(v)));
      call_.payload.push_back(static_cast<uint64_t>(v));
    } else {
      word(Tag::Int);
      call_.key.push_back(static_cast<uint64_t>(v));
    }
  }

  void boolean(bool v, ArgumentKind kind) {
    if (kind == ArgumentKind::Number) {
      word(Tag::ScalarBool);
      call_.payload.push_back(v ? 1 : 0);
    } else {
      word(Tag::Bool, v ? 1 : 0);
    }
  }

  void real(double v, ArgumentKind kind) {
    if (kind == ArgumentKind::NumberKey) {
      word(Tag::FloatKey);
      call_.key.push_back(bits(v));
    } else {
      word(Tag::Float, range_of(v));
      call_.payload.push_back(bits(v));
    }
  }

  // Where a number lies, also against the one before it. Operators check the ranges of their arguments: a value of
  // another kind than those seen is asked about, so that the error is raised at the call, as it is on CUDA. Not in
  // lists, of which there are too many kinds.
  uint64_t range_of(double v) {
    if (in_list_) return 0;
    const double size = std::abs(v);
    const uint64_t range = uint64_t{v < 0} | uint64_t{size > 0} << 1 | uint64_t{size >= 1} << 2 |
                           uint64_t{size > 1} << 3 | uint64_t{!(size < HUGE_VAL)} << 4 | uint64_t{v < previous_} << 5;
    previous_ = v;
    return range;
  }

  void complex(c10::complex<double> v) {
    word(Tag::Complex);
    call_.payload.push_back(bits(v.real()));
    call_.payload.push_back(bits(v.imag()));
  }

  void generator(const at::Generator& g) {
    word(Tag::Generator);
    call_.payload.push_back(generator_id(g, info_.name));
  }

  void device(const c10::Device& d) {
    require_existing(d);
    use_device(d);
    word(Tag::Device, d.is_cpu() ? 1 : 0);
  }

  void string(const std::string& s) {
    word(Tag::String, s.size());
    append_bytes(call_.key, s.data(), s.size());
  }

  void int_list(const IValue& v) {
    const auto items = v.toListRef();
    word(Tag::IntList, items.size());
    for (const auto& item : items) call_.key.push_back(static_cast<uint64_t>(item.toInt()));
  }

  void sym_int_list(const IValue& v) {
    const auto items = v.toSymIntVector();
    word(Tag::IntList, items.size());
    for (const auto& item : items) call_.key.push_back(static_cast<uint64_t>(item.guard_int(__FILE__, __LINE__)));
  }

  void bool_list(const IValue& v) {
    const auto items = v.toListRef();
    word(Tag::BoolList, items.size());
    for (const auto& item : items) call_.key.push_back(item.toBool() ? 1 : 0);
  }

  void double_list(const IValue& v) {
    const auto items = v.toListRef();
    word(Tag::FloatList, items.size());
    for (const auto& item : items) call_.key.push_back(bits(item.toDouble()));
  }

  void list(const IValue& v, ArgumentKind kind, bool written) {
    const auto items = v.toListRef();
    word(Tag::List, items.size() | (uint64_t{static_cast<uint8_t>(element_of(v))} << 32));
    in_list_ = true;
    for (const auto& item : items) value(item, kind, written);
    in_list_ = false;
  }

  static ListElement element_of(const IValue& v) {
    if (v.isTensorList()) return ListElement::Tensor;
    const auto type = v.type();
    switch (type->castRaw<c10::ListType>()->getElementType()->kind()) {
      case TypeKind::TensorType:
        return ListElement::Tensor;
      case TypeKind::OptionalType:
        return ListElement::OptionalTensor;
      case TypeKind::NumberType:
        return ListElement::Number;
      default:
        return ListElement::Other;
    }
  }

  const OpInfo& info_;
  EncodedCall& call_;
  double previous_ = -HUGE_VAL;
  bool in_list_ = false;
};

bool must_replace(const at::Tensor& t) {
  if (!t.defined()) return false;
  if (t._is_zerotensor()) return true;
  return t.dim() > 0 && t.device().is_cpu() && t.layout() == c10::kStrided && t.nbytes() > kInlineBytes &&
         at::isIntegralType(t.scalar_type(), true);
}

at::Tensor replacement(const at::Tensor& t) {
  if (!must_replace(t)) return t;
  if (t._is_zerotensor()) return at::zeros(t.sizes(), t.options().device(t.device()));
  return t.to(own_device());
}

// ZeroTensors have no storage, and large CPU tensors do not fit a message. Both are rare.
void replace_local_arguments(const OpInfo& info, torch::jit::Stack& stack) {
  const size_t first = stack.size() - info.kinds.size();
  for (size_t i = first; i < stack.size(); ++i) {
    auto& v = stack[i];
    if (v.isTensor()) {
      if (must_replace(v.toTensor()) && !info.writes[i - first]) v = replacement(v.toTensor());
    } else if (v.isTensorList()) {
      bool any = false;
      for (const auto& item : v.toListRef()) any = any || must_replace(item.toTensor());
      if (!any || info.writes[i - first]) continue;
      c10::List<at::Tensor> list;
      for (const auto& item : v.toListRef()) list.push_back(replacement(item.toTensor()));
      v = std::move(list);
    } else if (v.isList()) {
      const auto items = v.toListRef();
      bool any = false;
      for (const auto& item : items) any = any || (item.isTensor() && must_replace(item.toTensor()));
      if (!any) continue;
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& item : items)
        list.push_back(item.isTensor() ? std::optional<at::Tensor>(replacement(item.toTensor())) : std::nullopt);
      v = std::move(list);
    }
  }
}

}  // namespace

void encode_tensor_metadata(const at::Tensor& tensor, std::vector<uint64_t>& key) {
  const auto& impl = *tensor.unsafeGetTensorImpl();
  const bool is_canonical = canonical(impl);
  uint64_t flags = is_canonical ? Canonical : 0;
  if (tensor.is_conj()) flags |= Conj;
  if (tensor.is_neg()) flags |= Neg;
  if (impl.is_wrapped_number()) flags |= WrappedNumber;
  key.push_back(metadata_header(impl, Tag::Tensor, flags));
  for (auto size : impl.sizes()) key.push_back(static_cast<uint64_t>(size));
  if (!is_canonical) {
    for (auto stride : impl.strides()) key.push_back(static_cast<uint64_t>(stride));
    key.push_back(static_cast<uint64_t>(impl.storage_offset()));
  }
}

void encode_call(const OpInfo& info, torch::jit::Stack& stack, EncodedCall& call) {
  replace_local_arguments(info, stack);
  call.clear();
  call.flags = Flags::instance().current();
  auto& context = at::globalContext();
  call.key.push_back(globals_word(static_cast<uint8_t>(c10::typeMetaToScalarType(c10::get_default_dtype())),
                                  context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly()) |
                     (uint64_t{call.flags} << 16));
  Encoder encoder(info, call);
  const size_t first = stack.size() - info.kinds.size();
  for (size_t i = 0; i < info.kinds.size(); ++i) encoder.value(stack[first + i], info.kinds[i], info.writes[i]);
}

}  // namespace ergo::rank
