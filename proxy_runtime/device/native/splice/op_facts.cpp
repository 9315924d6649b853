#include "op_facts.hpp"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string_view>

namespace ergo::device::splice {
namespace {

using Names = std::set<std::string_view>;

// Of torch's own: they read nothing of their first argument, of which every element that the tensor has is written.
const Names& overwriting() {
  static const Names names{"aten::copy_",    "aten::zero_",        "aten::fill_",          "aten::normal_",
                           "aten::uniform_", "aten::exponential_", "aten::_foreach_copy_", "aten::_foreach_zero_"};
  return names;
}

// `out` of these is written throughout and never read. (Of others a kernel might read it: not believed.)
const Names& overwriting_out() {
  static const Names names{"aten::mul", "aten::div", "aten::add", "aten::sub", "aten::cat", "aten::copy"};
  return names;
}

const Names& uninitialised() {
  static const Names names{"aten::empty",     "aten::empty_like",        "aten::empty_strided", "aten::empty_permuted",
                           "aten::new_empty", "aten::new_empty_strided", "aten::resize_",       "aten::resize_as_"};
  return names;
}

// Arguments that are written though the schema does not say so, unless the flag at `training` says that they are not.
struct Undeclared {
  std::vector<size_t> arguments;
  int training;  // -1: always
};
const std::unordered_map<std::string_view, Undeclared>& undeclared() {
  static const std::unordered_map<std::string_view, Undeclared> table{
      {"aten::native_batch_norm", {{3, 4}, 5}},
      {"aten::cudnn_batch_norm", {{3, 4}, 5}},
      {"aten::miopen_batch_norm", {{3, 4}, 5}},
      {"aten::batch_norm_gather_stats", {{3, 4}, -1}},
      {"aten::batch_norm_gather_stats_with_counts", {{3, 4}, -1}},
      {"aten::batch_norm_update_stats", {{1, 2}, -1}},
  };
  return table;
}

bool writes(const c10::AliasInfo* alias) {
  if (!alias) return false;
  if (alias->isWrite()) return true;
  const auto& inner = alias->containedTypes();
  return std::any_of(inner.begin(), inner.end(), [](const c10::AliasInfo& a) { return writes(&a); });
}

// Walks the arguments as a call's handles are read.
struct Walk {
  OpFacts& facts;
  uint32_t place = 0;
  std::vector<uint32_t> uses;                  // per place
  std::vector<const TensorMeta*> overwritten;  // per place; null: none
  bool composed = false, generator = false;

  void value(const Value& v, bool written, bool overwrites) {
    switch (v.tag) {
      case Tag::Tensor:
        if (written) facts.written.push_back(place);
        overwritten.push_back(overwrites ? &v.tensor : nullptr);
        uses.push_back(1);
        place++;
        break;
      case Tag::SameTensor:
        if (v.same_as < place) {
          uses[v.same_as]++;
          if (written) facts.written.push_back(static_cast<uint32_t>(v.same_as));
        }
        break;
      case Tag::Composed:
        composed = true;
        for (const Value& child : v.children) value(child, true, false);
        break;
      case Tag::Generator:
        generator = true;
        break;
      default:
        for (const Value& child : v.children) value(child, written, overwrites);
    }
  }
};

bool is_contiguous(const TensorMeta& t) {
  int64_t dense = 1;
  for (size_t i = t.sizes.size(); i-- > 0;) {
    if (t.sizes[i] != 1 && t.strides[i] != dense) return false;
    dense *= t.sizes[i];
  }
  return true;
}

std::unique_ptr<OpFacts> read(const Template& t, const ValueNumber& identity) {
  auto facts = std::make_unique<OpFacts>();
  facts->name = t.name;
  facts->identity = identity;
  const c10::FunctionSchema& schema = t.op.schema();
  const std::string& name = schema.name();
  const bool ours = name.starts_with("aten::");
  const bool is_out = schema.overload_name().ends_with("out");
  const auto hidden = undeclared().find(name);
  Walk walk{*facts, 0, {}, {}, false, false};
  for (size_t i = 0; i < t.arguments.size(); i++) {
    const c10::Argument& argument = schema.arguments()[i];
    bool written = writes(argument.alias_info());
    const bool overwrites = written && ((i == 0 && overwriting().contains(name)) ||
                                        (is_out && argument.kwarg_only() && overwriting_out().contains(name)));
    if (hidden != undeclared().end() &&
        std::ranges::find(hidden->second.arguments, i) != hidden->second.arguments.end()) {
      const int flag = hidden->second.training;
      const bool evaluates = flag >= 0 && t.arguments[static_cast<size_t>(flag)].constant.isBool() &&
                             !t.arguments[static_cast<size_t>(flag)].constant.toBool();
      written |= !evaluates;
    }
    walk.value(t.arguments[i], written, overwrites);
    if (argument.type()->str().starts_with("Generator")) facts->random = true;
  }
  if (walk.composed) {  // its numbers of tensors count more than handles: nothing of it is believed
    facts->written.resize(walk.place);
    std::iota(facts->written.begin(), facts->written.end(), 0);
  }
  std::sort(facts->written.begin(), facts->written.end());
  facts->written.erase(std::unique(facts->written.begin(), facts->written.end()), facts->written.end());
  facts->is_written.assign(walk.place, false);
  for (uint32_t place : facts->written) facts->is_written[place] = true;
  facts->overwritten.resize(walk.place);
  for (uint32_t place = 0; place < walk.place; place++)
    if (const TensorMeta* meta = walk.overwritten[place]; meta && walk.uses[place] == 1 && is_contiguous(*meta)) {
      const uint64_t begin = static_cast<uint64_t>(meta->offset) * c10::elementSize(meta->dtype);
      facts->overwritten[place] = {begin, begin + meta->bytes};
    }
  facts->random |= t.op.hasTag(at::Tag::nondeterministic_seeded);
  facts->uninitialised = ours && uninitialised().contains(name);
  facts->always_checked = !ours;
  // A generator of the script's own has no number; sparse and nested tensors, and operators that may keep a state of
  // their own, are left alone.
  facts->shareable = ours && !walk.composed && !walk.generator;
  return facts;
}

}  // namespace

void OpFacts::found_written(uint32_t place) {
  if (is_written[place]) return;
  is_written[place] = true;
  written.insert(std::lower_bound(written.begin(), written.end(), place), place);
}

const Template& OpFacts::common(const Template& t) {
  if (!common_ || common_->globals != t.globals) common_ = t.shared_from_this();
  return *common_;
}

OpFacts& OpBook::of(const Template& t) {
  if (t.facts) return *t.facts;
  Mixer mixer(Domain::Call);
  mixer.word(t.name.size());
  for (char c : t.name) mixer.word(static_cast<unsigned char>(c));
  // The low 16 bits are the default dtype and determinism, the others the rank's own number of its flags.
  mixer.word(t.key.size()).word(t.key.at(0) & 0xffff).words(t.key.data() + 1, t.key.size() - 1);
  const ValueNumber identity = mixer.done();
  auto& facts = facts_[identity];
  if (!facts) facts = read(t, identity);
  t.facts = facts.get();
  return *facts;
}

}  // namespace ergo::device::splice
