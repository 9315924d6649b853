#include "schedule.hpp"

#include <algorithm>
#include <bit>
#include <tuple>

#include "../standstill.hpp"

namespace ergo::device::splice {
namespace {

// Nobody is waited for, and nobody keeps its turn, for more messages than this per rank; halved each time.
constexpr uint64_t kFar = 1 << 16;

}  // namespace

void Schedule::add(RankServer& server) {
  seats_.push_back({&server, server.state().member});
  current_ = nullptr;
  empty_ = nullptr;
}

std::vector<Schedule::Seat*> Schedule::seats_of(Slots slots) {
  std::vector<Seat*> found;
  for (Seat& seat : seats_)
    if (slots & slot_bit(seat.member->slot)) found.push_back(&seat);
  return found;
}

// Those that can still come: not ended, and not kept where they are by a stop.
Slots Schedule::present(Slots slots) const {
  Slots found = 0;
  for (const Seat& seat : seats_)
    if (!seat.held && !seat.server->finished()) found |= slot_bit(seat.member->slot);
  return found & slots;
}

// Those that wait where this one waits.
Slots Schedule::arrived(const Member& member) const {
  Slots found = 0;
  for (const Seat& seat : seats_) {
    const Member& other = *seat.member;
    if (other.hold != member.hold || seat.held || seat.server->finished()) continue;
    if (member.hold == Hold::Parked && !(other.call.key == member.call.key)) continue;
    found |= slot_bit(other.slot);
  }
  return found;
}

Slots Schedule::with_call(Slots slots, const ValueNumber& key) {
  Slots found = 0;
  for (Seat* seat : seats_of(slots))
    if (seat->member->call.key == key) found |= slot_bit(seat->member->slot);
  return found;
}

// Those that may begin a step next: sums are made of whole subtrees, with the fewest parts alive, where a subtree that
// has been begun is completed before another one is.
Slots Schedule::next_in_tree() const {
  Slots all = 0, gone = 0;
  for (const Seat& seat : seats_) {
    all |= slot_bit(seat.member->slot);
    const bool waits = seat.server->blocked() && !seat.server->ready();  // what it waited for may have come since
    if (seat.member->hold != Hold::None || waits) gone |= slot_bit(seat.member->slot);
  }
  for (uint32_t width = 2; width < kMostRanks; width *= 2)
    for (uint32_t begin = 0; begin < kMostRanks; begin += width) {
      const Slots subtree = all & (slot_bit(width) - 1) << begin, left = subtree & ~gone;
      if (left && left != subtree) return left;
    }
  return all & ~gone;
}

Schedule::Group* Schedule::group_of(const Member& member) {
  for (Group& group : groups_)
    if (group.members & slot_bit(member.slot)) return &group;
  return nullptr;
}

bool Schedule::turn(const std::function<bool(const RankServer&)>& held, const std::function<bool()>& urgent) {
  now_ = Clock::now();
  wakes_.reset();
  for (Seat& seat : seats_) seat.held = held(*seat.server);
  bool waits = false;
  asked_ = false;
  const bool did = gather() || advance_one(urgent, waits) || (!waits && resolve());
  if (did) last_progress_ = now_;
  return did || asked_;
}

// False: it has no next message, or none that can be executed now. `did`: it was more than a question.
bool Schedule::step(Seat& seat, bool& did) {
  const uint64_t questions = seat.server->questions();
  if (!seat.server->step()) return false;
  (seat.server->questions() == questions ? did : asked_) = true;
  return true;
}

// The rank whose turn it is goes on; where it waits for others, the next one. `waits`: the host of the one whose turn
// it is has nothing for it yet, and is waited for: another rank's activations would come to those of this one, or one
// more part of a sum to those that there are.
bool Schedule::advance_one(const std::function<bool()>& urgent, bool& waits) {
  const Slots next = next_in_tree();
  Seat* late = nullptr;  // the first of these whose queue is empty
  auto goes_on = [&](Seat& seat) {
    if (!seat.member->lockstep && could_go_on(seat)) make_room();
    const Progress progress = advance(seat, urgent);
    if (progress == Progress::Did) {
      if (empty_ == &seat) end_wait_for_host(false);
      seat.member->passed_over = false;
      turn_to(seat.member->begun || seat.member->lockstep ? &seat : nullptr);
    }
    if (progress == Progress::Empty) {
      if (seat.member->begun) waits = wait_for_host(seat);
      if (!seat.member->begun && !late && next & slot_bit(seat.member->slot)) late = &seat;
    }
    return progress == Progress::Did;
  };
  // Who has waited for all the others begins with them again.
  if (current_ && current_->server->blocked() && !current_->member->lockstep) current_ = nullptr;
  if (works_without_end()) {
    far_strikes_ = std::min(far_strikes_ + 1, kMostStrikes);
    strike();
    const std::vector<Seat*> others = others_in_order(next);
    turn_to(*std::ranges::find_if(others, [this](Seat* seat) { return could_go_on(*seat); }));
  }
  if (current_) {
    if (goes_on(*current_)) return true;
    if (waits) return false;
  }
  for (Seat* seat : others_in_order(next)) {
    const bool out_of_turn = !seat->member->begun && !(next & slot_bit(seat->member->slot));
    if (out_of_turn && late && could_go_on(*seat) && (waits = wait_for_host(*late))) return false;
    if (goes_on(*seat)) return true;
    if (waits) return false;
  }
  return false;
}

// A rank goes on alone: of those that wait for it nothing is kept on the device that needs not be there.
void Schedule::make_room() {
  for (Seat& seat : seats_) {
    Member& member = *seat.member;
    if (member.lockstep || seat.server->finished()) continue;
    if (member.hold != Hold::Sync && !seat.server->blocked()) continue;
    const Message last = seat.server->free_ahead(member.learns > 0);
    // Its host stands still, too, and gives up nothing. In steps whose operators are known it may do so every time.
    const bool stands_still = last == Message::Define || (is_synchronous(last) && member.learns > 0);
    const uint64_t message = member.rank.messages + 1;
    if (!stands_still || seat.server->awaits_store() || member.set_aside_at == message) continue;
    member.set_aside_at = message;
    splicer_.set_aside(member);
  }
}

void Schedule::turn_to(Seat* seat) {
  if (seat != current_) turn_since_ = messages();
  current_ = seat;
}

// Its host may work until it sees what that of another rank does when this one has had its turn.
bool Schedule::works_without_end() {
  if (!current_) return false;
  if (std::ranges::none_of(seats_, [this](const Seat& other) { return &other != current_ && could_go_on(other); }))
    turn_since_ = messages();
  return too_far(turn_since_);
}

// All but the current one: first those that have something of their own, then those that have come least far.
std::vector<Schedule::Seat*> Schedule::others_in_order(Slots next) {
  std::vector<Seat*> seats;
  for (Seat& seat : seats_)
    if (&seat != current_) seats.push_back(&seat);
  auto key = [next](const Seat* seat) {
    const bool out_of_turn = !(next & slot_bit(seat->member->slot));
    return std::tuple(!seat->member->begun, seat->server->step_done(), out_of_turn, seat->member->rank.rank);
  };
  std::ranges::sort(seats, [&](const Seat* a, const Seat* b) { return key(a) < key(b); });
  return seats;
}

bool Schedule::could_go_on(const Seat& seat) const {
  return !seat.held && seat.member->hold == Hold::None && seat.server->ready();
}

bool Schedule::wait_for_host(Seat& seat) {
  if (seat.member->passed_over || seat.server->asks() != RankServer::Asks::Nothing) {
    if (empty_ == &seat) empty_ = nullptr;
    return false;
  }
  if (std::ranges::none_of(seats_, [&](const Seat& other) { return &other != &seat && could_go_on(other); }))
    return false;
  if (empty_ != &seat) {
    empty_ = &seat;
    empty_since_ = now_;
  }
  if (!over(limits_.linger / (1 << lingered_in_vain_), empty_since_)) return true;
  seat.member->passed_over = true;
  end_wait_for_host(true);
  return false;
}

// Short waits say nothing of how long the next one should be.
void Schedule::end_wait_for_host(bool in_vain) {
  empty_ = nullptr;
  if (in_vain)
    lingered_in_vain_ = std::min(lingered_in_vain_ + 1, kMostStrikes);
  else if (lingered_in_vain_ > 0 && now_ - empty_since_ > limits_.linger / (2 << lingered_in_vain_))
    lingered_in_vain_--;
}

Schedule::Progress Schedule::advance(Seat& seat, const std::function<bool()>& urgent) {
  Member& member = *seat.member;
  if (seat.held || seat.server->finished()) return Progress::None;
  if (member.lockstep) return advance(*group_of(member), urgent);
  if (member.hold != Hold::None) return Progress::None;
  const uint64_t done = seat.server->step_done();
  bool did = false;
  for (int n = 0; n < kTurn && !urgent(); n++) {
    if (!step(seat, did)) {
      // A message that has come since is its next one: the turn is not another's for that.
      if (member.hold == Hold::None && !seat.server->finished() && seat.server->ready()) continue;
      break;
    }
    if (seat.server->step_done() == done) continue;
    member.begun = false;  // at the end of a step it has nothing but what it keeps, and others may come first
    break;
  }
  if (member.hold != Hold::None) seat.waits_since = messages();
  if (did || member.hold != Hold::None) return Progress::Did;
  return seat.server->blocked() ? Progress::None : Progress::Empty;
}

// Nobody can do anything: ends a wait that cannot end, or that has lasted long enough.
bool Schedule::resolve() {
  for (Seat& seat : seats_) {
    Member& member = *seat.member;
    if ((member.hold != Hold::Sync && member.hold != Hold::Parked) || seat.held || seat.server->finished()) continue;
    bool may_come = true;
    for (Seat* other : seats_of(present(member.waits_for) & ~arrived(member)))
      may_come &= other->member->lockstep || (other->member->hold == Hold::None && !hopeless(*other));
    const auto limit = member.hold == Hold::Parked ? limits_.lockstep : limits_.sync;
    if (!may_come) return end_wait(seat, false);
    if (over(limit / (1 << strikes_), last_progress_)) return end_wait(seat, true);
  }
  return false;
}

uint64_t Schedule::messages() const {
  uint64_t all = 0;
  for (const Seat& seat : seats_) all += seat.member->rank.messages;
  return all;
}

// So much has been done meanwhile that what is waited for is not about to come.
bool Schedule::too_far(uint64_t since) const { return messages() - since > seats_.size() * (kFar >> far_strikes_); }

bool Schedule::end_wait(Seat& seat, bool timed_out) {
  Member& member = *seat.member;
  if (timed_out) strike();
  if (member.hold == Hold::Sync) {
    member.met = member.call.message;
    member.hold = Hold::None;
    if (timed_out) turn_to(&seat);  // the others' hosts may wait for what it does now
    return true;
  }
  const std::vector<Seat*> seats = seats_of(arrived(member));
  for (Seat* one : seats) splicer_.never_again(*one->member);
  run_together(seats);
  return true;
}

// It waits for a collective, or asks for its result, that lacks the contribution of a rank which waits here, too.
bool Schedule::hopeless(const Seat& seat) const {
  std::set<uint64_t> tickets;
  if (seat.server->blocked() && !seat.server->awaits_store())
    tickets = awaited_by(*seat.server);
  else if (seat.server->asks() == RankServer::Asks::Result)
    for (const auto& [ticket, pending] : seat.member->rank.pending) tickets.insert(ticket);
  for (const Awaited& awaited : collectives_.engine().awaited(static_cast<int>(seat.member->rank.rank), tickets))
    for (int rank : awaited.missing)
      for (const Seat& other : seats_)
        if (static_cast<int>(other.member->rank.rank) == rank &&
            (other.member->hold != Hold::None || (other.member->lockstep && other.server->ring().has_message())))
          return true;
  return false;
}

void Schedule::strike() {
  splicer_.counters().timeouts++;
  strikes_ = std::min(strikes_ + 1, kMostStrikes);
  calm_ = 0;
}

bool Schedule::over(std::chrono::microseconds limit, Clock::time_point since) {
  const auto end = since + limit;
  if (now_ >= end) return true;
  if (!wakes_ || end < *wakes_) wakes_ = end;
  return false;
}

}  // namespace ergo::device::splice
