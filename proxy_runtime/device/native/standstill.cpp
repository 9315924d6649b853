#include "standstill.hpp"

#include <algorithm>
#include <cstring>

#include "message_bodies.hpp"
#include "store_service.hpp"

namespace ergo::device {
namespace {

void put(WordWriter& words, const SequenceId& id) {
  words.word(id.comm);
  words.word(static_cast<uint64_t>(id.source));
  words.word(static_cast<uint64_t>(id.destination));
}

SequenceId take_sequence(WordReader& words) {
  SequenceId id;
  id.comm = words.word();
  id.source = static_cast<int32_t>(words.word());
  id.destination = static_cast<int32_t>(words.word());
  return id;
}

std::string what_of(const std::vector<Awaited>& awaited) { return awaited.empty() ? "" : awaited.front().what; }

}  // namespace

std::set<uint64_t> awaited_by(RankServer& server) {
  RankState& state = server.state();
  std::set<uint64_t> tickets;
  std::optional<MessageView> message = server.ring().peek();
  if (!message) return tickets;
  std::set<const PhysicalStorage*> touched;
  auto touch = [&](const uint64_t* handles, size_t n) {
    for (size_t i = 0; i < n; i++)
      if (state.storages.is_pending(handles[i])) touched.insert(state.storages.find(handles[i]).get());
  };
  bool all = false;
  switch (WordReader body = message->body; message->type) {
    case Message::Read:
    case Message::Pull:
    case Message::Write:
    case Message::Resize:
      touch(body.words(1), 1);
      break;
    case Message::Exec: {
      ExecBody exec(body);
      touch(exec.handles, exec.n_handles);
      break;
    }
    case Message::Define: {
      DefineBody define(body);
      touch(define.handles, define.n_handles);
      break;
    }
    case Message::Collective: {
      CollectiveCall call = CollectiveCall::parse(body);
      for (const auto* refs : {&call.inputs, &call.outputs})
        for (const TensorRef& ref : *refs) touch(&ref.handle, 1);
      break;
    }
    default:
      all = true;
  }
  auto writes = [&](const PhysicalPtr& storage) { return touched.contains(storage.get()); };
  for (const auto& [ticket, pending] : state.pending)
    if (all || (pending.writes && std::ranges::any_of(pending.storages, writes))) tickets.insert(ticket);
  return tickets;
}

void Standstill::notice(const std::map<uint32_t, std::unique_ptr<RankServer>>& servers) {
  for (const auto& [number, server] : servers) {
    const int rank = static_cast<int>(number);
    const uint64_t message = server->standing_at();
    auto known = stands_.find(rank);
    if (known != stands_.end() && known->second.message == message) continue;
    if (known != stands_.end()) {
      tell(kRankMoves, rank, {});
      stands_.erase(known);
      standing_.erase(rank);
    }
    if (message == 0) continue;
    Standing standing{message, collectives_.engine().awaited(rank, awaited_by(*server)), {}};
    for (const auto& [id, counts] : collectives_.engine().counts(rank))
      if (counts.contributed) standing.contributed[id] = counts.contributed;
    tell(kRankStands, rank, standing);
    local_.insert(rank);
    standing_[rank] = what_of(standing.awaited);
    stands_[rank] = std::move(standing);
  }
}

void Standstill::tell(uint32_t kind, int rank, const Standing& standing) {
  WordWriter words;
  const ControlHeader header{kind, static_cast<uint32_t>(rank)};
  words.bytes(&header, sizeof header);
  words.word(standing.awaited.size());
  for (const Awaited& awaited : standing.awaited) {
    put(words, awaited.sequence);
    words.word(awaited.number);
    words.word(awaited.what.size());
    words.bytes(awaited.what.data(), awaited.what.size());
    words.word(awaited.missing.size());
    for (int missing : awaited.missing) words.word(static_cast<uint64_t>(missing));
  }
  words.word(standing.contributed.size());
  for (const auto& [id, count] : standing.contributed) {
    put(words, id);
    words.word(count);
  }
  collectives_.send_to_all(std::as_bytes(std::span(words.words())));
}

bool Standstill::on_control(int peer, const Slice& frame) {
  ControlHeader header;
  if (frame.size() < sizeof header) return false;
  std::memcpy(&header, frame.data(), sizeof header);
  if (header.kind != kRankStands && header.kind != kRankMoves) return false;
  const int rank = static_cast<int>(header.rank);
  stands_.erase(rank);
  standing_.erase(rank);
  if (header.kind == kRankMoves) return true;
  std::vector<uint64_t> copy(frame.size() / sizeof(uint64_t));
  std::memcpy(copy.data(), frame.data(), copy.size() * sizeof(uint64_t));
  try {
    WordReader words(copy.data() + 1, copy.size() - 1);
    Standing standing;
    for (uint64_t n = words.word(); n > 0; n--) {
      Awaited awaited;
      awaited.sequence = take_sequence(words);
      awaited.number = words.word();
      const uint64_t length = words.word();
      awaited.what.assign(words.bytes(length), length);
      for (uint64_t m = words.word(); m > 0; m--) awaited.missing.push_back(static_cast<int>(words.word()));
      standing.awaited.push_back(std::move(awaited));
    }
    for (uint64_t n = words.word(); n > 0; n--) {
      const SequenceId id = take_sequence(words);
      standing.contributed[id] = words.word();
    }
    standing_[rank] = what_of(standing.awaited);
    stands_[rank] = std::move(standing);
  } catch (const std::runtime_error& e) {
    throw FabricError("fabric_bad_frame", peer,
                      "proxy " + std::to_string(peer) + " sent a report of a rank: " + e.what());
  }
  return true;
}

// What `from` waits for that `to`, which stands too, has not contributed to.
const Awaited* Standstill::edge(int from, int to) const {
  auto waiting = stands_.find(from), other = stands_.find(to);
  if (waiting == stands_.end() || other == stands_.end()) return nullptr;
  for (const Awaited& awaited : waiting->second.awaited) {
    if (std::ranges::find(awaited.missing, to) == awaited.missing.end()) continue;
    auto count = other->second.contributed.find(awaited.sequence);
    if (count == other->second.contributed.end() || count->second < awaited.number) return &awaited;
  }
  return nullptr;
}

// Depth first; `path` is the circle when there is one.
bool Standstill::circle(int from, int to, std::vector<int>& path, std::set<int>& seen) const {
  path.push_back(from);
  if (edge(from, to)) return true;
  for (const auto& [next, standing] : stands_)
    if (!seen.contains(next) && edge(from, next)) {
      seen.insert(next);
      if (circle(next, to, path, seen)) return true;
    }
  path.pop_back();
  return false;
}

std::map<int, std::string> Standstill::circles() const {
  std::map<int, std::string> found;
  for (int rank : local_) {
    if (!stands_.contains(rank)) continue;
    std::vector<int> path;
    std::set<int> seen{rank};
    if (!circle(rank, rank, path, seen)) continue;
    // From its lowest rank on, so that all ranks of it say the same.
    std::ranges::rotate(path, std::ranges::min_element(path));
    std::string sentence;
    for (size_t i = 0; i < path.size(); i++) {
      const int other = path[(i + 1) % path.size()];
      sentence += (i ? ", " : "") + ("rank " + std::to_string(path[i])) + " called " + edge(path[i], other)->what +
                  " and waits in it for rank " + std::to_string(other);
    }
    found[rank] = sentence + ": they will wait for ever; all members must make the same calls in the same order";
  }
  return found;
}

}  // namespace ergo::device
