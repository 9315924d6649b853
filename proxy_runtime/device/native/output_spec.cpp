#include "output_spec.hpp"

#include <ATen/ops/alias.h>

#include <algorithm>

#include "failure.hpp"

namespace ergo::device {
namespace {

bool is_composed(const at::Tensor& t) { return ergo::is_composed(*t.unsafeGetTensorImpl()); }

c10::StorageImpl* storage_impl(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

void require_describable(const Template& t, const at::Tensor& result, c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !result.is_quantized(), t.name,
      " returned a quantized tensor, which cannot live on a proxied device: quantize on the CPU");
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_composed(result) ? composition_of(result).has_value() : result.has_storage(), t.name, " returned a ",
      result.layout(),
      " tensor; only dense, sparse and nested tensors can live on a proxied device: do this part on the CPU");
  TORCH_CHECK_NOT_IMPLEMENTED(result.device().type() == device.type(), t.name, " returned a tensor on ",
                              result.device(), "; results on the host cannot be sent back to the rank");
}

// Where the bytes of a dense result are.
ExpectedOutput classify_dense(const at::Tensor& result, const FlatTensors& arguments, std::vector<c10::Storage>& news) {
  ExpectedOutput out;
  out.dtype = result.scalar_type();
  out.sizes = result.sizes().vec();
  out.strides = result.strides().vec();
  out.offset = result.storage_offset();
  auto* impl = storage_impl(result);
  for (size_t i = 0; i < arguments.size(); i++)
    if (!is_composed(arguments[i]) && storage_impl(arguments[i]) == impl) {
      out.kind = OutKind::AliasOfArgument, out.reference = static_cast<uint32_t>(i);
      return out;
    }
  out.kind = OutKind::New;
  for (size_t i = 0; i < news.size(); i++)
    if (news[i].unsafeGetStorageImpl() == impl) {
      out.reference = static_cast<uint32_t>(i);
      return out;
    }
  out.reference = static_cast<uint32_t>(news.size());
  news.push_back(result.storage());
  return out;
}

ExpectedOutput same_as_argument(const at::Tensor& argument, size_t i) {
  ExpectedOutput out;
  out.kind = OutKind::SameAsArgument, out.reference = static_cast<uint32_t>(i);
  out.dtype = argument.scalar_type();
  if (is_composed(argument)) return out;  // the rank has it
  out.sizes = argument.sizes().vec(), out.strides = argument.strides().vec(), out.offset = argument.storage_offset();
  return out;
}

ExpectedOutput classify(const at::Tensor& result, const FlatTensors& arguments, std::vector<c10::Storage>& news) {
  if (!result.defined()) return {};
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return same_as_argument(result, i);
  if (!is_composed(result)) return classify_dense(result, arguments, news);
  ExpectedOutput out;
  out.kind = OutKind::Composed;
  out.dtype = result.scalar_type();
  for (const at::Tensor& component : decompose(result, *composition_of(result)).components)
    out.components.push_back(classify_dense(component, arguments, news));
  return out;
}

void write_out(WordWriter& words, const ExpectedOutput& out, const at::Tensor& t) {
  if (out.kind == OutKind::Undefined) {
    words.word(0);
    return;
  }
  if (out.kind == OutKind::Composed) {
    const Composed parts = decompose(t, *composition_of(t));
    words.word(static_cast<uint64_t>(out.kind) | static_cast<uint64_t>(out.dtype) << 8 |
               static_cast<uint64_t>(parts.kind) << 16 | uint64_t{parts.coalesced} << 24 |
               uint64_t{parts.sparse_dim} << 32);
    words.word(parts.geometry.size());
    for (int64_t number : parts.geometry) words.word(static_cast<uint64_t>(number));
    for (size_t i = 0; i < parts.components.size(); i++) write_out(words, out.components[i], parts.components[i]);
    return;
  }
  uint64_t flags = (t.is_conj() ? Conj : 0) | (t.is_neg() ? Neg : 0);
  words.word(static_cast<uint64_t>(out.kind) | static_cast<uint64_t>(out.dtype) << 8 |
             uint64_t{out.sizes.size()} << 16 | flags << 24 | uint64_t{out.reference} << 32);
  words.word(static_cast<uint64_t>(out.offset));
  for (int64_t size : out.sizes) words.word(static_cast<uint64_t>(size));
  for (int64_t stride : out.strides) words.word(static_cast<uint64_t>(stride));
}

bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  return storage_impl(a) == storage_impl(b) && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset();
}

bool same_composed(const at::Tensor& a, const at::Tensor& b) {
  if (composition_of(a) != composition_of(b)) return false;
  const Composed x = decompose(a, *composition_of(a)), y = decompose(b, *composition_of(b));
  return x.sparse_dim == y.sparse_dim && x.coalesced == y.coalesced && x.geometry == y.geometry &&
         std::equal(x.components.begin(), x.components.end(), y.components.begin(), same_tensor);
}

bool same_geometry(const at::Tensor& t, const ExpectedOutput& out) {
  return t.scalar_type() == out.dtype && t.sizes() == at::IntArrayRef(out.sizes) &&
         t.strides() == at::IntArrayRef(out.strides) && t.storage_offset() == out.offset;
}

}  // namespace

at::Tensor snapshot(const at::Tensor& tensor) {
  if (!is_composed(tensor)) return tensor.alias();
  return compose(decompose(tensor, *composition_of(tensor)));
}

Outputs describe_outputs(const Template& t, const torch::jit::Stack& returns, const FlatTensors& before,
                         const FlatTensors& after, c10::Device device, WordWriter& spec) {
  Outputs result;
  WordWriter values;
  auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined()) require_describable(t, tensor, device);
    result.tensors.push_back(classify(tensor, after, result.new_storages));
    write_out(values, result.tensors.back(), tensor);
  };
  for (const c10::IValue& value : returns) {
    if (value.isTensor()) {
      values.word('T');
      add(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      values.word('L');
      values.word(list.size());
      for (const at::Tensor& tensor : list) add(tensor);
    } else if (value.isBool()) {
      values.word('B');
      values.word(value.toBool());
    } else if (value.isInt()) {
      values.word('I');
      values.word(static_cast<uint64_t>(value.toInt()));
    } else if (value.isDouble()) {
      values.word('D');
      values.real(value.toDouble());
    } else if (value.isNone()) {
      values.word('N');
    } else {
      TORCH_CHECK_NOT_IMPLEMENTED(false, t.name, " returned a ", value.tagKind(), ", which cannot be sent to the rank");
    }
  }
  WordWriter posts;
  size_t n_posts = 0;
  auto post = [&](size_t i, const ExpectedOutput& out, uint64_t bytes) {
    n_posts++;
    posts.word(i);
    posts.word(bytes);
    write_out(posts, out, after[i]);
  };
  auto geometry = [&](size_t i) { post(i, same_as_argument(after[i], i), after[i].storage().nbytes()); };
  for (size_t i = 0; i < after.size(); i++) {
    if (is_composed(after[i])) {
      if (same_composed(before[i], after[i])) continue;
      // The storages of its components may have grown, too.
      for (size_t n = components_of(*composition_of(after[i])); n > 0; n--) geometry(i - n);
      FlatTensors others(after);
      others[i] = at::Tensor(before[i]);  // it is described by its components, not as itself
      post(i, classify(after[i], others, result.new_storages), 0);
      continue;
    }
    const at::Tensor &was = before[i], &is = after[i];
    TORCH_CHECK_NOT_IMPLEMENTED(storage_impl(was) == storage_impl(is), t.name,
                                " gave an argument another storage, which a proxied device does not support");
    if (was.sizes() == is.sizes() && was.strides() == is.strides() && was.storage_offset() == is.storage_offset() &&
        was.is_conj() == is.is_conj() && was.is_neg() == is.is_neg())
      continue;
    geometry(i);
  }
  spec.word(result.new_storages.size());
  for (const c10::Storage& storage : result.new_storages) spec.word(storage.nbytes());
  spec.word(returns.size());
  spec.append(values);
  spec.word(n_posts);
  spec.append(posts);
  return result;
}

std::vector<c10::Storage> match_outputs(const Template& t, const torch::jit::Stack& returns,
                                        const FlatTensors& arguments) {
  std::vector<c10::Storage> news(t.new_storages);
  size_t next = 0;
  auto match = [&](const at::Tensor& tensor) {
    TORCH_CHECK(next < t.expected.size(), "ergosphere: ", t.name, " returned more tensors than when it was first run");
    const ExpectedOutput& out = t.expected[next++];
    bool same = tensor.defined() == (out.kind != OutKind::Undefined);
    if (same && tensor.defined()) {
      same = tensor.has_storage() && same_geometry(tensor, out);
      if (same && out.kind == OutKind::SameAsArgument)
        same = arguments[out.reference].unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl();
      else if (same && out.kind == OutKind::AliasOfArgument)
        same = storage_impl(arguments[out.reference]) == storage_impl(tensor);
      else if (same && !news[out.reference])
        news[out.reference] = tensor.storage();
      else if (same)
        same = news[out.reference].unsafeGetStorageImpl() == storage_impl(tensor);
    }
    TORCH_CHECK(same, "ergosphere: ", t.name, " returned a result of another shape than when it was first run with ",
                "these arguments; please report it: the rank cannot use it");
  };
  for (const c10::IValue& value : returns) {
    if (value.isTensor()) {
      match(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) match(tensor);
    }
  }
  TORCH_CHECK(next == t.expected.size(), "ergosphere: ", t.name, " returned fewer tensors than when it was first run");
  return news;
}

}  // namespace ergo::device
