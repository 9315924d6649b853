#include "fallback.hpp"

#include <cstdlib>
#include <cstring>
#include <memory>

#include "call_buffers.hpp"
#include "channel.hpp"
#include "encoder.hpp"
#include "flags.hpp"
#include "libraries.hpp"
#include "memory.hpp"
#include "templates.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

uint64_t* put(uint64_t* at, const std::vector<uint64_t>& words) {
  if (!words.empty()) std::memcpy(at, words.data(), 8 * words.size());
  return at + words.size();
}

// ERGO_LAUNCH_BLOCKING=1: an operator that fails on the device raises at its line. Read once, as CUDA does.
bool launches_block() {
  static const bool blocking = [] {
    for (const char* name : {"ERGO_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"})
      if (const char* value = std::getenv(name); value != nullptr && std::strcmp(value, "1") == 0) return true;
    return false;
  }();
  return blocking;
}

// What it returns may depend on contents: nothing about such a call is remembered.
bool is_one_off(const OpInfo& info, const EncodedCall& call) {
  return info.one_off || call.has_composed || (info.one_off_with_mask && call.has_mask);
}

// What is left of a call that was sent by its template id.
void after_known(const Template& known) {
  if (C10_UNLIKELY(!known.outputs.warnings.empty())) known.outputs.warn();
  if (C10_UNLIKELY(launches_block())) Channel::instance().synchronize();
}

// Sends the call by template id, if its key is known. The results are pushed by the caller. Sets `one_off` if
// what is known is that the call must be a one-off.
const Template* execute_known(const OpInfo& info, uint64_t hash, const EncodedCall& call, uint64_t& base,
                              bool& one_off) {
  Channel& channel = Channel::instance();
  const size_t words = 4 + call.handles.size() + call.payload.size();
  Channel::Transaction t(channel, words + Flags::kMessageWords);
  const Template* known = TemplateTable::instance().find(hash, info, call.key);
  if (known == nullptr) return nullptr;
  if (known->one_off) {
    one_off = true;
    return nullptr;
  }
  require_memory(known->outputs.new_memory);
  Flags::instance().send(t, call.flags);
  base = t.next_handle();
  t.take_handles(known->outputs.new_bytes.size());
  uint64_t* body = t.begin(Message::Exec, words);
  body[0] = known->id;
  body[1] = base;
  body[2] = call.handles.size();
  body[3] = call.payload.size();
  put(put(body + 4, call.handles), call.payload);
  t.commit();
  ++channel.mutable_stats().executed;
  return known;
}

bool returns_composed(const OutputSpec& spec) {
  for (const auto& value : spec.returns)
    for (const auto& tensor : value.tensors)
      if (tensor.kind == OutKind::Composed) return true;
  return false;
}

// Sends the whole call and waits for its output specification. With `keep` the device and the rank
// remember it under the next template id.
OutputSpec define(const OpInfo& info, uint64_t hash, const EncodedCall& call, bool keep, uint64_t& base) {
  Channel& channel = Channel::instance();
  auto& table = TemplateTable::instance();
  const size_t name_words = (info.name.size() + 7) / 8;
  const size_t words = 6 + name_words + call.key.size() + call.handles.size() + call.payload.size();
  GilRelease gil;
  Channel::Transaction t(channel, words + Flags::kMessageWords);
  Flags::instance().send(t, call.flags);
  keep = keep && !table.full();
  base = t.next_handle();
  uint64_t* body = t.begin(Message::Define, words);
  body[0] = keep ? table.next_id() : kNoTemplate;
  body[1] = base;
  body[2] = info.name.size();
  body[3] = call.key.size();
  body[4] = call.handles.size();
  body[5] = call.payload.size();
  uint64_t* at = body + 6;
  std::memset(at, 0, 8 * name_words);
  std::memcpy(at, info.name.data(), info.name.size());
  put(put(put(at + name_words, call.key), call.handles), call.payload);
  t.commit();
  // The definition happens on the device whether this call is interrupted meanwhile or not: its template id and its
  // handles are used up.
  auto spec = std::make_shared<OutputSpec>();
  const auto learn = [&channel, &table, &info, hash, keep, spec, key = call.key, tensors = call.tensors.size()](
                         const char* data, size_t length) {
    *spec = parse_output_spec(data, length, tensors);
    channel.take_handles(spec->new_bytes.size());
    if (keep) {
      auto made = std::make_unique<Template>(Template{table.next_id(), &info, key, *spec, returns_composed(*spec)});
      made->outputs.keep_repeated_warnings();
      table.insert(hash, std::move(made));
      ++channel.mutable_stats().defined;
    } else {
      ++channel.mutable_stats().one_off;
    }
  };
  const auto abandon = [&channel, base, spec] {
    for (size_t i = 0; i < spec->new_bytes.size(); ++i)
      channel.queue_release(new Holding{base + i, spec->new_bytes[i]});
  };
  channel.wait_response(/*raise_asynchronous=*/true, {learn, abandon});
  return std::move(*spec);
}

// Has the device execute the call and makes its results: `take(const OutputSpec&, uint64_t base)`. Arguments that only
// exist in the rank are replaced on the stack.
template <class Take>
void forward(const OpInfo& info, torch::jit::Stack& stack, EncodedCall& call, Take&& take) {
  Channel::instance().require();
  (void)memory_fits(0);  // may ask the device, which cannot be done while the channel is held
  bool one_off = false;
  uint64_t hash = 0, base = 0;
  do {
    encode_call(info, stack, call);
    one_off = is_one_off(info, call);
    hash = one_off ? 0 : TemplateTable::hash(info, call.key);
    if (const Template* known = one_off ? nullptr : execute_known(info, hash, call, base, one_off)) {
      take(known->outputs, base);
      after_known(*known);
      return;
    }
    // Flags that were set without a word to us, by native code, show here at the latest.
  } while (Flags::instance().refresh());
  take_note_of_libraries();
  const OutputSpec spec = define(info, hash, call, !one_off, base);
  if (!memory_fits(spec.new_memory)) {
    // Only the device knew what it would need: the results are given back as if they had never been.
    for (size_t i = 0; i < spec.new_bytes.size(); ++i)
      Channel::instance().release(new Holding{base + i, spec.new_bytes[i]});
    require_memory(spec.new_memory);
  }
  take(spec, base);
  if (!spec.warnings.empty()) spec.warn();
}

}  // namespace

void forward_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (C10_UNLIKELY(bound_device() < 0)) use_device_of(*stack);
  const OpInfo& info = op_info(op);
  BuffersInUse buffers;
  EncodedCall& call = buffers->call;
  forward(info, *stack, call, [&](const OutputSpec& outputs, uint64_t base) {
    push_outputs(outputs, call, base, *stack, info.kinds.size());
  });
}

at::Tensor forward_plain(const c10::OperatorHandle& op, torch::jit::Stack& stack, EncodedCall& call) {
  at::Tensor result;
  forward(op_info(op), stack, call,
          [&](const OutputSpec& outputs, uint64_t base) { result = only_output(outputs, call, base); });
  return result;
}

}  // namespace ergo::rank
