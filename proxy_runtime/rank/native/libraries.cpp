#include "libraries.hpp"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

#include "channel.hpp"
#include "library.hpp"

namespace ergo::rank {
namespace {

// Names that a library imports which registers operators or kernels: torch::Library's constructors, its stable C
// interface, and the oldest way.
constexpr std::array<std::string_view, 3> kRegistration{"_ZN5torch7LibraryC", "torch_library_init",
                                                        "_ZN3c1017RegisterOperators"};

struct Candidate {
  std::string path;
  std::string soname;
  std::vector<std::string> needed;
  bool registers = false;
};

std::string file_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }

Candidate inspect(const dl_phdr_info& info) {
  Candidate result;
  char resolved[PATH_MAX];
  result.path = realpath(info.dlpi_name, resolved) != nullptr ? resolved : info.dlpi_name;
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < info.dlpi_phnum; ++i)
    if (info.dlpi_phdr[i].p_type == PT_DYNAMIC)
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + info.dlpi_phdr[i].p_vaddr);
  if (dynamic == nullptr) return result;
  const char* names = nullptr;
  size_t length = 0;
  for (const auto* d = dynamic; d->d_tag != DT_NULL; ++d) {
    if (d->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(d->d_un.d_ptr);
    if (d->d_tag == DT_STRSZ) length = d->d_un.d_val;
  }
  // The loader relocates this entry in place, but not in its own vDSO.
  if (names == nullptr || reinterpret_cast<ElfW(Addr)>(names) < info.dlpi_addr) return result;
  for (const auto* d = dynamic; d->d_tag != DT_NULL; ++d) {
    if (d->d_tag == DT_NEEDED) result.needed.emplace_back(names + d->d_un.d_val);
    if (d->d_tag == DT_SONAME) result.soname = names + d->d_un.d_val;
  }
  for (auto name : kRegistration)
    result.registers = result.registers || memmem(names, length, name.data(), name.size()) != nullptr;
  return result;
}

// Guards what follows, which lives for ever.
std::mutex& lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// Paths that the device has been told of, or has anyway.
std::set<std::string>& known() {
  static auto* paths = new std::set<std::string>;
  return *paths;
}

std::string& failure() {
  static auto* text = new std::string;
  return *text;
}

// Every library with a path, in the order of loading.
std::vector<Candidate> loaded_libraries() {
  std::vector<Candidate> all;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        if (info->dlpi_name == nullptr || info->dlpi_name[0] == '\0' || strchr(info->dlpi_name, '/') == nullptr)
          return 0;
        static_cast<std::vector<Candidate>*>(data)->push_back(inspect(*info));
        return 0;
      },
      &all);
  return all;
}

const Candidate* find_needed(const std::vector<Candidate>& all, const std::string& name) {
  for (const auto& candidate : all)
    if (candidate.soname == name || file_of(candidate.path) == name) return &candidate;
  return nullptr;
}

// `library` behind everything that it needs and the device may not have.
void put_in_order(const Candidate& library, const std::vector<Candidate>& all, std::set<std::string>& seen,
                  std::vector<std::string>& order) {
  if (known().count(library.path) != 0 || !seen.insert(library.path).second) return;
  for (const auto& name : library.needed)
    if (const Candidate* needed = find_needed(all, name)) put_in_order(*needed, all, seen, order);
  order.push_back(library.path);
}

class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat about{};
    if (fd >= 0 && fstat(fd, &about) == 0 && about.st_size > 0) {
      size_ = static_cast<size_t>(about.st_size);
      void* mapped = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
      bytes_ = mapped == MAP_FAILED ? nullptr : static_cast<const char*>(mapped);
    }
    if (fd >= 0) ::close(fd);
  }
  ~MappedFile() {
    if (bytes_ != nullptr) munmap(const_cast<char*>(bytes_), size_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const char* bytes() const { return bytes_; }
  size_t size() const { return size_; }

 private:
  const char* bytes_ = nullptr;
  size_t size_ = 0;
};

struct Name {
  uint64_t size, hash;
  const std::string& path;

  size_t words() const { return 3 + (path.size() + 7) / 8; }
  uint64_t* put(uint64_t* body) const {
    body[0] = size;
    body[1] = hash;
    body[2] = path.size();
    const size_t padded = (path.size() + 7) / 8;
    std::memset(body + 3, 0, 8 * padded);
    std::memcpy(body + 3, path.data(), path.size());
    return body + 3 + padded;
  }
};

bool ask(const Name& name) {
  bool loaded = false;
  Channel::instance().call(
      Message::Library, name.words(), [&](uint64_t* body) { name.put(body); },
      [&](const char* data, size_t n) { loaded = n == 1 && *data == 1; }, /*raise_asynchronous=*/false);
  return loaded;
}

void send_contents(const Name& name, const MappedFile& file) {
  Channel& channel = Channel::instance();
  const size_t chunk = channel.write_chunk() / 2;
  for (size_t at = 0; at < file.size(); at += chunk) {
    const size_t n = std::min(chunk, file.size() - at);
    const size_t padded = (n + 7) / 8;
    channel.send(Message::LibraryPart, name.words() + 1 + padded, [&](uint64_t* body) {
      uint64_t* rest = name.put(body);
      rest[0] = n;
      rest[padded] = 0;
      std::memcpy(rest + 1, file.bytes() + at, n);
    });
  }
}

void announce(const std::string& path) {
  const MappedFile file(path);
  if (file.bytes() == nullptr) {
    failure() = path + " cannot be read any more.";
    return;
  }
  const Name name{file.size(), content_hash(file.bytes(), file.size()), path};
  try {
    if (ask(name)) return;
    send_contents(name, file);
    if (!ask(name)) failure() = "The device proxy cannot load " + path + ".";
  } catch (const c10::Error& e) {
    failure() = e.what_without_backtrace();
  }
}

}  // namespace

void start_watching_libraries() {
  libraries_changed();
  std::lock_guard<std::mutex> guard(lock());
  for (auto& library : loaded_libraries()) known().insert(std::move(library.path));
}

bool libraries_changed() {
  static std::atomic<unsigned long long> seen{0};
  unsigned long long now = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        *static_cast<unsigned long long*>(data) = info->dlpi_adds;
        return 1;
      },
      &now);
  return seen.exchange(now) != now;
}

void announce_libraries() {
  if (!Channel::instance().open()) return;
  GilRelease gil;
  std::lock_guard<std::mutex> guard(lock());
  const auto all = loaded_libraries();
  std::set<std::string> seen;
  std::vector<std::string> order;
  for (const auto& library : all)
    if (library.registers) put_in_order(library, all, seen, order);
  for (const auto& path : order) {
    known().insert(path);
    announce(path);
  }
}

void take_note_of_libraries() {
  if (C10_UNLIKELY(libraries_changed())) announce_libraries();
}

std::string library_failure() {
  std::lock_guard<std::mutex> guard(lock());
  return failure();
}

}  // namespace ergo::rank
