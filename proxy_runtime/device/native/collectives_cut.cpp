// The part of the engine that a cut and a load use: counts, targets, pending operations, lost peers.
#include "collective_state.hpp"

namespace ergo {

std::map<SequenceId, MemberCounts> CollectiveEngine::counts(int rank) const {
  std::map<SequenceId, MemberCounts> found;
  for (const auto& [id, sequence] : sequences_) {
    if (!sequence->group) continue;
    auto member = sequence->group->group_rank(rank);
    if (!member || !sequence->counts.count(*member)) continue;
    const MemberCounts& counts = sequence->counts.at(*member);
    if (id.source < 0 || counts.contributed > 0) found[id] = counts;
  }
  return found;
}

std::vector<uint64_t> CollectiveEngine::communicators(int rank) const {
  std::vector<uint64_t> found;
  for (const auto& [comm, group] : groups_)
    if (group->group_rank(rank)) found.push_back(comm);
  return found;
}

void CollectiveEngine::set_targets(const std::map<SequenceId, uint64_t>& targets) {
  for (const auto& [id, target] : targets) {
    auto found = sequences_.find(id);
    if (found == sequences_.end()) continue;  // a sequence of other proxies, or a pair not used here
    for (const auto& [member, counts] : found->second->counts) {
      if (counts.completed <= target && target <= counts.contributed) continue;
      throw CollectiveError("cut_target", "sequence " + id.text() + ": the target " + std::to_string(target) +
                                              " is not between completed " + std::to_string(counts.completed) +
                                              " and contributed " + std::to_string(counts.contributed) + " of rank " +
                                              std::to_string(found->second->group->members[member]) +
                                              ": the targets belong to another stop, take the counts again");
    }
  }
  targets_ = targets;
}

bool CollectiveEngine::finished() const {
  if (!targets_ || !completions_.empty()) return false;
  for (const auto& [id, target] : *targets_) {
    auto found = sequences_.find(id);
    if (found != sequences_.end() && found->second->group && !found->second->counts.empty() &&
        found->second->completed() < target)
      return false;
  }
  return true;
}

void CollectiveEngine::resume() {
  targets_.reset();
  for (const auto& [id, sequence] : sequences_)
    if (!sequence->instances.empty()) touched_.emplace_back(id, sequence->instances.begin()->first);
}

std::vector<PendingOperation> CollectiveEngine::pending(int rank) const {
  std::vector<PendingOperation> found;
  auto operations = operations_.find(rank);
  if (operations == operations_.end()) return found;
  for (const auto& o : operations->second)
    found.push_back({o->ticket, o->sequence, o->number, o->descriptor, o->input});
  return found;
}

size_t CollectiveEngine::pending_count(int rank) const {
  auto operations = operations_.find(rank);
  return operations == operations_.end() ? 0 : operations->second.size();
}

void CollectiveEngine::restore_counts(int rank, const std::map<SequenceId, uint64_t>& completed,
                                      const std::set<SequenceId>& scattering) {
  for (const auto& [id, n] : completed) {
    if (n == 0)
      continue;  // counts list communicators that a neighbour on the same proxy has defined, this rank not yet
    const Group& group = group_of(id.comm, rank);
    Sequence& s = sequence(id);
    auto member = s.counts.find(*group.group_rank(rank));
    if (member == s.counts.end())
      throw CollectiveError("collective_counts", "rank " + std::to_string(rank) + " has counts of sequence " +
                                                     id.text() + " but is no member of it on this proxy");
    if (member->second.contributed != 0)
      throw CollectiveError("collective_counts", "counts of rank " + std::to_string(rank) + " in sequence " +
                                                     id.text() +
                                                     " are restored after it has issued operations or twice");
    member->second.contributed = member->second.completed = n;
    member->second.scatters = scattering.contains(id);
  }
}

void CollectiveEngine::depart(int rank, std::string why) { departed_.emplace(rank, std::move(why)); }

std::set<int> CollectiveEngine::gone() const {
  std::set<int> found;
  for (const auto& [rank, why] : departed_) found.insert(rank);
  for (size_t rank = 0; rank < rank_to_proxy_.size(); ++rank)
    if (fabric_.lost().count(rank_to_proxy_[rank])) found.insert(static_cast<int>(rank));
  return found;
}

std::string CollectiveEngine::describe(const Operation& operation) const {
  return std::string(kind_name(static_cast<uint8_t>(operation.descriptor.kind))) + " (number " +
         std::to_string(operation.number) + " of communicator " + operation.sequence.text() + ")";
}

bool CollectiveEngine::contributed(const Instance& instance, uint32_t member) const {
  auto found = instance.contributions.find(member);
  return found != instance.contributions.end() && found->second.complete();
}

std::vector<Awaited> CollectiveEngine::awaited(int rank, const std::set<uint64_t>& tickets) const {
  std::vector<Awaited> found;
  auto operations = operations_.find(rank);
  if (operations == operations_.end()) return found;
  for (const auto& operation : operations->second) {
    if (!tickets.count(operation->ticket)) continue;
    const Sequence& s = *sequences_.at(operation->sequence);
    const Instance& instance = s.instances.at(operation->number);
    Awaited awaited{operation->sequence, operation->number, describe(*operation), {}};
    for (auto member : s.roster.members)
      if (!contributed(instance, member)) awaited.missing.push_back(s.group->members[member]);
    found.push_back(std::move(awaited));
  }
  return found;
}

std::string CollectiveEngine::why_hopeless(int rank, const Operation& operation) const {
  const auto& lost = fabric_.lost();
  const Sequence& s = *sequences_.at(operation.sequence);
  const Instance& instance = s.instances.at(operation.number);
  if (instance.ready) return {};
  auto sentence = [&](const std::string& whom) {
    return "rank " + std::to_string(rank) + " waits in " + describe(operation) + " for " + whom;
  };
  auto lost_proxy = [&](int proxy) { return sentence("a rank whose device proxy is lost: " + lost.at(proxy)); };
  for (auto member : s.roster.members) {
    if (contributed(instance, member)) continue;
    if (int proxy = s.roster.proxy_of.at(member); lost.count(proxy)) return lost_proxy(proxy);
    int other = s.group->members[member];
    if (auto left = departed_.find(other); left != departed_.end())
      return sentence("rank " + std::to_string(other) + ", which has ended without it" +
                      (left->second.empty() ? "" : ": " + left->second));
  }
  if (!is_chunked(operation.descriptor, s.roster)) return {};
  for (uint32_t owner = 0; owner < s.roster.proxies.size(); ++owner)
    if (int proxy = s.roster.proxies[owner]; !instance.chunks.count(owner) && lost.count(proxy))
      return lost_proxy(proxy);
  return {};
}

std::map<int, std::string> CollectiveEngine::hopeless() const {
  std::map<int, std::string> found;
  if (fabric_.lost().empty() && departed_.empty()) return found;
  for (const auto& [rank, operations] : operations_)
    for (const auto& operation : operations) {
      std::string why = why_hopeless(rank, *operation);
      if (why.empty()) continue;
      found.emplace(rank, std::move(why));
      break;
    }
  return found;
}

std::optional<std::string> CollectiveEngine::waiting_for_lost_peer() const {
  auto found = hopeless();
  if (found.empty()) return std::nullopt;
  return found.begin()->second;
}

}  // namespace ergo
