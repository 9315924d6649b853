// The fixed reduction tree: group ranks [0, W), split at the largest power of two below the count:
// ((0+1)+(2+3)), (0+1)+2. What an element's bits are depends on W and the members' values alone.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "buffer.hpp"

namespace ergo {

// Where [lo, hi) splits: lo + the largest power of two below hi - lo. Needs hi - lo >= 2.
inline size_t tree_split(size_t lo, size_t hi) { return lo + std::bit_floor(hi - lo - 1); }

namespace detail {
template <class Combine>
void tree_range(std::span<const std::byte* const> leaves, size_t lo, size_t hi, size_t at, size_t n, std::byte* out,
                std::vector<std::shared_ptr<Buffer>>& scratch, size_t depth, size_t tile, const Combine& combine) {
  size_t mid = tree_split(lo, hi);
  const std::byte *left = leaves[lo] + at, *right = leaves[mid] + at;
  if (mid - lo > 1) {
    tree_range(leaves, lo, mid, at, n, out, scratch, depth, tile, combine);
    left = out;
  }
  if (hi - mid > 1) {
    if (scratch.size() <= depth) scratch.resize(depth + 1);
    if (!scratch[depth]) scratch[depth] = Buffer::allocate(tile);
    std::byte* into = scratch[depth]->data();
    tree_range(leaves, mid, hi, at, n, into, scratch, depth + 1, tile, combine);
    right = into;
  }
  combine(out, left, right, n);
}
}  // namespace detail

// Reduces `n` bytes of every leaf into `out` (no overlap), leaves in group-rank order. `combine(out, left,
// right, bytes)` works element by element, so that tiling, which keeps the accumulators in cache, changes no bit; `out`
// may be `left`.
// `tile` is a multiple of 64 and so of every element size.
template <class Combine>
void tree_reduce(std::span<const std::byte* const> leaves, size_t n, std::byte* out, const Combine& combine,
                 size_t tile = 256 * 1024) {
  if (leaves.size() == 1) {
    if (n) std::memcpy(out, leaves[0], n);
    return;
  }
  std::vector<std::shared_ptr<Buffer>> scratch;
  for (size_t at = 0; at < n; at += tile)
    detail::tree_range(leaves, 0, leaves.size(), at, std::min(tile, n - at), out + at, scratch, 0, tile, combine);
}

}  // namespace ergo
