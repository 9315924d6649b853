#include "output_spec.hpp"

#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <ATen/ops/alias.h>

#include <algorithm>

#include "failure.hpp"

namespace ergo::device {
namespace {

at::SparseTensorImpl* sparse_impl(const at::Tensor& t) {
  return static_cast<at::SparseTensorImpl*>(t.unsafeGetTensorImpl());
}

c10::StorageImpl* storage_impl(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

void require_describable(const Template& t, const at::Tensor& result, c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      result.layout() == c10::kSparse || (result.layout() == c10::kStrided && result.has_storage()), t.name,
      " returned a ", result.layout(),
      " tensor; only dense and sparse COO tensors can live on a proxied device: do this part on the CPU");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !result.is_quantized(), t.name,
      " returned a quantized tensor, which cannot live on a proxied device: quantize on the CPU");
  TORCH_CHECK_NOT_IMPLEMENTED(result.device().type() == device.type(), t.name, " returned a tensor on ",
                              result.device(), "; results on the host cannot be sent back to the rank");
}

ExpectedOutput classify(const at::Tensor& result, const FlatTensors& arguments, std::vector<c10::Storage>& news) {
  ExpectedOutput out;
  if (!result.defined()) return out;
  out.dtype = result.scalar_type();
  out.sizes = result.sizes().vec();
  if (result.is_sparse()) {
    out.strides.resize(out.sizes.size());  // it has none; an argument's own are not looked at
  } else {
    out.strides = result.strides().vec();
    out.offset = result.storage_offset();
  }
  auto number = [](size_t i) { return static_cast<uint32_t>(i); };
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) {
      out.kind = OutKind::SameAsArgument, out.reference = number(i);
      return out;
    }
  if (result.is_sparse()) {
    const auto* sparse = sparse_impl(result);
    out.kind = OutKind::Sparse;
    out.reference = number(static_cast<size_t>(sparse->sparse_dim()));
    out.coalesced = sparse->coalesced();
    out.components = {classify(sparse->indices(), arguments, news), classify(sparse->values(), arguments, news)};
    return out;
  }
  auto* impl = storage_impl(result);
  for (size_t i = 0; i < arguments.size(); i++)
    if (storage_impl(arguments[i]) == impl) {
      out.kind = OutKind::AliasOfArgument, out.reference = number(i);
      return out;
    }
  out.kind = OutKind::New;
  for (size_t i = 0; i < news.size(); i++)
    if (news[i].unsafeGetStorageImpl() == impl) {
      out.reference = number(i);
      return out;
    }
  out.reference = number(news.size());
  news.push_back(result.storage());
  return out;
}

void write_out(WordWriter& words, const ExpectedOutput& out, const at::Tensor& t) {
  if (out.kind == OutKind::Undefined) {
    words.word(0);
    return;
  }
  if (out.kind == OutKind::Sparse) {
    words.word(static_cast<uint64_t>(out.kind) | static_cast<uint64_t>(out.dtype) << 8 |
               uint64_t{out.sizes.size()} << 16 | uint64_t{out.coalesced} << 24 | uint64_t{out.reference} << 32);
    for (int64_t size : out.sizes) words.word(static_cast<uint64_t>(size));
    write_out(words, out.components[0], sparse_impl(t)->indices());
    write_out(words, out.components[1], sparse_impl(t)->values());
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

bool same_sparse(const at::Tensor& a, const at::Tensor& b) {
  const auto *x = sparse_impl(a), *y = sparse_impl(b);
  return x->sparse_dim() == y->sparse_dim() && x->dense_dim() == y->dense_dim() && x->sizes() == y->sizes() &&
         x->coalesced() == y->coalesced() && same_tensor(x->indices(), y->indices()) &&
         same_tensor(x->values(), y->values());
}

bool same_geometry(const at::Tensor& t, const ExpectedOutput& out) {
  return t.scalar_type() == out.dtype && t.sizes() == at::IntArrayRef(out.sizes) &&
         t.strides() == at::IntArrayRef(out.strides) && t.storage_offset() == out.offset;
}

}  // namespace

at::Tensor snapshot(const at::Tensor& tensor) {
  if (!tensor.is_sparse()) return tensor.alias();
  const auto* impl = sparse_impl(tensor);
  return at::_sparse_coo_tensor_with_dims_and_tensors(impl->sparse_dim(), impl->dense_dim(), impl->sizes(),
                                                      impl->indices(), impl->values(), tensor.options(),
                                                      impl->coalesced());
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
  auto geometry = [&](size_t i) {
    ExpectedOutput out;
    out.kind = OutKind::SameAsArgument;
    out.reference = static_cast<uint32_t>(i);
    out.dtype = after[i].scalar_type();
    out.sizes = after[i].sizes().vec(), out.strides = after[i].strides().vec(), out.offset = after[i].storage_offset();
    post(i, out, after[i].storage().nbytes());
  };
  for (size_t i = 0; i < after.size(); i++) {
    if (after[i].is_sparse()) {
      if (same_sparse(before[i], after[i])) continue;
      // The storages of its components may have grown, too.
      geometry(i - 2), geometry(i - 1);
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
