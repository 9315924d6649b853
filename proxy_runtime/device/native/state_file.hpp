// The two files of a dumped rank. `meta`: named sections of words, with a checksum over all.
// `storages`: the bytes of each physical storage at an offset that is a multiple of 4096.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "backend.hpp"
#include "wire.hpp"

namespace ergo::device {

inline constexpr uint64_t kMetaMagic = 0x5645444F47524531ull;
inline constexpr uint64_t kMetaVersion = 1;
inline constexpr uint64_t kStorageAlign = 4096;

class MetaWriter {
 public:
  // Names have at most 8 characters.
  WordWriter& section(std::string_view name);
  // Throws ControlError("device-proxy.dump").
  void write(const std::string& path) const;

 private:
  std::deque<std::pair<uint64_t, WordWriter>> sections_;  // a deque: section() hands out references
};

class MetaReader {
 public:
  // Throws ControlError("device-proxy.meta") naming the file: missing, damaged, of another version.
  explicit MetaReader(const std::string& path);
  // Throws std::runtime_error if there is no such section.
  WordReader section(std::string_view name) const;

 private:
  std::vector<uint64_t> words_;
  std::map<uint64_t, std::pair<size_t, size_t>> sections_;  // name -> where, how many words
};

void put_text(WordWriter& words, std::string_view text);
std::string get_text(WordReader& words);

// An open storages file. Throws ControlError with `code` on every failure.
class StoragesFile {
 public:
  enum class Mode { Create, Open };
  StoragesFile(std::string path, Mode mode);
  ~StoragesFile();
  StoragesFile(const StoragesFile&) = delete;
  StoragesFile& operator=(const StoragesFile&) = delete;
  // Appends at the next aligned offset, which is returned.
  uint64_t append(DeviceBackend& backend, const c10::Storage& storage);
  void read(DeviceBackend& backend, const c10::Storage& storage, uint64_t offset);
  // Pads to the alignment and returns the size.
  uint64_t finish();

 private:
  [[noreturn]] void fail(const std::string& what) const;
  void write_all(const void* data, size_t n, uint64_t at);
  void read_all(void* data, size_t n, uint64_t at);
  std::string path_;
  Mode mode_;
  int fd_ = -1;
  uint64_t end_ = 0;
};

}  // namespace ergo::device
