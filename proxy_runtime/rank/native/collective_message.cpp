#include "collective_message.hpp"

#include <cstring>
#include <utility>

#include "channel.hpp"
#include "encoder.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

// Host tensors and their stand-ins on the device.
class Staging {
 public:
  std::vector<at::Tensor> stage(const std::vector<at::Tensor>& tensors, bool copied_in, bool copied_back) {
    std::vector<at::Tensor> result;
    result.reserve(tensors.size());
    for (const at::Tensor& t : tensors) {
      TORCH_CHECK(t.defined() && t.layout() == c10::Layout::Strided,
                  "ergosphere: collectives take dense tensors; got a tensor of layout ",
                  t.defined() ? t.layout() : c10::Layout::Strided);
      if (t.device().type() == kDeviceType) {
        result.push_back(t);
        continue;
      }
      TORCH_CHECK(t.device().is_cpu(), "ergosphere: a collective got a tensor on ", t.device());
      at::Tensor staged = find(t);
      if (!staged.defined()) {
        staged = at::empty(t.sizes(), t.options().device(own_device()).pinned_memory(false));
        if (copied_in) staged.copy_(t);
        if (copied_back) pairs_.emplace_back(t, staged);
      }
      result.push_back(staged);
    }
    return result;
  }

  HostResults take_results() { return std::move(pairs_); }

 private:
  at::Tensor find(const at::Tensor& t) const {
    for (const auto& [host, staged] : pairs_)
      if (host.is_same(t)) return staged;
    return {};
  }
  HostResults pairs_;
};

void append_reference(const at::Tensor& t, std::vector<uint64_t>& words) {
  encode_tensor_metadata(t, words);
  words.push_back(handle_of(t));
}

}  // namespace

HostResults send_collective(uint64_t communicator, const CollectiveCall& call) {
  at::NoGradGuard no_grad;
  Channel& channel = Channel::instance();
  channel.require();
  Staging staging;
  // Outputs come first: a tensor that is both is sent with its contents and comes back.
  const auto outputs = staging.stage(call.outputs, /*copied_in=*/true, /*copied_back=*/true);
  const auto inputs = staging.stage(call.inputs, /*copied_in=*/true, /*copied_back=*/false);
  std::vector<uint64_t> words{communicator,
                              static_cast<uint64_t>(call.kind),
                              static_cast<uint64_t>(call.reduce),
                              static_cast<uint64_t>(call.root),
                              inputs.size(),
                              outputs.size(),
                              call.extra.size()};
  for (const auto& t : inputs) append_reference(t, words);
  for (const auto& t : outputs) append_reference(t, words);
  for (int64_t value : call.extra) words.push_back(static_cast<uint64_t>(value));
  channel.send(Message::Collective, words.size(),
               [&](uint64_t* body) { std::memcpy(body, words.data(), 8 * words.size()); });
  return staging.take_results();
}

bool collectives_done(const std::vector<at::Tensor>& tensors) {
  bool done = true;
  Channel::instance().call(
      Message::Ready, 1 + tensors.size(),
      [&](uint64_t* body) {
        body[0] = tensors.size();
        for (size_t i = 0; i < tensors.size(); ++i) body[1 + i] = handle_of(tensors[i]);
      },
      [&](const char* data, size_t n) { done = n == 1 && data[0] != 0; });
  return done;
}

}  // namespace ergo::rank
