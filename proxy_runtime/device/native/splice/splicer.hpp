// Sharing by value between the ranks of one device: what equals is computed once and kept once.
// docs/design/0004-splicing.md says how and why; this is where it meets the executor.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "../collectives.hpp"
#include "../executor.hpp"
#include "member.hpp"
#include "sharing.hpp"

namespace ergo::device {
struct CollectiveCall;
}

namespace ergo::device::splice {

class Splicer {
 public:
  Splicer(DeviceBackend& backend, ProcessState& process, Executor& executor)
      : backend_(backend),
        process_(process),
        executor_(executor),
        ledger_(counters_),
        sharing_(backend, ledger_, counters_) {}

  // Of a storage that is loaded: it, or the equal one of a rank that was loaded before. `taken`: how many of each value
  // this rank has; it never has two handles on one storage.
  using Taken = std::unordered_map<ValueNumber, size_t, NumberHash>;
  PhysicalPtr loaded(const PhysicalPtr& storage, Taken& taken);
  // All ranks that share have been admitted.
  void all_loaded();
  // From now on this rank shares. Its storages are named by their contents, and merged with equal ones.
  void admit(RankState& rank);
  bool active() const { return !members_.empty(); }
  const std::vector<std::unique_ptr<Member>>& members() const { return members_; }
  Counters& counters() { return counters_; }
  Counters count() const;
  // Ranks that go on together are at the same operator on different values: gives what they do not all share the
  // numbers of contents, if it may be that these are equal though they have come about in different ways: a cut has
  // found some before and some behind the same step. False: that has been seen to already.
  bool name_again(Slots ranks);
  bool may_name_again(const Member& one, const Member& other) const;
  void met() { ledger_.met(); }
  // One of so many results that are shared, on average, is computed again and compared; 0: none.
  void verify_one_of(uint64_t n) { verify_one_of_ = verify_at_ = n; }
  // For tests: in so many comparisons from now on, a bit is found to differ; 0: never.
  void err_at(uint64_t comparison) { errs_at_ = comparison; }
  // Of the message at the heads of the queues of ranks that go on together: whether one of them executes it for all.
  bool serves_all(const Member& member) const;
  // Whether such a call is one to be computed by each of them and compared.
  bool samples(const Member& member);

  // A Define (`spec` is given) or an Exec. False: not now, see Member::hold. Throws what the operator throws.
  bool execute(Member& member, Template& t, Call call, WordWriter* spec);

  // The other messages that make or change storages.
  PhysicalPtr allocate(uint64_t bytes);
  void allocated(Member& member, uint64_t handle);
  void released(Member& member, uint64_t handle);
  void resized(Member& member, uint64_t handle, const ValueNumber& before);
  // False: not now, as for execute().
  bool write(Member& member, uint64_t handle, uint64_t offset, const void* bytes, uint64_t n);
  PhysicalStorage& readable(const PhysicalPtr& storage);
  // And those that change what its operators see.
  void seeded(Member& member, uint64_t generator, uint64_t seed);
  void random_set(Member& member, uint64_t generator, const void* bytes, size_t n);
  void flags_set(Member& member);
  // A new process at a shared ring, or the end of a rank.
  void reset(Member& member);

  // An all-reduce's packed input of `packed` bytes that is its only tensor's storage itself, where nobody else needs
  // it: the engine may write to it, and the tensor is bound to another by issued(). Else nothing.
  Slice lend(Member& member, const CollectiveCall& call, size_t packed);
  // Packed bytes that count as the device's while somebody has them.
  Slice counted(std::shared_ptr<Buffer> packed);
  // A collective has taken its inputs: its outputs are this rank's own from now on.
  void issued(Member& member, const CollectiveCall& call, PendingCollective& pending, const std::vector<int>& ranks);
  // Its result is here: `unpack` writes it to the pending storages, where it is not another rank's already.
  void completed(Member& member, const CollectiveCall& call, PendingCollective& pending, const CollectiveResult& result,
                 const std::function<void(const CollectiveResult&)>& unpack);
  // Waiting before the call at the head of its queue was in vain.
  void never_again(Member& member);
  // Its host stands still until others have come: what this rank has alone goes to the host, until it goes on.
  void set_aside(Member& member);
  // All that this rank's dump will read has bytes.
  void settle(Member& member);

 private:
  void prepare(Member& member, const Template& t, const Call& call);
  bool may_run(Member& member);
  bool take_known(Member& leader, Template& t, WordWriter* spec);
  void perform(Member& leader, Template& t, const Call& call, WordWriter* spec);
  PhysicalPtr owned(const PhysicalPtr& from, uint32_t of_writers, Range overwritten, bool counts);
  void own_written(Member& leader);
  void run(Member& leader, Template& t, const Call& call, WordWriter* spec);
  void number_results(Member& leader, uint32_t new_storages, bool failed);
  void place_number(Member& member, uint64_t handle, const ValueNumber& value, bool merge);
  void learn(Member& member);
  uint64_t shared_written_bytes(const Member& member) const;
  uint64_t site(const Member& member) const;
  Slots holders_of_written(const Member& member) const;
  Slots waiting_for_it_here(const Member& member) const;
  void name_contents(Member& member);
  ValueNumber contents_of(PhysicalStorage& storage);
  bool parks(Member& member);
  void advance_random(Member& member);
  bool take_lent(Member& member, uint64_t handle, const PhysicalStorage& waiting, const CollectiveResult& result,
                 const ValueNumber& number);
  std::vector<ValueNumber> result_numbers(const CollectiveCall& call, const CollectiveResult& result);

  DeviceBackend& backend_;
  ProcessState& process_;
  Executor& executor_;
  Counters counters_;
  Ledger ledger_;
  Sharing sharing_;
  OpBook book_;
  std::vector<std::unique_ptr<Member>> members_;
  // From the first load to all_loaded(): storages by what they hold.
  std::unordered_map<ValueNumber, std::vector<PhysicalPtr>, NumberHash> loaded_;
  uint64_t prepared_ = 0;  // calls
  uint32_t namings_ = 0;   // how often name_again() may look before the next load
  uint64_t verify_one_of_ = 1024, verify_at_ = verify_one_of_, unverified_ = 0, samples_ = 0, errs_at_ = 0;
  // Calls for which shared storages had to be copied: who made them.
  struct Copied {
    Member* member;
    uint64_t site;
  };
  ska::flat_hash_map<ValueNumber, Copied, NumberHash> copied_;
  // Storages that are packed inputs of collectives, by their bytes: a sum is made in one of them.
  std::unordered_map<const std::byte*, PhysicalStorage*> lent_;
  // Per sequence, the last instance that a local member has completed, and the numbers of its results.
  struct Instance {
    uint64_t number = 0;
    ValueNumber base;
    std::vector<ValueNumber> values;  // of a broadcast, as the root had them
  };
  std::map<SequenceId, Instance> instances_;
};

}  // namespace ergo::device::splice
