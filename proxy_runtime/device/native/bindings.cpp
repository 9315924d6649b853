// The Python face of the device side: the module _ergo_device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>

#include "proxy.hpp"

namespace py = pybind11;

namespace ergo::device {
namespace {

// Deadlines cross the boundary as seconds from now.
Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e6)));
}

py::dict comms_dict(const std::map<std::string, MemberCounts>& comms) {
  py::dict result;
  for (const auto& [text, counts] : comms) {
    py::dict one;
    one["contributed"] = counts.contributed;
    one["completed"] = counts.completed;
    one["members"] = counts.members;
    one["scatters"] = counts.scatters;
    result[py::str(text)] = one;
  }
  return result;
}

py::dict stop(Proxy& proxy, std::optional<uint64_t> at_step, double deadline_s) {
  StopReport report;
  {
    py::gil_scoped_release release;
    report = proxy.stop(at_step, after(deadline_s));
  }
  py::dict ranks;
  for (const auto& [rank, r] : report.ranks) {
    py::dict one;
    one["step"] = r.step;
    one["exited"] = r.exited;
    one["failure"] = r.failure;
    one["comms"] = comms_dict(r.comms);
    ranks[py::str(std::to_string(rank))] = one;
  }
  py::dict result;
  result["ranks"] = ranks;
  result["reached"] = report.reached;
  return result;
}

py::dict finish(Proxy& proxy, std::map<std::string, uint64_t> targets, double deadline_s) {
  FinishReport report;
  {
    py::gil_scoped_release release;
    report = proxy.finish(std::move(targets), after(deadline_s));
  }
  py::dict completed;
  for (const auto& [text, ranks] : report.completed) {
    py::dict one;
    for (const auto& [rank, n] : ranks) one[py::str(std::to_string(rank))] = n;
    completed[py::str(text)] = one;
  }
  py::dict result;
  result["completed"] = completed;
  result["pending_operations"] = report.pending_operations;
  result["pending_bytes"] = report.pending_bytes;
  return result;
}

py::dict load(Proxy& proxy, uint32_t rank, const std::string& meta, const std::string& storages, double deadline_s) {
  std::map<std::string, MemberCounts> counts;
  {
    py::gil_scoped_release release;
    counts = proxy.load(rank, meta, storages, after(deadline_s));
  }
  return comms_dict(counts);
}

py::dict splice_dict(const splice::Counters& c) {
  py::dict result;
  result["executed"] = c.executed;
  result["shared"] = c.shared;
  result["copies"] = c.copies;
  result["copied_bytes"] = c.copied_bytes;
  result["merged_bytes"] = c.merged_bytes;
  result["set_aside_bytes"] = c.set_aside_bytes;
  result["timeouts"] = c.timeouts;
  result["parks"] = c.parks;
  result["lockstep_runs"] = c.lockstep_runs;
  result["lockstep_breaks"] = c.lockstep_breaks;
  result["verified"] = c.verified;
  result["mismatches"] = c.mismatches;
  result["unshared"] = std::vector<std::string>(c.unshared.begin(), c.unshared.end());
  result["physical_bytes"] = c.physical_bytes;
  result["peak_bytes"] = c.peak_bytes;
  result["step_peak_bytes"] = c.step_peak_bytes;
  result["logical_bytes"] = c.logical_bytes;
  return result;
}

py::dict stats(Proxy& proxy, double deadline_s) {
  ProxyStats s;
  {
    py::gil_scoped_release release;
    s = proxy.stats(after(deadline_s));
  }
  py::dict ranks;
  for (const auto& [rank, json] : s.ranks) ranks[py::str(std::to_string(rank))] = json;
  py::dict result;
  result["ranks"] = ranks;
  result["physical_bytes"] = s.physical_bytes;
  result["fabric_bytes_sent"] = s.fabric_bytes_sent;
  result["fabric_bytes_received"] = s.fabric_bytes_received;
  result["running"] = s.running;
  result["stopped"] = s.stopped;
  if (s.splice) result["splice"] = splice_dict(*s.splice);
  return result;
}

void connect(Proxy& proxy, int self, std::vector<int> ranks, std::string token, std::vector<std::pair<int, int>> shared,
             std::vector<std::tuple<int, bool, std::string, int>> tcp, double deadline_s, int board_fd,
             std::vector<int> board) {
  FabricSpec spec;
  spec.self = self;
  spec.rank_to_proxy = std::move(ranks);
  spec.token = std::move(token);
  for (auto [index, fd] : shared) spec.shared.push_back({index, fd});
  spec.board_fd = board_fd;
  spec.board = std::move(board);
  for (auto& [index, listen, host, port] : tcp) spec.tcp.push_back({index, listen, host, static_cast<uint16_t>(port)});
  proxy.connect(std::move(spec), after(deadline_s));
}

}  // namespace
}  // namespace ergo::device

PYBIND11_MODULE(_ergo_device, m) {
  using namespace ergo::device;
  m.doc() = "Device side of the Ergosphere runtime: executes the ranks' operators and owns their storages.";
  m.attr("PROTOCOL_VERSION") = ergo::kProtocolVersion;
  m.attr("BOARD_REGION_BYTES") = ergo::Board::kRegionBytes;

  // Python code reads `code` and the message; the classes derive from RuntimeError.
  static py::exception<ControlError> control_error(m, "ControlError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr p) {
    auto raise = [](const char* message, const std::string& code) {
      py::object error = static_cast<const py::object&>(control_error)(message);
      error.attr("code") = code;
      PyErr_SetObject(control_error.ptr(), error.ptr());
    };
    try {
      if (p) std::rethrow_exception(p);
    } catch (const ControlError& e) {
      raise(e.what(), e.code());
    } catch (const ergo::FabricError& e) {
      raise(e.what(), "device-proxy.fabric");
    }
  });

  m.def("keep_freed_memory", &keep_freed_memory, "Sets malloc's thresholds for a process whose device is the CPU.");
  m.def("shm_segment_bytes", &ergo::shm_segment_bytes, py::arg("ring_bytes"),
        "Size in bytes of the memfd that joins two proxies with rings of `ring_bytes` each way.");

  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<Proxy>(m, "Proxy")
      .def(py::init<const std::string&, uint64_t>(), py::arg("device_kind"), py::arg("build") = 0)
      .def("serve", &Proxy::serve, release(), "Serves until shut_down(); call it from the process's main thread.")
      .def("shut_down", &Proxy::shut_down, release())
      .def("connect", &connect, release(), py::arg("self_index"), py::arg("ranks"), py::arg("token"), py::arg("shared"),
           py::arg("tcp"), py::arg("deadline_s"), py::arg("board_fd") = -1, py::arg("board") = std::vector<int>())
      .def(
          "attach", [](Proxy& p, uint32_t rank, int fd, double s) { p.attach(rank, fd, after(s)); }, release(),
          py::arg("rank"), py::arg("fd"), py::arg("deadline_s"))
      .def("load", &load, py::arg("rank"), py::arg("meta"), py::arg("storages"), py::arg("deadline_s"))
      .def(
          "run", [](Proxy& p, double s) { p.run(after(s)); }, release(), py::arg("deadline_s"))
      .def("stop", &stop, py::arg("at_step"), py::arg("deadline_s"))
      .def("finish", &finish, py::arg("targets"), py::arg("deadline_s"))
      .def(
          "dump",
          [](Proxy& p, uint32_t rank, const std::string& meta, const std::string& storages, double s) {
            return p.dump(rank, meta, storages, after(s));
          },
          release(), py::arg("rank"), py::arg("meta"), py::arg("storages"), py::arg("deadline_s"))
      .def(
          "resume", [](Proxy& p, double s) { p.resume(after(s)); }, release(), py::arg("deadline_s"))
      .def("stats", &stats, py::arg("deadline_s"));
}
