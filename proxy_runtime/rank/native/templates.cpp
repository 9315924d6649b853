#include "templates.hpp"

#include <cstring>

namespace ergo::rank {

TemplateTable& TemplateTable::instance() {
  static TemplateTable* table = new TemplateTable;
  return *table;
}

uint64_t TemplateTable::hash(const OpInfo& op, const std::vector<uint64_t>& key) {
  uint64_t h = reinterpret_cast<uintptr_t>(&op) * 0x9E3779B97F4A7C15ull ^ key.size();
  for (uint64_t word : key) {
    h = (h ^ word) * 0xff51afd7ed558ccdull;
    h ^= h >> 32;
  }
  return h;
}

namespace {

bool matches(const Template& candidate, const OpInfo& op, const std::vector<uint64_t>& key) {
  return candidate.op == &op && candidate.key.size() == key.size() &&
         std::memcmp(candidate.key.data(), key.data(), 8 * key.size()) == 0;
}

}  // namespace

const Template* TemplateTable::find(uint64_t hash, const OpInfo& op, const std::vector<uint64_t>& key) const {
  const Template*& recent = recent_[hash % kRecent];
  if (recent != nullptr && matches(*recent, op, key)) return recent;
  const Template* found = search(hash, op, key);
  if (found != nullptr) recent = found;
  return found;
}

const Template* TemplateTable::search(uint64_t hash, const OpInfo& op, const std::vector<uint64_t>& key) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return nullptr;
  for (const Template* candidate : found->second)
    if (matches(*candidate, op, key)) return candidate;
  return nullptr;
}

const Template* TemplateTable::insert(uint64_t hash, std::unique_ptr<Template> made) {
  all_.push_back(std::move(made));
  by_hash_[hash].push_back(all_.back().get());
  return all_.back().get();
}

}  // namespace ergo::rank
