// What a rank's and a proxy's decoders read that need torch's headers: definitions of operators with their arguments,
// the answer to a definition, the state file of a rank. As in fuzz_decoders.cpp: an exception of theirs, and no byte
// beyond the end. No operator is executed: that is torch's own code, and words that decode are calls that a rank may
// make.
#include <ATen/CPUGeneratorImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "../../proxy_runtime/rank/native/output_spec.hpp"
#include "failure.hpp"
#include "message_bodies.hpp"
#include "state_file.hpp"
#include "template.hpp"

using namespace ergo;

// What is made of a decoded answer, in a rank; nothing is made of it here.
namespace ergo::rank {
c10::Storage make_storage(uint64_t, uint64_t) { abort(); }
void adopt_size(c10::StorageImpl&, uint64_t) { abort(); }
c10::Device own_device() { abort(); }
}  // namespace ergo::rank

namespace {

std::vector<uint64_t> words_of(const uint8_t* data, size_t size) {
  std::vector<uint64_t> words(size / 8);
  if (!words.empty()) std::memcpy(words.data(), data, words.size() * 8);
  return words;
}

c10::Storage storage_of(size_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                            c10::GetAllocator(c10::kCPU), true));
}

// The body of a definition; one with a name that torch does not know gets one that takes arguments of every kind.
void definition(const uint8_t* data, size_t size) {
  static const char* const kNames[] = {"aten::neg",
                                       "aten::add.Tensor",
                                       "aten::cat",
                                       "aten::index.Tensor",
                                       "aten::sum.dim_IntList",
                                       "aten::rand.generator",
                                       "aten::to.dtype",
                                       "aten::upsample_nearest2d.vec",
                                       "aten::_foreach_add.ScalarList",
                                       "aten::norm.ScalarOpt_dim",
                                       "aten::bucketize.Tensor",
                                       "aten::conv2d"};
  static device::StorageTable storages(0);
  static std::unordered_map<uint64_t, at::Generator> generators;
  if (storages.size() == 0) {
    for (uint64_t handle = 1; handle < 4; ++handle)
      storages.bind(handle, c10::make_intrusive<device::PhysicalStorage>(storage_of(64 * handle)));
    generators[0] = at::detail::createCPUGenerator();
  }
  const auto words = words_of(data + 1, size - 1);
  try {
    device::DefineBody body(WordReader(words.data(), words.size()));
    auto known = device::parse_template(kNames[data[0] % std::size(kNames)], body.key, body.n_key, at::kCPU);
    device::CallContext call{storages,
                             generators,
                             WordReader(body.handles, body.n_handles),
                             body.payload,
                             c10::DispatchKeySet(c10::DispatchKey::CPU),
                             {}};
    torch::jit::Stack stack;
    for (const auto& value : known->arguments) stack.push_back(device::materialise(value, call));
  } catch (const std::exception&) {
  }
}

void answer(const uint8_t* data, size_t size) {
  const auto words = words_of(data, size);
  try {
    const auto spec = rank::parse_output_spec(reinterpret_cast<const char*>(words.data()), words.size() * 8, 3);
    if (spec.new_bytes.size() > words.size()) abort();
  } catch (const std::exception&) {
  }
}

// With the right magic, version and checksum: otherwise nothing would come further than that.
void state(const uint8_t* data, size_t size) {
  static const int fd = memfd_create("fuzz", 0);
  auto words = words_of(data, size);
  if (words.size() < 4) words.resize(4);
  words[0] = device::kMetaMagic, words[1] = device::kMetaVersion;
  uint64_t h = 0xCBF29CE484222325ull;
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    h = (h ^ words[i]) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
  }
  words.back() = h;
  if (ftruncate(fd, 0) != 0 || pwrite(fd, words.data(), words.size() * 8, 0) < 0) abort();
  try {
    const device::MetaReader meta("/proc/self/fd/" + std::to_string(fd));
    for (const char* name : {"rank", "physical", "template", "store", "x"}) try {
        WordReader section = meta.section(name);
        while (section.left() != 0) device::get_text(section);
      } catch (const std::runtime_error&) {
      }
  } catch (const device::ControlError& e) {
    if (std::string(e.what()).find("checksum") != std::string::npos) abort();  // then nothing is tested here
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  switch (data[0] % 3) {
    case 0:
      definition(data + 1, size - 1);
      break;
    case 1:
      answer(data + 1, size - 1);
      break;
    default:
      state(data + 1, size - 1);
  }
  return 0;
}
