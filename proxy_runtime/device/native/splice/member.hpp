// A rank as one of several on a device, and the call at the head of its queue.
#pragma once

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

#include "../rank_state.hpp"
#include "op_facts.hpp"

namespace ergo::device::splice {

class Splicer;

// Why a rank's next call is not executed now, though nothing that it needs is missing.
enum class Hold : uint8_t {
  None,
  Sync,    // it is the first to touch a collective's result: its peers may be about to do the same
  Parked,  // it writes what others share, and they were seen to write the same
  Head     // it goes on together with its peers: they must all be here
};

struct HeldCall {
  OpFacts* facts = nullptr;  // null: it is no operator but what the host writes, and `key` the number of that
  ValueNumber key;
  uint64_t base = 0;
  c10::SmallVector<uint64_t, 8> handles;
  c10::SmallVector<PhysicalStorage*, 8> storages;
  c10::SmallVector<uint32_t, 8> first;  // per place, the first place with the same handle
  uint64_t message = 0;                 // number of the message that it is of; 0: none
  bool repeats = false;                 // some handle has several places
  bool first_of(uint32_t place) const { return first[place] == place; }
  bool repeated(uint32_t place) const {
    if (!repeats) return false;
    for (uint32_t i = 0; i < first.size(); i++)
      if (i != place && first[i] == first[place]) return true;
    return false;
  }
};

// What another rank's execution has brought this one.
struct Delivery {
  std::exception_ptr failure;
  std::vector<uint64_t> spec;
  std::vector<ExpectedOutput> expected;
  uint32_t new_storages = 0;
};

struct Member {
  Member(Splicer& s, RankState& r) : splicer(s), rank(r), slot(r.slot) {}
  Splicer& splicer;
  RankState& rank;
  uint32_t slot;

  ValueNumber random;  // of the default generator's state
  ValueNumber flags;
  // Results of collectives that have not been touched since, and who of this device they are shared with.
  ska::flat_hash_map<uint64_t, Slots> marks;

  HeldCall call;
  Hold hold = Hold::None;
  Slots waits_for = 0;                  // Sync, Parked: the ranks that should come, this one included
  bool lockstep = false;                // in a group
  bool begun = false;                   // has computed on its own since: it may have activations
  bool passed_over = false;             // its host was waited for in vain; until it goes on
  uint64_t pass = 0;                    // number of the message that runs, whatever the rules say
  bool verifies = false;                // the next call runs though its result is known, and both are compared
  uint32_t learns = 0;                  // so many meetings from now on its steps have operators that were new
  uint64_t set_aside_at = 0;            // number of the message at which what it has alone went to the host
  uint64_t met = 0;                     // number of the message at which it need not wait for its peers
  uint64_t position = 0;                // its calls so far; whoever meets has the same afterwards
  Slots unsynced = 0;                   // with whom it has issued collectives since it last met its peers
  c10::SmallVector<Member*, 4> others;  // for which it runs, too
  std::optional<Delivery> delivery;
  // Per place in the script (operator and first handle that it writes): whether peers were seen to do the same.
  // 1: yes; -1: waiting for them was in vain, never again.
  ska::flat_hash_map<uint64_t, int8_t> sites;
};

}  // namespace ergo::device::splice
