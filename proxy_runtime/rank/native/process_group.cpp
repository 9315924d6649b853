#include "process_group.hpp"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "channel.hpp"
#include "collective_message.hpp"
#include "storage.hpp"

namespace ergo::rank {
namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The channel is ordered, so whatever uses the results comes after the collective: the work is done, in
// the sense in which a CUDA stream is "done" with what was enqueued.
class DoneWork final : public c10d::Work {
 public:
  DoneWork(int rank, Tensors outputs, OpType type) : Work(rank, type), outputs_(std::move(outputs)) {
    std::vector<c10::Device> devices;
    if (std::any_of(outputs_.begin(), outputs_.end(), [](const Tensor& t) { return t.device().type() == kDeviceType; }))
      devices.push_back(device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  void blockCurrentStream() override {}
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

ReduceOp reduce_op(const c10d::ReduceOp& op) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.op_ <= c10d::ReduceOp::BXOR, "ergosphere: this reduce operation is not supported");
  return static_cast<ReduceOp>(static_cast<uint8_t>(op.op_));
}

class ProcessGroupErgo final : public c10d::Backend {
 public:
  ProcessGroupErgo(std::string name, uint64_t id, int rank, int size)
      : Backend(rank, size), name_(std::move(name)), id_(id), options_(c10::make_intrusive<Options>(name_)) {}

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return done({}, OpType::COALESCED); }
  void setTimeout(std::chrono::milliseconds) override {}
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
    for (const Tensor& t : tensors)
      send({.kind = CollectiveKind::Reduce,
            .reduce = reduce_op(o.reduceOp),
            .root = o.rootRank,
            .inputs = {t},
            .outputs = {t}});
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
    return done(outputs, OpType::ALLGATHER_INTO_TENSOR_COALESCED);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    check_lists(outputs.size(), inputs.size());
    for (size_t i = 0; i < outputs.size(); ++i)
      send({.kind = CollectiveKind::ReduceScatter,
            .reduce = reduce_op(o.reduceOp),
            .inputs = inputs[i],
            .outputs = {outputs[i]}});
    return done(outputs, OpType::REDUCE_SCATTER);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(input.numel() == output.numel() * getSize(),
                "reduce_scatter: the input must have world_size times the elements of the output");
    send({.kind = CollectiveKind::ReduceScatter,
          .reduce = reduce_op(o.reduceOp),
          .inputs = {input},
          .outputs = {output}});
    return done({output}, OpType::_REDUCE_SCATTER_BASE);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& o) override {
    check_lists(outputs.size(), inputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], o);
    return done(outputs, OpType::REDUCE_SCATTER_TENSOR_COALESCED);
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

  // Messages between two ranks keep their order; tags do not reorder them, as with NCCL.
  WorkPtr send(Tensors& tensors, int destination, int) override {
    for (const Tensor& t : tensors) send({.kind = CollectiveKind::Send, .root = destination, .inputs = {t}});
    return done({}, OpType::SEND);
  }
  WorkPtr recv(Tensors& tensors, int source, int) override {
    for (const Tensor& t : tensors) send({.kind = CollectiveKind::Recv, .root = source, .outputs = {t}});
    return done(tensors, OpType::RECV);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    send({.kind = CollectiveKind::Barrier});
    Channel::instance().synchronize();
    return done({}, OpType::BARRIER);
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool) override { barrier(o); }

 private:
  void send(const CollectiveCall& call) {
    send_collective(id_, call);
    ++sequence_;
  }
  WorkPtr done(Tensors outputs, OpType type) {
    return c10::make_intrusive<DoneWork>(getRank(), std::move(outputs), type);
  }
  WorkPtr reduce_in_place(Tensors& tensors, const c10d::ReduceOp& op, OpType type) {
    send({.kind = CollectiveKind::AllReduce, .reduce = reduce_op(op), .inputs = tensors, .outputs = tensors});
    return done(tensors, type);
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
  c10::intrusive_ptr<Options> options_;
  uint64_t sequence_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_process_group(const std::string& name, uint64_t id, int rank,
                                                     const std::vector<int64_t>& members) {
  Channel& channel = Channel::instance();
  channel.require();
  channel.send(Message::Communicator, 3 + members.size(), [&](uint64_t* body) {
    body[0] = id;
    body[1] = static_cast<uint64_t>(rank);
    body[2] = members.size();
    for (size_t i = 0; i < members.size(); ++i) body[3 + i] = static_cast<uint64_t>(members[i]);
  });
  return c10::make_intrusive<ProcessGroupErgo>(name, id, rank, static_cast<int>(members.size()));
}

}  // namespace ergo::rank
