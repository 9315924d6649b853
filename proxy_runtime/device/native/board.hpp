// Memory that the proxies of one node share: a large payload stays where its owner packed it, and its readers look at
// it there. Frames then carry only its place.
//
// One segment for all of them, a region for each: a counter of readers for every block, then the blocks. Only the owner
// of a region allocates in it. It counts a reader in before it tells it of a block; the reader counts itself out. A
// block is used again once its owner has let go of it and it has no readers. What a lost peer was reading stays in use:
// that proxy has no successor in the same fabric.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "buffer.hpp"

namespace ergo {

class Board : public std::enable_shared_from_this<Board> {
 public:
  // Address space only: pages come with the first write.
  static constexpr size_t kRegionBytes = size_t{1} << 34;
  // Buffers from here on are worth a place on the board.
  static constexpr size_t kLeastBytes = 16 * 1024;
  static constexpr size_t segment_bytes(size_t slots) { return slots * kRegionBytes; }

  struct Place {
    uint32_t block;
    uint64_t offset;  // in the owner's region
  };

  // Maps the segment behind `fd`, a zero-filled memfd of segment_bytes(slots), which stays the caller's.
  // Throws FabricError.
  Board(int fd, uint32_t slot, uint32_t slots);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // In the own region; null where there is no room.
  std::shared_ptr<Buffer> allocate(size_t bytes);
  // Where a slice of such a buffer lies; nothing for any other.
  std::optional<Place> place_of(const Slice& slice) const;
  void count_in(uint32_t block);
  // What the owner of `slot` has told this proxy of; counts out when the last copy of the slice goes. Nothing if it is
  // not inside that region.
  std::optional<Slice> read(uint32_t slot, Place place, size_t length);

  // Bytes that are in use, by the owner or by readers.
  size_t used() const { return used_; }

 private:
  struct Block {
    size_t offset, bytes;
  };
  std::byte* region(uint32_t slot) const { return base_ + slot * kRegionBytes; }
  std::atomic<uint32_t>& readers(uint32_t slot, uint32_t block) const;
  void let_go(uint32_t block);
  void reclaim(uint32_t block);
  void reclaim_unread();

  uint32_t slot_, slots_;
  std::byte* base_ = nullptr;
  std::map<size_t, size_t> free_;      // offset -> bytes, never side by side
  std::map<size_t, uint32_t> blocks_;  // offset -> number, of all in use
  std::vector<Block> table_;
  std::vector<uint32_t> unused_;   // numbers
  std::vector<uint32_t> let_go_;   // numbers of blocks that are being read still
  size_t used_ = 0, touched_ = 0;  // touched: no page above has been written since the last trim
};

}  // namespace ergo
