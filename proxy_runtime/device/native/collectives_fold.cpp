// Sums of complete subtrees as soon as their members have contributed, where all members live on one proxy: of the
// right half's input nothing is left, so that log2(W) + 1 inputs are alive and not W.
//
// The bits are those of the whole tree: the same two numbers are added in the same order. A cut sees the left half's
// input as the sum of both and the right half's as absorbed in it; wherever the members live next, the tree adds what
// is there.
//
// The price: where a member then makes another call than the others, what they gave cannot be given back. Small inputs,
// which are not worth it, are kept until all have contributed.
#include <array>

#include "collective_state.hpp"
#include "reduce_tree.hpp"

namespace ergo {
namespace {

bool folds(const Descriptor& descriptor, const Roster& roster) {
  return descriptor.kind == CollectiveKind::AllReduce && roster.proxies.size() == 1 && roster.members.size() > 1;
}

ReduceOp summing(ReduceOp op) { return op == ReduceOp::Avg ? ReduceOp::Sum : op; }

}  // namespace

void CollectiveEngine::fold_ready(Sequence& s, uint64_t number) {
  Instance& instance = s.instances.at(number);
  const Descriptor& first = instance.operations.begin()->second->descriptor;
  if (!folds(first, s.roster)) return;
  if (packed_bytes(first.segments) < kFoldEarly && instance.operations.size() < s.roster.members.size()) return;
  for (const auto& [member, operation] : instance.operations)  // who disagrees gets a sentence instead
    if (signature_of(operation->descriptor) != signature_of(first)) return;
  if (has_kernels(first)) fold(instance, 0, s.roster.members.size());
}

// Whether the kernels have this reduction in these dtypes; if not, that is found again, and said, when all are there.
bool CollectiveEngine::has_kernels(const Descriptor& descriptor) const {
  alignas(kBufferAlign) std::array<std::byte, kBufferAlign> one{}, other{};
  try {
    for (const Segment& segment : descriptor.segments) {
      reduce_(segment.dtype, summing(descriptor.op), one.data(), one.data(), other.data(), 1);
      if (descriptor.op == ReduceOp::Avg) scale_(segment.dtype, one.data(), 1, 2);
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Makes one sum of the members [lo, hi), and of every subtree in it, where they are all here; whether they are.
bool CollectiveEngine::fold(Instance& instance, size_t lo, size_t hi) {
  if (hi - lo == 1) return contributed(instance, static_cast<uint32_t>(lo));
  const size_t mid = tree_split(lo, hi);
  const bool left = fold(instance, lo, mid), right = fold(instance, mid, hi);
  if (!left || !right) return false;
  Operation& into = *instance.operations.at(static_cast<uint32_t>(lo));
  Operation& from = *instance.operations.at(static_cast<uint32_t>(mid));
  if (from.descriptor.absorbed) return true;  // done before
  add_into(into, from.input);
  from.descriptor.absorbed = true;
  from.input = Slice();
  Contribution& gone = instance.contributions.at(static_cast<uint32_t>(mid));
  gone.first.absorbed = 1;
  for (auto& [part, payload] : gone.parts) payload.second = Slice();
  return true;
}

void CollectiveEngine::add_into(Operation& operation, const Slice& input) {
  // Packed, or lent, for this operation: nobody else reads it.
  auto* out = const_cast<std::byte*>(operation.input.data());
  const Descriptor& descriptor = operation.descriptor;
  const auto offsets = segment_offsets(descriptor.segments);
  for (size_t i = 0; i < descriptor.segments.size(); i++) {
    const Segment& segment = descriptor.segments[i];
    reduce_(segment.dtype, summing(descriptor.op), out + offsets[i], out + offsets[i], input.data() + offsets[i],
            segment.bytes / segment.element_bytes);
  }
}

// The sum of all, where the first member's input has become it. An average is made elsewhere: until it is delivered, a
// cut must find the sum.
Slice CollectiveEngine::folded_result(const Sequence& s, const Instance& instance) const {
  const auto first = instance.operations.find(s.roster.members.front());
  if (first == instance.operations.end() || !folds(first->second->descriptor, s.roster)) return {};
  if (first->second->descriptor.op == ReduceOp::Avg) return {};
  for (size_t i = 1; i < s.roster.members.size(); i++)
    if (!instance.contributions.at(s.roster.members[i]).first.absorbed) return {};
  return first->second->input;
}

}  // namespace ergo
