// Libraries that register operators and that a rank has loaded: the proxy loads them too, for their kernels.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "wire.hpp"

namespace ergo::device {

// One library of this process, there until the process ends.
struct Library {
  std::string name;  // its path in the rank
  uint64_t size = 0, hash = 0;
  std::string contents;  // only if no file of this name and contents is here: it came through the channel
};

// What one rank has asked for. The libraries themselves are the process's: two ranks' are loaded once.
class LibraryList {
 public:
  // Loads the library from the file `name` if that file has this size and hash. False: it has not, and the
  // contents are needed. Throws c10::Error naming the library if it cannot be loaded.
  bool load(const std::string& name, uint64_t size, uint64_t hash);
  // The next part of the contents of a library; with the last one it is loaded. Throws as `load`, and
  // std::runtime_error for parts that do not follow each other.
  void receive(const std::string& name, uint64_t size, uint64_t hash, std::string_view part);

  // Into a dump, and from there: loads them. Throws ControlError("device-proxy.library").
  void write(WordWriter& words) const;
  void read(WordReader words);

 private:
  void add(const std::shared_ptr<const Library>& library);
  std::vector<std::shared_ptr<const Library>> libraries_;  // in the order of loading
  Library partial_;
};

// One sentence for each library that could not be loaded here: why an operator may be missing.
std::string library_failures();

}  // namespace ergo::device
