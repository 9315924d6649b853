// Ranks that are where their peers are: how they meet, go on together, and part.
#include <algorithm>
#include <bit>

#include "schedule.hpp"

namespace ergo::device::splice {
namespace {

// So many calls in lockstep take back a strike; twice as many after each that there has ever been: hosts that wait for
// each other in every step must not pay for it in every step.
constexpr uint64_t kCalm = 2048;
constexpr uint64_t kMostDoublings = 20;

}  // namespace

Schedule::Progress Schedule::advance(Group& group, const std::function<bool()>& urgent) {
  const std::vector<Seat*> seats = seats_of(group.members);
  if (present(group.members) != group.members) {
    dissolve(group);
    return Progress::Did;
  }
  bool did = false, all = true, kept = false, empty = false, lost = false;
  for (Seat* seat : seats) {
    Member& member = *seat->member;
    for (int n = 0; n < kTurn && member.hold == Hold::None && !urgent() && step(*seat, did); n++) {
    }
    if (member.hold == Hold::Head) {
      kept = true;
      continue;
    }
    all = false;
    empty |= !seat->server->blocked() && !seat->server->ring().has_message();
    lost |= seat->server->finished();
  }
  if (lost) {
    dissolve(group);
    return Progress::Did;
  }
  if (all) {
    group.idle_since.reset();
    const ValueNumber& key = seats.front()->member->call.key;
    if (std::all_of(seats.begin(), seats.end(), [&](Seat* seat) { return seat->member->call.key == key; })) {
      if (join(group)) return Progress::Did;
      const Member& first = *seats.front()->member;
      const bool serves_all = splicer_.serves_all(first), verifies = serves_all && splicer_.samples(first);
      if (serves_all && !verifies)
        run_together(seats);
      else
        run_each(seats, verifies);
      if (strikes_ > 0 && ++calm_ >= kCalm << std::min(splicer_.counters().timeouts, kMostDoublings)) {
        strikes_--;
        calm_ = 0;
      }
    } else if (alike(seats) && splicer_.name_again(group.members)) {
      for (Seat* seat : seats) seat->member->hold = Hold::None;  // and they look again
    } else {
      splicer_.counters().lockstep_breaks++;
      dissolve(group);
    }
    return Progress::Did;
  }
  if (did) {
    group.idle_since.reset();
    return Progress::Did;
  }
  // Those who wait, wait for each other.
  if (std::any_of(seats.begin(), seats.end(), [&](Seat* seat) { return hopeless(*seat); })) {
    dissolve(group);
    return Progress::Did;
  }
  if (!kept) {  // hosts that all have something else to do keep nobody here from going on
    group.idle_since.reset();
    return Progress::None;
  }
  if (!group.idle_since) group.idle_since = now_;
  if (over((empty ? limits_.lockstep : limits_.sync) / (1 << strikes_), *group.idle_since)) {
    strike();
    dissolve(group);
    return Progress::Did;
  }
  return Progress::None;
}

// The calls at the heads of their queues are one call. Who has not met its operator yet runs it: it learns of what kind
// the results are, and the others know.
bool Schedule::run_together(std::vector<Seat*> seats) {
  std::ranges::stable_partition(seats, [](Seat* seat) { return seat->server->ring().peek()->type == Message::Define; });
  Seat& leader = *seats.front();
  for (size_t i = 0; i < seats.size(); i++) {
    seats[i]->member->hold = Hold::None;
    if (i) leader.member->others.push_back(seats[i]->member);
  }
  leader.member->pass = leader.member->call.message;
  const bool did = leader.server->step();
  leader.member->others.clear();
  for (size_t i = 1; i < seats.size(); i++)
    if (seats[i]->member->delivery) seats[i]->server->step();
  return did;
}

// The same, but each for itself. `verifies`: and the results are compared.
void Schedule::run_each(const std::vector<Seat*>& seats, bool verifies) {
  for (Seat* seat : seats) {
    Member& member = *seat->member;
    member.hold = Hold::None;
    member.pass = member.call.message;
    member.verifies = verifies;
    seat->server->step();
    member.verifies = false;
  }
}

// Who waits for this group at the call that it has come to.
bool Schedule::join(Group& group) {
  const Slots members = group.members;
  const Member& first = *seats_of(members).front()->member;
  Slots waiting = 0;
  for (const Seat& seat : seats_) {
    const Member& member = *seat.member;
    if (member.hold != Hold::Sync || !(member.waits_for & members) || seat.held) continue;
    if (member.call.key == first.call.key || splicer_.may_name_again(member, first)) waiting |= slot_bit(member.slot);
  }
  if (!waiting) return false;
  groups_.erase(groups_.begin() + (&group - groups_.data()));
  form(members | waiting);
  return true;
}

void Schedule::form(Slots members) {
  uint64_t position = 0;
  for (const Seat* seat : seats_of(members)) position = std::max(position, seat->member->position);
  for (Seat* seat : seats_of(members)) {
    seat->member->position = position;
    seat->member->hold = Hold::None;
    seat->member->waits_for = 0;
    seat->member->lockstep = true;
    seat->member->begun = false;
    if (seat->member->learns > 0) seat->member->learns--;
  }
  groups_.push_back({members, std::nullopt});
  splicer_.counters().lockstep_runs++;
}

void Schedule::dissolve(Group& group) {
  for (Seat* seat : seats_of(group.members)) {
    Member& member = *seat->member;
    member.lockstep = false;
    // It has met its peers here: it does not wait for them again at the same call.
    if (member.hold == Hold::Head) member.met = member.call.message;
    member.hold = Hold::None;
  }
  groups_.erase(groups_.begin() + (&group - groups_.data()));
}

// Forms groups of those who are all there; true if one was formed or a wait ended.
bool Schedule::gather() {
  for (Seat& seat : seats_) {
    Member& member = *seat.member;
    if ((member.hold != Hold::Sync && member.hold != Hold::Parked) || seat.held || seat.server->finished()) continue;
    const Slots needed = present(member.waits_for), here = arrived(member);
    if (needed & ~here) {
      if (!too_far(seat.waits_since)) continue;
      far_strikes_ = std::min(far_strikes_ + 1, kMostStrikes);
      return end_wait(seat, true);
    }
    if (std::popcount(needed) < 2) return end_wait(seat, false);
    if (member.hold == Hold::Parked) run_together(seats_of(needed));
    const Slots first = furthest_behind(needed);
    if (std::popcount(first) < 2) return end_wait(*seats_of(first).front(), false);
    form(first);
    splicer_.met();
    return true;
  }
  return false;
}

// The same operator, whatever its values, which may have more than one number since the last load.
bool Schedule::alike(const std::vector<Seat*>& seats) const {
  return std::ranges::all_of(
      seats, [&](const Seat* seat) { return splicer_.may_name_again(*seat->member, *seats.front()->member); });
}

// Of those who are all there: who is to go on first, so that the others may meet it where they are.
Slots Schedule::furthest_behind(Slots slots) {
  const std::vector<Seat*> seats = seats_of(slots);
  if (alike(seats)) return slots;
  const Seat* last = *std::ranges::min_element(seats, {}, [](const Seat* seat) { return seat->member->position; });
  return with_call(slots, last->member->call.key);
}

}  // namespace ergo::device::splice
