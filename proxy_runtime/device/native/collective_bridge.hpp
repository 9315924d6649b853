// Between Collective messages, which speak of tensors, and the engine, which speaks of bytes.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "backend.hpp"
#include "collectives.hpp"
#include "fabric.hpp"
#include "rank_state.hpp"
#include "wire.hpp"

namespace ergo::device {

struct TensorRef {
  TensorMeta meta;
  uint64_t handle = 0;
};

// The tensor is its storage: every byte, in order.
bool covers(const TensorMeta& meta, const PhysicalStorage& storage);

// A Collective message's body, parsed. In-place kinds have the same tensors as inputs and outputs.
struct CollectiveCall {
  uint64_t comm = 0;
  CollectiveKind kind = CollectiveKind::Barrier;
  ReduceOp op = ReduceOp::Sum;
  uint32_t root = 0;
  std::vector<TensorRef> inputs, outputs;
  std::vector<uint64_t> extra;

  static CollectiveCall parse(WordReader body);  // throws ProtocolError
  // An output is a storage of its own, from end to end.
  bool fills(size_t output, const PhysicalStorage& storage) const;
};

// Reduction kernels of the engine, in ATen and so in every dtype that torch can add.
ReduceFn aten_reduce();
ScaleFn aten_scale();

class CollectiveBridge {
 public:
  CollectiveBridge(DeviceBackend& backend, c10::DispatchKeySet keys) : backend_(backend), keys_(keys) {}

  // Once, before any rank runs. `rank_to_proxy` is the same list at all proxies.
  void connect(std::unique_ptr<Fabric> fabric, std::vector<int> rank_to_proxy);
  bool connected() const { return engine_ != nullptr; }
  CollectiveEngine& engine() { return *engine_; }
  Fabric& fabric() { return *fabric_; }
  const std::vector<int>& rank_to_proxy() const { return rank_to_proxy_; }

  // A control frame to every other proxy.
  void send_to_all(std::span<const std::byte> bytes);

  // Message::Communicator. Throws ProtocolError.
  void define(RankState& rank, WordReader body);
  // True if the message reads or writes a storage that an earlier collective will still write.
  bool must_wait(const RankState& rank, WordReader body) const;
  // Message::Collective. A misuse by the script is reported as the rank's asynchronous error.
  void issue(RankState& rank, WordReader body);
  // After a load: the same, with the inputs that were packed then and the storages they had.
  void reissue(RankState& rank, PendingCollective pending, Slice input);

 private:
  const Communicator& communicator(const RankState& rank, uint64_t comm) const;
  bool all_here(const Communicator& communicator) const;
  uint32_t group_rank(const RankState& rank, uint64_t comm) const;
  void contribute(RankState& rank, const CollectiveCall& call, Descriptor descriptor, Slice input,
                  PendingCollective pending);
  std::optional<CollectiveResult> misfit(const RankState& rank, const CollectiveCall& call,
                                         const CollectiveResult& result) const;
  void give_back(RankState& rank, const CollectiveCall& call, const PendingCollective& pending,
                 const CollectiveResult& result);
  void complete(RankState& rank, const CollectiveCall& call, const PendingCollective& pending,
                const CollectiveResult& result);
  std::vector<at::Tensor> tensors(const std::vector<TensorRef>& refs, const std::vector<PhysicalPtr>& storages,
                                  size_t from);

  DeviceBackend& backend_;
  c10::DispatchKeySet keys_;
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<CollectiveEngine> engine_;
  std::vector<int> rank_to_proxy_;
};

}  // namespace ergo::device
