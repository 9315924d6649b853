// Maps the rank's channel before torch is imported: no torch, no C++ runtime, loaded through ctypes by
// ergo_rank.boot. The interposer adopts the mapping later; the descriptor is closed by then, and the
// mapping is MADV_DONTFORK, so no child of the rank can reach the channel (but for the pinned memory at its end).
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

// The first words of ergo::RingHeader (channel/ring.hpp), which the interposer checks again when it adopts.
struct prefix {
  uint64_t magic;
  uint32_t version;
  uint32_t rank;
  uint64_t ring_bytes;
  uint64_t response_bytes;
};
// Where RingHeader has pinned_bytes, and where ergo::SharedWords has the pid of the process that uses a shared ring,
// and the word that says it is one.
enum { kPinnedBytes = 2576, kShared = 4096, kClaimant = 4100 };

// Takes a shared ring that `from` (0: nobody) has, for `pid`. 1: taken, 0: somebody else was faster, or it is no such.
__attribute__((visibility("default"))) int ergo_channel_claim(void* base, uint32_t from, uint32_t pid) {
  _Atomic(uint32_t)* shared = (_Atomic(uint32_t)*)((char*)base + kShared);
  _Atomic(uint32_t)* claimant = (_Atomic(uint32_t)*)((char*)base + kClaimant);
  return atomic_load(shared) == 1 && atomic_compare_exchange_strong(claimant, &from, pid);
}

__attribute__((visibility("default"))) void ergo_channel_unmap(void* base, size_t bytes) { munmap(base, bytes); }

static const uint64_t kMagic = 0x4552474F52494E47ull;
static const uint64_t kHeaderBytes = 8192;

// Returns the base address of the ring behind `fd`, or null with one sentence in `error` (n bytes).
// The descriptor stays the caller's.
__attribute__((visibility("default"))) void* ergo_channel_map(int fd, char* error, size_t n) {
  struct stat st;
  if (fstat(fd, &st) != 0) {
    snprintf(error, n, "cannot stat the channel: %s", strerror(errno));
    return NULL;
  }
  if ((uint64_t)st.st_size < kHeaderBytes) {
    snprintf(error, n, "the channel is too small to be a ring");
    return NULL;
  }
  void* base = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    snprintf(error, n, "cannot map the channel: %s", strerror(errno));
    return NULL;
  }
  const struct prefix* p = base;
  const uint64_t size = (uint64_t)st.st_size, pinned = *(const uint64_t*)((const char*)base + kPinnedBytes);
  if (p->magic != kMagic || p->ring_bytes > size || p->response_bytes > size || pinned > size ||
      kHeaderBytes + p->ring_bytes + p->response_bytes + pinned > size) {
    snprintf(error, n, "the channel is not a ring of this runtime");
    munmap(base, size);
    return NULL;
  }
  // Children have the pinned memory of their parent, as they have CUDA's.
  if (madvise(base, size - pinned, MADV_DONTFORK) != 0) {
    snprintf(error, n, "cannot keep the channel out of child processes: %s", strerror(errno));
    munmap(base, size);
    return NULL;
  }
  return base;
}
