// Collectives between ranks that live on device proxies: issuing and completing are separate, nothing
// blocks, several ranks may live on one proxy, and the bits of a result do not depend on where they live.
//
// Sequences. Operations are numbered from 1 in sequences: one per communicator, and one per direction of a
// pair of its members for Send/Recv (source -> destination, two members), so that the rule of a cut holds
// for them too and a Recv blocks only itself. Completion is in order within a sequence.
//
// The rule that makes a cut simple: *an operation completes anywhere only when all members have contributed*,
// also a Broadcast, a Gather, a Send. So if n is complete at any member, then n <= every member's contributed,
// and stays so because contributed only grows until its proxy stops. Hence after a stop request, and before
// the targets are known, going on receiving and completing is safe: the target (the smallest contributed,
// read when all have stopped) can never turn out below something already completed. And every n <= target
// completes without any host: all its contributions have been handed to the fabric at issue. Instances beyond
// the target lack a member's contribution, cannot complete, and are in `pending` with their inputs untouched.
//
// One thread calls everything. Callbacks come only from pump, never from issue.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "../../channel/messages.hpp"
#include "buffer.hpp"
#include "fabric.hpp"

namespace ergo {

// A misuse by a rank (or a damaged dump), to be raised in that rank. `code` is stable.
class CollectiveError : public std::runtime_error {
 public:
  CollectiveError(std::string code, const std::string& message) : std::runtime_error(message), code_(std::move(code)) {}
  const std::string& code() const { return code_; }

 private:
  std::string code_;
};

// A contiguous run of elements of one dtype. In packed bytes each segment starts at a multiple of 64 and the
// whole is padded to one: segment i is at segment_offsets(s)[i], the buffer has packed_bytes(s) bytes.
struct Segment {
  uint8_t dtype;          // torch ScalarType; opaque but for the default kernels
  uint8_t element_bytes;  // 1, 2, 4, 8, 16
  uint64_t bytes;         // multiple of element_bytes
};
size_t packed_bytes(const std::vector<Segment>& segments);
std::vector<size_t> segment_offsets(const std::vector<Segment>& segments);

// What is issued. `segments` describes the packed input:
//   AllReduce, Reduce          all tensors, one segment each; the same at all members
//   Broadcast, Send            all tensors at the root / sender; others (Recv): none
//   AllGather, Gather          this member's input (sizes may differ between members)
//   ReduceScatter              W segments: block d goes to group rank d; the same at all members
//   AllToAll                   W segments: block d goes to group rank d (a split of 0 elements: 0 bytes)
//   Scatter                    W segments at the root, none elsewhere
//   Barrier                    none
struct Descriptor {
  uint64_t comm = 0;
  CollectiveKind kind = CollectiveKind::Barrier;
  ReduceOp op = ReduceOp::Sum;
  uint32_t root = 0;  // group rank; Send: destination, Recv: source
  std::vector<Segment> segments;
  // Of the tensors that a Broadcast or Recv fills, where they are no input; else 0.
  uint64_t expected_bytes = 0;
  // This member's input is part of another's, and empty (collectives_fold.cpp). AllReduce alone.
  bool absorbed = false;
};

struct Range {
  size_t begin, end;
};

// Whether the operation changes anything at this member: if not (the root of a Broadcast, a Send, the
// senders of Reduce and Gather), the input was packed at issue and the executor need not mark its
// tensors pending.
bool has_result(CollectiveKind kind, uint32_t root, uint32_t group_rank);

// Names a sequence; as text "7" or, for group rank 0 sending to 1 in communicator 7, "7:0>1".
struct SequenceId {
  uint64_t comm = 0;
  int32_t source = -1, destination = -1;
  auto operator<=>(const SequenceId&) const = default;
  std::string text() const;
  static SequenceId parse(std::string_view text);  // throws CollectiveError
};

// What a member gets. Blocks, by kind: AllReduce: pieces that one after another are packed as the input's segments;
// Reduce (root), Broadcast, ReduceScatter, Scatter, Recv: one, packed likewise (ReduceScatter, Scatter: the own block);
// AllGather, Gather (root): W, block i
// = input of group rank i; AllToAll: W, block i = from group rank i. Empty where has_result is false.
struct CollectiveResult {
  std::vector<Slice> blocks;
  // Not empty: the members disagree (the same sentence at all) or a kernel failed. The block is the member's input, and
  // there is none where that was part of a sum by then (collectives_fold.cpp).
  std::string error;
  SequenceId sequence;  // which operation this is the result of
  uint64_t number = 0;
};

struct MemberCounts {
  uint64_t contributed = 0, completed = 0;
  bool scatters = false;     // members have been given different parts of a sum: they hold different shards
  std::vector<int> members;  // global ranks in group order
};

struct Awaited {
  SequenceId sequence;
  uint64_t number;
  std::string what;          // "AllReduce (number 3 of communicator 7)"
  std::vector<int> missing;  // global ranks
};

struct PendingOperation {
  uint64_t ticket;  // as returned by issue: the executor's key to its outputs
  SequenceId sequence;
  uint64_t number;
  Descriptor descriptor;
  Slice input;
};

// out = left (op) right, element by element, in the dtype; out may be left. Buffers are aligned to the element at
// least. Avg arrives as Sum. Must not depend on n or alignment for its bits.
using ReduceFn = std::function<void(uint8_t dtype, ReduceOp op, std::byte* out, const std::byte* left,
                                    const std::byte* right, size_t n_elements)>;
// data /= divisor in the dtype (integers: truncated), for Avg.
using ScaleFn = std::function<void(uint8_t dtype, std::byte* data, size_t n_elements, uint64_t divisor)>;
// f32, f64, i32, i64, u8, bool by ScalarType number; others throw CollectiveError. For tests.
void default_reduce(uint8_t dtype, ReduceOp op, std::byte* out, const std::byte* left, const std::byte* right,
                    size_t n_elements);
void default_scale(uint8_t dtype, std::byte* data, size_t n_elements, uint64_t divisor);

class CollectiveEngine {
 public:
  using OnComplete = std::function<void(const CollectiveResult&)>;
  using OnControl = std::function<void(int peer, Slice bytes)>;

  // All-reduces of more bytes than this are reduced in chunks by owning proxies, others whole by everybody.
  static constexpr size_t kWholeLimit = 64 * 1024;
  // All-reduces of at least so many bytes are summed before all members have contributed, where they all live here.
  static constexpr size_t kFoldEarly = 16 * 1024;

  // rank_to_proxy[r]: index of the proxy that holds global rank r; the same list at all proxies.
  CollectiveEngine(int self, std::vector<int> rank_to_proxy, Fabric& fabric, ReduceFn reduce = default_reduce,
                   ScaleFn scale = default_scale);
  ~CollectiveEngine();

  // Message::Communicator of a local rank. Repeating it with the same members is fine.
  void define(uint64_t comm, const std::vector<int>& members);

  // Contributes. The packed input is kept until completion. Returns a ticket, unique in this engine.
  // Throws CollectiveError: unknown communicator, rank not a member, segments that do not fit the kind.
  uint64_t issue(int rank, const Descriptor& descriptor, Slice input, OnComplete on_complete);

  // Moves bytes, completes what can be; true if anything happened (call again before sleeping).
  // Throws FabricError (bad frame); exceptions of callbacks pass through.
  bool pump(const OnControl& on_control);

  // For the stop and finish of a cut. `counts` lists every communicator of the rank, those it never used
  // included, and the pairs it has sent or received on (a pair its other member does not list counts 0 there).
  std::map<SequenceId, MemberCounts> counts(int rank) const;
  std::vector<uint64_t> communicators(int rank) const;
  // Sequences that are not named count as target 0 beyond what is completed: held.
  // Throws CollectiveError if a target is beyond what a local member has contributed or below what is completed.
  void set_targets(const std::map<SequenceId, uint64_t>& targets);
  bool finished() const;  // every local member has completed every target
  void resume();          // forgets the targets

  // Issued and not completed, in issue order, over all sequences. Nothing is taken away: after `resume` they
  // go on, contributed once.
  std::vector<PendingOperation> pending(int rank) const;
  size_t pending_count(int rank) const;

  // At load, after define: sets contributed = completed = n. Then `issue` every pending operation in order.
  void restore_counts(int rank, const std::map<SequenceId, uint64_t>& completed,
                      const std::set<SequenceId>& scattering = {});

  // This rank will contribute to nothing that it has not contributed to already.
  // `why`: the error that it ended with; empty if none.
  void depart(int rank, std::string why);
  // Local ranks with an operation that can never complete, each with a sentence that names the operation and the
  // rank or lost peer (Fabric::lost) whose contribution or result is missing.
  std::map<int, std::string> hopeless() const;
  std::optional<std::string> waiting_for_lost_peer() const;
  // The ranks that will contribute to nothing more: those that have departed, and those on lost proxies.
  std::set<int> gone() const;
  // What a local rank waits for in these of its operations: whose contributions have not come.
  std::vector<Awaited> awaited(int rank, const std::set<uint64_t>& tickets) const;

 private:
  struct Group;
  struct Sequence;
  struct Instance;
  struct Operation;
  struct Contribution;
  struct Completion;

  const Group& group_of(uint64_t comm, int rank) const;
  Sequence& sequence(const SequenceId& id);
  void bind(Sequence& sequence, const Group& group);
  void contribute(Sequence& sequence, uint64_t number, uint32_t group_rank, const Operation& operation);
  void receive(int peer, Frame frame);
  [[noreturn]] void bad_frame(int peer, const FrameHeader& header, const std::string& what) const;
  void prepare(Sequence& sequence, uint64_t number);
  std::string describe(const Operation& operation) const;
  bool contributed(const Instance& instance, uint32_t member) const;
  std::string why_hopeless(int rank, const Operation& operation) const;
  std::string disagreement(const Sequence& sequence, uint64_t number, const Instance& instance) const;
  void fold_ready(Sequence& sequence, uint64_t number);
  bool fold(Instance& instance, size_t lo, size_t hi);
  Slice folded_result(const Sequence& sequence, const Instance& instance) const;
  bool has_kernels(const Descriptor& descriptor) const;
  void add_into(Operation& operation, const Slice& input);
  bool reduce_own_chunk(Sequence& sequence, uint64_t number, Instance& instance);
  void make_results(Sequence& sequence, Instance& instance);
  Slice reduce(const Sequence& sequence, const Instance& instance, const Descriptor& descriptor, uint32_t part,
               Range range, std::shared_ptr<Buffer> into);
  bool held(const SequenceId& id, uint64_t number) const;
  void complete_ready(Sequence& sequence);

  int self_;
  std::vector<int> rank_to_proxy_;
  Fabric& fabric_;
  ReduceFn reduce_;
  ScaleFn scale_;
  std::map<uint64_t, std::unique_ptr<Group>> groups_;
  std::map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::map<int, std::list<std::shared_ptr<Operation>>> operations_;  // per rank, issue order
  std::optional<std::map<SequenceId, uint64_t>> targets_;            // in force between finish and resume
  std::map<int, std::string> departed_;                              // global ranks, with the error they ended with
  std::deque<std::pair<SequenceId, uint64_t>> touched_;              // instances that something arrived for
  std::deque<Completion> completions_;                               // callbacks that wait for pump
  uint64_t next_ticket_ = 1;
};

}  // namespace ergo
