#include "recent_read.hpp"

#include <array>
#include <atomic>
#include <cstring>

#include "channel.hpp"
#include "kernels.hpp"
#include "storage.hpp"

namespace ergo::rank {
namespace {

// Answers of this size cost no more than one of a word; larger storages are read element by element.
constexpr uint64_t kWholeBytes = 1024;

// It is part of the process image, as the position of the ring is that it goes by. Whoever finds it in use by another
// thread asks the device.
struct RecentRead {
  std::atomic<bool> in_use{false};
  uint64_t handle = 0;  // 0: nothing
  uint64_t length = 0;
  uint64_t position = 0;  // of the channel, right after the request: nothing has been sent since while it is that
  std::array<char, kWholeBytes> bytes;
};
RecentRead recent;

class Use {
 public:
  Use() : mine_(!recent.in_use.exchange(true, std::memory_order_acquire)) {}
  ~Use() {
    if (mine_) recent.in_use.store(false, std::memory_order_release);
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  explicit operator bool() const { return mine_; }

 private:
  bool mine_;
};

// Of one element: a call for a number that the compiler does not know costs more than the copy.
void copy_element(void* to, const char* from, uint64_t bytes) {
  switch (bytes) {
    case 4:
      std::memcpy(to, from, 4);
      break;
    case 8:
      std::memcpy(to, from, 8);
      break;
    default:
      std::memcpy(to, from, bytes);
  }
}

bool known(const Channel& channel, uint64_t handle, uint64_t whole, uint64_t offset, void* destination,
           uint64_t bytes) {
  const Use use;
  if (!use || recent.handle != handle || recent.length != whole || recent.position != channel.published() ||
      channel.faulted())
    return false;
  copy_element(destination, recent.bytes.data() + offset, bytes);
  return true;
}

}  // namespace

void read_element(const c10::StorageImpl& storage, uint64_t offset, void* destination, uint64_t bytes) {
  const uint64_t handle = handle_of(storage);
  Channel& channel = Channel::instance();
  channel.require();
  const uint64_t whole = storage.nbytes();
  if (whole > kWholeBytes || offset + bytes > whole) return read_storage(handle, offset, destination, bytes);
  if (known(channel, handle, whole, offset, destination, bytes)) return;
  uint64_t before = 0;
  channel.call(
      Message::Read, 3,
      [&](uint64_t* body) {
        before = channel.position();
        body[0] = handle;
        body[1] = 0;
        body[2] = whole;
      },
      [&](const char* data, size_t length) {
        TORCH_CHECK(length == whole, "ergosphere: the device proxy answered a read of ", whole, " bytes with ", length);
        std::memcpy(destination, data + offset, bytes);
        // A signal handler may have used the device while this one waited: then the bytes are of before that. The
        // request is 32 bytes, with padding less than 64; no message that writes fits beside it into 64.
        const bool current = channel.position() - before < 64;
        const Use use;
        if (!use) return;
        std::memcpy(recent.bytes.data(), data, whole);
        recent.length = whole;
        recent.position = channel.position();
        recent.handle = current ? handle : 0;
      });
}

}  // namespace ergo::rank
