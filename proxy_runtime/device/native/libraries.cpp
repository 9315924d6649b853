#include "libraries.hpp"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>

#include "failure.hpp"
#include "library.hpp"
#include "state_file.hpp"

namespace ergo::device {
namespace {

// Of the process. Only the loop's thread loads; a lock all the same, since it costs nothing here.
struct Loaded {
  std::mutex mutex;
  std::vector<std::shared_ptr<const Library>> libraries;
  std::vector<std::string> failures;
};

Loaded& loaded() {
  static auto* all = new Loaded;
  return *all;
}

std::shared_ptr<const Library> find(uint64_t size, uint64_t hash) {
  for (const auto& library : loaded().libraries)
    if (library->size == size && library->hash == hash) return library;
  return nullptr;
}

bool is_file_with(const std::string& name, uint64_t size, uint64_t hash) {
  std::error_code error;  // looked at first: a device or a pipe would be read for ever
  if (!std::filesystem::is_regular_file(name, error) || std::filesystem::file_size(name, error) != size) return false;
  std::ifstream file(name, std::ios::binary);
  if (!file) return false;
  std::ostringstream contents;
  contents << file.rdbuf();
  const std::string bytes = std::move(contents).str();
  return content_hash(bytes.data(), bytes.size()) == hash;
}

// A file that only this process sees: a rank's own, that lies in its private mounts.
std::string path_of_contents(const Library& library) {
  int fd = memfd_create("ergo-library", MFD_CLOEXEC);
  TORCH_CHECK(fd >= 0, "ergosphere: there is no memory for the library ", library.name);
  for (size_t at = 0; at < library.contents.size();) {
    ssize_t n = ::write(fd, library.contents.data() + at, library.contents.size() - at);
    TORCH_CHECK(n > 0, "ergosphere: there is no memory for the library ", library.name);
    at += static_cast<size_t>(n);
  }
  // The descriptor stays: debuggers and the loader's messages look through it.
  return "/proc/self/fd/" + std::to_string(fd);
}

std::shared_ptr<const Library> open(Library library) {
  const std::string path = library.contents.empty() ? library.name : path_of_contents(library);
  if (dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL) == nullptr) {
    const char* why = dlerror();
    std::string sentence = "The device proxy cannot load " + library.name +
                           ", which registers operators in the rank: " + (why != nullptr ? why : "unknown reason") +
                           ".";
    auto& failures = loaded().failures;
    if (std::find(failures.begin(), failures.end(), sentence) == failures.end()) failures.push_back(sentence);
    TORCH_CHECK(false, sentence);
  }
  auto shared = std::make_shared<const Library>(std::move(library));
  loaded().libraries.push_back(shared);
  return shared;
}

}  // namespace

bool LibraryList::load(const std::string& name, uint64_t size, uint64_t hash) {
  std::lock_guard<std::mutex> lock(loaded().mutex);
  auto library = find(size, hash);
  if (!library) {
    if (!is_file_with(name, size, hash)) return false;
    library = open({name, size, hash, {}});
  }
  add(library);
  return true;
}

void LibraryList::receive(const std::string& name, uint64_t size, uint64_t hash, std::string_view part) {
  if (partial_.hash != hash || partial_.size != size) partial_ = {name, size, hash, {}};
  if (part.size() > size - partial_.contents.size()) throw std::runtime_error("more of a library than its size");
  partial_.contents.append(part);
  if (partial_.contents.size() < size) return;
  Library whole = std::move(partial_);
  partial_ = {};
  if (content_hash(whole.contents.data(), size) != hash) throw std::runtime_error("a library with other contents");
  std::lock_guard<std::mutex> lock(loaded().mutex);
  auto library = find(size, hash);
  add(library ? library : open(std::move(whole)));
}

void LibraryList::add(const std::shared_ptr<const Library>& library) {
  if (std::find(libraries_.begin(), libraries_.end(), library) == libraries_.end()) libraries_.push_back(library);
}

void LibraryList::write(WordWriter& words) const {
  words.word(libraries_.size());
  for (const auto& library : libraries_) {
    put_text(words, library->name);
    words.word(library->size);
    words.word(library->hash);
    put_text(words, library->contents);
  }
}

void LibraryList::read(WordReader words) {
  for (uint64_t i = 0, n = words.word(); i < n; i++) {
    const std::string name = get_text(words);
    const uint64_t size = words.word(), hash = words.word();
    const std::string contents = get_text(words);
    try {
      if (!contents.empty())
        receive(name, size, hash, contents);
      else if (!load(name, size, hash))
        throw ControlError("device-proxy.library", "the library " + name +
                                                       ", whose operators the job uses, is not here or is another one "
                                                       "than at the checkpoint");
    } catch (const c10::Error& e) {
      throw ControlError("device-proxy.library", e.what_without_backtrace());
    }
  }
}

std::string library_failures() {
  std::lock_guard<std::mutex> lock(loaded().mutex);
  std::string text;
  for (const auto& sentence : loaded().failures) text += (text.empty() ? "" : " ") + sentence;
  return text;
}

}  // namespace ergo::device
