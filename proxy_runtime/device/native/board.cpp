#include "board.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "streams.hpp"

namespace ergo {
namespace {

constexpr size_t kPage = 4096;
constexpr uint32_t kBlocks = 16 * 1024;
constexpr size_t kFirst = kBlocks * sizeof(std::atomic<uint32_t>);  // where the blocks begin
static_assert(kFirst % kPage == 0 && std::atomic<uint32_t>::is_always_lock_free);
// Pages that are kept when nothing is in use: writing to a page for the first time costs more than the copy into it.
constexpr size_t kKept = size_t{256} << 20;

}  // namespace

Board::Board(int fd, uint32_t slot, uint32_t slots) : slot_(slot), slots_(slots) {
  auto fail = [](const std::string& why) {
    throw FabricError("fabric_segment", -1, "the memory that the device proxies of this node share " + why);
  };
  struct stat status{};
  if (fstat(fd, &status) != 0) fail("cannot be examined: " + error_text(errno));
  if (slot >= slots || static_cast<size_t>(status.st_size) < segment_bytes(slots))
    fail("is too small: " + std::to_string(status.st_size) + " bytes for " + std::to_string(slots) + " of them");
  void* mapping = mmap(nullptr, segment_bytes(slots), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (mapping == MAP_FAILED) fail("cannot be mapped: " + error_text(errno));
  madvise(mapping, segment_bytes(slots), MADV_DONTDUMP);
  base_ = static_cast<std::byte*>(mapping);
  free_[kFirst] = kRegionBytes - kFirst;
}

Board::~Board() { munmap(base_, segment_bytes(slots_)); }

std::atomic<uint32_t>& Board::readers(uint32_t slot, uint32_t block) const {
  return reinterpret_cast<std::atomic<uint32_t>*>(region(slot))[block];
}

std::shared_ptr<Buffer> Board::allocate(size_t bytes) {
  reclaim_unread();
  size_t needed = align_up(std::max<size_t>(bytes, 1), kPage);
  auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& range) { return range.second >= needed; });
  if (found == free_.end()) return nullptr;
  if (unused_.empty()) {
    if (table_.size() == kBlocks) return nullptr;
    unused_.push_back(static_cast<uint32_t>(table_.size()));
    table_.emplace_back();
  }
  auto [offset, available] = *found;
  free_.erase(found);
  if (available > needed) free_[offset + needed] = available - needed;
  uint32_t block = unused_.back();
  unused_.pop_back();
  table_[block] = {offset, needed};
  blocks_[offset] = block;
  used_ += needed;
  touched_ = std::max(touched_, offset + needed);
  return Buffer::around(region(slot_) + offset, bytes, [board = shared_from_this(), block] { board->let_go(block); });
}

std::optional<Board::Place> Board::place_of(const Slice& slice) const {
  const std::byte *begin = region(slot_), *at = slice.data();
  if (at < begin || at >= begin + kRegionBytes) return std::nullopt;
  auto offset = static_cast<size_t>(at - begin);
  return Place{std::prev(blocks_.upper_bound(offset))->second, offset};
}

void Board::count_in(uint32_t block) { readers(slot_, block).fetch_add(1, std::memory_order_relaxed); }

std::optional<Slice> Board::read(uint32_t slot, Place place, size_t length) {
  if (slot >= slots_ || place.block >= kBlocks || place.offset < kFirst || place.offset > kRegionBytes ||
      length > kRegionBytes - place.offset)
    return std::nullopt;
  return Buffer::around(region(slot) + place.offset, length, [board = shared_from_this(), slot, place] {
    board->readers(slot, place.block).fetch_sub(1, std::memory_order_release);
  });
}

void Board::let_go(uint32_t block) {
  if (readers(slot_, block).load(std::memory_order_acquire) == 0)
    reclaim(block);
  else
    let_go_.push_back(block);
}

void Board::reclaim(uint32_t block) {
  auto [offset, bytes] = table_[block];
  blocks_.erase(offset);
  unused_.push_back(block);
  used_ -= bytes;
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && after->first == offset + bytes) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin() && std::prev(after)->first + std::prev(after)->second == offset)
    std::prev(after)->second += bytes;
  else
    free_[offset] = bytes;
  if (used_ == 0 && touched_ > kKept) {
    madvise(region(slot_) + kKept, touched_ - kKept, MADV_REMOVE);
    touched_ = kKept;
  }
}

void Board::reclaim_unread() {
  std::erase_if(let_go_, [this](uint32_t block) {
    if (readers(slot_, block).load(std::memory_order_acquire) != 0) return false;
    reclaim(block);
    return true;
  });
}

}  // namespace ergo
