#include "output_spec.hpp"

#include <algorithm>

#include "failure.hpp"

namespace ergo::device {
namespace {

c10::StorageImpl* storage_impl(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

void require_describable(const Template& t, const at::Tensor& result, c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == c10::kStrided && result.has_storage(), t.name, " returned a ",
                              result.layout(), " tensor; only dense tensors can live on a proxied device");
  TORCH_CHECK_NOT_IMPLEMENTED(result.device().type() == device.type(), t.name, " returned a tensor on ",
                              result.device(), "; results on the host cannot be sent back to the rank");
}

ExpectedOutput classify(const at::Tensor& result, const FlatTensors& arguments, std::vector<c10::Storage>& news) {
  ExpectedOutput out;
  if (!result.defined()) return out;
  out.dtype = result.scalar_type();
  out.sizes = result.sizes().vec();
  out.strides = result.strides().vec();
  out.offset = result.storage_offset();
  auto number = [](size_t i) { return static_cast<uint32_t>(i); };
  for (size_t i = 0; i < arguments.size(); i++)
    if (arguments[i].unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) {
      out.kind = OutKind::SameAsArgument, out.reference = number(i);
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
  uint64_t flags = (t.is_conj() ? Conj : 0) | (t.is_neg() ? Neg : 0);
  words.word(static_cast<uint64_t>(out.kind) | static_cast<uint64_t>(out.dtype) << 8 |
             uint64_t{out.sizes.size()} << 16 | flags << 24 | uint64_t{out.reference} << 32);
  words.word(static_cast<uint64_t>(out.offset));
  for (int64_t size : out.sizes) words.word(static_cast<uint64_t>(size));
  for (int64_t stride : out.strides) words.word(static_cast<uint64_t>(stride));
}

bool same_geometry(const at::Tensor& t, const ExpectedOutput& out) {
  return t.scalar_type() == out.dtype && t.sizes() == at::IntArrayRef(out.sizes) &&
         t.strides() == at::IntArrayRef(out.strides) && t.storage_offset() == out.offset;
}

}  // namespace

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
  spec.word(result.new_storages.size());
  for (const c10::Storage& storage : result.new_storages) spec.word(storage.nbytes());
  spec.word(returns.size());
  spec.append(values);

  WordWriter posts;
  size_t n_posts = 0;
  for (size_t i = 0; i < after.size(); i++) {
    const at::Tensor &was = before[i], &is = after[i];
    TORCH_CHECK_NOT_IMPLEMENTED(storage_impl(was) == storage_impl(is), t.name,
                                " gave an argument another storage, which a proxied device does not support");
    if (was.sizes() == is.sizes() && was.strides() == is.strides() && was.storage_offset() == is.storage_offset() &&
        was.is_conj() == is.is_conj() && was.is_neg() == is.is_neg())
      continue;
    n_posts++;
    ExpectedOutput out;
    out.kind = OutKind::SameAsArgument;
    out.reference = static_cast<uint32_t>(i);
    out.dtype = is.scalar_type();
    out.sizes = is.sizes().vec(), out.strides = is.strides().vec(), out.offset = is.storage_offset();
    posts.word(i);
    posts.word(is.storage().nbytes());
    write_out(posts, out, is);
  }
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
