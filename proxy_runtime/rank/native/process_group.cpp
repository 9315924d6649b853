#include "process_group.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>

#include "channel.hpp"
#include "collective_message.hpp"
#include "storage.hpp"
#include "tree.hpp"
#include "work.hpp"

namespace ergo::rank {
namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

ReduceOp reduce_op(const c10d::ReduceOp& op) {
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) return ReduceOp::Sum;  // of what premultiplied() gives
  TORCH_CHECK_NOT_IMPLEMENTED(op.op_ <= c10d::ReduceOp::BXOR, "ergosphere: this reduce operation is not supported");
  return static_cast<ReduceOp>(static_cast<uint8_t>(op.op_));
}

// Newer versions of torch have names of their own for these two.
template <class Type>
constexpr Type gathered_into_tensors() {
  if constexpr (requires { Type::ALLGATHER_INTO_TENSOR_COALESCED; })
    return Type::ALLGATHER_INTO_TENSOR_COALESCED;
  else
    return Type::ALLGATHER_COALESCED;
}
template <class Type>
constexpr Type scattered_tensors() {
  if constexpr (requires { Type::REDUCE_SCATTER_TENSOR_COALESCED; })
    return Type::REDUCE_SCATTER_TENSOR_COALESCED;
  else
    return Type::REDUCE_SCATTER;
}

// The inputs, each multiplied by the factor of a PREMUL_SUM, and as they are for any other reduction.
Tensors premultiplied(const Tensors& inputs, const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return inputs;
  const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(factor != nullptr, "ergosphere: a premultiplied sum without its factor");
  at::NoGradGuard no_grad;
  Tensors result;
  for (const Tensor& t : inputs)
    result.push_back(factor->tensor_factor.defined() ? t.mul(factor->tensor_factor.to(t.device(), t.scalar_type()))
                                                     : t.mul(factor->double_factor));
  return result;
}

// Must begin as torch's own gloo backend does: DDP's logger looks at the number of its threads through a static cast
// of every backend that calls itself "gloo" (logger.cpp).
struct GlooOptions : c10d::Backend::Options {
  using Options::Options;
  // Virtual in newer versions of torch only, hence no `override`.
  c10::intrusive_ptr<Options> clone() const { return c10::make_intrusive<GlooOptions>(*this); }
  std::vector<std::shared_ptr<void>> devices;
  int threads = 1;
};
class GlooShaped : public c10d::Backend {
 public:
  GlooShaped(const std::string& name, int rank, int size)
      : Backend(rank, size), options_(c10::make_intrusive<GlooOptions>(name)) {}

 protected:
  std::shared_ptr<void> store_;
  const c10::intrusive_ptr<GlooOptions> options_;
};

class ProcessGroupErgo final : public GlooShaped {
 public:
  ProcessGroupErgo(std::string name, uint64_t id, int rank, std::vector<int64_t> members)
      : GlooShaped(name, rank, static_cast<int>(members.size())),
        name_(std::move(name)),
        id_(id),
        members_(std::move(members)) {
    announce(id_);
  }
  ProcessGroupErgo(std::string name, Meet meet, int rank, int size)
      : GlooShaped(name, rank, size), name_(std::move(name)), id_(0), meet_(std::move(meet)) {}

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    return done({}, OpType::COALESCED);
  }
  bool supportsSplitting() const override { return true; }
  // `ranks` are of this group. All its members split it in the same order.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    const auto own = std::find(ranks.begin(), ranks.end(), getRank());
    if (own == ranks.end()) return nullptr;
    const uint64_t parent = id();
    std::vector<int64_t> members;
    uint64_t what = 0x73706C6974ull;
    for (int rank : ranks) {
      members.push_back(members_.at(rank));
      what = (what ^ static_cast<uint64_t>(rank)) * 0x100000001B3ull + ranks.size();
    }
    auto child = c10::make_intrusive<ProcessGroupErgo>(name_, mixed(parent, what + ++splits_[ranks]),
                                                       static_cast<int>(own - ranks.begin()), std::move(members));
    if (options) child->setTimeout(options->timeout);
    return child;
  }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setSequenceNumberForGroup() override {}

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    for (const Tensor& t : tensors) send({.kind = CollectiveKind::Broadcast, .root = o.rootRank, .outputs = {t}});
    return done(tensors, OpType::BROADCAST);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    return reduce_in_place(tensors, o.reduceOp, OpType::ALLREDUCE);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return reduce_in_place(tensors, o.reduceOp, OpType::ALLREDUCE_COALESCED);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    // In place at the root; what a premultiplied sum works on is a copy.
    const Tensors values = premultiplied(tensors, o.reduceOp);
    for (size_t i = 0; i < tensors.size(); ++i) {
      send({.kind = CollectiveKind::Reduce,
            .reduce = reduce_op(o.reduceOp),
            .root = o.rootRank,
            .inputs = {values[i]},
            .outputs = {values[i]}});
      if (getRank() == o.rootRank) take_over(tensors[i], values[i]);
    }
    return done(tensors, OpType::REDUCE);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    check_lists(outputs.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i)
      send({.kind = CollectiveKind::AllGather, .inputs = {inputs[i]}, .outputs = outputs[i]});
    return done(outputs.empty() ? Tensors{} : outputs[0], OpType::ALLGATHER);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    // Here the outer list is by rank: outputs[rank][tensor].
    Tensors all;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors of_tensor;
      for (auto& of_rank : outputs) of_tensor.push_back(of_rank.at(i));
      send({.kind = CollectiveKind::AllGather, .inputs = {inputs[i]}, .outputs = of_tensor});
      all.insert(all.end(), of_tensor.begin(), of_tensor.end());
    }
    return done(all, OpType::ALLGATHER_COALESCED);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(output.numel() == input.numel() * getSize(),
                "all_gather: the output must have world_size times the elements of the input");
    send({.kind = CollectiveKind::AllGather, .inputs = {input}, .outputs = {output}});
    return done({output}, OpType::_ALLGATHER_BASE);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    check_lists(outputs.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) _allgather_base(outputs[i], inputs[i], o);
    return done(outputs, gathered_into_tensors<OpType>());
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    check_lists(outputs.size(), inputs.size());
    for (size_t i = 0; i < outputs.size(); ++i)
      send({.kind = CollectiveKind::ReduceScatter,
            .reduce = reduce_op(o.reduceOp),
            .inputs = premultiplied(inputs[i], o.reduceOp),
            .outputs = {outputs[i]}});
    return done(outputs, OpType::REDUCE_SCATTER);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(input.numel() == output.numel() * getSize(),
                "reduce_scatter: the input must have world_size times the elements of the output");
    send({.kind = CollectiveKind::ReduceScatter,
          .reduce = reduce_op(o.reduceOp),
          .inputs = premultiplied({input}, o.reduceOp),
          .outputs = {output}});
    return done({output}, OpType::_REDUCE_SCATTER_BASE);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& o) override {
    check_lists(outputs.size(), inputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], o);
    return done(outputs, scattered_tensors<OpType>());
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    send({.kind = CollectiveKind::Gather,
          .root = o.rootRank,
          .inputs = inputs,
          .outputs = outputs.empty() ? Tensors{} : outputs[0]});
    return done(outputs.empty() ? Tensors{} : outputs[0], OpType::GATHER);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    send({.kind = CollectiveKind::Scatter,
          .root = o.rootRank,
          .inputs = inputs.empty() ? Tensors{} : inputs[0],
          .outputs = outputs});
    return done(outputs, OpType::SCATTER);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    send({.kind = CollectiveKind::AllToAll, .inputs = inputs, .outputs = outputs});
    return done(outputs, OpType::ALLTOALL);
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions&) override {
    // Splits are rows of dimension 0; the message counts elements.
    auto extra = element_splits(input, input_splits);
    const auto out = element_splits(output, output_splits);
    extra.insert(extra.end(), out.begin(), out.end());
    send({.kind = CollectiveKind::AllToAll, .inputs = {input}, .outputs = {output}, .extra = std::move(extra)});
    return done({output}, OpType::ALLTOALL_BASE);
  }

  // As with NCCL, tags do not reorder messages of device tensors; as with gloo, those of host tensors match by tag.
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    for (const Tensor& t : tensors)
      send({.kind = CollectiveKind::Send, .root = destination, .inputs = {t}}, tagged(tag, t));
    return done({}, OpType::SEND);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    for (const Tensor& t : tensors)
      send({.kind = CollectiveKind::Recv, .root = source, .outputs = {t}}, tagged(tag, t));
    return done(tensors, OpType::RECV);
  }
  WorkPtr recvAnysource(Tensors&, int) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "ergosphere: receiving from any rank has no fixed order, so a job that does it could "
                                "not be continued with the same bits. Name the rank: recv(tensor, src=...).");
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    send({.kind = CollectiveKind::Barrier});
    Channel::instance().synchronize();
    settle_forgotten_works();
    return done({}, OpType::BARRIER);
  }

  // Everybody reports to group rank 0, which answers: so it knows who has not come.
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    at::NoGradGuard no_grad;
    const auto timeout = o.timeout == c10d::kUnsetTimeout || o.timeout == kNoTimeout ? options_->timeout : o.timeout;
    const auto until = std::chrono::steady_clock::now() + timeout;
    // One communicator for each: what a barrier that failed has left behind disturbs no later one.
    const uint64_t group = derived(0x6D6F6E69746F72ull + 2 * ++monitored_barriers_);
    const Tensor token = at::zeros({1}, at::TensorOptions().device(own_device()).dtype(at::kByte));
    std::string missing;
    auto report = [&] {
      TORCH_CHECK(missing.empty(), "Rank ", getRank(), " waited ", timeout.count(),
                  " ms in monitored_barrier for ranks that did not come: ", missing);
    };
    if (getRank() != 0) {
      send({.kind = CollectiveKind::Send, .root = 0, .inputs = {token}}, group);
      if (!received(0, group, until)) missing = "0 (or ranks that it waits for)";
      report();
      return;
    }
    for (int from = 1; from < getSize(); ++from) {
      if (received(from, group, until)) continue;
      missing += (missing.empty() ? "" : ", ") + std::to_string(from);
      if (!wait_all_ranks) report();
    }
    report();
    for (int to = 1; to < getSize(); ++to) send({.kind = CollectiveKind::Send, .root = to, .inputs = {token}}, group);
  }

 private:
  void send(const CollectiveCall& call) { send(call, id()); }
  void send(const CollectiveCall& call, uint64_t communicator) {
    auto results = send_collective(communicator, call);
    results_.insert(results_.end(), std::make_move_iterator(results.begin()), std::make_move_iterator(results.end()));
    ++sequence_;
  }
  WorkPtr done(Tensors outputs, OpType type) {
    // The handles of calls that are coalesced are dropped: the one of all of them waits for their results.
    if (coalescing_) return make_work(getRank(), std::move(outputs), type);
    return make_work(getRank(), std::move(outputs), type, std::exchange(results_, {}));
  }
  WorkPtr reduce_in_place(Tensors& tensors, const c10d::ReduceOp& op, OpType type) {
    const Tensors values = premultiplied(tensors, op);
    send({.kind = CollectiveKind::AllReduce, .reduce = reduce_op(op), .inputs = values, .outputs = values});
    for (size_t i = 0; i < tensors.size(); ++i) take_over(tensors[i], values[i]);
    return done(tensors, type);
  }
  // The result of a premultiplied sum, which was made in a copy.
  void take_over(const Tensor& target, const Tensor& value) {
    if (target.is_same(value)) return;
    at::NoGradGuard no_grad;
    if (!results_.empty()) make_work(getRank(), {}, OpType::UNKNOWN, std::exchange(results_, {}))->wait();
    Tensor(target).copy_(value);
  }

  uint64_t id() {
    if (C10_UNLIKELY(static_cast<bool>(meet_))) {
      std::tie(id_, members_) = meet_();
      announce(id_);
      meet_ = nullptr;
    }
    return id_;
  }
  void announce(uint64_t communicator) {
    Channel& channel = Channel::instance();
    channel.require();
    channel.send(Message::Communicator, 3 + members_.size(), [&](uint64_t* body) {
      body[0] = communicator;
      body[1] = static_cast<uint64_t>(getRank());
      body[2] = members_.size();
      for (size_t i = 0; i < members_.size(); ++i) body[3 + i] = static_cast<uint64_t>(members_[i]);
    });
  }
  // Another communicator of the same members, the same at all of them for equal `what`.
  uint64_t derived(uint64_t what) {
    auto [entry, fresh] = derived_.try_emplace(what, 0);
    if (fresh) {
      entry->second = mixed(id(), what);
      announce(entry->second);
    }
    return entry->second;
  }
  static uint64_t mixed(uint64_t group, uint64_t what) {
    uint64_t mixed = (group ^ what) * 0x9E3779B97F4A7C15ull;
    mixed ^= mixed >> 32;
    return mixed * 0xBF58476D1CE4E5B9ull + what;
  }
  uint64_t tagged(int tag, const Tensor& t) {
    return tag == 0 || t.device().type() == kDeviceType ? id() : derived(2 * static_cast<uint64_t>(tag) + 1);
  }
  bool received(int source, uint64_t communicator, std::chrono::steady_clock::time_point until) {
    const Tensor token = at::empty({1}, at::TensorOptions().device(own_device()).dtype(at::kByte));
    send({.kind = CollectiveKind::Recv, .root = source, .outputs = {token}}, communicator);
    while (!collectives_done({token})) {
      if (std::chrono::steady_clock::now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  static void check_lists(size_t outputs, size_t inputs) {
    TORCH_CHECK(outputs == inputs, "collective: got ", outputs, " outputs for ", inputs, " inputs");
  }
  std::vector<int64_t> element_splits(const Tensor& t, const std::vector<int64_t>& rows) const {
    if (rows.empty()) {
      TORCH_CHECK(t.numel() % getSize() == 0, "all_to_all: dimension 0 does not divide equally across the group");
      return std::vector<int64_t>(getSize(), t.numel() / getSize());
    }
    TORCH_CHECK(static_cast<int>(rows.size()) == getSize(), "all_to_all: one split size per rank is needed");
    TORCH_CHECK(t.dim() > 0 && std::accumulate(rows.begin(), rows.end(), int64_t{0}) == t.size(0),
                "all_to_all: split sizes do not sum up to dimension 0");
    const int64_t row = t.size(0) == 0 ? 0 : t.numel() / t.size(0);
    std::vector<int64_t> splits;
    for (int64_t n : rows) splits.push_back(n * row);
    return splits;
  }

  std::string name_;
  uint64_t id_;
  std::vector<int64_t> members_;
  std::map<uint64_t, uint64_t> derived_;  // communicators of tags and monitored barriers
  std::map<std::vector<int>, uint64_t> splits_;
  uint64_t sequence_ = 0, monitored_barriers_ = 0;
  bool coalescing_ = false;
  HostResults results_;  // of the call that is being made, or of all that are coalesced
  Meet meet_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_meeting_process_group(const std::string& name, int rank, int size, Meet meet) {
  return c10::make_intrusive<ProcessGroupErgo>(name, std::move(meet), rank, size);
}

c10::intrusive_ptr<c10d::Backend> make_process_group(const std::string& name, uint64_t id, int rank,
                                                     const std::vector<int64_t>& members) {
  return c10::make_intrusive<ProcessGroupErgo>(name, id, rank, members);
}

}  // namespace ergo::rank
