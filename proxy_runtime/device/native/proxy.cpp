#include "proxy.hpp"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string_view>

#include "sleep.hpp"
#include "snapshot.hpp"

namespace ergo::device {
namespace {

// How many messages of a rank are executed before the others, the fabric and the control thread are looked at.
constexpr int kTurn = 32;
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr auto kWideAwake = kSpin - kDrowsyFor;
constexpr int kPauses = 8;  // between two looks, a fraction of a microsecond
constexpr auto kLongestSleep = std::chrono::milliseconds(500);

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

}  // namespace

Proxy::Proxy(const std::string& device_kind, uint64_t build)
    : backend_(make_backend(device_kind)),
      build_(build),
      process_(*backend_),
      executor_(*backend_, process_),
      splicer_(*backend_, process_, executor_),
      collectives_(*backend_, executor_.keys()),
      standstill_(collectives_),
      store_(collectives_, standstill_,
             [this](uint32_t rank, std::string reply) { server(rank).deliver_store_reply(std::move(reply)); }),
      departures_(collectives_) {}

Proxy::~Proxy() { commands_.close(); }

void Proxy::serve() {
  auto idle_since = Clock::now();
  auto looked = idle_since;
  std::optional<Clock::time_point> drowsy_since;
  while (!ended_) {
    const bool progress = turn();
    const auto now = Clock::now();
    if (now - looked > kLongestSleep) {
      notice_lost_peers();
      looked = now;
    }
    if (progress) {
      idle_since = now;
      if (drowsy_since) wake_up();
      drowsy_since.reset();
      continue;
    }
    settle_stop();
    if (now - idle_since < kWideAwake) {
      // Each look takes the line of the head from the rank, which waits for it with its next message.
      for (int i = 0; i < kPauses; ++i) pause();
      continue;
    }
    if (!drowsy_since) {
      for (auto& [rank, server] : servers_) server->ring().grow_drowsy();
      drowsy_since = Clock::now();
    }
    if (now < *drowsy_since + kDrowsyFor) continue;
    notice_lost_peers();
    looked = now;
    sleep();
    wake_up();
    drowsy_since.reset();
  }
  commands_.close();
}

bool Proxy::turn() {
  bool progress = commands_.run();
  progress |= pump();
  if (schedule_ && running_)
    progress |= schedule_->turn([this](const RankServer& server) { return held(server); },
                                [this] { return commands_.waiting(); });
  if (running_)
    for (auto& [rank, server] : servers_)
      if (!server->state().member) progress |= serve_rank(*server);
  if (stop_ != Stop::None) settle_stop();
  return progress;
}

bool Proxy::held(const RankServer& server) const {
  if (server.finished() || stop_ == Stop::Now) return true;
  return stop_ == Stop::AtStep && (server.idle() || server.step_done() >= stop_step_);
}

bool Proxy::serve_rank(RankServer& server) {
  bool progress = false;
  for (int i = 0; i < kTurn && !commands_.waiting() && !held(server) && server.step(); i++) progress = true;
  return progress;
}

bool Proxy::pump() {
  if (!collectives_.connected()) return false;
  try {
    return collectives_.engine().pump([this](int peer, Slice frame) {
      if (!departures_.on_control(frame) && !standstill_.on_control(peer, frame)) store_.on_control(peer, frame);
    });
  } catch (const FabricError& e) {
    for (auto& [rank, server] : servers_)
      server->fail({Status::Runtime, std::string("the device proxies lost touch: ") + e.what()});
    throw;
  }
}

void Proxy::sleep() {
  std::vector<futex_waitv> waiters;  // values first, then look once more, then sleep
  commands_.append_waiter(waiters);
  if (collectives_.connected()) collectives_.fabric().append_waiters(waiters);
  if (running_)
    for (auto& [rank, server] : servers_)
      if (!held(*server)) server->ring().announce_sleep(waiters);
  if (!turn()) {
    auto until = Clock::now() + kLongestSleep;
    if (schedule_ && schedule_->wakes()) until = std::min(until, *schedule_->wakes());
    wait_any(waiters, until);
  }
}

void Proxy::wake_up() {
  for (auto& [rank, server] : servers_) server->ring().withdraw_sleep();
}

void Proxy::notice_lost_peers() {
  // While stopped, peers may have been ended on purpose: a move kills all proxies of a job one by one.
  if (!running_ || stop_ != Stop::None || !collectives_.connected()) return;
  standstill_.notice(servers_);
  // Who waits in a circle says so: told of a rank of it that has ended meanwhile, it would say less.
  std::map<int, std::string> hopeless = standstill_.circles();
  departures_.notice(servers_);
  hopeless.merge(collectives_.engine().hopeless());
  for (auto& [rank, server] : servers_) {
    bool needs_store =
        server->awaits_store() && collectives_.fabric().lost().contains(collectives_.rank_to_proxy().at(0));
    if (auto why = hopeless.find(static_cast<int>(rank)); why != hopeless.end())
      server->fail({Status::Runtime, why->second});
    else if (needs_store)
      server->fail({Status::Runtime, "the device proxy of rank 0, which keeps the rendezvous store, is gone"});
  }
}

void Proxy::settle_stop() {
  auto settled = [&](const auto& entry) {
    const RankServer& server = *entry.second;
    return held(server) || (stop_ == Stop::AtStep && stop_step_ > 1 && server.stepless());
  };
  bool all = stop_ != Stop::None && std::all_of(servers_.begin(), servers_.end(), settled);
  std::lock_guard<std::mutex> lock(stop_mutex_);
  if (all == all_held_) return;
  all_held_ = all;
  stop_changed_.notify_all();
}

RankServer& Proxy::server(uint32_t rank) {
  auto it = servers_.find(rank);
  if (it == servers_.end())
    throw ControlError("device-proxy.rank", "rank " + std::to_string(rank) + " is not attached to this device proxy");
  return *it->second;
}

// A job of one proxy needs no fabric: then every rank is here.
void Proxy::require_fabric() {
  if (collectives_.connected()) return;
  uint32_t ranks = servers_.empty() ? 1 : servers_.rbegin()->first + 1;
  collectives_.connect(std::make_unique<Fabric>(0), std::vector<int>(ranks, 0));
}

void Proxy::shut_down() {
  commands_.call([this] { ended_ = true; }, Clock::now() + std::chrono::hours(1));
}

void Proxy::connect(FabricSpec spec, Clock::time_point deadline) {
  commands_.call(
      [this, spec, deadline] {
        if (collectives_.connected())
          throw ControlError("device-proxy.order", "the fabric of this device proxy is connected already");
        if (spec.rank_to_proxy.empty() || std::ranges::any_of(spec.rank_to_proxy, [](int proxy) { return proxy < 0; }))
          throw ControlError("device-proxy.request", "the fabric needs the index of a proxy for every rank of the job");
        auto fabric = std::make_unique<Fabric>(spec.self);
        for (const SharedPeer& peer : spec.shared) fabric->add_shm_peer(peer.index, peer.fd, spec.self < peer.index);
        if (spec.board_fd >= 0) fabric->add_board(spec.board_fd, spec.board);
        if (!spec.tcp.empty()) fabric->connect_tcp_peers(spec.tcp, spec.token, deadline);
        collectives_.connect(std::move(fabric), spec.rank_to_proxy);
      },
      deadline + std::chrono::seconds(5));
}

void Proxy::attach(uint32_t rank, int fd, Clock::time_point deadline) {
  commands_.call(
      [this, rank, fd] {
        if (collectives_.connected() && rank >= collectives_.rank_to_proxy().size())
          throw ControlError("device-proxy.rank", "rank " + std::to_string(rank) + " is not in this proxy's fabric");
        if (servers_.contains(rank))
          throw ControlError("device-proxy.order", "rank " + std::to_string(rank) + " is attached already");
        auto slot = static_cast<uint32_t>(servers_.size());
        std::unique_ptr<RankServer> server;
        try {
          server = std::make_unique<RankServer>(Services{*backend_, process_, executor_, collectives_, store_}, rank,
                                                slot, fd);
        } catch (const std::runtime_error& e) {
          throw ControlError("device-proxy.ring",
                             "the ring of rank " + std::to_string(rank) + " cannot be used: " + e.what());
        }
        if (build_ != 0 && server->ring().header().build != 0 && server->ring().header().build != build_)
          throw ControlError("device-proxy.build",
                             "the ring of rank " + std::to_string(rank) +
                                 " was made by another build of the runtime than this device proxy");
        servers_.emplace(rank, std::move(server));
        if (running_) splice();
      },
      deadline);
}

bool Proxy::shares() const {
  const char* wanted = std::getenv("ERGO_SPLICE");
  if (servers_.size() < 2 || servers_.size() > splice::kMostRanks) return false;
  if (wanted && std::string_view(wanted) == "off") return false;
  // A tree's slots are all here, at any width, and most are nobody's.
  return std::ranges::none_of(
      servers_, [](const auto& entry) { return shared_words(entry.second->ring().header()).shared.load() == 1; });
}

// From the moment that several ranks run here, what is equal is kept and computed once.
void Proxy::splice() {
  if (!shares()) return;
  if (const char* n = std::getenv("ERGO_SPLICE_VERIFY")) splicer_.verify_one_of(std::strtoull(n, nullptr, 10));
  if (const char* n = std::getenv("ERGO_SPLICE_ERR")) splicer_.err_at(std::strtoull(n, nullptr, 10));
  if (!schedule_) schedule_ = std::make_unique<splice::Schedule>(splicer_, collectives_, splice::Schedule::Limits());
  for (auto& [rank, server] : servers_) {
    if (server->state().member) continue;
    splicer_.admit(server->state());
    schedule_->add(*server);
  }
  splicer_.all_loaded();
}

void Proxy::run(Clock::time_point deadline) {
  commands_.call(
      [this] {
        require_fabric();
        splice();
        running_ = true;
      },
      deadline);
}

StopReport Proxy::report(std::optional<uint64_t> at_step) {
  StopReport result;
  result.reached = true;
  for (const auto& [rank, server] : servers_) {
    RankReport& r = result.ranks[rank];
    r.step = server->step_done();
    r.exited = server->exited();
    r.failure = server->failure();
    if (collectives_.connected())
      for (const auto& [id, counts] : collectives_.engine().counts(static_cast<int>(rank))) r.comms[id.text()] = counts;
    const bool takes_none = server->idle() || (at_step && *at_step > 1 && server->stepless());
    result.reached &= !at_step || server->finished() || takes_none || r.step >= *at_step;
  }
  return result;
}

StopReport Proxy::stop(std::optional<uint64_t> at_step, Clock::time_point deadline) {
  auto grace = std::max(deadline, Clock::now()) + std::chrono::seconds(1);
  commands_.call(
      [this, at_step] {
        stop_ = at_step ? Stop::AtStep : Stop::Now;
        stop_step_ = at_step.value_or(0);
        settle_stop();
      },
      grace);
  if (at_step) {
    std::unique_lock<std::mutex> lock(stop_mutex_);
    stop_changed_.wait_until(lock, deadline, [this] { return all_held_; });
  }
  return commands_.call(
      [this, at_step] {
        StopReport result = report(at_step);
        stop_ = Stop::Now;
        settle_stop();
        return result;
      },
      grace);
}

FinishReport Proxy::finish(std::map<std::string, uint64_t> targets, Clock::time_point deadline) {
  return commands_.call([this, targets, deadline] { return finish_in_loop(targets, deadline); },
                        deadline + std::chrono::seconds(1));
}

FinishReport Proxy::finish_in_loop(const std::map<std::string, uint64_t>& targets, Clock::time_point deadline) {
  if (stop_ != Stop::Now) throw ControlError("device-proxy.order", "the device proxy is not stopped");
  require_fabric();
  CollectiveEngine& engine = collectives_.engine();
  try {
    std::map<SequenceId, uint64_t> parsed;
    for (const auto& [text, n] : targets) parsed[SequenceId::parse(text)] = n;
    engine.set_targets(parsed);
  } catch (const CollectiveError& e) {
    throw ControlError("device-proxy.targets", e.what());
  }
  auto waits = [&] {
    if (!engine.finished()) return true;
    return std::any_of(servers_.begin(), servers_.end(),
                       [](const auto& entry) { return entry.second->awaits_store(); });
  };
  while (waits() || !collectives_.fabric().flushed()) {
    std::vector<futex_waitv> waiters;
    commands_.append_waiter(waiters);
    collectives_.fabric().append_waiters(waiters);
    bool progress = pump();
    // A rank that waits for the store gets its answer: the request is half done, and the store is about to be dumped.
    for (auto& [rank, server] : servers_)
      if (server->awaits_store()) progress |= server->step();
    if (progress) continue;
    if (Clock::now() >= deadline)
      throw ControlError("device-proxy.deadline",
                         "collectives or store requests did not finish before the deadline; "
                         "another device proxy of the job does not answer");
    wait_any(waiters, std::min(deadline, Clock::now() + std::chrono::milliseconds(20)));
  }
  FinishReport result;
  for (auto& [rank, server] : servers_) {
    for (const auto& [id, counts] : engine.counts(static_cast<int>(rank)))
      result.completed[id.text()][rank] = counts.completed;
    for (const PendingOperation& op : engine.pending(static_cast<int>(rank))) {
      result.pending_operations++;
      result.pending_bytes += op.input.size();
    }
  }
  return result;
}

void Proxy::resume(Clock::time_point deadline) {
  commands_.call(
      [this] {
        stop_ = Stop::None;
        stop_step_ = 0;
        if (collectives_.connected()) collectives_.engine().resume();
        settle_stop();
      },
      deadline);
}

uint64_t Proxy::dump(uint32_t rank, const std::string& meta, const std::string& storages, Clock::time_point deadline) {
  return commands_.call(
      [this, rank, meta, storages] {
        if (stop_ != Stop::Now) throw ControlError("device-proxy.order", "the device proxy is not stopped");
        RankServer& s = server(rank);
        if (auto* member = s.state().member) splicer_.settle(*member);
        const KeyValueStore* store = rank == 0 ? &store_.items() : nullptr;
        return dump_rank({*backend_, process_, collectives_}, s.state(), store, meta, storages);
      },
      deadline);
}

std::map<std::string, MemberCounts> Proxy::load(uint32_t rank, const std::string& meta, const std::string& storages,
                                                Clock::time_point deadline) {
  return commands_.call(
      [this, rank, meta, storages] {
        if (running_)
          throw ControlError("device-proxy.order", "the device proxy is running; nothing can be loaded into it");
        require_fabric();
        RankServer& s = server(rank);
        KeyValueStore* store = rank == 0 ? &store_.items() : nullptr;
        load_rank({*backend_, process_, collectives_, shares() ? &splicer_ : nullptr}, s.state(), store, meta,
                  storages);
        std::map<std::string, MemberCounts> result;
        for (const auto& [id, counts] : collectives_.engine().counts(static_cast<int>(rank)))
          result[id.text()] = counts;
        return result;
      },
      deadline);
}

ProxyStats Proxy::stats(Clock::time_point deadline) {
  return commands_.call(
      [this] {
        ProxyStats result;
        std::set<const PhysicalStorage*> seen;
        for (auto& [rank, server] : servers_) {
          result.ranks[rank] = server->stats();
          for (const auto& [handle, physical] : server->state().storages)
            if (seen.insert(physical.get()).second) result.physical_bytes += physical->storage.nbytes();
        }
        if (splicer_.active()) {
          result.splice = splicer_.count();
          result.physical_bytes = result.splice->physical_bytes;
        }
        if (collectives_.connected()) {
          result.fabric_bytes_sent = collectives_.fabric().bytes_sent();
          result.fabric_bytes_received = collectives_.fabric().bytes_received();
        }
        result.running = running_;
        result.stopped = stop_ == Stop::Now;
        return result;
      },
      deadline);
}

}  // namespace ergo::device
