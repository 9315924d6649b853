#include "collective_plan.hpp"

#include <algorithm>
#include <bit>
#include <charconv>

namespace ergo {

size_t packed_bytes(const std::vector<Segment>& segments) {
  size_t total = 0;
  for (const auto& segment : segments) total += align_up(segment.bytes);
  return total;
}

std::vector<size_t> segment_offsets(const std::vector<Segment>& segments) {
  std::vector<size_t> offsets;
  offsets.reserve(segments.size());
  size_t at = 0;
  for (const auto& segment : segments) {
    offsets.push_back(at);
    at += align_up(segment.bytes);
  }
  return offsets;
}

bool has_result(CollectiveKind kind, uint32_t root, uint32_t group_rank) {
  switch (kind) {
    case CollectiveKind::Broadcast:
      return group_rank != root;
    case CollectiveKind::Reduce:
    case CollectiveKind::Gather:
      return group_rank == root;
    case CollectiveKind::Send:
    case CollectiveKind::Barrier:
      return false;
    default:
      return true;
  }
}

std::string SequenceId::text() const {
  if (source < 0) return std::to_string(comm);
  return std::to_string(comm) + ":" + std::to_string(source) + ">" + std::to_string(destination);
}

SequenceId SequenceId::parse(std::string_view text) {
  SequenceId id;
  const char *p = text.data(), *end = p + text.size();
  auto number = [&](auto& into) {
    auto [next, error] = std::from_chars(p, end, into);
    bool ok = error == std::errc() && next != p;
    p = next;
    return ok;
  };
  auto sign = [&](char c) { return p != end && *p++ == c; };
  bool ok = number(id.comm);
  if (ok && p != end)
    ok = sign(':') && number(id.source) && sign('>') && number(id.destination) && id.source >= 0 && id.destination >= 0;
  if (!ok || p != end)
    throw CollectiveError(
        "collective_sequence",
        "\"" + std::string(text) + "\" does not name a sequence: expected COMM or COMM:SOURCE>DESTINATION");
  return id;
}

const char* kind_name(uint8_t kind) {
  static constexpr const char* kNames[] = {"AllReduce", "Broadcast", "AllGather", "ReduceScatter", "Reduce", "Gather",
                                           "Scatter",   "AllToAll",  "Send",      "Recv",          "Barrier"};
  return kind < std::size(kNames) ? kNames[kind] : "an unknown operation";
}

namespace {

const char* op_name(uint8_t op) {
  static constexpr const char* kNames[] = {"sum", "average", "product", "min", "max", "and", "or", "xor"};
  return op < std::size(kNames) ? kNames[op] : "an unknown reduction";
}

// By the number of torch's ScalarType.
std::string dtype_name(uint8_t dtype) {
  static constexpr const char* kNames[] = {"uint8",   "int8",    "int16",     "int32",     "int64",      "float16",
                                           "float32", "float64", "complex32", "complex64", "complex128", "bool"};
  if (dtype < std::size(kNames)) return kNames[dtype];
  return dtype == 15 ? "bfloat16" : "dtype " + std::to_string(dtype);
}

bool is_pair(CollectiveKind kind) { return kind == CollectiveKind::Send || kind == CollectiveKind::Recv; }
bool reduces(CollectiveKind kind) {
  return kind == CollectiveKind::AllReduce || kind == CollectiveKind::Reduce || kind == CollectiveKind::ReduceScatter;
}
bool has_root(CollectiveKind kind) {
  return is_pair(kind) || kind == CollectiveKind::Broadcast || kind == CollectiveKind::Reduce ||
         kind == CollectiveKind::Gather || kind == CollectiveKind::Scatter;
}

}  // namespace

std::string call_text(const FrameHeader& header) {
  auto kind = static_cast<CollectiveKind>(header.kind);
  std::string inside;
  auto add = [&](const std::string& text) { inside += (inside.empty() ? "" : ", ") + text; };
  if (reduces(kind)) add(op_name(header.op));
  if (has_root(kind)) add((is_pair(kind) ? "group rank " : "root ") + std::to_string(header.root));
  if (header.bytes)
    add(std::to_string(header.bytes) + " bytes" + (header.dtype == kNoDtype ? "" : " of " + dtype_name(header.dtype)));
  return std::string(kind_name(header.kind)) + (inside.empty() ? "" : " (" + inside + ")");
}

bool differ_in_size(const FrameHeader& one, const FrameHeader& other) {
  auto kind = static_cast<CollectiveKind>(one.kind);
  return (is_pair(kind) || kind == CollectiveKind::Broadcast) && one.bytes && other.bytes && one.bytes != other.bytes;
}

std::vector<uint32_t> Roster::on(int proxy) const {
  std::vector<uint32_t> found;
  for (auto member : members)
    if (proxy_of.at(member) == proxy) found.push_back(member);
  return found;
}

Range chunk_of(const std::vector<Segment>& segments, size_t owner, size_t owners) {
  size_t total = packed_bytes(segments);
  auto boundary = [&](size_t i) {
    size_t wanted = total / kBufferAlign * i / owners * kBufferAlign, begin = 0;
    for (const Segment& segment : segments) {
      size_t end = begin + align_up(segment.bytes);
      if (wanted < end) return begin + (wanted - begin) / kUnit * kUnit;
      begin = end;
    }
    return total;
  };
  return {boundary(owner), boundary(owner + 1)};
}

bool is_chunked(const Descriptor& descriptor, const Roster& roster) {
  return descriptor.kind == CollectiveKind::AllReduce && roster.proxies.size() > 1 &&
         packed_bytes(descriptor.segments) > CollectiveEngine::kWholeLimit;
}

std::vector<Part> parts_for(int proxy, uint32_t group_rank, const Descriptor& descriptor, const Slice& input,
                            const Roster& roster) {
  std::vector<Part> parts;
  auto whole = [&] { parts.push_back({0, 0, input}); };
  auto blocks = [&] {
    auto offsets = segment_offsets(descriptor.segments);
    for (auto member : roster.on(proxy))
      parts.push_back(
          {member, offsets[member], input.part(offsets[member], align_up(descriptor.segments[member].bytes))});
  };
  bool root = group_rank == descriptor.root;
  bool to_root = roster.proxy_of.count(descriptor.root) && roster.proxy_of.at(descriptor.root) == proxy;
  switch (descriptor.kind) {
    case CollectiveKind::AllReduce:
      if (is_chunked(descriptor, roster)) {
        size_t owner = static_cast<size_t>(std::find(roster.proxies.begin(), roster.proxies.end(), proxy) -
                                           roster.proxies.begin());
        Range chunk = chunk_of(descriptor.segments, owner, roster.proxies.size());
        parts.push_back({0, chunk.begin, input.part(chunk.begin, chunk.end - chunk.begin)});
      } else {
        whole();
      }
      break;
    case CollectiveKind::AllGather:
      whole();
      break;
    case CollectiveKind::Broadcast:
      if (root) whole();
      break;
    case CollectiveKind::Reduce:
    case CollectiveKind::Gather:
    case CollectiveKind::Send:  // its root is the destination
      if (to_root) whole();
      break;
    case CollectiveKind::ReduceScatter:
    case CollectiveKind::AllToAll:
      blocks();
      break;
    case CollectiveKind::Scatter:
      if (root) blocks();
      break;
    case CollectiveKind::Recv:
    case CollectiveKind::Barrier:
      break;
  }
  if (parts.empty()) parts.push_back({kNoPart, 0, Slice()});
  return parts;
}

uint64_t signature_of(const Descriptor& descriptor) {
  uint64_t hash = 0xCBF29CE484222325ull;
  auto mix = [&](uint64_t word) {
    hash = (hash ^ word) * 0x100000001B3ull;
    hash ^= hash >> 31;
  };
  auto kind = descriptor.kind;
  if (is_pair(kind)) return 0;  // the sequence says who does what
  mix(static_cast<uint64_t>(kind));
  if (has_root(kind)) mix(descriptor.root);
  if (reduces(kind)) {
    mix(static_cast<uint64_t>(descriptor.op));
    for (const auto& segment : descriptor.segments) mix(segment.dtype), mix(segment.bytes);
  }
  return hash;
}

void check_descriptor(const Descriptor& d, uint32_t group_rank, size_t world, size_t input_bytes) {
  auto fail = [&](const std::string& what) {
    throw CollectiveError("collective_argument", std::string(kind_name(static_cast<uint8_t>(d.kind))) +
                                                     " in communicator " + std::to_string(d.comm) + ": " + what);
  };
  if (d.kind > CollectiveKind::Barrier || d.op > ReduceOp::BXor) fail("unknown kind or reduction");
  if (has_root(d.kind) && d.root >= world)
    fail("group rank " + std::to_string(d.root) + " of " + std::to_string(world) + " does not exist");
  if (is_pair(d.kind) && d.root == group_rank) fail("a rank cannot send to itself: copy the tensor instead");
  for (const auto& segment : d.segments) {
    bool sized = segment.element_bytes && segment.element_bytes <= 16 && std::has_single_bit(segment.element_bytes);
    if (!sized || segment.bytes % segment.element_bytes || segment.bytes > kMaxPayload)
      fail("a segment's size is no multiple of its element's");
  }
  bool blocks = d.kind == CollectiveKind::ReduceScatter || d.kind == CollectiveKind::AllToAll ||
                (d.kind == CollectiveKind::Scatter && group_rank == d.root);
  bool nothing = d.kind == CollectiveKind::Recv || d.kind == CollectiveKind::Barrier ||
                 ((d.kind == CollectiveKind::Broadcast || d.kind == CollectiveKind::Scatter) && group_rank != d.root);
  if (blocks && d.segments.size() != world)
    fail(std::to_string(d.segments.size()) + " input blocks for " + std::to_string(world) + " members");
  if (nothing && !d.segments.empty()) fail("this member gives no input");
  if (d.kind == CollectiveKind::ReduceScatter)
    for (const auto& segment : d.segments)
      if (segment.dtype != d.segments[0].dtype) fail("its blocks differ in dtype");
  if (d.absorbed ? d.kind != CollectiveKind::AllReduce || input_bytes != 0 : input_bytes != packed_bytes(d.segments))
    fail(std::to_string(input_bytes) + " packed bytes where the segments need " +
         std::to_string(packed_bytes(d.segments)));
}

}  // namespace ergo
