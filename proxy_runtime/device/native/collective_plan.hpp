// What of an operation goes where: pure functions of the descriptor and of where the members live.
// Internal to collectives.cpp.
#pragma once

#include "collectives.hpp"

namespace ergo {

// Frame.part of a contribution that carries nothing for this proxy but says "contributed".
inline constexpr uint32_t kNoPart = ~uint32_t{0};

// Who takes part in a sequence and where. Positions are group ranks; for a pair only its two members are set.
struct Roster {
  std::vector<uint32_t> members;              // group ranks, ascending
  std::vector<uint32_t> local;                // those that live here
  std::vector<int> proxies;                   // participating, by first member: the owner index
  std::map<uint32_t, int> proxy_of;           // group rank -> proxy
  std::vector<uint32_t> on(int proxy) const;  // members that live there
};

struct Part {
  uint32_t part;  // destination group rank of a block, 0 for a whole, kNoPart
  size_t offset;
  Slice payload;
};

// The owner's share of a packed input. It cuts a segment only at multiples of kUnit bytes from the segment's start:
// vectorised kernels treat what is left over at the end of a range in another way, and which elements those are must
// not depend on how many owners there are (complex products, signs of zeros).
inline constexpr size_t kUnit = 1024;
Range chunk_of(const std::vector<Segment>& segments, size_t owner, size_t owners);
bool is_chunked(const Descriptor& descriptor, const Roster& roster);
std::vector<Part> parts_for(int proxy, uint32_t group_rank, const Descriptor& descriptor, const Slice& input,
                            const Roster& roster);
// What all members must agree on: kind, op, root, and the segments where they must be equal.
uint64_t signature_of(const Descriptor& descriptor);
// Throws CollectiveError where the descriptor cannot be executed by this member.
void check_descriptor(const Descriptor& descriptor, uint32_t group_rank, size_t world, size_t input_bytes);
const char* kind_name(uint8_t kind);
inline constexpr uint8_t kNoDtype = 0xff;
// What a member called, for a sentence: "AllReduce (sum, 40 bytes of float32)".
std::string call_text(const FrameHeader& header);
// Of a kind whose members must give and take the same number of bytes, and they do not. (0 bytes: it does not say.)
bool differ_in_size(const FrameHeader& one, const FrameHeader& other);

}  // namespace ergo
