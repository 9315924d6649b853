#include "state_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "failure.hpp"

namespace ergo::device {
namespace {

constexpr size_t kBounce = 4 << 20;

uint64_t name_word(std::string_view name) {
  uint64_t word = 0;
  std::memcpy(&word, name.data(), std::min<size_t>(name.size(), sizeof word));
  return word;
}

uint64_t checksum(const uint64_t* words, size_t n) {
  uint64_t h = 0xCBF29CE484222325ull;
  for (size_t i = 0; i < n; i++) {
    h = (h ^ words[i]) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
  }
  return h;
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

WordWriter& MetaWriter::section(std::string_view name) {
  return sections_.emplace_back(name_word(name), WordWriter()).second;
}

void MetaWriter::write(const std::string& path) const {
  WordWriter all;
  all.word(kMetaMagic);
  all.word(kMetaVersion);
  all.word(sections_.size());
  for (const auto& [name, words] : sections_) {
    all.word(name);
    all.word(words.size());
    all.append(words);
  }
  all.word(checksum(all.words().data(), all.size()));
  Descriptor fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const auto* p = reinterpret_cast<const char*>(all.words().data());
  size_t left = all.size() * sizeof(uint64_t);
  while (fd.get() >= 0 && left > 0) {
    ssize_t n = ::write(fd.get(), p, left);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;
    p += n, left -= static_cast<size_t>(n);
  }
  if (fd.get() < 0 || left > 0)
    throw ControlError("device-proxy.dump", "the device state cannot be written to " + path + ": " + strerror(errno));
}

MetaReader::MetaReader(const std::string& path) {
  auto damaged = [&](const std::string& why) -> ControlError {
    return ControlError("device-proxy.meta", "the device state in " + path + " cannot be used: " + why);
  };
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat st{};
  if (fd.get() < 0 || fstat(fd.get(), &st) != 0) throw damaged(strerror(errno));
  auto bytes = static_cast<size_t>(st.st_size);
  if (bytes % sizeof(uint64_t) != 0 || bytes < 4 * sizeof(uint64_t)) throw damaged("it is cut off");
  words_.resize(bytes / sizeof(uint64_t));
  size_t got = 0;
  while (got < bytes) {
    ssize_t n = ::read(fd.get(), reinterpret_cast<char*>(words_.data()) + got, bytes - got);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw damaged(n < 0 ? strerror(errno) : "it is cut off");
    got += static_cast<size_t>(n);
  }
  if (words_[0] != kMetaMagic) throw damaged("it is no device state");
  if (words_[1] != kMetaVersion)
    throw damaged("its format has version " + std::to_string(words_[1]) + ", this build reads " +
                  std::to_string(kMetaVersion));
  if (checksum(words_.data(), words_.size() - 1) != words_.back()) throw damaged("its checksum is wrong");
  try {
    WordReader reader(words_.data() + 2, words_.size() - 3);
    uint64_t n = reader.word();
    for (uint64_t i = 0; i < n; i++) {
      uint64_t name = reader.word(), size = reader.word();
      const uint64_t* begin = reader.words(size);
      sections_[name] = {static_cast<size_t>(begin - words_.data()), size};
    }
  } catch (const std::runtime_error&) {
    throw damaged("its sections are longer than the file");
  }
}

WordReader MetaReader::section(std::string_view name) const {
  auto it = sections_.find(name_word(name));
  if (it == sections_.end()) throw std::runtime_error("the section '" + std::string(name) + "' is missing");
  return WordReader(words_.data() + it->second.first, it->second.second);
}

void put_text(WordWriter& words, std::string_view text) {
  words.word(text.size());
  words.bytes(text.data(), text.size());
}

std::string get_text(WordReader& words) {
  size_t n = words.word();
  return std::string(words.bytes(n), n);
}

StoragesFile::StoragesFile(std::string path, Mode mode) : path_(std::move(path)), mode_(mode) {
  int flags = mode == Mode::Create ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY;
  fd_ = ::open(path_.c_str(), flags | O_CLOEXEC, 0600);
  if (fd_ < 0) fail(strerror(errno));
}

StoragesFile::~StoragesFile() {
  if (fd_ >= 0) ::close(fd_);
}

void StoragesFile::fail(const std::string& what) const {
  if (mode_ == Mode::Create)
    throw ControlError("device-proxy.dump", "device storages cannot be written to " + path_ + ": " + what);
  throw ControlError("device-proxy.storages", "device storages cannot be read from " + path_ + ": " + what);
}

void StoragesFile::write_all(const void* data, size_t n, uint64_t at) {
  const auto* p = static_cast<const char*>(data);
  while (n > 0) {
    ssize_t done = ::pwrite(fd_, p, n, static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(strerror(errno));
    p += done, at += static_cast<uint64_t>(done), n -= static_cast<size_t>(done);
  }
}

void StoragesFile::read_all(void* data, size_t n, uint64_t at) {
  auto* p = static_cast<char*>(data);
  while (n > 0) {
    ssize_t done = ::pread(fd_, p, n, static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(strerror(errno));
    if (done == 0) fail("it is shorter than its meta file says");
    p += done, at += static_cast<uint64_t>(done), n -= static_cast<size_t>(done);
  }
}

uint64_t StoragesFile::append(DeviceBackend& backend, const c10::Storage& storage) {
  uint64_t at = (end_ + kStorageAlign - 1) / kStorageAlign * kStorageAlign;
  size_t bytes = storage.nbytes();
  if (const void* view = backend.host_view(storage)) {
    write_all(view, bytes, at);
  } else {
    std::vector<char> bounce(std::min(bytes, kBounce));
    for (size_t done = 0; done < bytes;) {
      size_t n = std::min(bytes - done, bounce.size());
      backend.read(storage, done, bounce.data(), n);
      write_all(bounce.data(), n, at + done);
      done += n;
    }
  }
  end_ = at + bytes;
  return at;
}

void StoragesFile::read(DeviceBackend& backend, const c10::Storage& storage, uint64_t offset) {
  size_t bytes = storage.nbytes();
  if (offset % kStorageAlign != 0) fail("a storage is not aligned");
  if (void* view = backend.host_view(storage)) {
    read_all(view, bytes, offset);
    return;
  }
  std::vector<char> bounce(std::min(bytes, kBounce));
  for (size_t done = 0; done < bytes;) {
    size_t n = std::min(bytes - done, bounce.size());
    read_all(bounce.data(), n, offset + done);
    backend.write(storage, done, bounce.data(), n);
    done += n;
  }
}

uint64_t StoragesFile::finish() {
  end_ = (end_ + kStorageAlign - 1) / kStorageAlign * kStorageAlign;
  if (::ftruncate(fd_, static_cast<off_t>(end_)) != 0) fail(strerror(errno));
  return end_;
}

}  // namespace ergo::device
