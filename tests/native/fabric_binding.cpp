// The fabric and the collective engine for Python tests: thin, and only for them.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "collectives.hpp"
#include "reduce_tree.hpp"

namespace py = pybind11;
using namespace ergo;

namespace {

Deadline in_seconds(double s) {
  return std::chrono::steady_clock::now() + std::chrono::microseconds(static_cast<int64_t>(s * 1e6));
}

std::span<const std::byte> view(const py::bytes& bytes) {
  std::string_view text = bytes;
  return std::as_bytes(std::span(text.data(), text.size()));
}

py::bytes to_python(std::span<const std::byte> bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

using PySegment = std::tuple<uint8_t, uint8_t, uint64_t>;

Descriptor descriptor_of(uint64_t comm, int kind, int op, uint32_t root, const std::vector<PySegment>& segments) {
  Descriptor d{comm, static_cast<CollectiveKind>(kind), static_cast<ReduceOp>(op), root, {}, 0};
  for (auto [dtype, element, bytes] : segments) d.segments.push_back({dtype, element, bytes});
  return d;
}

class Engine {
 public:
  Engine(int self, std::vector<int> rank_to_proxy, Fabric& fabric)
      : fabric_(fabric), engine_(self, std::move(rank_to_proxy), fabric) {}

  void define(uint64_t comm, const std::vector<int>& members) { engine_.define(comm, members); }

  uint64_t issue(int rank, uint64_t comm, int kind, int op, uint32_t root, const std::vector<PySegment>& segments,
                 const py::bytes& packed, uint64_t tag) {
    Descriptor descriptor = descriptor_of(comm, kind, op, root, segments);
    // As at a load: what was part of another's input when it was pending.
    descriptor.absorbed =
        descriptor.kind == CollectiveKind::AllReduce && view(packed).empty() && packed_bytes(descriptor.segments) != 0;
    return engine_.issue(rank, descriptor, Buffer::copy_of(view(packed)),
                         [this, rank, tag, kind](CollectiveResult result) {
                           if (kind == static_cast<int>(CollectiveKind::AllReduce)) join(result);
                           done_.push_back({rank, tag, std::move(result)});
                         });
  }

  bool pump() {
    return engine_.pump([this](int peer, Slice bytes) { control_.push_back({peer, std::move(bytes)}); });
  }

  // Pumps and sleeps until a completion or a control message is there, a peer is lost, or the deadline.
  bool wait(double seconds) {
    py::gil_scoped_release release;
    auto deadline = in_seconds(seconds);
    size_t lost = fabric_.lost().size();
    std::vector<futex_waitv> waiters;
    for (;;) {
      waiters.clear();
      fabric_.append_waiters(waiters);
      while (pump()) {
      }
      if (!done_.empty() || !control_.empty() || fabric_.lost().size() != lost) return true;
      if (!wait_any(waiters, deadline)) return false;
    }
  }

  py::list take_done() {
    py::list list;
    for (auto& [rank, tag, result] : done_) {
      py::list blocks;
      for (auto& block : result.blocks) blocks.append(to_python(block.bytes()));
      list.append(py::make_tuple(rank, tag, blocks, result.error));
    }
    done_.clear();
    return list;
  }
  py::list take_control() {
    py::list list;
    for (auto& [peer, bytes] : control_) list.append(py::make_tuple(peer, to_python(bytes.bytes())));
    control_.clear();
    return list;
  }

  py::dict counts(int rank) const {
    py::dict found;
    for (auto& [id, c] : engine_.counts(rank)) {
      py::dict entry;
      entry["contributed"] = c.contributed;
      entry["completed"] = c.completed;
      entry["members"] = c.members;
      found[py::str(id.text())] = entry;
    }
    return found;
  }
  void set_targets(const std::map<std::string, uint64_t>& targets) { engine_.set_targets(parse(targets)); }
  void restore_counts(int rank, const std::map<std::string, uint64_t>& completed) {
    engine_.restore_counts(rank, parse(completed));
  }
  bool finished() const { return engine_.finished(); }
  void resume() { engine_.resume(); }

  py::list pending(int rank) const {
    py::list list;
    for (auto& p : engine_.pending(rank)) {
      std::vector<PySegment> segments;
      for (auto& s : p.descriptor.segments) segments.emplace_back(s.dtype, s.element_bytes, s.bytes);
      py::dict entry;
      entry["ticket"] = p.ticket;
      entry["sequence"] = p.sequence.text();
      entry["number"] = p.number;
      entry["comm"] = p.descriptor.comm;
      entry["kind"] = static_cast<int>(p.descriptor.kind);
      entry["op"] = static_cast<int>(p.descriptor.op);
      entry["root"] = p.descriptor.root;
      entry["segments"] = segments;
      entry["input"] = to_python(p.input.bytes());
      list.append(entry);
    }
    return list;
  }
  size_t pending_count(int rank) const { return engine_.pending_count(rank); }
  std::optional<std::string> waiting_for_lost_peer() const { return engine_.waiting_for_lost_peer(); }

 private:
  // The pieces of an AllReduce as one block.
  static void join(CollectiveResult& result) {
    std::string whole;
    for (auto& block : result.blocks) whole.append(reinterpret_cast<const char*>(block.data()), block.size());
    if (result.blocks.size() > 1) result.blocks = {Buffer::copy_of(std::as_bytes(std::span(whole)))};
  }
  static std::map<SequenceId, uint64_t> parse(const std::map<std::string, uint64_t>& named) {
    std::map<SequenceId, uint64_t> parsed;
    for (auto& [name, n] : named) parsed[SequenceId::parse(name)] = n;
    return parsed;
  }
  struct Done {
    int rank;
    uint64_t tag;
    CollectiveResult result;
  };
  Fabric& fabric_;
  CollectiveEngine engine_;
  std::vector<Done> done_;
  std::vector<std::pair<int, Slice>> control_;
};

}  // namespace

PYBIND11_MODULE(_fabric_under_test, m) {
  static py::exception<FabricError> fabric_error(m, "FabricError");
  static py::exception<CollectiveError> collective_error(m, "CollectiveError");
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const FabricError& e) {
      py::object error = static_cast<py::object&>(fabric_error)(e.what());
      error.attr("code") = e.code();
      error.attr("peer") = e.peer();
      PyErr_SetObject(fabric_error.ptr(), error.ptr());
    } catch (const CollectiveError& e) {
      py::object error = static_cast<py::object&>(collective_error)(e.what());
      error.attr("code") = e.code();
      PyErr_SetObject(collective_error.ptr(), error.ptr());
    }
  });

  py::class_<MemoryLink, std::shared_ptr<MemoryLink>>(m, "MemoryLink")
      .def(py::init<>())
      .def("deliver", &MemoryLink::deliver)
      .def("in_flight", &MemoryLink::in_flight)
      .def("close", &MemoryLink::close);

  py::class_<Fabric>(m, "Fabric")
      .def(py::init<int>())
      .def("add_memory_peer", &Fabric::add_memory_peer)
      .def("add_shm_peer", &Fabric::add_shm_peer)
      .def("add_tcp_peer", &Fabric::add_tcp_peer)
      .def("connect_tcp_peers",
           [](Fabric& fabric, const std::vector<std::tuple<int, bool, std::string, uint16_t>>& peers,
              const py::bytes& token, double timeout_s) {
             std::vector<TcpPeer> list;
             for (auto& [peer, listen, host, port] : peers) list.push_back({peer, listen, host, port});
             std::string secret = token;
             py::gil_scoped_release release;
             fabric.connect_tcp_peers(list, secret, in_seconds(timeout_s));
           })
      .def("send_control",
           [](Fabric& fabric, int peer, const py::bytes& bytes) { fabric.send_control(peer, view(bytes)); })
      .def("lost", &Fabric::lost)
      .def("flushed", &Fabric::flushed)
      .def("shutdown",
           [](Fabric& fabric, double timeout_s) {
             py::gil_scoped_release release;
             return fabric.shutdown(in_seconds(timeout_s));
           })
      .def("bytes_sent", &Fabric::bytes_sent)
      .def("bytes_received", &Fabric::bytes_received);

  py::class_<Engine>(m, "Engine")
      .def(py::init<int, std::vector<int>, Fabric&>(), py::keep_alive<1, 4>())
      .def("define", &Engine::define)
      .def("issue", &Engine::issue)
      .def("pump", &Engine::pump)
      .def("wait", &Engine::wait)
      .def("take_done", &Engine::take_done)
      .def("take_control", &Engine::take_control)
      .def("counts", &Engine::counts)
      .def("set_targets", &Engine::set_targets)
      .def("restore_counts", &Engine::restore_counts)
      .def("finished", &Engine::finished)
      .def("resume", &Engine::resume)
      .def("pending", &Engine::pending)
      .def("pending_count", &Engine::pending_count)
      .def("waiting_for_lost_peer", &Engine::waiting_for_lost_peer);

  m.def("shm_segment_bytes", &shm_segment_bytes);
  m.def("tree_split", &tree_split);
  m.def("sequence_text", [](const std::string& text) { return SequenceId::parse(text).text(); });
  m.attr("WHOLE_LIMIT") = CollectiveEngine::kWholeLimit;
}
