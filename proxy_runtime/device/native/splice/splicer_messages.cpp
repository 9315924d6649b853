// What a rank does but for operators: storages made, written and read by its host, generators, flags, and collectives.
#include <algorithm>
#include <cstring>

#include "../collective_bridge.hpp"
#include "splicer.hpp"

namespace ergo::device::splice {
namespace {

// Ranks that go on together do not look at each other's smaller writes.
constexpr uint64_t kDiffers = 1024;

// Smaller storages stay where they are while their rank waits.
constexpr uint64_t kWorthSettingAside = 1024;
// A batch stops at two places of DDP's second step; what stays for longer is not worth moving time and again.
constexpr uint8_t kMostLeft = 2;

// Smaller updates are those of counters, scales and statistics.
constexpr uint64_t kWorthNaming = 4096;

// A rank that a cut finds a step behind makes it alone, and meets its peers at one sync point or the other after that.
constexpr uint32_t kNamings = 3;

// Ranks of one script make theirs in the same order.
std::vector<uint64_t> handles_of(const Member& m) {
  std::vector<uint64_t> handles;
  for (const auto& [handle, storage] : m.rank.storages) handles.push_back(handle);
  std::sort(handles.begin(), handles.end());
  return handles;
}

// All members take part alike and go on alike.
bool meets(CollectiveKind kind) {
  return kind == CollectiveKind::AllReduce || kind == CollectiveKind::Broadcast || kind == CollectiveKind::AllGather ||
         kind == CollectiveKind::ReduceScatter;
}

}  // namespace

PhysicalPtr Splicer::loaded(const PhysicalPtr& storage, Taken& taken) {
  const ValueNumber number = contents_of(*storage);
  std::vector<PhysicalPtr>& equal = loaded_[number];
  size_t& nth = taken[number];
  if (nth == equal.size()) {
    equal.push_back(storage);
    storage->value = number;
  } else {
    counters_.merged_bytes += storage->storage.nbytes();
  }
  return equal[nth++];
}

void Splicer::all_loaded() { loaded_.clear(); }

void Splicer::admit(RankState& rank) {
  if (rank.slot >= kMostRanks) return;
  members_.push_back(std::make_unique<Member>(*this, rank));
  Member& m = *members_.back();
  rank.member = &m;
  flags_set(m);
  const at::Tensor state = process_.get_state(rank, 0);
  m.random = number_of_contents(state.const_data_ptr(), state.nbytes());
  name_contents(m);
}

ValueNumber Splicer::contents_of(PhysicalStorage& storage) {
  sharing_.materialise(storage);
  const size_t n = storage.storage.nbytes();
  if (const void* contents = n ? backend_.host_view(storage.storage) : nullptr) return number_of_contents(contents, n);
  std::vector<char> bytes(n);
  if (n) backend_.read(storage.storage, 0, bytes.data(), n);
  return number_of_contents(bytes.data(), n);
}

void Splicer::name_contents(Member& m) {
  for (uint64_t handle : handles_of(m)) {
    const PhysicalPtr storage = m.rank.storages.find(handle);
    ledger_.entry(*storage);
    if (storage->pending) {
      storage->value = fresh_number();
      continue;
    }
    // One that was loaded has its number; one that a rank had alone on the device has none.
    place_number(m, handle, is_numbered(storage->value) ? storage->value : contents_of(*storage), true);
  }
  if (m.rank.storages.size() == 0) return;
  // Peers that a cut has left in the midst of a step meet at the first call that writes what they share.
  m.unsynced = slot_bit(m.slot);
  namings_ = kNamings;
}

// Where they update something of size, as an optimizer does: on different batches they are at the same operator in
// every step.
bool Splicer::may_name_again(const Member& one, const Member& other) const {
  const OpFacts* facts = one.call.facts;
  if (namings_ == 0 || !facts || facts != other.call.facts) return false;
  uint64_t bytes = 0;
  for (uint32_t place : facts->written)
    if (facts->overwritten[place].empty()) bytes += one.call.storages[place]->storage.nbytes();
  return bytes >= kWorthNaming;
}

bool Splicer::name_again(Slots ranks) {
  if (namings_ == 0) return false;
  namings_--;
  std::unordered_map<const PhysicalStorage*, PhysicalPtr> named;  // kept, so that no address is used twice
  for (const auto& member : members_) {
    Member& m = *member;
    if (!(ranks & slot_bit(m.slot))) continue;
    m.call.message = 0;
    for (uint64_t handle : handles_of(m)) {
      const PhysicalPtr storage = m.rank.storages.find(handle);
      if (storage->pending || ledger_.entry(*storage).hollow || !(ranks & ~holders(*storage))) continue;
      if (named.try_emplace(storage.get(), storage).second) ledger_.publish(*storage, contents_of(*storage));
      PhysicalStorage* same = ledger_.find(storage->value, slot_bit(m.slot), storage->storage.nbytes());
      if (!same) continue;
      if (references(*storage) == 1) counters_.merged_bytes += storage->storage.nbytes();
      m.rank.storages.rebind(handle, PhysicalPtr::reclaim_copy(same));
    }
  }
  return true;
}

// Ranks that go on together allocate together, and then use what they have one after another.
PhysicalPtr Splicer::allocate(uint64_t bytes) { return sharing_.hollow(bytes); }

void Splicer::allocated(Member& m, uint64_t handle) {
  PhysicalStorage& storage = *m.rank.storages.find(handle);
  ledger_.entry(storage);
  storage.value = number_of_uninitialised(storage.storage.nbytes());
}

void Splicer::released(Member& m, uint64_t handle) {
  if (!m.marks.empty()) m.marks.erase(handle);
}

void Splicer::resized(Member& m, uint64_t handle, const ValueNumber& before) {
  PhysicalStorage& storage = *m.rank.storages.find(handle);
  const uint64_t bytes = storage.storage.nbytes();
  ledger_.recharge(storage);
  storage.value = bytes ? Mixer(Domain::Resized).number(before).word(bytes).done() : number_of_uninitialised(0);
}

bool Splicer::write(Member& m, uint64_t handle, uint64_t offset, const void* bytes, uint64_t n) {
  const uint64_t message = m.rank.messages + 1;
  if (m.call.message != message) {
    m.call.facts = nullptr;
    m.call.key = number_of_contents(bytes, n);
    m.call.message = message;
  }
  // Ranks go on together until one gets what the others do not: a batch each is on the device when its turn comes.
  if (m.lockstep && n >= kDiffers && m.pass != message) {
    m.hold = Hold::Head;
    return false;
  }
  m.call.message = 0;
  m.begun |= !m.lockstep && n >= kDiffers;
  const PhysicalPtr from = m.rank.storages.find(handle);
  const uint64_t size = from->storage.nbytes();
  ledger_.entry(*from);
  const bool whole = offset == 0 && n == size;
  ValueNumber value = m.call.key;
  if (!whole) {
    value = Mixer(Domain::Part).number(from->value).word(offset).number(value).done();
  } else if (PhysicalStorage* same = ledger_.find(value, slot_bit(m.slot), size)) {
    m.rank.storages.rebind(handle, PhysicalPtr::reclaim_copy(same));
    counters_.shared++;
    return true;
  }
  const PhysicalPtr own = owned(from, 1, {offset, offset + n}, true);
  if (own != from) m.rank.storages.rebind(handle, own);
  backend_.write(own->storage, offset, bytes, n);
  sharing_.fill(*own, {offset, offset + n});
  place_number(m, handle, value, true);
  return true;
}

PhysicalStorage& Splicer::readable(const PhysicalPtr& storage) {
  sharing_.materialise(*storage);
  return *storage;
}

void Splicer::seeded(Member& m, uint64_t generator, uint64_t seed) {
  if (generator == 0) m.random = Mixer(Domain::Random).word(seed).done();
}

void Splicer::random_set(Member& m, uint64_t generator, const void* bytes, size_t n) {
  if (generator == 0) m.random = number_of_contents(bytes, n);
}

void Splicer::flags_set(Member& m) {
  m.flags = Mixer(Domain::Flags).words(m.rank.flags.data(), m.rank.flags.size()).done();
}

void Splicer::reset(Member& m) {
  m.marks.clear();
  m.call.message = 0;
  m.hold = Hold::None;
  m.random = fresh_number();
  flags_set(m);
}

void Splicer::set_aside(Member& m) {
  for (const auto& [handle, storage] : m.rank.storages) {
    if (storage->storage.nbytes() < kWorthSettingAside || references(*storage) != 1) continue;
    if (storage->pending || storage.use_count() != 1) continue;  // collectives read it
    const Entry& entry = ledger_.entry(*storage);
    if (!entry.hollow && !entry.source && entry.left < kMostLeft) sharing_.set_aside(*storage);
  }
  m.begun = false;
}

void Splicer::settle(Member& m) {
  for (const auto& [handle, storage] : m.rank.storages) sharing_.materialise(*storage);
  for (const auto& [ticket, pending] : m.rank.pending)
    for (const PhysicalPtr& storage : pending.storages) sharing_.materialise(*storage);
}

Counters Splicer::count() const {
  Counters counters = counters_;
  for (const auto& m : members_) counters.logical_bytes += m->rank.storages.logical_bytes();
  return counters;
}

Slice Splicer::lend(Member& m, const CollectiveCall& call, size_t packed) {
  if (call.kind != CollectiveKind::AllReduce || call.outputs.size() != 1) return {};
  const PhysicalPtr& storage = m.rank.storages.find(call.outputs[0].handle);
  const uint64_t bytes = storage->storage.nbytes();
  if (!covers(call.outputs[0].meta, *storage) || references(*storage) != 1 || storage->pending) return {};
  if (bytes != packed && !ledger_.entry(*storage).padded) return {};
  auto* data = static_cast<std::byte*>(backend_.host_view(storage->storage));
  if (!data) return {};
  std::memset(data + bytes, 0, packed - bytes);
  // It is nobody's value from now on.
  ledger_.forget(*storage);
  storage->value = fresh_number();
  lent_[data] = storage.get();
  return Slice(Buffer::around(data, packed, [this, data, storage] { lent_.erase(data); }));
}

Slice Splicer::counted(std::shared_ptr<Buffer> packed) {
  const size_t bytes = packed->size();
  std::byte* data = packed->data();
  ledger_.hold(bytes);
  return Slice(Buffer::around(data, bytes, [this, packed = std::move(packed)] { ledger_.let_go(packed->size()); }));
}

// Where the sum was made in a storage that was lent for it, that is the result.
bool Splicer::take_lent(Member& m, uint64_t handle, const PhysicalStorage& waiting, const CollectiveResult& result,
                        const ValueNumber& number) {
  if (result.blocks.size() != 1) return false;
  const auto lent = lent_.find(result.blocks[0].data());
  if (lent == lent_.end() || lent->second->storage.nbytes() != waiting.storage.nbytes()) return false;
  m.rank.storages.rebind(handle, PhysicalPtr::reclaim_copy(lent->second));
  place_number(m, handle, number, true);
  return true;
}

void Splicer::issued(Member& m, const CollectiveCall& call, PendingCollective& pending, const std::vector<int>& ranks) {
  for (size_t i = 0; i < call.outputs.size(); i++) {
    PhysicalPtr& storage = pending.storages[call.inputs.size() + i];
    pending.values.push_back(covers(call.outputs[i].meta, *storage) ? storage->value : ValueNumber{});
  }
  if (meets(call.kind)) {
    Slots cohort = 0;
    for (const auto& other : members_)
      if (std::ranges::find(ranks, static_cast<int>(other->rank.rank)) != ranks.end()) cohort |= slot_bit(other->slot);
    if (cohort & ~slot_bit(m.slot)) {
      m.unsynced |= cohort;
      for (const TensorRef& ref : call.outputs) m.marks[ref.handle] = cohort;
    }
  }
  if (!pending.writes) return;
  for (size_t i = 0; i < call.outputs.size(); i++) {
    const uint64_t handle = call.outputs[i].handle;
    const PhysicalPtr from = m.rank.storages.find(handle);
    ledger_.entry(*from);
    PhysicalPtr own;
    const bool whole = call.fills(i, *from);
    if (whole && (call.kind == CollectiveKind::AllReduce || references(*from) > 1)) {
      own = sharing_.hollow(from->storage.nbytes());
      if (call.kind != CollectiveKind::AllReduce) {  // whose input says what it was
        pending.kept.resize(call.outputs.size());
        pending.kept[i] = from;
        from->entry->readers++;
      }
    } else {
      own = owned(from, 1, {}, true);
      sharing_.materialise(*own);
    }
    own->value = fresh_number();  // whatever comes: equal to nothing until it has come
    if (own == from) continue;
    m.rank.storages.rebind(handle, own);
    for (PhysicalPtr& storage : pending.storages)
      if (storage == from) storage = own;
  }
}

std::vector<ValueNumber> Splicer::result_numbers(const CollectiveCall& call, const CollectiveResult& result) {
  std::vector<ValueNumber> numbers;
  const bool same = call.kind == CollectiveKind::AllReduce || call.kind == CollectiveKind::Broadcast ||
                    call.kind == CollectiveKind::AllGather;
  Instance& instance = instances_[result.sequence];
  if (instance.number != result.number) instance = {result.number, fresh_number(), {}};
  for (size_t i = 0; i < call.outputs.size(); i++) {
    if (!same)
      numbers.push_back(fresh_number());
    else if (i < instance.values.size() && is_numbered(instance.values[i]))
      numbers.push_back(instance.values[i]);
    else
      numbers.push_back(Mixer(Domain::New).number(instance.base).word(i).done());
  }
  return numbers;
}

void Splicer::completed(Member& m, const CollectiveCall& call, PendingCollective& pending,
                        const CollectiveResult& result, const std::function<void(const CollectiveResult&)>& unpack) {
  const size_t first = call.inputs.size();
  for (size_t i = 0; i < pending.kept.size(); i++)
    if (pending.kept[i]) pending.kept[i]->entry->readers--;
  auto fill = [&](const CollectiveResult& from) {
    for (const PhysicalPtr& storage : pending.storages) sharing_.materialise(*storage);
    unpack(from);
  };
  if (!result.error.empty()) {  // every tensor is as it was, or gone with the sum that it was part of
    fill(result);
    for (size_t i = 0; i < pending.kept.size(); i++)
      if (pending.kept[i] && m.rank.storages.contains(call.outputs[i].handle))
        m.rank.storages.rebind(call.outputs[i].handle, pending.kept[i]);
    return;
  }
  const std::vector<ValueNumber> numbers = result_numbers(call, result);
  if (!pending.writes) {
    if (call.kind == CollectiveKind::Broadcast) instances_[result.sequence].values = pending.values;
    return unpack(result);
  }
  // What the rank still has a handle on.
  auto bound = [&](size_t i) {
    const uint64_t handle = call.outputs[i].handle;
    return m.rank.storages.contains(handle) && m.rank.storages.find(handle) == pending.storages[first + i];
  };
  std::vector<PhysicalStorage*> known;
  bool all = true;
  for (size_t i = 0; i < call.outputs.size() && all; i++) {
    const PhysicalStorage& storage = *pending.storages[first + i];
    all = call.fills(i, storage);
    if (!all) break;
    known.push_back(bound(i) ? ledger_.find(numbers[i], slot_bit(m.slot), storage.storage.nbytes()) : nullptr);
    all = known.back() || !bound(i);
  }
  if (all) {
    for (size_t i = 0; i < call.outputs.size(); i++)
      if (known[i]) m.rank.storages.rebind(call.outputs[i].handle, PhysicalPtr::reclaim_copy(known[i]));
    counters_.shared++;
    return;
  }
  if (call.outputs.size() == 1 && bound(0) && covers(call.outputs[0].meta, *pending.storages[first]) &&
      take_lent(m, call.outputs[0].handle, *pending.storages[first], result, numbers[0]))
    return;
  fill(result);
  for (size_t i = 0; i < call.outputs.size(); i++) {
    if (!bound(i)) continue;
    PhysicalStorage& storage = *pending.storages[first + i];
    if (call.fills(i, storage))
      place_number(m, call.outputs[i].handle, numbers[i], true);
    else
      storage.value = fresh_number();
  }
}

}  // namespace ergo::device::splice
