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
// Where the sum of [lo, hi) is: `out`, or the only leaf there is; null if there is none.
template <class Combine>
const std::byte* tree_range(std::span<const std::byte* const> leaves, size_t lo, size_t hi, size_t at, size_t n,
                            std::byte* out, std::vector<std::shared_ptr<Buffer>>& scratch, size_t depth, size_t tile,
                            const Combine& combine) {
  if (hi - lo == 1) return leaves[lo] ? leaves[lo] + at : nullptr;
  const size_t mid = tree_split(lo, hi);
  const std::byte* left = tree_range(leaves, lo, mid, at, n, out, scratch, depth, tile, combine);
  std::byte* into = nullptr;
  if (hi - mid > 1) {
    if (scratch.size() <= depth) scratch.resize(depth + 1);
    if (!scratch[depth]) scratch[depth] = Buffer::allocate(tile);
    into = scratch[depth]->data();
  }
  const std::byte* right = tree_range(leaves, mid, hi, at, n, into, scratch, depth + 1, tile, combine);
  if (!left || !right) return left ? left : right;
  combine(out, left, right, n);
  return out;
}
}  // namespace detail

// Reduces `n` bytes of every leaf into `out` (no overlap, but with the first leaf), leaves in group-rank order; a leaf
// that is null is part of one before it already. `combine(out, left, right, bytes)` works element by element, so that
// tiling, which keeps the accumulators in cache, changes no bit; `out` may be `left`.
// `tile` is a multiple of 64 and so of every element size.
template <class Combine>
void tree_reduce(std::span<const std::byte* const> leaves, size_t n, std::byte* out, const Combine& combine,
                 size_t tile = 256 * 1024) {
  std::vector<std::shared_ptr<Buffer>> scratch;
  for (size_t at = 0; at < n; at += tile) {
    const size_t size = std::min(tile, n - at);
    const std::byte* sum = detail::tree_range(leaves, 0, leaves.size(), at, size, out + at, scratch, 0, tile, combine);
    if (sum && sum != out + at) std::memcpy(out + at, sum, size);
  }
}

}  // namespace ergo
