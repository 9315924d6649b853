// One device proxy: the loop that serves its ranks, and what its control socket may ask of it.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "commands.hpp"
#include "departures.hpp"
#include "rank_server.hpp"
#include "splice/schedule.hpp"
#include "store_service.hpp"

namespace ergo::device {

struct SharedPeer {
  int index;
  int fd;  // of the shared memory segment; stays the caller's
};

struct FabricSpec {
  int self = 0;
  std::vector<int> rank_to_proxy;
  std::string token;
  std::vector<SharedPeer> shared;
  int board_fd = -1;       // memory of all proxies of this node, none: -1; stays the caller's
  std::vector<int> board;  // their indices, in the order of their slots
  std::vector<TcpPeer> tcp;
};

struct RankReport {
  uint64_t step = 0;
  bool exited = false;
  std::string failure;
  std::map<std::string, MemberCounts> comms;  // by the text of the sequence
};

struct StopReport {
  std::map<uint32_t, RankReport> ranks;
  bool reached = false;
};

struct FinishReport {
  std::map<std::string, std::map<uint32_t, uint64_t>> completed;
  uint64_t pending_operations = 0, pending_bytes = 0;
};

struct ProxyStats {
  std::map<uint32_t, std::string> ranks;  // JSON each
  uint64_t physical_bytes = 0, fabric_bytes_sent = 0, fabric_bytes_received = 0;
  bool running = false, stopped = false;
  std::optional<splice::Counters> splice;  // while ranks share the device
};

// serve() runs in one thread; every other method may be called from another and is carried out by the
// loop at a message boundary. They throw ControlError.
class Proxy {
 public:
  Proxy(const std::string& device_kind, uint64_t build);
  ~Proxy();

  // Serves until shut_down(). Throws if the proxy itself is broken.
  void serve();
  void shut_down();

  void connect(FabricSpec spec, Clock::time_point deadline);
  void attach(uint32_t rank, int fd, Clock::time_point deadline);
  void run(Clock::time_point deadline);
  // `at_step`: each rank stops right after that Step message; those that have not come there by the
  // deadline stop where they are, and `reached` is false.
  StopReport stop(std::optional<uint64_t> at_step, Clock::time_point deadline);
  FinishReport finish(std::map<std::string, uint64_t> targets, Clock::time_point deadline);
  void resume(Clock::time_point deadline);
  uint64_t dump(uint32_t rank, const std::string& meta, const std::string& storages, Clock::time_point deadline);
  // Returns the completed counts, by sequence.
  std::map<std::string, MemberCounts> load(uint32_t rank, const std::string& meta, const std::string& storages,
                                           Clock::time_point deadline);
  ProxyStats stats(Clock::time_point deadline);

 private:
  enum class Stop { None, Now, AtStep };
  bool turn();
  bool serve_rank(RankServer& server);
  bool shares() const;
  void splice();
  bool held(const RankServer& server) const;
  bool pump();
  void sleep();
  void wake_up();
  void notice_lost_peers();
  void settle_stop();
  void require_fabric();
  RankServer& server(uint32_t rank);
  StopReport report(std::optional<uint64_t> at_step);
  FinishReport finish_in_loop(const std::map<std::string, uint64_t>& targets, Clock::time_point deadline);

  std::unique_ptr<DeviceBackend> backend_;
  uint64_t build_;
  ProcessState process_;
  Executor executor_;
  splice::Splicer splicer_;  // outlives the storages of the servers
  CollectiveBridge collectives_;
  Standstill standstill_;
  StoreService store_;
  Departures departures_;
  std::map<uint32_t, std::unique_ptr<RankServer>> servers_;
  std::unique_ptr<splice::Schedule> schedule_;  // while more than one rank is here
  CommandQueue commands_;
  bool running_ = false, ended_ = false;
  Stop stop_ = Stop::None;
  uint64_t stop_step_ = 0;
  std::mutex stop_mutex_;
  std::condition_variable stop_changed_;
  bool all_held_ = false;  // guarded by stop_mutex_
};

}  // namespace ergo::device
