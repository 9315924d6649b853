// Messages on the ring. One message is the atom of execution and of a cut: either all of it has
// happened or nothing of it has. Every length is checked by the consumer before it is used.
#pragma once

#include <cstdint>

namespace ergo {

// `length` counts the header and is a multiple of 8; a message never wraps: Pad fills the end of the ring.
struct MessageHeader {
  uint32_t length;
  uint16_t type;   // Message
  uint16_t check;  // header_check(length, type): a torn or foreign header is an error, not a crash
};
static_assert(sizeof(MessageHeader) == 8);

inline uint16_t header_check(uint32_t length, uint16_t type) {
  uint32_t x = (length ^ (uint32_t{type} << 16)) * 0x9E3779B1u;
  return static_cast<uint16_t>((x >> 16) ^ x ^ 0x5A5A);
}

// Bodies are sequences of u64 words ("w") in host byte order; bytes are padded to 8.
// [S] = synchronous: the proxy writes one response, then moves the tail.
enum class Message : uint16_t {
  Pad = 0,
  Alloc = 1,          // handle, bytes
  Free = 2,           // handle
  Resize = 3,         // handle, bytes            contents up to min(old, new) are kept
  Write = 4,          // handle, offset, length, bytes[length]
  Read = 5,           // [S] handle, offset, length <= response_bytes     -> the bytes
  Define = 6,         // [S] see Define body below                        -> OutputSpec (wire.hpp)
  Exec = 7,           // template id, base handle, n_handles, n_payload, handles[], payload[]
  Sync = 8,           // [S]                                              -> empty
  Seed = 9,           // generator id, seed
  NewGenerator = 10,  // generator id
  GetRng = 11,        // [S] generator id                                 -> state bytes
  SetRng = 12,        // generator id, n, bytes[n]
  Store = 13,         // [S] n, request bytes[n] (wire.hpp StoreOp)        -> reply bytes
  Communicator = 14,  // comm id, my group rank, n members, global ranks[n]
  Collective = 15,    // see Collective body below                     asynchronous, deferred
  Step = 16,          // step number: the rank's optimizer-step boundary
  Stats = 17,         // [S]                                              -> JSON bytes
  Exit = 18,          // the rank's interpreter ends normally; nothing follows
  Flags = 19,         // n, words[n]: precision and determinism flags of the rank (wire.hpp FlagWord order)
  Ready = 20,         // [S] n, handles[n]: is no collective going to write them any more?  -> 1 byte, 0 or 1
  DeviceInfo = 21,    // [S]                      -> words: bytes of memory, capability (0: unknown), processors, name[]
  Mark = 22,          // marker id: the moment at which the queue has come here is kept
  Unmark = 23,        // marker id
  Elapsed = 24,       // [S] marker id, marker id -> i64 nanoseconds from the first to the second
  Pull = 25,          // handle, offset, length, at: the bytes go to the response area, from `at`; no response
  FreeGenerator = 26,  // generator id
  PullPinned = 27,     // handle, offset, length, at: the bytes go to the pinned memory, from `at`
  PushPinned = 28,     // handle, offset, length, at: the bytes come from there
  Library = 30,        // [S] size, hash (library.hpp), n_path, path: a library that registers operators
                       //                                               -> one byte: 1 loaded, 0 contents are needed
  LibraryPart = 31,    // size, hash, n_path, path, n, bytes[n]: the next part of the contents; loaded with the last
};

// Define body (words): template id (kNoTemplate: one-off, do not keep), base handle, n_name_bytes,
//   n_key, n_handles, n_payload, then name (padded), key[], handles[], payload[].
//   `name` is "aten::add.Tensor". Template ids are chosen by the rank, consecutive from 0; a Define that
//   fails (error status in the response) registers nothing and its id is used again.
// Collective body (words): comm id, kind (CollectiveKind), reduce op (ReduceOp), root (group rank),
//   n_inputs, n_outputs, n_extra, then n_inputs + n_outputs TensorRefs (wire.hpp: one tensor key each,
//   its handle follows the key), then extra[] words (AllToAll: split sizes in elements, in then out).
inline constexpr uint64_t kNoTemplate = ~0ull;

enum class CollectiveKind : uint8_t {
  AllReduce = 0,      // inputs == outputs, in place, any number of tensors
  Broadcast = 1,      // outputs; the root's inputs are its outputs
  AllGather = 2,      // 1 input; outputs: W tensors, or 1 tensor of W times the elements
  ReduceScatter = 3,  // inputs: W tensors or 1 of W times the elements; 1 output
  Reduce = 4,         // in place at the root; other members' tensors stay as they are
  Gather = 5,         // 1 input; the root has W outputs
  Scatter = 6,        // the root has W inputs; 1 output
  AllToAll = 7,       // W inputs and W outputs, or 1 and 1 with split sizes in extra
  Send = 8,           // 1 input, root = destination group rank
  Recv = 9,           // 1 output, root = source group rank
  Barrier = 10
};
enum class ReduceOp : uint8_t { Sum = 0, Avg = 1, Product = 2, Min = 3, Max = 4, BAnd = 5, BOr = 6, BXor = 7 };

}  // namespace ergo
