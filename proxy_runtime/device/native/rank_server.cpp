#include "rank_server.hpp"

#include <algorithm>
#include <sstream>

#include "failure.hpp"
#include "message_bodies.hpp"
#include "splice/splicer.hpp"

namespace ergo::device {
namespace {

constexpr size_t kMarks = 1 << 20;
// Smaller storages are given up when their turn comes.
constexpr uint64_t kWorthFreeing = 1024;
// From then on a queue that waits is looked at.
constexpr auto kStands = std::chrono::seconds(1);

}  // namespace

RankServer::RankServer(Services services, uint32_t rank, uint32_t slot, int fd)
    : services_(services), state_(rank, slot), ring_(fd) {
  if (ring_.header().rank != rank)
    throw std::runtime_error("the ring belongs to rank " + std::to_string(ring_.header().rank) + ", not to rank " +
                             std::to_string(rank));
  shared_ = shared_words(ring_.header()).shared.load() == 1;
  state_.report = [this](const Failure& failure) { ring_.report(failure); };
  services_.process.admit(state_);
}

RankServer::~RankServer() { services_.process.leave(state_); }

void RankServer::fail(const Failure& failure) {
  if (finished()) return;
  failed_ = true;
  failure_ = failure.message;
  ring_.close(failure);
}

bool RankServer::departed() {
  if (finished()) return true;
  // Another process may use a shared ring next; and whoever starts a tree's ranks looks after them.
  if (shared_ || ring_.header().rank_leaving.load() == 0) return false;
  return ring_.has_message() ? blocked_ && !awaits_store_ && !ring_.holds(Message::Collective) : true;
}

uint64_t RankServer::standing_at() const {
  const bool stands = blocked_ && !awaits_store_ && !finished() && stands_at_ == state_.messages + 1;
  return stands && std::chrono::steady_clock::now() - stands_since_ >= kStands ? stands_at_ : 0;
}

// What a process that is gone has left unexecuted, as a driver drops the launches of one that was killed.
void RankServer::drop_left_behind() {
  if (!ring_.drop_to(shared_words(ring_.header()).dropped_to.load(std::memory_order_acquire))) return;
  blocked_ = awaits_store_ = false;
  store_reply_.reset();
}

// Communicators stay: their counts are part of what the other members agree on at a cut, and ids are never used again.
void RankServer::reset() {
  if (!shared_) throw ProtocolError("a new beginning on a ring that is not shared");
  services_.process.leave(state_);
  state_.storages.clear();
  state_.templates = TemplateTable();
  state_.generators.clear();
  state_.default_state = at::Tensor();
  state_.flags.clear();
  services_.process.admit(state_);
  if (auto* member = state_.member) member->splicer.reset(*member);
  ring_.header().step.store(0);
  ring_.header().step_done.store(0);
  ring_.header().error_flag.store(0);
}

bool RankServer::step() {
  if (finished()) return false;
  if (shared_) drop_left_behind();
  if (blocked_) {
    if (awaits_store_ ? !store_reply_ : blocked_at_ == state_.completions) return false;
    blocked_ = false;
  }
  std::optional<MessageView> message;
  running_.clear();
  try {
    message = ring_.peek();
    if (!message) return false;
    Failure failure;
    bool failed = false;
    asks_ = message->type == Message::Store ? Asks::Store : Asks::Nothing;
    try {
      const Outcome outcome = handle(*message);
      if (outcome == Outcome::Held) return false;
      if (outcome == Outcome::Waits) {
        blocked_ = true;
        blocked_at_ = state_.completions;
        if (stands_at_ != state_.messages + 1) {
          stands_at_ = state_.messages + 1;
          stands_since_ = std::chrono::steady_clock::now();
        }
        return false;
      }
    } catch (...) {
      failure = current_failure();
      failed = true;
    }
    if (failed && is_synchronous(message->type))
      ring_.respond(failure.status, failure.message.data(), failure.message.size());
    else if (failed)
      ring_.report({failure.status, running_ + failure.message});
    state_.messages++;
    if (message->type == Message::Ready || message->type == Message::Store) questions_++;
    ring_.advance(*message);
  } catch (const ProtocolError& e) {
    fail({Status::Runtime, "the device proxy stopped serving rank " + std::to_string(state_.rank) +
                               " because a message of it is malformed: " + e.what()});
  }
  return true;
}

bool RankServer::ready() const {
  if (finished() || !ring_.has_message()) return false;
  return !blocked_ || (awaits_store_ ? store_reply_.has_value() : blocked_at_ != state_.completions);
}

Message RankServer::free_ahead(bool to_the_end) {
  // What it named before this wait may have been all that was in the way.
  if (std::exchange(looked_before_, state_.messages + 1) != state_.messages + 1) looked_at_ = 0;
  return ring_.free_ahead(
      looked_at_, to_the_end,
      [this](uint64_t handle) {
        if (!state_.storages.contains(handle)) return false;
        const PhysicalStorage& storage = *state_.storages.find(handle);
        return storage.pending == 0 && storage.storage.nbytes() >= kWorthFreeing && splice::references(storage) == 1;
      },
      [this](uint64_t handle) { state_.storages.release(handle); });
}

void RankServer::deliver_store_reply(std::string reply) { store_reply_ = std::move(reply); }

bool RankServer::any_pending(const uint64_t* handles, size_t n) const {
  for (size_t i = 0; i < n; i++)
    if (state_.storages.is_pending(handles[i])) return true;
  return false;
}

bool RankServer::waits(Message type, WordReader body) const {
  switch (type) {
    case Message::Read:
    case Message::Pull:
    case Message::PullPinned:
    case Message::PushPinned:
    case Message::Write:
    case Message::Resize:
      return state_.storages.is_pending(body.word());
    case Message::Exec: {
      ExecBody exec(body);
      return any_pending(exec.handles, exec.n_handles);
    }
    case Message::Define: {
      DefineBody define(body);
      return any_pending(define.handles, define.n_handles);
    }
    case Message::Collective:
      return services_.collectives.must_wait(state_, body);
    case Message::Sync:
    case Message::Stats:
    case Message::GetRng:
    case Message::Mark:
      return true;
    default:
      return false;
  }
}

RankServer::Outcome RankServer::handle(const MessageView& message) {
  WordReader body = message.body;
  auto* member = state_.member;  // null: alone on its device
  try {
    if (!state_.pending.empty() && waits(message.type, body)) return Outcome::Waits;
    if (message.type == kResetMessage) return reset(), Outcome::Done;
    switch (message.type) {
      case Message::Exec:
        return execute(body);
      case Message::Free: {
        const uint64_t handle = operands<1>(body)[0];
        state_.storages.release(handle);
        if (member) member->splicer.released(*member, handle);
        break;
      }
      case Message::Alloc:
        allocate(body);
        break;
      case Message::Define:
        return define(body);
      case Message::Write:
        return write(body);
      case Message::Read:
        read(body);
        break;
      case Message::Resize:
        resize(body);
        break;
      case Message::Sync:
        operands<0>(body);
        services_.backend.synchronize();
        ring_.respond(Status::Ok, nullptr, 0);
        break;
      case Message::Seed: {
        auto [id, seed] = operands<2>(body);
        services_.process.seed(state_, id, seed);
        if (member) member->splicer.seeded(*member, id, seed);
        break;
      }
      case Message::NewGenerator:
        services_.process.new_generator(state_, operands<1>(body)[0]);
        break;
      case Message::FreeGenerator:
        services_.process.free_generator(state_, operands<1>(body)[0]);
        break;
      case Message::GetRng: {
        at::Tensor state = services_.process.get_state(state_, operands<1>(body)[0]);
        ring_.respond(Status::Ok, state.const_data_ptr(), state.nbytes());
        break;
      }
      case Message::SetRng: {
        uint64_t id = body.word(), n = body.word();
        const char* bytes = body.bytes(n);
        services_.process.set_state(state_, id, bytes, n);
        if (member) member->splicer.random_set(*member, id, bytes, n);
        break;
      }
      case Message::Store:
        return store(body);
      case Message::Communicator:
        services_.collectives.define(state_, body);
        break;
      case Message::Collective:
        services_.collectives.issue(state_, body);
        break;
      case Message::Step:
        ring_.header().step_done.store(operands<1>(body)[0]);
        state_.given.clear();
        state_.given_bytes = 0;
        break;
      case Message::Stats: {
        operands<0>(body);
        std::string json = stats();
        ring_.respond(Status::Ok, json.data(), json.size());
        break;
      }
      case Message::Ready: {
        uint64_t n = body.word();
        const char ready = !any_pending(body.words(n), n);
        if (!ready) asks_ = Asks::Result;
        ring_.respond(Status::Ok, &ready, 1);
        break;
      }
      case Message::Mark: {
        const uint64_t id = operands<1>(body)[0];
        if (state_.marks.size() >= kMarks && !state_.marks.count(id)) throw ProtocolError("too many timing events");
        state_.marks[id] = services_.backend.now();
        break;
      }
      case Message::Unmark:
        state_.marks.erase(operands<1>(body)[0]);
        break;
      case Message::Elapsed: {
        auto [from, to] = operands<2>(body);
        const auto first = state_.marks.find(from), second = state_.marks.find(to);
        TORCH_CHECK(first != state_.marks.end() && second != state_.marks.end(), "an event that was not recorded");
        const int64_t ns = second->second - first->second;
        ring_.respond(Status::Ok, &ns, sizeof ns);
        break;
      }
      case Message::Pull:
        pull(body);
        break;
      case Message::PullPinned:
      case Message::PushPinned:
        return copy_pinned(message.type, body);
      case Message::DeviceInfo: {
        operands<0>(body);
        const DeviceInfo info = services_.backend.info();
        WordWriter words;
        words.word(info.memory_bytes);
        words.word(uint64_t{info.major} << 32 | info.minor);
        words.word(info.processors);
        words.bytes(info.name.data(), info.name.size());
        ring_.respond(Status::Ok, words.words().data(), words.size() * sizeof(uint64_t));
        break;
      }
      case Message::Exit:
        operands<0>(body);
        if (shared_) {
          reset();
          shared_words(ring_.header()).claimant.store(0);
        } else {
          exited_ = true;
          if (member) state_.storages.clear();  // what it shared is its peers' alone
        }
        break;
      case Message::Flags: {
        uint64_t n = body.word();
        const uint64_t* words = body.words(n);
        services_.process.enter(state_);
        services_.process.set_flags(state_, std::vector<uint64_t>(words, words + n));
        if (member) member->splicer.flags_set(*member);
        break;
      }
      case Message::Library:
      case Message::LibraryPart:
        library(message.type, body);
        break;
      default:
        throw ProtocolError("unknown message type " + std::to_string(static_cast<int>(message.type)));
    }
  } catch (const ProtocolError&) {
    throw;
  } catch (const std::runtime_error& e) {  // WordReader's; what kernels throw has become a c10::Error
    throw ProtocolError(e.what());
  }
  return Outcome::Done;
}

RankServer::Outcome RankServer::define(WordReader body) {
  DefineBody d(body);
  bool keep = d.id != kNoTemplate;
  if (keep) state_.templates.check_next(d.id);
  auto t = parse_template(std::move(d.name), d.key, d.n_key, services_.backend.device());
  WordWriter spec;
  const Call call{WordReader(d.handles, d.n_handles), d.payload, d.base};
  if (auto* member = state_.member) {
    if (!member->splicer.execute(*member, *t, call, &spec)) return Outcome::Held;
  } else {
    services_.executor.define(state_, *t, call, spec);
  }
  size_t bytes = spec.size() * sizeof(uint64_t);
  TORCH_CHECK(bytes <= ring_.response_bytes(), "ergosphere: the description of the results of ", t->name,
              " is too long for the channel");
  if (keep) state_.templates.add(std::move(t));
  ring_.respond(Status::Ok, spec.words().data(), bytes);
  return Outcome::Done;
}

RankServer::Outcome RankServer::execute(WordReader body) {
  ExecBody e(body);
  Template& t = state_.templates.at(e.id);
  const Call call{WordReader(e.handles, e.n_handles), e.payload, e.base};
  try {
    if (auto* member = state_.member) {
      if (!member->splicer.execute(*member, t, call, nullptr)) return Outcome::Held;
    } else {
      services_.executor.execute(state_, t, call);
    }
  } catch (...) {
    running_ = t.name + ": ";  // nobody waits for this message: its failure must say where it comes from
    throw;
  }
  return Outcome::Done;
}

void RankServer::allocate(WordReader body) {
  auto [handle, bytes] = operands<2>(body);
  if (state_.storages.contains(handle)) throw ProtocolError("storage handle " + std::to_string(handle) + " is in use");
  TORCH_CHECK_WITH(OutOfMemoryError, bytes < (uint64_t{1} << 48), "the device cannot allocate ", bytes, " bytes");
  state_.storages.bind(handle, state_.member ? state_.member->splicer.allocate(bytes)
                                             : c10::make_intrusive<PhysicalStorage>(services_.backend.allocate(bytes)));
  if (auto* member = state_.member) member->splicer.allocated(*member, handle);
}

void RankServer::resize(WordReader body) {
  auto [handle, bytes] = operands<2>(body);
  const PhysicalPtr old = readable(handle);
  TORCH_CHECK_WITH(OutOfMemoryError, bytes < (uint64_t{1} << 48), "the device cannot allocate ", bytes, " bytes");
  auto resized = c10::make_intrusive<PhysicalStorage>(services_.backend.allocate(bytes));
  services_.backend.copy(old->storage, resized->storage, std::min<uint64_t>(old->storage.nbytes(), bytes));
  state_.storages.rebind(handle, std::move(resized));
  if (auto* member = state_.member) member->splicer.resized(*member, handle, old->value);
}

RankServer::Outcome RankServer::store(WordReader body) {
  uint64_t n = body.word();
  std::string_view request(body.bytes(n), n);
  std::optional<std::string> reply;
  if (awaits_store_) {
    reply.swap(store_reply_);
  } else {
    reply = services_.store.request(state_.rank, request);
  }
  awaits_store_ = !reply.has_value();
  if (!reply) return Outcome::Waits;
  if (reply->empty()) throw ProtocolError("a malformed store request");
  ring_.respond(Status::Ok, reply->data(), reply->size());
  return Outcome::Done;
}

std::string RankServer::stats() const {
  std::ostringstream json;
  json << "{\"storages\":" << state_.storages.size() << ",\"bytes\":" << state_.storages.logical_bytes()
       << ",\"peak_bytes\":" << std::max(state_.storages.peak_bytes(), state_.storages.logical_bytes())
       << ",\"gradient_bytes\":" << state_.gradient_bytes << ",\"templates\":" << state_.templates.size()
       << ",\"executed\":" << state_.executed << ",\"defined\":" << state_.defined
       << ",\"messages\":" << state_.messages << ",\"pending\":" << state_.pending.size() << ",\"step\":" << step_done()
       << "}";
  return json.str();
}

}  // namespace ergo::device
