// The Python face of the interposer: ergo_rank._interposer.
#include <dlfcn.h>
#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdio>
#include <memory>

#include "channel.hpp"
#include "engine_rest.hpp"
#include "fault.hpp"
#include "flags.hpp"
#include "generator.hpp"
#include "libraries.hpp"
#include "memory.hpp"
#include "pinned.hpp"
#include "process_group.hpp"
#include "queue.hpp"
#include "registration.hpp"
#include "storage.hpp"
#include "templates.hpp"
#include "tree.hpp"

namespace py = pybind11;

namespace ergo::rank {
namespace {

int raise_kept(void* kept) {
  std::unique_ptr<python_error>(static_cast<python_error*>(kept))->restore();
  return -1;
}

// cudaStreamSynchronize and its like call this through C code, where nothing may be thrown: the error
// stays in the channel's header (or will be met again) and is raised by the next call that can.
void synchronize_from_stub() {
  Channel& channel = Channel::instance();
  if (!channel.open()) return;
  try {
    channel.call(Message::Sync, 0, [](uint64_t*) {}, [](const char*, size_t) {}, /*raise_asynchronous=*/false);
  } catch (python_error& interrupted) {
    // A signal handler raised: the interpreter raises it again as soon as torch's C++ has returned to it.
    auto* kept = new python_error(std::move(interrupted));
    if (Py_AddPendingCall(&raise_kept, kept) != 0) delete kept;
  } catch (const std::exception&) {
  }
}

// cudaMemGetInfo, and the device's total memory in its properties.
void memory_for_stub(size_t* available, size_t* total) {
  if (!Channel::instance().open() && !device_memory_known()) return;
  try {
    *total = device_memory();
    const uint64_t used = memory_stats().allocated;
    *available = *total > used ? *total - used : 0;
  } catch (const std::exception&) {
    // The channel is lost: the next call that can raise says so.
  }
}

void connect_stubs() {
  if (auto* set_sync = reinterpret_cast<void (*)(void (*)())>(dlsym(RTLD_DEFAULT, "ergo_stub_set_sync")))
    set_sync(&synchronize_from_stub);
  if (auto* set_memory =
          reinterpret_cast<void (*)(void (*)(size_t*, size_t*))>(dlsym(RTLD_DEFAULT, "ergo_stub_set_memory")))
    set_memory(&memory_for_stub);
  Channel::instance().set_refusals(
      reinterpret_cast<unsigned long (*)()>(dlsym(RTLD_DEFAULT, "ergo_stub_refused_count")),
      reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "ergo_stub_last_refused")));
}

// Operators whose CUDA kernel is a Python function, as torch.library keeps them: "ns/op.overload/CUDA".
std::unordered_set<std::string> python_kernels() {
  std::unordered_set<std::string> names;
  for (auto item : py::module_::import("torch.library").attr("_impls")) {
    const auto entry = py::cast<std::string>(item);
    const auto first = entry.find('/');
    const auto last = entry.rfind('/');
    if (first == last || entry.substr(last + 1) != "CUDA") continue;
    names.insert(entry.substr(0, first) + "::" + entry.substr(first + 1, last - first - 1));
  }
  return names;
}

// Everything that libraries have registered since the last time is forwarded, and the device gets their kernels.
size_t sweep() {
  announce_libraries();
  const size_t n = sweep_operators(python_kernels());
  TORCH_CHECK(overridden_operators().empty() || library_failure().empty(), "ergosphere: a library has replaced ",
              overridden_operators().front(),
              " for CUDA tensors, and the device proxy does not have that library: ", library_failure());
  return n;
}

// After a library was loaded. Most are not for torch, which costs nothing.
void on_library_loaded() {
  if (Channel::instance().open() && libraries_changed()) sweep();
}

std::atomic<bool> sweep_scheduled{false};

int sweep_now(void*) {
  sweep_scheduled.store(false);
  try {
    sweep();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return -1;
  }
  return 0;
}

// Within the dispatcher's lock: the interpreter sweeps as soon as the library has finished loading.
void on_new_operators() {
  if (Py_IsInitialized() && !sweep_scheduled.exchange(true) && Py_AddPendingCall(&sweep_now, nullptr) != 0)
    sweep_scheduled.store(false);
}

void start(uintptr_t base, const std::string& kind, uint64_t device_bytes, std::function<void(int)> connect) {
  TORCH_CHECK(kind == "cpu" || kind == "cuda", "ergosphere: unknown kind of device: ", kind);
  Channel& channel = Channel::instance();
  if (connect) {
    join_tree(std::move(connect));
  } else {
    channel.attach(reinterpret_cast<void*>(base));
  }
  channel.install_fork_handlers();
  set_device_memory(device_bytes);
  connect_stubs();
  connect_queue();
  install_fault_handler();
  install_pinned_memory();
  c10::SetAllocator(kDeviceType, device_allocator(), 255);
  register_operators(kind == "cpu" ? DeviceKind::Cpu : DeviceKind::Cuda);
  register_composed_layouts();
  register_quantized_layout();
  start_watching_libraries();
  watch_registrations(&on_new_operators);
  // When the destructors of Python's objects have run: they may use the device, as with CUDA.
  Py_AtExit([] { Channel::instance().exit(); });
}

py::bytes store_request(const py::bytes& request) {
  const std::string bytes = request;
  std::string reply;
  Channel::instance().call(
      Message::Store, 1 + (bytes.size() + 7) / 8,
      [&](uint64_t* body) {
        body[0] = bytes.size();
        if (bytes.size() % 8 != 0) body[1 + bytes.size() / 8] = 0;
        std::memcpy(body + 1, bytes.data(), bytes.size());
      },
      [&](const char* data, size_t n) { reply.assign(data, n); }, /*raise_asynchronous=*/false);
  return reply;
}

py::bytes device_stats() {
  std::string reply;
  Channel::instance().call(
      Message::Stats, 0, [](uint64_t*) {}, [&](const char* data, size_t n) { reply.assign(data, n); });
  return reply;
}

py::dict channel_stats() {
  const ChannelStats& s = Channel::instance().stats();
  py::dict d;
  d["messages"] = s.messages;
  d["bytes"] = s.bytes;
  d["executed"] = s.executed;
  d["defined"] = s.defined;
  d["one_off"] = s.one_off;
  d["responses"] = s.responses;
  d["waits_for_room"] = s.waits_for_room;
  d["templates"] = TemplateTable::instance().size();
  d["refused"] = Channel::instance().refused();
  return d;
}

py::dict memory() {
  const MemoryStats s = memory_stats();
  py::dict d;
  d["allocated"] = s.allocated;
  d["peak"] = s.peak;
  d["allocated_ever"] = s.allocated_ever;
  d["released_ever"] = s.released_ever;
  d["allocations"] = s.allocations;
  d["releases"] = s.releases;
  d["peak_count"] = s.peak_count;
  d["failures"] = s.failures;
  d["limit"] = s.limit;
  return d;
}

}  // namespace
}  // namespace ergo::rank

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ergo::rank;
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (python_error& raised) {  // by a signal handler, during a wait
      raised.restore();
    }
  });
  m.def("start", &start,
        "Registers the device, behind the channel mapped at `base`, or the one that `connect` claims at first use.",
        py::arg("base"), py::arg("kind"), py::arg("device_bytes"), py::arg("connect") = py::none());
  m.def("bind_device", [](uintptr_t base, int index) { bind_device(reinterpret_cast<void*>(base), index); });
  m.def("bound_device", [] { return bound_device(); });
  m.def("use_device", [](int index) { use_device(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(index))); });
  m.def("synchronize", [] {
    if (bound_device() >= 0) Channel::instance().synchronize();
  });
  m.def("step", [] { Channel::instance().step(); });
  m.def("steps", [] { return Channel::instance().steps(); });
  m.def(
      "rest_engine",
      [](double limit_s) { rest_engine(std::chrono::milliseconds(static_cast<int64_t>(1e3 * limit_s))); },
      py::arg("limit_s"), py::call_guard<py::gil_scoped_release>());
  m.def("leaving", [] { Channel::instance().leaving(); });
  m.def("exit", [] { Channel::instance().exit(); });
  m.def("is_open", [] { return Channel::instance().open(); });
  m.def("is_forked", [] { return Channel::instance().forked(); });
  m.def("require", [] { Channel::instance().require(); });
  m.def("sweep", &sweep);
  m.def("on_library_loaded", &on_library_loaded);
  m.def("default_generator", [](int index) { return default_generator(index); }, py::arg("index") = 0);
  m.def("new_generator", [] { return new_generator(); });
  m.def("resize_storage",
        [](const at::Tensor& t, uint64_t bytes) { resize_storage(*t.storage().unsafeGetStorageImpl(), bytes); });
  m.def("handle", [](const at::Tensor& t) { return handle_of(t); });
  m.def("store_request", &store_request);
  m.def("device_stats", &device_stats);
  m.def("channel_stats", &channel_stats);
  m.def("memory_stats", &memory);
  m.def("reset_peak_memory", [] { reset_peak_memory(); });
  m.def("reset_accumulated_memory", [] { reset_accumulated_memory(); });
  m.def("set_memory_fraction", [](double fraction) { set_memory_fraction(fraction); });
  m.def("memory_fraction", [] { return memory_fraction(); });
  m.def("touch_flags", [] { Flags::instance().touch(); });
  m.def("set_flush_denormal", [](bool on) { Flags::instance().set_flush_denormal(on); });
  m.def("set_threads", [](uint64_t n) { Flags::instance().set_threads(n); });
  m.def("fault_raised", [] { return Channel::instance().fault_raised(); });
  m.def("make_process_group", [](const std::string& name, uint64_t id, int rank, const std::vector<int64_t>& members) {
    return make_process_group(name, id, rank, members);
  });
  m.def("make_meeting_process_group", [](const std::string& name, int rank, int size, Meet meet) {
    return make_meeting_process_group(name, rank, size, std::move(meet));
  });
}
