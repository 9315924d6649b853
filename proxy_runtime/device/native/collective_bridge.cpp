#include "collective_bridge.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "collective_plan.hpp"
#include "failure.hpp"
#include "splice/splicer.hpp"

namespace ergo::device {
namespace {

constexpr uint64_t kMaxTensors = 1 << 20;

bool in_place(CollectiveKind kind) {
  return kind == CollectiveKind::AllReduce || kind == CollectiveKind::Broadcast || kind == CollectiveKind::Reduce;
}

TensorRef parse_ref(WordReader& body) {
  uint64_t header = body.word();
  if (static_cast<Tag>(header & 0xff) != Tag::Tensor)
    throw ProtocolError("a collective on something that is no tensor");
  TensorRef ref;
  ref.meta = parse_tensor(header, body, true);
  ref.handle = body.word();
  return ref;
}

// Whether a tensor's elements are its bytes, one after another, where the host can reach them.
bool plain(const at::Tensor& t) { return t.is_cpu() && t.is_contiguous() && !t.is_conj() && !t.is_neg(); }

at::Tensor on_host(const void* data, const at::Tensor& like) {
  return at::from_blob(const_cast<void*>(data), like.sizes(), at::TensorOptions().dtype(like.scalar_type()));
}

void pack(const at::Tensor& from, std::byte* to) {
  if (from.numel() == 0) return;
  if (plain(from))
    std::memcpy(to, from.const_data_ptr(), from.nbytes());
  else
    on_host(to, from).copy_(from);
}

// The first bytes of a packed tensor.
void unpack(const std::byte* from, const at::Tensor& to) {
  if (to.numel() == 0) return;
  if (plain(to))
    std::memcpy(to.mutable_data_ptr(), from, to.nbytes());
  else
    to.copy_(on_host(from, to));
}

// Packed tensors that come in pieces, each a whole number of elements.
void unpack(const std::vector<Slice>& pieces, const std::vector<Segment>& segments,
            const std::vector<at::Tensor>& outputs) {
  auto offsets = segment_offsets(segments);
  for (size_t i = 0; i < outputs.size(); i++) {
    const at::Tensor& out = outputs[i];
    if (out.numel() == 0) continue;
    at::Tensor flat = plain(out) ? out.view(-1) : at::empty({out.numel()}, out.options());
    const size_t begin = offsets[i], end = begin + segments[i].bytes;
    size_t at = 0;
    for (const Slice& piece : pieces) {
      const size_t from = std::max(at, begin), to = std::min(at + piece.size(), end);
      if (from < to) {
        const auto size = static_cast<size_t>(out.element_size());
        unpack(piece.data() + (from - at),
               flat.narrow(0, static_cast<int64_t>((from - begin) / size), static_cast<int64_t>((to - from) / size)));
      }
      at += piece.size();
    }
    if (!flat.is_alias_of(out)) out.copy_(flat.view(out.sizes()));
  }
}

// The pieces of one tensor's elements, in order; a piece is a view where the tensor is contiguous.
std::vector<at::Tensor> split(const at::Tensor& contiguous, const std::vector<int64_t>& pieces) {
  at::Tensor flat = contiguous.view({-1});
  std::vector<at::Tensor> result;
  int64_t at = 0;
  for (int64_t n : pieces) {
    TORCH_CHECK_VALUE(n >= 0 && n <= flat.numel() - at, "the split sizes of a collective exceed its tensor");
    result.push_back(flat.narrow(0, at, n));
    at += n;
  }
  TORCH_CHECK_VALUE(at == flat.numel(), "the split sizes of a collective do not add up to its tensor");
  return result;
}

std::vector<int64_t> piece_sizes(const CollectiveCall& call, int64_t whole, size_t members, bool output) {
  if (call.kind == CollectiveKind::AllToAll && !call.extra.empty()) {
    TORCH_CHECK_VALUE(call.extra.size() == 2 * members, "an all-to-all needs a split size per member and direction");
    auto from = call.extra.begin() + static_cast<ptrdiff_t>(output ? members : 0);
    return {from, from + static_cast<ptrdiff_t>(members)};
  }
  TORCH_CHECK_VALUE(whole % static_cast<int64_t>(members) == 0, "a tensor of ", whole,
                    " elements cannot be split among ", members, " ranks");
  return std::vector<int64_t>(members, whole / static_cast<int64_t>(members));
}

// Whether a member has anything to say; of these kinds only the source has.
bool contributes(const CollectiveCall& call, uint32_t own) {
  if (call.kind == CollectiveKind::Broadcast || call.kind == CollectiveKind::Scatter) return own == call.root;
  return call.kind != CollectiveKind::Recv && call.kind != CollectiveKind::Barrier;
}

std::vector<Segment> segments_of(const std::vector<at::Tensor>& pieces) {
  std::vector<Segment> segments;
  for (const at::Tensor& piece : pieces)
    segments.push_back({static_cast<uint8_t>(piece.scalar_type()), static_cast<uint8_t>(piece.element_size()),
                        static_cast<uint64_t>(piece.nbytes())});
  return segments;
}

// What a member that only receives has room for.
uint64_t expected_bytes(const CollectiveCall& call, uint32_t own) {
  if (call.kind != CollectiveKind::Recv && (call.kind != CollectiveKind::Broadcast || own == call.root)) return 0;
  uint64_t total = 0;
  for (const TensorRef& ref : call.outputs) total += ref.meta.bytes;
  return total;
}

bool splits_input(CollectiveKind kind) {
  return kind == CollectiveKind::ReduceScatter || kind == CollectiveKind::Scatter || kind == CollectiveKind::AllToAll;
}
bool splits_output(CollectiveKind kind) {
  return kind == CollectiveKind::AllGather || kind == CollectiveKind::Gather || kind == CollectiveKind::AllToAll;
}

// Bytes of what each output, or each member's part of the only one, can take of `members` ranks.
std::vector<uint64_t> rooms_of(const CollectiveCall& call, size_t members) {
  std::vector<uint64_t> rooms;
  for (const TensorRef& ref : call.outputs) rooms.push_back(ref.meta.bytes);
  if (!splits_output(call.kind) || rooms.size() != 1 || members == 1) return rooms;
  const uint64_t item = c10::elementSize(call.outputs[0].meta.dtype);
  const auto whole = static_cast<int64_t>(rooms[0] / item);
  rooms.clear();
  for (int64_t n : piece_sizes(call, whole, members, true)) rooms.push_back(static_cast<uint64_t>(n) * item);
  return rooms;
}

// Tensors that are gone do not count any more: looked at only where the sum would be the highest.
void count_given(RankState& rank, const CollectiveCall& call) {
  if (call.kind != CollectiveKind::AllReduce) return;
  for (const TensorRef& ref : call.inputs) {
    uint64_t& bytes = rank.given[ref.handle];
    const uint64_t more = std::max(bytes, ref.meta.bytes);
    rank.given_bytes += more - bytes;
    bytes = more;
  }
  if (rank.given_bytes <= rank.gradient_bytes) return;
  std::erase_if(rank.given, [&](const auto& entry) {
    if (rank.storages.contains(entry.first)) return false;
    rank.given_bytes -= entry.second;
    return true;
  });
  rank.gradient_bytes = std::max(rank.gradient_bytes, rank.given_bytes);
}

std::vector<at::Tensor> input_pieces(const CollectiveCall& call, const std::vector<at::Tensor>& inputs,
                                     size_t members) {
  if (!splits_input(call.kind) || inputs.empty()) return inputs;
  if (inputs.size() == 1 && members != 1) {
    at::Tensor whole = inputs[0].contiguous();
    return split(whole, piece_sizes(call, whole.numel(), members, false));
  }
  TORCH_CHECK_VALUE(inputs.size() == members, "a collective among ", members, " ranks was given ", inputs.size(),
                    " inputs");
  return inputs;
}

}  // namespace

CollectiveCall CollectiveCall::parse(WordReader body) {
  try {
    CollectiveCall call;
    call.comm = body.word();
    uint64_t kind = body.word(), op = body.word(), root = body.word();
    uint64_t n_inputs = body.word(), n_outputs = body.word(), n_extra = body.word();
    if (kind > static_cast<uint64_t>(CollectiveKind::Barrier)) throw ProtocolError("an unknown kind of collective");
    if (op > static_cast<uint64_t>(ReduceOp::BXor)) throw ProtocolError("an unknown reduction");
    if (root > UINT32_MAX || n_inputs > kMaxTensors || n_outputs > kMaxTensors)
      throw ProtocolError("a collective of impossible size");
    call.kind = static_cast<CollectiveKind>(kind);
    call.op = static_cast<ReduceOp>(op);
    call.root = static_cast<uint32_t>(root);
    for (uint64_t i = 0; i < n_inputs; i++) call.inputs.push_back(parse_ref(body));
    for (uint64_t i = 0; i < n_outputs; i++) call.outputs.push_back(parse_ref(body));
    const uint64_t* extra = body.words(n_extra);
    call.extra.assign(extra, extra + n_extra);
    if (body.left() != 0) throw ProtocolError("a collective with more words than tensors");
    if (in_place(call.kind)) {  // named once or twice: the same tensors
      if (call.outputs.empty()) call.outputs = call.inputs;
      call.inputs = call.outputs;
    }
    return call;
  } catch (const std::runtime_error& e) {
    throw ProtocolError(e.what());
  }
}

bool covers(const TensorMeta& meta, const PhysicalStorage& storage) {
  return (meta.flags & Canonical) != 0 && (meta.flags & (Conj | Neg)) == 0 && meta.bytes == storage.storage.nbytes() &&
         meta.bytes > 0;
}

bool CollectiveCall::fills(size_t output, const PhysicalStorage& storage) const {
  const TensorRef& ref = outputs[output];
  return covers(ref.meta, storage) &&
         std::ranges::count_if(outputs, [&](const TensorRef& other) { return other.handle == ref.handle; }) == 1;
}

void CollectiveBridge::connect(std::unique_ptr<Fabric> fabric, std::vector<int> rank_to_proxy) {
  fabric_ = std::move(fabric);
  rank_to_proxy_ = std::move(rank_to_proxy);
  engine_ = std::make_unique<CollectiveEngine>(fabric_->self(), rank_to_proxy_, *fabric_, aten_reduce(), aten_scale());
}

void CollectiveBridge::send_to_all(std::span<const std::byte> bytes) {
  std::set<int> peers(rank_to_proxy_.begin(), rank_to_proxy_.end());
  peers.erase(fabric_->self());
  for (int peer : peers) fabric_->send_control(peer, bytes);
}

void CollectiveBridge::define(RankState& rank, WordReader body) {
  Communicator communicator;
  communicator.id = body.word();
  uint64_t own = body.word(), n = body.word();
  const uint64_t* members = body.words(n);
  for (uint64_t i = 0; i < n; i++) {
    if (members[i] >= rank_to_proxy_.size())
      throw ProtocolError("a communicator names rank " + std::to_string(members[i]) + " in a job of " +
                          std::to_string(rank_to_proxy_.size()));
    communicator.members.push_back(static_cast<int>(members[i]));
  }
  if (own >= n || members[own] != rank.rank)
    throw ProtocolError("a communicator of which the rank is not the member it says");
  for (const Communicator& known : rank.communicators)
    if (known.id == communicator.id) {
      if (known.members != communicator.members)
        throw ProtocolError("a communicator is defined twice with other members");
      return;
    }
  engine_->define(communicator.id, communicator.members);
  rank.communicators.push_back(std::move(communicator));
}

const Communicator& CollectiveBridge::communicator(const RankState& rank, uint64_t comm) const {
  for (const Communicator& c : rank.communicators)
    if (c.id == comm) return c;
  throw ProtocolError("a collective on the unknown communicator " + std::to_string(comm));
}

uint32_t CollectiveBridge::group_rank(const RankState& rank, uint64_t comm) const {
  const std::vector<int>& members = communicator(rank, comm).members;
  return static_cast<uint32_t>(std::find(members.begin(), members.end(), static_cast<int>(rank.rank)) -
                               members.begin());
}

bool CollectiveBridge::all_here(const Communicator& communicator) const {
  return std::ranges::all_of(communicator.members, [this](int member) {
    return rank_to_proxy_[static_cast<size_t>(member)] == fabric_->self();
  });
}

bool CollectiveBridge::must_wait(const RankState& rank, WordReader body) const {
  if (rank.pending.empty()) return false;
  CollectiveCall call = CollectiveCall::parse(body);
  auto pending = [&](const TensorRef& ref) { return rank.storages.is_pending(ref.handle); };
  return std::any_of(call.inputs.begin(), call.inputs.end(), pending) ||
         std::any_of(call.outputs.begin(), call.outputs.end(), pending);
}

std::vector<at::Tensor> CollectiveBridge::tensors(const std::vector<TensorRef>& refs,
                                                  const std::vector<PhysicalPtr>& storages, size_t from) {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < refs.size(); i++)
    result.push_back(tensor_on(refs[i].meta, storages.at(from + i)->storage, keys_));
  return result;
}

void CollectiveBridge::issue(RankState& rank, WordReader body) {
  at::NoGradGuard no_grad;
  CollectiveCall call = CollectiveCall::parse(body);
  size_t members = communicator(rank, call.comm).members.size();
  uint32_t own = group_rank(rank, call.comm);
  PendingCollective pending;
  pending.body.assign(body.position(), body.position() + body.left());
  for (const auto* refs : {&call.inputs, &call.outputs})
    for (const TensorRef& ref : *refs) pending.storages.push_back(rank.storages.find(ref.handle));
  if (rank.member)
    for (size_t i = 0; i < call.inputs.size(); i++) rank.member->splicer.readable(pending.storages[i]);

  Descriptor descriptor{call.comm, call.kind, call.op, call.root, {}, 0};
  Slice input;
  if (contributes(call, own)) {
    auto pieces = input_pieces(call, tensors(call.inputs, pending.storages, 0), members);
    descriptor.segments = segments_of(pieces);
    if (rank.member && members > 1 && all_here(communicator(rank, call.comm)))
      input = rank.member->splicer.lend(*rank.member, call, packed_bytes(descriptor.segments));
    if (input.empty()) {
      auto buffer = fabric_->allocate(packed_bytes(descriptor.segments));
      auto offsets = segment_offsets(descriptor.segments);
      for (size_t i = 0; i < pieces.size(); i++) pack(pieces[i], buffer->data() + offsets[i]);
      input = rank.member ? rank.member->splicer.counted(std::move(buffer)) : Slice(std::move(buffer));
    }
  }
  descriptor.expected_bytes = expected_bytes(call, own);
  pending.writes = has_result(call.kind, call.root, own);
  if (members > 1) count_given(rank, call);
  contribute(rank, call, std::move(descriptor), std::move(input), std::move(pending));
}

void CollectiveBridge::reissue(RankState& rank, PendingCollective pending, Slice input) {
  CollectiveCall call = CollectiveCall::parse(WordReader(pending.body.data(), pending.body.size()));
  uint32_t own = group_rank(rank, call.comm);
  if (pending.storages.size() != call.inputs.size() + call.outputs.size())
    throw ProtocolError("a pending collective lacks some of its storages");
  Descriptor descriptor{call.comm, call.kind, call.op, call.root, {}, 0};
  if (contributes(call, own)) {  // segments follow from shapes alone; the bytes are those packed before the dump
    at::NoGradGuard no_grad;
    size_t members = communicator(rank, call.comm).members.size();
    descriptor.segments = segments_of(input_pieces(call, tensors(call.inputs, pending.storages, 0), members));
  }
  descriptor.expected_bytes = expected_bytes(call, own);
  // One whose input was part of another's when it was dumped.
  descriptor.absorbed =
      call.kind == CollectiveKind::AllReduce && own != 0 && input.empty() && packed_bytes(descriptor.segments) != 0;
  if (!descriptor.absorbed && packed_bytes(descriptor.segments) != input.size())
    throw ProtocolError("a pending collective's packed input has another size than its tensors");
  pending.writes = has_result(call.kind, call.root, own);
  contribute(rank, call, std::move(descriptor), std::move(input), std::move(pending));
}

void CollectiveBridge::contribute(RankState& rank, const CollectiveCall& call, Descriptor descriptor, Slice input,
                                  PendingCollective pending) {
  auto ticket = std::make_shared<uint64_t>(0);
  auto on_complete = [this, &rank, call, ticket](const CollectiveResult& result) {
    auto node = rank.pending.extract(*ticket);
    rank.completions++;
    if (node.mapped().writes)
      for (size_t i = call.inputs.size(); i < node.mapped().storages.size(); i++) node.mapped().storages[i]->pending--;
    try {
      auto unpack = [&](const CollectiveResult& from) { complete(rank, call, node.mapped(), from); };
      // Before anybody looks whether the result is needed at all: a script that drops its tensors is told too.
      const auto refused = node.mapped().writes ? misfit(rank, call, result) : std::nullopt;
      const CollectiveResult& given = refused ? *refused : result;
      if (rank.member)
        rank.member->splicer.completed(*rank.member, call, node.mapped(), given, unpack);
      else
        unpack(given);
    } catch (...) {
      rank.report(current_failure());
    }
  };
  try {
    *ticket = engine_->issue(static_cast<int>(rank.rank), descriptor, std::move(input), std::move(on_complete));
  } catch (const CollectiveError& e) {  // a misuse by the script, not a malformed message
    TORCH_CHECK(false, e.what());
  }
  if (rank.member) rank.member->splicer.issued(*rank.member, call, pending, communicator(rank, call.comm).members);
  if (pending.writes)
    for (size_t i = call.inputs.size(); i < pending.storages.size(); i++) pending.storages[i]->pending++;
  rank.pending.emplace(*ticket, std::move(pending));
}

// Where a member has no room for what was given: the result that it gets instead, so that its tensors stay as they are.
std::optional<CollectiveResult> CollectiveBridge::misfit(const RankState& rank, const CollectiveCall& call,
                                                         const CollectiveResult& result) const {
  if (!result.error.empty() || call.outputs.empty()) return std::nullopt;
  const std::vector<int>& members = communicator(rank, call.comm).members;
  auto check = [&](size_t given, size_t room, size_t from) {
    TORCH_CHECK(given == room, "rank ", rank.rank, " called ", kind_name(static_cast<uint8_t>(call.kind)),
                " with room for ", room, " bytes of rank ", members.at(from), ", which gave ", given,
                " (each rounded up to a multiple of 64): the ranks disagree on shapes or dtypes");
  };
  try {
    const auto rooms = rooms_of(call, result.blocks.size());
    if (splits_output(call.kind)) {
      TORCH_CHECK(rooms.size() == result.blocks.size(), "a collective among ", result.blocks.size(),
                  " ranks was given ", rooms.size(), " outputs");
      for (size_t i = 0; i < rooms.size(); i++) check(result.blocks[i].size(), align_up(rooms[i]), i);
    } else {  // packed as segments
      size_t given = 0, room = 0;
      for (const Slice& block : result.blocks) given += block.size();
      for (uint64_t bytes : rooms) room += align_up(bytes);
      check(given, room, call.root);
    }
    return std::nullopt;
  } catch (const c10::Error& e) {
    return CollectiveResult{{}, e.what_without_backtrace(), result.sequence, result.number};
  }
}

// After an all-reduce that failed: tensors are what the member gave. Where that was part of a sum by then, it cannot be
// had back: the tensor is gone, as the result of an operator that failed is, and whoever uses it is told so.
void CollectiveBridge::give_back(RankState& rank, const CollectiveCall& call, const PendingCollective& pending,
                                 const CollectiveResult& result) {
  at::NoGradGuard no_grad;
  if (!result.blocks.empty()) {
    auto outputs = tensors(call.outputs, pending.storages, call.inputs.size());
    return unpack(result.blocks, segments_of(outputs), outputs);
  }
  for (size_t i = 0; i < call.outputs.size(); i++) {
    const uint64_t handle = call.outputs[i].handle;
    if (!call.fills(i, *pending.storages[call.inputs.size() + i])) continue;  // a copy of it was given
    rank.storages.release(handle);
    if (rank.member) rank.member->splicer.released(*rank.member, handle);
  }
}

void CollectiveBridge::complete(RankState& rank, const CollectiveCall& call, const PendingCollective& pending,
                                const CollectiveResult& result) {
  if (!result.error.empty()) {
    rank.report({Status::Runtime, result.error});
    if (call.kind == CollectiveKind::AllReduce && pending.writes) give_back(rank, call, pending, result);
    return;
  }
  if (!pending.writes || call.outputs.empty()) return;
  at::NoGradGuard no_grad;
  auto outputs = tensors(call.outputs, pending.storages, call.inputs.size());
  if (!splits_output(call.kind)) return unpack(result.blocks, segments_of(outputs), outputs);  // packed as segments
  std::vector<at::Tensor> pieces = outputs;
  at::Tensor staging;
  if (outputs.size() == 1 && result.blocks.size() != 1) {
    staging = outputs[0].is_contiguous() ? outputs[0] : at::empty_like(outputs[0], at::MemoryFormat::Contiguous);
    pieces = split(staging, piece_sizes(call, staging.numel(), result.blocks.size(), true));
  }
  for (size_t i = 0; i < pieces.size(); i++) unpack(result.blocks[i].data(), pieces[i]);
  if (staging.defined() && !staging.is_same(outputs[0])) outputs[0].copy_(staging);
}

}  // namespace ergo::device
