#include "splicer.hpp"

#include <algorithm>
#include <cstring>

#include "input_check.hpp"

namespace ergo::device::splice {
namespace {

// Storages that are smaller together are copied at once: waiting for a peer costs more.
constexpr uint64_t kParkBytes = 4096;
// What a verified call may take in memory beyond the shared one.
constexpr uint64_t kVerifyBytes = 32 << 20;
// Ranks that have met this often since they have come to an operator that was new are in steps that they know.
constexpr uint32_t kLearns = 4;
constexpr size_t kRemembered = 100000;

// A call that has been defined for another rank is defined for this one, too.
void learn_results(Template& t, WordWriter& spec, const std::vector<uint64_t>& words,
                   const decltype(Template::expected)& expected, uint32_t new_storages) {
  for (uint64_t word : words) spec.word(word);
  t.expected = expected;
  t.new_storages = new_storages;
}

void flip_bit(DeviceBackend& backend, const c10::Storage& storage) {
  if (storage.nbytes() == 0) return;
  char byte = 0;
  backend.read(storage, 0, &byte, 1);
  byte ^= 1;
  backend.write(storage, 0, &byte, 1);
}

uint64_t held_by_group(const PhysicalStorage& storage, const Member& leader, uint32_t place) {
  uint64_t n = leader.call.storages[place] == &storage;
  for (const Member* other : leader.others) n += other->call.storages[place] == &storage;
  return n;
}

}  // namespace

void Splicer::prepare(Member& m, const Template& t, const Call& from) {
  HeldCall& call = m.call;
  const uint64_t message = m.rank.messages + 1;
  if (call.message == message) return;
  call.facts = &book_.of(t);
  OpFacts& facts = *call.facts;
  call.base = from.base_handle;
  WordReader reader = from.handles;
  const size_t n = reader.left();
  const uint64_t* handles = reader.words(n);
  if (n > facts.is_written.size())
    throw ProtocolError(t.name + ": a call with more words than its template has room for");
  if (n < facts.is_written.size()) throw ProtocolError(t.name + ": ergosphere: message shorter than its contents say");
  call.handles.assign(handles, handles + n);
  call.storages.resize(n);
  call.first.resize(n);
  call.repeats = false;
  m.position++;
  prepared_++;
  for (uint32_t i = 0; i < n; i++) {
    const PhysicalPtr& storage = m.rank.storages.find(handles[i]);
    if (!is_numbered(storage->value)) storage->value = fresh_number();
    if (!storage->entry) ledger_.entry(*storage);
    if (storage->call != prepared_) storage->place = i;  // a rank never has two handles on one storage
    storage->call = prepared_;
    call.storages[i] = storage.get();
    call.first[i] = storage->place;
    call.repeats |= storage->place != i;
  }
  Mixer mixer = facts.named(m.flags);
  WordReader payload = from.payload;
  const size_t words = payload.left();
  mixer.word(words).words(payload.words(words), words);
  for (uint32_t i = 0; i < n; i++) {
    const uint64_t bytes = call.storages[i]->storage.nbytes();
    const Range over = facts.overwritten[i];
    mixer.word(uint64_t{call.first[i]} << 47 | bytes);  // addresses have 47 bits
    if (!over.empty() && over.begin == 0 && over.end == bytes && !call.repeated(i)) continue;
    mixer.number(call.storages[i]->value);
  }
  if (facts.random) mixer.number(m.random);
  call.key = mixer.done();
  call.message = message;
}

bool Splicer::execute(Member& m, Template& t, Call call, WordWriter* spec) {
  if (spec) m.learns = kLearns;
  if (m.delivery) {
    const Delivery delivery = std::move(*m.delivery);
    m.delivery.reset();
    m.call.message = 0;
    if (delivery.failure) std::rethrow_exception(delivery.failure);
    if (spec) learn_results(t, *spec, delivery.spec, delivery.expected, delivery.new_storages);
    return true;
  }
  prepare(m, t, call);
  if (!may_run(m)) return false;
  m.begun |= !m.lockstep;
  if (take_known(m, t, spec)) return true;
  if (m.others.empty() && parks(m)) return false;
  perform(m, t, call, spec);
  return true;
}

bool Splicer::may_run(Member& m) {
  if (m.pass == m.call.message) return true;
  const OpFacts& facts = *m.call.facts;
  if (m.lockstep) {
    if (!m.marks.empty())
      for (uint64_t handle : m.call.handles) m.marks.erase(handle);
    m.unsynced = 0;
    if (!facts.shareable || facts.uninitialised) return true;
    m.hold = Hold::Head;
    return false;
  }
  Slots cohort = 0;
  if (!m.marks.empty())
    for (uint64_t handle : m.call.handles)
      if (auto mark = m.marks.find(handle); mark != m.marks.end()) {
        cohort |= mark->second;
        m.marks.erase(mark);
      }
  // What is shared and written after the gradients have gone, and before they are looked at (the step counters of a
  // fused optimizer): the peers are about to do the same, also one that has come too late to share it yet.
  if (!cohort && m.unsynced)
    if (const Slots holders = holders_of_written(m); holders & ~slot_bit(m.slot)) cohort = holders | m.unsynced;
  cohort |= waiting_for_it_here(m);
  if (!(cohort & ~slot_bit(m.slot)) || m.met == m.call.message) return true;
  m.unsynced = 0;
  m.hold = Hold::Sync;
  m.waits_for = cohort | slot_bit(m.slot);
  return false;
}

// Those that wait at the same call, for this rank too: they have come to a sync point that this one has passed.
Slots Splicer::waiting_for_it_here(const Member& m) const {
  Slots waiting = 0;
  for (const auto& other : members_)
    if (other->hold == Hold::Sync && other->waits_for & slot_bit(m.slot) && other->call.key == m.call.key)
      waiting |= other->waits_for;
  return waiting;
}

// Ranks that share something which the call writes and reads.
Slots Splicer::holders_of_written(const Member& m) const {
  Slots found = 0;
  for (uint32_t place : m.call.facts->written) {
    if (m.call.facts->overwritten[place].empty()) found |= holders(*m.call.storages[place]);
  }
  return found;
}

uint64_t Splicer::shared_written_bytes(const Member& m) const {
  uint64_t bytes = 0;
  for (uint32_t place : m.call.facts->written) {
    const PhysicalStorage& storage = *m.call.storages[place];
    if (m.call.first_of(place) && m.call.facts->overwritten[place].empty() && references(storage) > 1)
      bytes += storage.storage.nbytes();
  }
  return bytes;
}

uint64_t Splicer::site(const Member& m) const {
  return Mixer(Domain::Call)
      .number(m.call.facts->identity)
      .word(m.call.facts->written.empty() ? 0 : m.call.handles[m.call.facts->written[0]])
      .done()
      .high;
}

bool Splicer::parks(Member& m) {
  const OpFacts& facts = *m.call.facts;
  if (m.pass == m.call.message || facts.written.empty() || facts.random || !facts.shareable) return false;
  if (shared_written_bytes(m) < kParkBytes) return false;
  const auto seen = m.sites.find(site(m));
  if (seen == m.sites.end() || seen->second <= 0) return false;
  m.hold = Hold::Parked;
  m.waits_for = holders_of_written(m);
  counters_.parks++;
  return true;
}

void Splicer::never_again(Member& m) { m.sites[site(m)] = -1; }

// A peer had to copy for the same call: next time it should wait for this rank, and this rank for it.
void Splicer::learn(Member& m) {
  if (m.call.facts->written.empty()) return;
  const auto same = copied_.find(m.call.key);
  if (same == copied_.end() || same->second.member == &m) return;
  auto seen = [](Member& member, uint64_t where) {
    if (auto& expectation = member.sites[where]; expectation >= 0) expectation = 1;
  };
  seen(*same->second.member, same->second.site);
  seen(m, site(m));
}

// Also for those that it leads: what a rank has computed that has come there first is not computed again.
bool Splicer::take_known(Member& m, Template& t, WordWriter* spec) {
  OpFacts& facts = *m.call.facts;
  if (facts.random || !facts.shareable || facts.uninitialised) return false;
  if (spec && (facts.spec.empty() || facts.spec_key != m.call.key)) return false;
  const uint32_t n = spec ? facts.new_storages : t.new_storages;
  if (n == 0 && facts.written.empty()) return false;
  Slots takers = slot_bit(m.slot);
  for (const Member* other : m.others) takers |= slot_bit(other->slot);
  c10::SmallVector<PhysicalStorage*, 16> found;
  for (uint32_t k = 0; k < n; k++) {
    const uint64_t bytes = spec ? facts.new_bytes[k] : Ledger::kAnySize;
    found.push_back(ledger_.find(Mixer(Domain::New).number(m.call.key).word(k).done(), takers, bytes));
    if (!found.back()) return false;
  }
  for (uint32_t place : facts.written) {
    if (!m.call.first_of(place)) return false;
    found.push_back(ledger_.find(Mixer(Domain::Written).number(m.call.key).word(place).done(), takers,
                                 m.call.storages[place]->storage.nbytes()));
    if (!found.back()) return false;
  }
  if (m.others.empty()) {
    if (m.verifies || samples(m)) {
      m.verifies = true;
      return false;
    }
    learn(m);
  }
  auto take = [&](Member& taker) {
    size_t next = 0;
    for (uint32_t k = 0; k < n; k++)
      taker.rank.storages.bind(taker.call.base + k, PhysicalPtr::reclaim_copy(found[next++]));
    for (uint32_t place : facts.written)
      taker.rank.storages.rebind(taker.call.handles[place], PhysicalPtr::reclaim_copy(found[next++]));
  };
  take(m);
  for (Member* other : m.others) {
    take(*other);
    other->delivery = spec ? Delivery{nullptr, facts.spec, facts.expected, facts.new_storages} : Delivery();
  }
  if (spec) learn_results(t, *spec, facts.spec, facts.expected, facts.new_storages);
  m.call.message = 0;
  counters_.shared += 1 + m.others.size();
  return true;
}

bool Splicer::serves_all(const Member& m) const { return m.call.facts && !m.call.facts->random; }

bool Splicer::samples(const Member& m) {
  if (verify_one_of_ == 0 || ++unverified_ < verify_at_) return false;
  uint64_t bytes = 0;  // of a result, which is there twice, and of what is written to, which is copied
  for (uint32_t place : m.call.facts->written) bytes += 2 * m.call.storages[place]->storage.nbytes();
  for (uint64_t size : m.call.facts->new_bytes) bytes += 2 * size;
  // A sample must not be what takes the device to its limit: else the next call that is small enough is compared.
  const bool fits = verify_one_of_ == 1 || counters_.physical_bytes + bytes <= counters_.peak_bytes;
  if (bytes > kVerifyBytes || !fits) return false;
  unverified_ = 0;
  // Steps repeat: at a fixed distance it would be the same few operators for ever.
  const uint64_t drawn = Mixer(Domain::Random).word(++samples_).done().high;
  verify_at_ = 1 + drawn % (2 * verify_one_of_ - 1);
  return true;
}

void Splicer::perform(Member& leader, Template& t, const Call& call, WordWriter* spec) {
  OpFacts& facts = *leader.call.facts;
  if (leader.others.empty()) learn(leader);
  own_written(leader);
  for (uint32_t i = 0; i < leader.call.handles.size(); i++) {
    if (facts.overwritten[i].empty() || leader.call.repeated(i)) sharing_.materialise(*leader.call.storages[i]);
  }
  try {
    run(leader, t, call, spec);
  } catch (...) {
    // What it has written until then is the same for all, and equal to nothing.
    number_results(leader, 0, true);
    for (Member* other : leader.others) other->delivery = Delivery{std::current_exception(), {}, {}, 0};
    leader.verifies = false;
    leader.call.message = 0;
    throw;
  }
  for (uint32_t i = 0; i < leader.call.handles.size(); i++)
    if (const Range over = facts.overwritten[i]; !over.empty() && !leader.call.repeated(i))
      sharing_.fill(*leader.rank.storages.find(leader.call.handles[i]), over);
  number_results(leader, t.new_storages, false);
  if (facts.random) advance_random(leader);
  if (spec) {
    facts.spec = spec->words();
    facts.spec_key = leader.call.key;
    facts.expected = t.expected;
    facts.new_storages = t.new_storages;
    facts.new_bytes.clear();
    for (uint32_t k = 0; k < t.new_storages; k++)
      facts.new_bytes.push_back(leader.rank.storages.find(leader.call.base + k)->storage.nbytes());
  }
  for (Member* other : leader.others)
    other->delivery = spec ? Delivery{nullptr, spec->words(), t.expected, t.new_storages} : Delivery();
  counters_.executed++;
  counters_.shared += leader.others.size();
  leader.verifies = false;
  leader.call.message = 0;
}

PhysicalPtr Splicer::owned(const PhysicalPtr& from, uint32_t of_writers, Range overwritten, bool counts) {
  uint64_t copied = 0;
  PhysicalPtr own = sharing_.own(from, of_writers, overwritten, copied);
  if (copied && counts) {
    counters_.copies++;
    counters_.copied_bytes += copied;
  }
  return own;
}

void Splicer::own_written(Member& leader) {
  HeldCall& call = leader.call;
  const uint64_t copies = counters_.copies;
  for (uint32_t place : call.facts->written) {
    if (!call.first_of(place)) continue;
    const PhysicalPtr from = leader.rank.storages.find(call.handles[place]);
    const Range over = call.repeated(place) ? Range() : call.facts->overwritten[place];
    const auto writers = static_cast<uint32_t>(held_by_group(*from, leader, place));
    PhysicalPtr own = owned(from, writers, over, !leader.verifies);
    if (own == from) continue;
    for (uint32_t i = place; i < call.first.size(); i++)
      if (call.first[i] == place) call.storages[i] = own.get();
    leader.rank.storages.rebind(call.handles[place], std::move(own));
  }
  if (counters_.copies == copies || !leader.others.empty()) return;
  if (copied_.size() > kRemembered) copied_.clear();
  copied_[call.key] = {&leader, site(leader)};
}

void Splicer::run(Member& leader, Template& t, const Call& call, WordWriter* spec) {
  OpFacts& facts = *leader.call.facts;
  const bool check = facts.checks > 0 || facts.always_checked;
  std::optional<InputCheck> inputs;
  at::Tensor random_before;
  if (check) inputs.emplace(backend_, leader.call, leader.rank.storages);
  if (facts.always_checked && !facts.random) random_before = process_.get_state(leader.rank, 0);
  if (spec)
    executor_.define(leader.rank, t, call, *spec);
  else
    executor_.execute(leader.rank, facts.common(t), call);
  if (random_before.defined()) {
    const at::Tensor after = process_.get_state(leader.rank, 0);
    facts.random = after.nbytes() != random_before.nbytes() ||
                   std::memcmp(after.const_data_ptr(), random_before.const_data_ptr(), after.nbytes()) != 0;
  }
  if (!check) return;
  if (facts.checks > 0) facts.checks--;
  for (const InputCheck::Change& change : inputs->changes(leader.call, leader.rank.storages)) {
    const PhysicalPtr storage = leader.rank.storages.find(leader.call.handles[change.place]);
    facts.found_written(change.place);
    ledger_.entry(*storage);
    if (references(*storage) == held_by_group(*storage, leader, change.place)) {
      ledger_.forget(*storage);
      continue;
    }
    // Others have it as it was.
    const size_t bytes = storage->storage.nbytes();
    PhysicalPtr written = sharing_.fresh(bytes);
    backend_.copy(storage->storage, written->storage, bytes);
    backend_.copy(change.before, storage->storage, bytes);
    leader.rank.storages.rebind(leader.call.handles[change.place], std::move(written));
  }
}

void Splicer::number_results(Member& leader, uint32_t new_storages, bool failed) {
  const HeldCall& call = leader.call;
  const bool named = call.facts->shareable && !failed, findable = named && !call.facts->uninitialised;
  const bool merge = findable && leader.others.empty();
  auto number = [&](uint64_t handle, Domain domain, uint32_t i) {
    const ValueNumber value = named ? Mixer(domain).number(call.key).word(i).done() : fresh_number();
    if (findable) {
      place_number(leader, handle, value, merge);
    } else {
      PhysicalStorage& storage = *leader.rank.storages.find(handle);
      ledger_.forget(storage);
      ledger_.recharge(storage);
      storage.value = value;
    }
  };
  for (uint32_t k = 0; k < new_storages; k++) {
    number(call.base + k, Domain::New, k);
    for (Member* other : leader.others)
      other->rank.storages.bind(other->call.base + k, leader.rank.storages.find(call.base + k));
  }
  for (uint32_t place : call.facts->written) {
    if (!call.first_of(place)) continue;
    number(call.handles[place], Domain::Written, place);
    for (Member* other : leader.others)
      other->rank.storages.rebind(other->call.handles[place], leader.rank.storages.find(call.handles[place]));
  }
}

void Splicer::place_number(Member& m, uint64_t handle, const ValueNumber& value, bool merge) {
  PhysicalStorage& storage = *m.rank.storages.find(handle);
  ledger_.recharge(storage);
  if (merge) {
    const uint64_t bytes = storage.storage.nbytes();
    PhysicalStorage* same = ledger_.find(value, slot_bit(m.slot), bytes);
    if (same && same != &storage && references(storage) == 1) {
      if (m.verifies) {
        counters_.verified++;
        sharing_.materialise(*same);
        if (errs_at_ > 0 && --errs_at_ == 0) flip_bit(backend_, storage.storage);
        if (!equal_bytes(backend_, storage.storage, same->storage)) {
          counters_.mismatches++;
          m.call.facts->shareable = false;
          counters_.unshared.insert(m.call.facts->name);
          ledger_.forget(storage);
          storage.value = fresh_number();
          return;
        }
      }
      counters_.merged_bytes += bytes;
      m.rank.storages.rebind(handle, PhysicalPtr::reclaim_copy(same));
      return;
    }
  }
  ledger_.publish(storage, value);
}

void Splicer::advance_random(Member& m) { m.random = Mixer(Domain::Random).number(m.random).number(m.call.key).done(); }

}  // namespace ergo::device::splice
