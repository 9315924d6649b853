#include "collectives.hpp"

#include <algorithm>

#include "collective_state.hpp"
#include "reduce_tree.hpp"

namespace ergo {

CollectiveEngine::CollectiveEngine(int self, std::vector<int> rank_to_proxy, Fabric& fabric, ReduceFn reduce,
                                   ScaleFn scale)
    : self_(self),
      rank_to_proxy_(std::move(rank_to_proxy)),
      fabric_(fabric),
      reduce_(std::move(reduce)),
      scale_(std::move(scale)) {}

CollectiveEngine::~CollectiveEngine() = default;

void CollectiveEngine::define(uint64_t comm, const std::vector<int>& members) {
  auto fail = [&](const std::string& what) {
    throw CollectiveError("collective_communicator", "communicator " + std::to_string(comm) + ": " + what);
  };
  if (auto known = groups_.find(comm); known != groups_.end()) {
    if (known->second->members != members) fail("two ranks define it with different members");
    return;
  }
  auto group = std::make_unique<Group>();
  group->comm = comm;
  group->members = members;
  if (members.empty()) fail("it has no members");
  for (uint32_t i = 0; i < members.size(); ++i) {
    int rank = members[i];
    if (rank < 0 || static_cast<size_t>(rank) >= rank_to_proxy_.size())
      fail("rank " + std::to_string(rank) + " does not exist");
    if (*group->group_rank(rank) != i) fail("rank " + std::to_string(rank) + " is in it twice");
    int proxy = rank_to_proxy_[static_cast<size_t>(rank)];
    auto& roster = group->roster;
    roster.members.push_back(i);
    roster.proxy_of[i] = proxy;
    if (proxy == self_) roster.local.push_back(i);
    if (std::find(roster.proxies.begin(), roster.proxies.end(), proxy) == roster.proxies.end())
      roster.proxies.push_back(proxy);
  }
  if (group->roster.local.empty()) fail("no rank of this proxy is a member");
  Group& added = *groups_.emplace(comm, std::move(group)).first->second;
  for (auto& [id, sequence] : sequences_)
    if (id.comm == comm) bind(*sequence, added);
  sequence({comm, -1, -1});
}

const CollectiveEngine::Group& CollectiveEngine::group_of(uint64_t comm, int rank) const {
  auto found = groups_.find(comm);
  if (found == groups_.end())
    throw CollectiveError("collective_communicator", "communicator " + std::to_string(comm) + " is not defined");
  if (!found->second->group_rank(rank))
    throw CollectiveError("collective_communicator",
                          "rank " + std::to_string(rank) + " is no member of communicator " + std::to_string(comm));
  return *found->second;
}

CollectiveEngine::Sequence& CollectiveEngine::sequence(const SequenceId& id) {
  auto& slot = sequences_[id];
  if (!slot) {
    slot = std::make_unique<Sequence>();
    slot->id = id;
    if (auto group = groups_.find(id.comm); group != groups_.end()) bind(*slot, *group->second);
  }
  return *slot;
}

void CollectiveEngine::bind(Sequence& s, const Group& group) {
  if (s.id.source < 0) {
    s.roster = group.roster;
  } else {
    auto source = static_cast<uint32_t>(s.id.source), destination = static_cast<uint32_t>(s.id.destination);
    if (source >= group.members.size() || destination >= group.members.size() || source == destination)
      throw CollectiveError("collective_sequence",
                            "sequence " + s.id.text() + " names no pair of the communicator's members");
    s.roster = Roster{};
    s.roster.members = {std::min(source, destination), std::max(source, destination)};
    for (auto member : s.roster.members) {
      int proxy = group.roster.proxy_of.at(member);
      s.roster.proxy_of[member] = proxy;
      if (proxy == self_) s.roster.local.push_back(member);
      if (s.roster.proxies.empty() || s.roster.proxies[0] != proxy) s.roster.proxies.push_back(proxy);
    }
  }
  s.group = &group;
  std::vector<int> ranks;
  for (auto member : s.roster.members) ranks.push_back(group.members[member]);
  for (auto member : s.roster.local) s.counts[member].members = ranks;
  for (const auto& [number, instance] : s.instances) touched_.emplace_back(s.id, number);
}

uint64_t CollectiveEngine::issue(int rank, const Descriptor& descriptor, Slice input, OnComplete on_complete) {
  const Group& group = group_of(descriptor.comm, rank);
  uint32_t me = *group.group_rank(rank);
  check_descriptor(descriptor, me, group.members.size(), input.size());
  SequenceId id{descriptor.comm, -1, -1};
  if (descriptor.kind == CollectiveKind::Send)
    id.source = static_cast<int32_t>(me), id.destination = static_cast<int32_t>(descriptor.root);
  if (descriptor.kind == CollectiveKind::Recv)
    id.source = static_cast<int32_t>(descriptor.root), id.destination = static_cast<int32_t>(me);
  Sequence& s = sequence(id);
  if (!s.counts.count(me))
    throw CollectiveError("collective_communicator",
                          "rank " + std::to_string(rank) + " does not live on proxy " + std::to_string(self_));

  MemberCounts& counts = s.counts.at(me);
  counts.scatters |= descriptor.kind == CollectiveKind::ReduceScatter;
  auto operation = std::make_shared<Operation>(Operation{
      next_ticket_++, rank, ++counts.contributed, id, descriptor, std::move(input), std::move(on_complete), {}});
  auto& list = operations_[rank];
  operation->place = list.insert(list.end(), operation);
  s.instances[operation->number].operations[me] = operation;
  contribute(s, operation->number, me, *operation);
  fold_ready(s, operation->number);
  return operation->ticket;
}

// Everything of it is handed to the fabric here, so that finishing a cut needs no host.
void CollectiveEngine::contribute(Sequence& s, uint64_t number, uint32_t me, const Operation& operation) {
  const Descriptor& d = operation.descriptor;
  for (int proxy : s.roster.proxies) {
    auto parts =
        d.absorbed ? std::vector<Part>{{kNoPart, 0, Slice()}} : parts_for(proxy, me, d, operation.input, s.roster);
    for (auto& part : parts) {
      FrameHeader header;
      header.type = static_cast<uint8_t>(FrameType::Collective);
      header.phase = static_cast<uint8_t>(Phase::Contribution);
      header.comm = s.id.comm;
      header.number = number;
      header.pair_source = s.id.source;
      header.pair_destination = s.id.destination;
      header.source = me;
      header.part = part.part;
      header.parts = static_cast<uint32_t>(parts.size());
      header.root = d.root;
      header.kind = static_cast<uint8_t>(d.kind);
      header.op = static_cast<uint8_t>(d.op);
      header.absorbed = d.absorbed;
      header.signature = signature_of(d);
      header.bytes = d.expected_bytes;
      for (const Segment& segment : d.segments) header.bytes += segment.bytes;
      header.dtype = d.segments.empty() ? kNoDtype : d.segments[0].dtype;
      header.offset = part.offset;
      if (proxy != self_) {
        fabric_.send(proxy, header, std::move(part.payload));
        continue;
      }
      auto& contribution = s.instances[number].contributions[me];
      contribution.first = header;
      contribution.parts[part.part] = {part.offset, std::move(part.payload)};
    }
  }
  touched_.emplace_back(s.id, number);
}

void CollectiveEngine::bad_frame(int peer, const FrameHeader& header, const std::string& what) const {
  throw FabricError("fabric_bad_frame", peer,
                    "proxy " + std::to_string(self_) + ": unexpected frame from proxy " + std::to_string(peer) +
                        " for number " + std::to_string(header.number) + " of sequence " +
                        SequenceId{header.comm, header.pair_source, header.pair_destination}.text() + ": " + what);
}

void CollectiveEngine::receive(int peer, Frame frame) {
  const FrameHeader& h = frame.header;
  if ((h.pair_source < 0) != (h.pair_destination < 0) || h.pair_source < -1 || h.number == 0)
    bad_frame(peer, h, "it names no sequence");
  SequenceId id{h.comm, h.pair_source, h.pair_destination};
  Sequence* found = nullptr;
  try {
    found = &sequence(id);
  } catch (const CollectiveError& error) {
    bad_frame(peer, h, error.what());
  }
  Sequence& s = *found;
  if (s.group) {
    if (s.roster.local.empty()) bad_frame(peer, h, "no member of it lives here");
    if (h.number <= s.completed()) bad_frame(peer, h, "that number is complete already");
  }
  Instance& instance = s.instances[h.number];
  if (h.phase == static_cast<uint8_t>(Phase::Result)) {
    if (!instance.chunks.emplace(h.source, Instance::Chunk{h.offset, std::move(frame.payload), h.part == kNoPart})
             .second)
      bad_frame(peer, h, "a chunk came twice");
  } else if (h.phase == static_cast<uint8_t>(Phase::Contribution)) {
    if (h.absorbed && (h.kind != static_cast<uint8_t>(CollectiveKind::AllReduce) || h.source == 0))
      bad_frame(peer, h, "it cannot be part of another's");
    if (h.parts == 0 || h.parts > rank_to_proxy_.size()) bad_frame(peer, h, "it has an impossible number of parts");
    if (s.group && (!s.roster.proxy_of.count(h.source) || s.roster.proxy_of.at(h.source) != peer))
      bad_frame(peer, h,
                "group rank " + std::to_string(h.source) + " does not live there: the proxies' placements differ");
    Contribution& contribution = instance.contributions[h.source];
    if (contribution.parts.empty()) contribution.first = h;
    if (contribution.first.parts != h.parts || contribution.first.signature != h.signature ||
        !contribution.parts.emplace(h.part, std::pair{h.offset, std::move(frame.payload)}).second)
      bad_frame(peer, h, "a contribution came twice");
  } else {
    bad_frame(peer, h, "unknown phase " + std::to_string(h.phase));
  }
  touched_.emplace_back(id, h.number);
}

bool CollectiveEngine::pump(const OnControl& on_control) {
  bool moved = fabric_.pump([&](int peer, Frame frame) {
    if (frame.header.type == static_cast<uint8_t>(FrameType::Control))
      on_control(peer, std::move(frame.payload));
    else
      receive(peer, std::move(frame));
  });
  while (!touched_.empty()) {
    auto [id, number] = touched_.front();
    touched_.pop_front();
    Sequence& s = sequence(id);
    if (!s.group) continue;
    prepare(s, number);
    complete_ready(s);
  }
  // One at a time and popped before the call: a callback may issue, or throw, and the others are not lost.
  while (!completions_.empty()) {
    Completion completion = std::move(completions_.front());
    completions_.pop_front();
    moved = true;
    if (completion.operation->on_complete) completion.operation->on_complete(completion.result);
  }
  return moved;
}

// Makes the results of local members once every member has contributed (and, chunked, every owner answered).
void CollectiveEngine::prepare(Sequence& s, uint64_t number) {
  auto found = s.instances.find(number);
  if (found == s.instances.end() || found->second.ready) return;
  Instance& instance = found->second;
  for (auto member : s.roster.members) {
    auto contribution = instance.contributions.find(member);
    if (contribution == instance.contributions.end() || !contribution->second.complete()) return;
  }
  if (instance.contributions.size() != s.roster.members.size())
    throw CollectiveError("collective_sequence", "number " + std::to_string(number) + " of sequence " + s.id.text() +
                                                     " has a contribution of a rank that is no member");
  if (auto why = disagreement(s, number, instance); !why.empty()) {
    for (auto& [member, operation] : instance.operations) instance.results[member].error = why;
  } else {
    try {
      const Descriptor& descriptor = instance.operations.begin()->second->descriptor;
      if (is_chunked(descriptor, s.roster) && !reduce_own_chunk(s, number, instance)) return;
      make_results(s, instance);
    } catch (const FabricError&) {
      throw;
    } catch (const std::exception& error) {
      // A kernel that the dtype or reduction lacks, whatever it throws: every proxy that reduces finds the same.
      for (auto& [member, operation] : instance.operations) instance.results[member].error = error.what();
    }
  }
  instance.ready = true;
}

// Every proxy sees every member's header, so all find the same sentence or none.
std::string CollectiveEngine::disagreement(const Sequence& s, uint64_t number, const Instance& instance) const {
  auto first = s.roster.members.front();
  const FrameHeader& expected = instance.contributions.at(first).first;
  for (auto member : s.roster.members) {
    const FrameHeader& header = instance.contributions.at(member).first;
    if (header.signature == expected.signature && !differ_in_size(header, expected)) continue;
    auto what = [&](uint32_t group_rank, const FrameHeader& h) {
      return "rank " + std::to_string(s.group->members[group_rank]) + " called " + call_text(h);
    };
    return "collective " + std::to_string(number) + " of communicator " + s.id.text() + ": " + what(first, expected) +
           " but " + what(member, header) + ": all members must make the same call, on tensors of the same size and " +
           "dtype";
  }
  return {};
}

// Reduces one part of all members over `range` of the packed input, in tree order, into a buffer that starts at
// range.begin. Ranges start and end at multiples of 64, and so between elements.
Slice CollectiveEngine::reduce(const Sequence& s, const Instance& instance, const Descriptor& descriptor, uint32_t part,
                               Range range, std::shared_ptr<Buffer> into) {
  std::vector<Slice> inputs;
  for (auto member : s.roster.members) {
    inputs.push_back(instance.contributions.at(member).payload(part));
    if (instance.contributions.at(member).first.absorbed) continue;
    if (inputs.back().size() != range.end - range.begin)
      throw CollectiveError("collective_argument", "rank " + std::to_string(s.group->members[member]) +
                                                       " contributed " + std::to_string(inputs.back().size()) +
                                                       " bytes to sequence " + s.id.text() + " where " +
                                                       std::to_string(range.end - range.begin) + " were expected");
  }
  ReduceOp op = descriptor.op == ReduceOp::Avg ? ReduceOp::Sum : descriptor.op;
  auto offsets = segment_offsets(descriptor.segments);
  std::vector<const std::byte*> leaves(inputs.size());
  for (size_t i = 0; i < descriptor.segments.size(); ++i) {
    const Segment& segment = descriptor.segments[i];
    size_t padded_end = std::min(offsets[i] + align_up(segment.bytes), range.end);
    size_t begin = std::max(offsets[i], range.begin), end = std::min(offsets[i] + segment.bytes, range.end);
    if (begin < end) {
      std::byte* out = into->data() + (begin - range.begin);
      for (size_t leaf = 0; leaf < leaves.size(); ++leaf)
        leaves[leaf] = inputs[leaf].empty() ? nullptr : inputs[leaf].data() + (begin - range.begin);
      tree_reduce(leaves, end - begin, out,
                  [&](std::byte* to, const std::byte* left, const std::byte* right, size_t bytes) {
                    reduce_(segment.dtype, op, to, left, right, bytes / segment.element_bytes);
                  });
      if (descriptor.op == ReduceOp::Avg)
        scale_(segment.dtype, out, (end - begin) / segment.element_bytes, leaves.size());
    }
    if (size_t from = std::max(end, range.begin); from < padded_end)  // padding: never uninitialised on a wire
      std::memset(into->data() + (from - range.begin), 0, padded_end - from);
  }
  return Slice(std::move(into)).part(0, range.end - range.begin);
}

// True when the chunks of all owners are here.
bool CollectiveEngine::reduce_own_chunk(Sequence& s, uint64_t number, Instance& instance) {
  const Descriptor& descriptor = instance.operations.begin()->second->descriptor;
  auto& proxies = s.roster.proxies;
  auto me = static_cast<uint32_t>(std::find(proxies.begin(), proxies.end(), self_) - proxies.begin());
  if (!instance.chunks.count(me)) {
    Range chunk = chunk_of(descriptor.segments, me, proxies.size());
    Instance::Chunk own{chunk.begin, Slice(), false};
    try {
      own.payload = reduce(s, instance, descriptor, 0, chunk, fabric_.allocate(chunk.end - chunk.begin));
    } catch (const std::exception& error) {
      // Perhaps only this chunk has a dtype that the kernel lacks: the others must hear of it, not wait for it.
      own.failed = true;
      own.payload = Buffer::copy_of(std::as_bytes(std::span(std::string_view(error.what()))));
    }
    instance.chunks[me] = own;
    FrameHeader header;
    header.type = static_cast<uint8_t>(FrameType::Collective);
    header.phase = static_cast<uint8_t>(Phase::Result);
    header.comm = s.id.comm;
    header.number = number;
    header.source = me;
    header.offset = chunk.begin;
    header.part = own.failed ? kNoPart : 0;
    for (int proxy : proxies)
      if (proxy != self_) fabric_.send(proxy, header, own.payload);
  }
  return instance.chunks.size() == proxies.size();
}

void CollectiveEngine::make_results(Sequence& s, Instance& instance) {
  const Descriptor& any = instance.operations.begin()->second->descriptor;
  std::vector<Slice> shared;  // what all local members with a result get
  if (any.kind == CollectiveKind::AllReduce && is_chunked(any, s.roster)) {
    for (auto& [owner, chunk] : instance.chunks)  // the lowest failed owner's sentence, at every member
      if (chunk.failed)
        throw CollectiveError("collective_kernel",
                              std::string(reinterpret_cast<const char*>(chunk.payload.data()), chunk.payload.size()));
    for (auto& [owner, chunk] : instance.chunks) {
      Range range = chunk_of(any.segments, owner, s.roster.proxies.size());
      if (owner >= s.roster.proxies.size() || chunk.offset != range.begin ||
          chunk.payload.size() != range.end - range.begin)
        throw FabricError("fabric_bad_frame", owner < s.roster.proxies.size() ? s.roster.proxies[owner] : -1,
                          "a reduced chunk of sequence " + s.id.text() + " does not have the expected place and size");
      shared.push_back(chunk.payload);
    }
  } else if (any.kind == CollectiveKind::AllReduce ||
             (any.kind == CollectiveKind::Reduce && instance.operations.count(any.root))) {
    size_t total = packed_bytes(any.segments);
    if (auto folded = folded_result(s, instance); !folded.empty())
      shared.push_back(std::move(folded));
    else
      shared.push_back(reduce(s, instance, any, 0, {0, total}, Buffer::allocate(total)));
  } else if (any.kind == CollectiveKind::Broadcast) {
    shared.push_back(instance.contributions.at(any.root).payload(0));
  } else if (any.kind == CollectiveKind::AllGather ||
             (any.kind == CollectiveKind::Gather && instance.operations.count(any.root))) {
    for (auto member : s.roster.members) shared.push_back(instance.contributions.at(member).payload(0));
  }
  for (auto& [member, operation] : instance.operations) {
    const Descriptor& descriptor = operation->descriptor;
    auto& blocks = instance.results[member].blocks;
    if (!has_result(descriptor.kind, descriptor.root, member)) continue;
    switch (descriptor.kind) {
      case CollectiveKind::ReduceScatter: {
        auto offsets = segment_offsets(descriptor.segments);
        size_t bytes = align_up(descriptor.segments[member].bytes);
        blocks.push_back(reduce(s, instance, descriptor, member, {offsets[member], offsets[member] + bytes},
                                Buffer::allocate(bytes)));
        break;
      }
      case CollectiveKind::AllToAll:
        for (auto from : s.roster.members) blocks.push_back(instance.contributions.at(from).payload(member));
        break;
      case CollectiveKind::Scatter:
        blocks.push_back(instance.contributions.at(descriptor.root).payload(member));
        break;
      case CollectiveKind::Recv:
        blocks.push_back(instance.contributions.at(descriptor.root).payload(0));
        break;
      default:
        blocks = shared;
    }
  }
}

bool CollectiveEngine::held(const SequenceId& id, uint64_t number) const {
  if (!targets_) return false;
  auto target = targets_->find(id);
  return target == targets_->end() || number > target->second;
}

// In order; all local members of an instance together: all members have contributed, so all local ones issued.
void CollectiveEngine::complete_ready(Sequence& s) {
  for (;;) {
    uint64_t number = s.completed() + 1;
    auto found = s.instances.find(number);
    if (found == s.instances.end() || !found->second.ready || held(s.id, number)) return;
    for (auto& [member, operation] : found->second.operations) {
      MemberCounts& counts = s.counts.at(member);
      if (counts.completed + 1 != number)
        throw CollectiveError("collective_counts",
                              "sequence " + s.id.text() + ": the ranks of proxy " + std::to_string(self_) +
                                  " have completed different counts: their checkpoints do not belong together");
      counts.completed = number;
      operations_.at(operation->rank).erase(operation->place);
      completions_.push_back({operation, std::move(found->second.results[member])});
      completions_.back().result.sequence = s.id;
      completions_.back().result.number = number;
      // What the member gave, if it is still what it gave: its tensors may have lent the engine their bytes. A sum
      // (which may have been made before a cut) has its right neighbour's input in it.
      const auto next = found->second.contributions.find(member + 1);
      const bool sum = next != found->second.contributions.end() && next->second.first.absorbed;
      if (!completions_.back().result.error.empty() && !operation->descriptor.absorbed && !sum)
        completions_.back().result.blocks = {operation->input};
    }
    s.instances.erase(found);
  }
}

}  // namespace ergo
