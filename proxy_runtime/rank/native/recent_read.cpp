#include "recent_read.hpp"

#include <array>
#include <cstring>

#include "channel.hpp"
#include "kernels.hpp"
#include "storage.hpp"

namespace ergo::rank {
namespace {

// Answers of this size cost no more than one of a word; larger storages are read element by element.
constexpr uint64_t kWholeBytes = 1024;

// Guarded by the channel lock. It is part of the process image, as the position of the ring is that it goes by.
struct RecentRead {
  uint64_t handle = 0;  // 0: nothing
  uint64_t length = 0;
  uint64_t position = 0;  // of the channel, right after the request: nothing has been sent since while it is that
  std::array<char, kWholeBytes> bytes;
};

RecentRead& recent() {
  static auto* read = new RecentRead;
  return *read;
}

}  // namespace

void read_element(const c10::StorageImpl& storage, uint64_t offset, void* destination, uint64_t bytes) {
  const uint64_t handle = handle_of(storage);
  Channel& channel = Channel::instance();
  channel.require();
  const uint64_t whole = storage.nbytes();
  if (whole > kWholeBytes || offset + bytes > whole) return read_storage(handle, offset, destination, bytes);
  RecentRead& last = recent();
  if (channel.unless_sent_since(last.position, [&] {
        if (last.handle != handle || last.length != whole) return false;
        std::memcpy(destination, last.bytes.data() + offset, bytes);
        return true;
      }))
    return;
  uint64_t before = 0;
  channel.call(
      Message::Read, 3,
      [&](uint64_t* body) {
        before = channel.position();
        last.handle = 0;
        body[0] = handle;
        body[1] = 0;
        body[2] = whole;
      },
      [&](const char* data, size_t length) {
        TORCH_CHECK(length == whole, "ergosphere: the device proxy answered a read of ", whole, " bytes with ", length);
        std::memcpy(last.bytes.data(), data, whole);
        // A signal handler may have used the device while this one waited: then the bytes are of before that. The
        // request is 32 bytes, with padding less than 64; no message that writes fits beside it into 64.
        const bool current = channel.position() - before < 64;
        last.length = whole;
        last.position = channel.position();
        last.handle = current ? handle : 0;
        std::memcpy(destination, data + offset, bytes);
      });
}

}  // namespace ergo::rank
