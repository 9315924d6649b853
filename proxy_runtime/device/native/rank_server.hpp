// Executes one rank's messages, one at a time, in order.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "collective_bridge.hpp"
#include "executor.hpp"
#include "process_state.hpp"
#include "rank_state.hpp"
#include "ring_consumer.hpp"
#include "shared_ring.hpp"

namespace ergo::device {

// The rendezvous store as a rank's server sees it: local, or behind the fabric.
class StorePort {
 public:
  virtual ~StorePort() = default;
  // The reply, or nothing: it will come by RankServer::deliver_store_reply.
  virtual std::optional<std::string> request(uint32_t rank, std::string_view bytes) = 0;
};

// What the servers of one proxy share. All of it belongs to the loop's thread.
struct Services {
  DeviceBackend& backend;
  ProcessState& process;
  Executor& executor;
  CollectiveBridge& collectives;
  StorePort& store;
};

class RankServer {
 public:
  // Takes the ring behind `fd`. Throws std::runtime_error if it is none, or is another rank's.
  RankServer(Services services, uint32_t rank, uint32_t slot, int fd);
  ~RankServer();
  RankServer(const RankServer&) = delete;
  RankServer& operator=(const RankServer&) = delete;

  // Executes the next message. False: there is none, or it waits for a collective or the store.
  bool step();
  // A request has gone to the proxy that has the store and its answer is not here yet.
  bool awaits_store() const { return awaits_store_; }
  // There is a next message, and what it has waited for may have come.
  bool ready() const;
  // While it waits: gives up large storages that are its own and that its queue gives up, if nothing before that names
  // them. When their turn comes they are gone already, which is no error.
  // It looks as far as the next collective, behind which the rank waits again, or to the end of the queue. Returns the
  // type of the last message that it has looked at.
  Message free_ahead(bool to_the_end);
  void deliver_store_reply(std::string reply);
  // What its host did last was to ask for something that had not come, or for something in the store: it asks again
  // and again, and does nothing else until others have gone on.
  enum class Asks { Nothing, Result, Store };
  Asks asks() const { return asks_; }
  // Messages that only asked whether something had come: no work.
  uint64_t questions() const { return questions_; }
  // Its queue has stopped at a message that waits for a collective or the store.
  bool blocked() const { return blocked_; }
  // Gives the rank an error that it cannot survive, and executes nothing of it any more.
  void fail(const Failure& failure);

  bool finished() const { return exited_ || failed_; }
  bool exited() const { return exited_; }
  // Nothing that this rank still does can contribute to a collective: it has ended, or is ending and waits for
  // others, with no collective left in its queue.
  bool departed();
  // A shared ring that no process has: nothing will come until one claims it.
  bool idle() const { return shared_ && shared_words(ring_.header()).claimant.load() == 0; }
  // The process of a tree that has it has taken no step, and may never take one: nobody waits for its steps.
  bool stepless() const { return shared_ && step_done() == 0; }
  // The number of the message at which its queue has waited for collectives for a second or more; 0: it has not.
  uint64_t standing_at() const;
  const std::string& failure() const { return failure_; }
  uint64_t step_done() const { return ring_.header().step_done.load(std::memory_order_relaxed); }
  RankState& state() { return state_; }
  const RankState& state() const { return state_; }
  RingConsumer& ring() { return ring_; }
  std::string stats() const;  // JSON

 private:
  enum class Outcome { Done, Waits, Held };  // Held: not now, though nothing is missing (splice/)
  Outcome handle(const MessageView& message);
  bool waits(Message type, WordReader body) const;
  bool any_pending(const uint64_t* handles, size_t n) const;
  Outcome define(WordReader body);
  void drop_left_behind();
  void reset();
  Outcome execute(WordReader body);
  void allocate(WordReader body);
  void resize(WordReader body);
  const PhysicalPtr& readable(uint64_t handle);  // what it names, with all its bytes
  Outcome write(WordReader body);
  Outcome write(uint64_t handle, uint64_t offset, const char* bytes, uint64_t length);
  void read(WordReader body);
  void pull(WordReader body);
  Outcome copy_pinned(Message type, WordReader body);
  Outcome store(WordReader body);
  void library(Message type, WordReader body);

  Services services_;
  RankState state_;
  RingConsumer ring_;
  bool shared_ = false;
  bool exited_ = false, failed_ = false;
  bool blocked_ = false, awaits_store_ = false;
  Asks asks_ = Asks::Nothing;
  uint64_t questions_ = 0;
  uint64_t blocked_at_ = 0;     // state_.completions when it blocked
  uint64_t looked_at_ = 0;      // where free_ahead() has got to in the queue,
  uint64_t looked_before_ = 0;  // and before which message, from 1
  uint64_t stands_at_ = 0;      // the message at which it did, from 1
  std::chrono::steady_clock::time_point stands_since_;
  std::optional<std::string> store_reply_;
  std::string failure_;
  std::string running_;  // the operator whose failure is being reported
};

}  // namespace ergo::device
