// Which rank of a device runs when.
//
// One at a time until it waits for a collective, so that one rank's activations live at once; those that have come less
// far first, and of these in an order in which sums are made of whole subtrees. Where ranks are about to
// do the same (they touch a collective's result, or write what they share), whoever comes first waits; who turns out to
// be behind then comes to where the others are. Together they go on in lockstep: as long as their next operators are
// the same on the same values, one run serves all. The first difference ends it. Waiting that cannot end is found where
// it can be, and ended by a time limit where not (a host that waits for another host; work without end): limits change
// memory and time, never bits. Hosts that ask again and again whether something has come do no work by that.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "../collective_bridge.hpp"
#include "../rank_server.hpp"
#include "splicer.hpp"

namespace ergo::device::splice {

class Schedule {
 public:
  using Clock = std::chrono::steady_clock;
  struct Limits {
    // A rank whose turn it is and whose queue is empty is waited for, for so long, while another could go on. Halved
    // each time that it was in vain, and doubled when half of it was enough, but not less.
    std::chrono::microseconds linger{1000000};
    // Lockstep and parked writes end when a peer's queue is empty for so long; halved each time.
    std::chrono::microseconds lockstep{1000000};
    // Likewise waiting for peers at a collective's result.
    std::chrono::microseconds sync{2000000};
  };

  Schedule(Splicer& splicer, CollectiveBridge& collectives, Limits limits)
      : splicer_(splicer), collectives_(collectives), limits_(limits) {}

  void add(RankServer& server);
  // Executes some messages; false: nothing can be done now. `held`: ranks that a stop keeps where they are; `urgent`:
  // something else wants the loop.
  bool turn(const std::function<bool(const RankServer&)>& held, const std::function<bool()>& urgent);
  // When to call turn() again though nothing has come.
  std::optional<Clock::time_point> wakes() const { return wakes_; }

 private:
  // How many messages of a rank are executed before the fabric and the control thread are looked at.
  static constexpr int kTurn = 32;
  // What a limit is divided by at most: 2^8.
  static constexpr uint32_t kMostStrikes = 8;
  struct Seat {
    RankServer* server;
    Member* member;
    bool held = false;         // in this turn
    uint64_t waits_since = 0;  // all ranks' messages when it began to wait
  };
  struct Group {
    Slots members = 0;
    std::optional<Clock::time_point> idle_since;
  };
  enum class Progress { None, Empty, Did };

  bool step(Seat& seat, bool& did);
  bool advance_one(const std::function<bool()>& urgent, bool& waits);
  bool wait_for_host(Seat& seat);
  void end_wait_for_host(bool in_vain);
  void turn_to(Seat* seat);
  bool works_without_end();
  std::vector<Seat*> others_in_order(Slots next);
  bool could_go_on(const Seat& seat) const;
  void make_room();
  Progress advance(Seat& seat, const std::function<bool()>& urgent);
  Progress advance(Group& group, const std::function<bool()>& urgent);
  bool run_together(std::vector<Seat*> seats);
  void run_each(const std::vector<Seat*>& seats, bool verifies);
  bool gather();
  bool resolve();
  bool too_far(uint64_t since) const;
  uint64_t messages() const;
  bool end_wait(Seat& seat, bool timed_out);
  bool hopeless(const Seat& seat) const;
  bool alike(const std::vector<Seat*>& seats) const;
  Slots furthest_behind(Slots slots);
  bool join(Group& group);
  void form(Slots members);
  void dissolve(Group& group);
  void strike();
  bool over(std::chrono::microseconds limit, Clock::time_point since);
  Slots present(Slots slots) const;
  Slots arrived(const Member& member) const;
  Slots with_call(Slots slots, const ValueNumber& key);
  Slots next_in_tree() const;
  std::vector<Seat*> seats_of(Slots slots);
  Group* group_of(const Member& member);

  Splicer& splicer_;
  CollectiveBridge& collectives_;
  Limits limits_;
  std::vector<Seat> seats_;  // by slot
  std::vector<Group> groups_;
  Seat* current_ = nullptr;
  uint64_t turn_since_ = 0;  // all ranks' messages when its turn began, or when last no other could have gone on
  Clock::time_point now_, last_progress_ = Clock::now();
  const Seat* empty_ = nullptr;  // whose host is waited for
  Clock::time_point empty_since_;
  std::optional<Clock::time_point> wakes_;
  bool asked_ = false;  // in this turn some host has asked whether something had come
  uint32_t strikes_ = 0, far_strikes_ = 0;
  uint32_t lingered_in_vain_ = 0;
  uint64_t calm_ = 0;  // calls in lockstep since the last strike
};

}  // namespace ergo::device::splice
