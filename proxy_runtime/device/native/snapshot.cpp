#include "snapshot.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <unordered_map>

#include "failure.hpp"
#include "splice/splicer.hpp"
#include "state_file.hpp"

namespace ergo::device {
namespace {

constexpr uint64_t kImpossible = uint64_t{1} << 48;
// With the number of collectives that a communicator has completed: MemberCounts::scatters.
constexpr uint64_t kScatters = uint64_t{1} << 63;

// Numbers the distinct physical storages in the order in which they are met, writing each once.
class PhysicalIndex {
 public:
  PhysicalIndex(DeviceBackend& backend, StoragesFile& file) : backend_(backend), file_(file) {}
  uint64_t operator()(const PhysicalPtr& physical) {
    auto [it, inserted] = index_.emplace(physical.get(), index_.size());
    if (inserted) {
      words_.word(file_.append(backend_, physical->storage));
      words_.word(physical->storage.nbytes());
      words_.word(physical->value.high);
      words_.word(physical->value.low);
    }
    return it->second;
  }
  void write(WordWriter& section) const {
    section.word(index_.size());
    section.append(words_);
  }

 private:
  DeviceBackend& backend_;
  StoragesFile& file_;
  std::unordered_map<const PhysicalStorage*, uint64_t> index_;
  WordWriter words_;
};

void put_expected(WordWriter& words, const ExpectedOutput& out) {
  words.word(static_cast<uint64_t>(out.kind));
  words.word(out.reference);
  words.word(static_cast<uint64_t>(out.dtype));
  words.word(static_cast<uint64_t>(out.offset));
  words.word(out.sizes.size());
  for (int64_t v : out.sizes) words.word(static_cast<uint64_t>(v));
  for (int64_t v : out.strides) words.word(static_cast<uint64_t>(v));
}

ExpectedOutput get_expected(WordReader& words) {
  ExpectedOutput out;
  out.kind = static_cast<OutKind>(words.word());
  out.reference = static_cast<uint32_t>(words.word());
  out.dtype = static_cast<at::ScalarType>(words.word());
  out.offset = static_cast<int64_t>(words.word());
  size_t n = words.word();
  const uint64_t* sizes = words.words(n);
  const uint64_t* strides = words.words(n);
  out.sizes.assign(sizes, sizes + n);
  out.strides.assign(strides, strides + n);
  return out;
}

void put_templates(WordWriter& words, const TemplateTable& templates) {
  words.word(templates.size());
  for (const auto& t : templates.all()) {
    put_text(words, t->name);
    words.word(t->key.size());
    words.bytes(t->key.data(), t->key.size() * sizeof(uint64_t));
    words.word(t->new_storages);
    words.word(t->expected.size());
    for (const ExpectedOutput& out : t->expected) put_expected(words, out);
  }
}

void get_templates(WordReader words, TemplateTable& templates, c10::Device device) {
  for (uint64_t i = 0, n = words.word(); i < n; i++) {
    std::string name = get_text(words);
    size_t n_key = words.word();
    auto t = parse_template(std::move(name), words.words(n_key), n_key, device);
    t->new_storages = static_cast<uint32_t>(words.word());
    for (uint64_t k = 0, outputs = words.word(); k < outputs; k++) {
      t->expected.push_back(get_expected(words));
      if (t->expected.back().kind == OutKind::New && t->expected.back().reference >= t->new_storages)
        throw std::runtime_error("a template's results are inconsistent");
    }
    templates.check_next(templates.size());
    templates.add(std::move(t));
  }
}

// Storages by their numbers in the file, in the order in which their rank has made the first handle on each; those that
// only collectives name come last.
std::vector<uint64_t> in_order_of_handles(WordReader handles, uint64_t n) {
  std::vector<uint64_t> first(n, ~uint64_t{0}), order(n);
  for (uint64_t i = 0, named = handles.word(); i < named; i++) {
    const uint64_t handle = handles.word();
    uint64_t& earliest = first.at(handles.word());
    earliest = std::min(earliest, handle);
  }
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::ranges::stable_sort(order, {}, [&](uint64_t index) { return first[index]; });
  return order;
}

// Which storages collectives have taken as input or will write to: these stay their rank's own.
std::vector<bool> in_collectives(WordReader pending, uint64_t n) {
  std::vector<bool> found(n);
  for (uint64_t i = 0, operations = pending.word(); i < operations; i++) {
    pending.words(pending.word());
    for (uint64_t k = 0, storages = pending.word(); k < storages; k++) found.at(pending.word()) = true;
    pending.bytes(pending.word());
  }
  return found;
}

// Where ranks share the device, what another rank has brought already is kept once from the start: otherwise a device
// that they fit could not load them.
std::vector<PhysicalPtr> get_physical(const MetaReader& meta, SnapshotServices services, const std::string& path) {
  StoragesFile file(path, StoragesFile::Mode::Open);
  WordReader words = meta.section("physical");
  const uint64_t n = words.word();
  const uint64_t* entries = words.words(4 * n);  // offset, bytes, and a number that means nothing here
  const std::vector<bool> own = in_collectives(meta.section("pending"), n);
  splice::Splicer::Taken taken;
  std::vector<PhysicalPtr> result(n);
  for (uint64_t index : in_order_of_handles(meta.section("handles"), n)) {
    const uint64_t offset = entries[4 * index], bytes = entries[4 * index + 1];
    if (bytes > kImpossible) throw std::runtime_error("a storage of impossible size");
    auto physical = c10::make_intrusive<PhysicalStorage>(services.backend.allocate(bytes));
    file.read(services.backend, physical->storage, offset);
    result[index] = services.splicer && !own[index] ? services.splicer->loaded(physical, taken) : physical;
  }
  return result;
}

void put_collectives(MetaWriter& meta, CollectiveBridge& collectives, const RankState& rank, PhysicalIndex& index) {
  WordWriter& comms = meta.section("comms");
  comms.word(rank.communicators.size());
  for (const Communicator& c : rank.communicators) {
    comms.word(c.id);
    comms.word(c.members.size());
    for (int member : c.members) comms.word(static_cast<uint64_t>(member));
  }
  auto counts = collectives.engine().counts(static_cast<int>(rank.rank));
  WordWriter& completed = meta.section("counts");
  completed.word(counts.size());
  for (const auto& [id, count] : counts) {
    put_text(completed, id.text());
    completed.word(count.completed | (count.scatters ? kScatters : 0));
  }
  auto operations = collectives.engine().pending(static_cast<int>(rank.rank));
  WordWriter& pending = meta.section("pending");
  pending.word(operations.size());
  for (const PendingOperation& operation : operations) {
    const PendingCollective& ours = rank.pending.at(operation.ticket);
    pending.word(ours.body.size());
    pending.bytes(ours.body.data(), ours.body.size() * sizeof(uint64_t));
    pending.word(ours.storages.size());
    for (const PhysicalPtr& physical : ours.storages) pending.word(index(physical));
    put_text(pending, {reinterpret_cast<const char*>(operation.input.data()), operation.input.size()});
  }
}

void get_collectives(const MetaReader& meta, CollectiveBridge& collectives, RankState& rank,
                     const std::vector<PhysicalPtr>& physical) {
  WordReader comms = meta.section("comms");
  for (uint64_t i = 0, n = comms.word(); i < n; i++) {
    // The body of a Communicator message again: what checks that one checks this one.
    WordWriter body;
    body.word(comms.word());
    size_t members = comms.word();
    const uint64_t* ranks = comms.words(members);
    size_t own = static_cast<size_t>(std::find(ranks, ranks + members, uint64_t{rank.rank}) - ranks);
    body.word(own);
    body.word(members);
    for (size_t k = 0; k < members; k++) body.word(ranks[k]);
    collectives.define(rank, WordReader(body.words().data(), body.size()));
  }
  WordReader counts = meta.section("counts");
  std::map<SequenceId, uint64_t> completed;
  std::set<SequenceId> scattering;
  for (uint64_t i = 0, n = counts.word(); i < n; i++) {
    SequenceId id = SequenceId::parse(get_text(counts));
    const uint64_t count = counts.word();
    completed[id] = count & ~kScatters;
    if (count & kScatters) scattering.insert(id);
  }
  collectives.engine().restore_counts(static_cast<int>(rank.rank), completed, scattering);
  WordReader pending = meta.section("pending");
  for (uint64_t i = 0, n = pending.word(); i < n; i++) {
    PendingCollective operation;
    size_t n_body = pending.word();
    const uint64_t* body = pending.words(n_body);
    operation.body.assign(body, body + n_body);
    for (uint64_t k = 0, storages = pending.word(); k < storages; k++)
      operation.storages.push_back(physical.at(pending.word()));
    size_t n_input = pending.word();
    const char* input = pending.bytes(n_input);
    Slice packed;
    if (n_input) packed = Buffer::copy_of(std::as_bytes(std::span(input, n_input)));
    collectives.reissue(rank, std::move(operation), std::move(packed));
  }
}

void put_store(WordWriter& words, const KeyValueStore& store) {
  words.word(store.items().size());
  for (const auto& [key, value] : store.items()) {
    put_text(words, key);
    put_text(words, value);
  }
}

void load(const MetaReader& meta, SnapshotServices services, RankState& rank, KeyValueStore* store,
          const std::string& storages_path) {
  WordReader identity = meta.section("rank");
  uint64_t saved_rank = identity.word(), saved_protocol = identity.word();
  if (saved_rank != rank.rank) throw std::runtime_error("it is the state of rank " + std::to_string(saved_rank));
  if (saved_protocol != kProtocolVersion) throw std::runtime_error("it speaks another protocol version");
  if (rank.storages.size() != 0 || rank.templates.size() != 0)
    throw ControlError("device-proxy.order", "rank " + std::to_string(rank.rank) + " has device state already");

  auto physical = get_physical(meta, services, storages_path);
  WordReader handles = meta.section("handles");
  for (uint64_t i = 0, n = handles.word(); i < n; i++) {
    uint64_t handle = handles.word();
    rank.storages.bind(handle, physical.at(handles.word()));
  }
  rank.libraries.read(meta.section("library"));
  get_templates(meta.section("template"), rank.templates, services.backend.device());
  WordReader generators = meta.section("rng");
  for (uint64_t i = 0, n = generators.word(); i < n; i++) {
    uint64_t id = generators.word();
    std::string state = get_text(generators);
    if (id != 0) services.process.new_generator(rank, id);
    services.process.set_state(rank, id, state.data(), state.size());
  }
  WordReader flags = meta.section("flags");
  size_t n_flags = flags.word();
  const uint64_t* words = flags.words(n_flags);
  if (n_flags) {
    services.process.enter(rank);
    services.process.set_flags(rank, std::vector<uint64_t>(words, words + n_flags));
  }
  // Moments are kept as how long ago they were: the clock of this machine may be another one.
  WordReader marks = meta.section("marks");
  const int64_t now = services.backend.now();
  for (uint64_t i = 0, n = marks.word(); i < n; i++) {
    const uint64_t id = marks.word();
    rank.marks[id] = now - static_cast<int64_t>(marks.word());
  }
  get_collectives(meta, services.collectives, rank, physical);
  WordReader counters = meta.section("counters");
  rank.executed = counters.word(), rank.defined = counters.word(), rank.messages = counters.word();
  if (counters.left() != 0) {  // not in what was dumped before there were these
    rank.storages.remember_peak(counters.word());
    rank.gradient_bytes = counters.word();
  }
  if (!store) return;
  WordReader keys = meta.section("store");
  std::map<std::string, std::string> items;
  for (uint64_t i = 0, n = keys.word(); i < n; i++) {
    std::string key = get_text(keys);
    items[key] = get_text(keys);
  }
  store->replace(std::move(items));
}

}  // namespace

uint64_t dump_rank(SnapshotServices services, RankState& rank, const KeyValueStore* store, const std::string& meta_path,
                   const std::string& storages_path) {
  services.backend.synchronize();
  StoragesFile file(storages_path, StoragesFile::Mode::Create);
  PhysicalIndex index(services.backend, file);
  MetaWriter meta;
  WordWriter& identity = meta.section("rank");
  identity.word(rank.rank);
  identity.word(kProtocolVersion);
  WordWriter handles;
  for (const auto& [handle, physical] : rank.storages) {
    handles.word(handle);
    handles.word(index(physical));
  }
  WordWriter& section = meta.section("handles");
  section.word(rank.storages.size());
  section.append(handles);
  rank.libraries.write(meta.section("library"));
  put_templates(meta.section("template"), rank.templates);
  WordWriter& generators = meta.section("rng");
  generators.word(rank.generators.size());
  for (const auto& [id, generator] : rank.generators) {
    at::Tensor state = services.process.get_state(rank, id);
    generators.word(id);
    put_text(generators, {static_cast<const char*>(state.const_data_ptr()), state.nbytes()});
  }
  WordWriter& flags = meta.section("flags");
  flags.word(rank.flags.size());
  for (uint64_t word : rank.flags) flags.word(word);
  WordWriter& marks = meta.section("marks");
  const int64_t now = services.backend.now();
  marks.word(rank.marks.size());
  for (const auto& [id, moment] : rank.marks) {
    marks.word(id);
    marks.word(static_cast<uint64_t>(now - moment));
  }
  put_collectives(meta, services.collectives, rank, index);
  WordWriter& counters = meta.section("counters");
  counters.word(rank.executed);
  counters.word(rank.defined);
  counters.word(rank.messages);
  counters.word(rank.storages.peak_bytes());
  counters.word(rank.gradient_bytes);
  if (store) put_store(meta.section("store"), *store);
  index.write(meta.section("physical"));
  uint64_t bytes = file.finish();
  meta.write(meta_path);
  return bytes;
}

void load_rank(SnapshotServices services, RankState& rank, KeyValueStore* store, const std::string& meta_path,
               const std::string& storages_path) {
  MetaReader meta(meta_path);
  auto unusable = [&](const std::string& why) {
    return ControlError("device-proxy.meta", "the device state in " + meta_path + " cannot be used: " + why);
  };
  try {
    load(meta, services, rank, store, storages_path);
  } catch (const ControlError&) {
    throw;
  } catch (const c10::Error& e) {
    throw unusable(e.what_without_backtrace());
  } catch (const std::exception& e) {
    throw unusable(e.what());
  }
}

}  // namespace ergo::device
