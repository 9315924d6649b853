#include "flags.hpp"

#include <cstring>

namespace ergo::rank {

Flags& Flags::instance() {
  static Flags* flags = new Flags;
  return *flags;
}

bool Flags::refresh() {
  std::lock_guard<std::mutex> lock(mutex_);
  // Before the flags are read: a setter that comes meanwhile is looked at by the next call.
  changed_.store(false);
  FlagWords now = read_flags();
  now[static_cast<size_t>(FlagWord::FlushDenormal)] = flush_denormal_;
  now[static_cast<size_t>(FlagWord::Threads)] = threads_;
  uint32_t number = 0;
  while (number < sets_.size() && sets_[number] != now) ++number;
  if (number == sets_.size()) {
    TORCH_CHECK(number < 65536, "ergosphere: this process has used 65536 different sets of precision flags");
    sets_.push_back(std::move(now));
  }
  return current_.exchange(number) != number;
}

void Flags::set_flush_denormal(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  flush_denormal_ = on ? 2 : 1;
  touch();
}

void Flags::set_threads(uint64_t n) {
  std::lock_guard<std::mutex> lock(mutex_);
  threads_ = n;
  touch();
}

void Flags::send(Channel::Transaction& t, uint32_t number) {
  if (C10_LIKELY(number == sent_)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const FlagWords& words = sets_[number];
  uint64_t* body = t.begin(Message::Flags, 1 + words.size());
  body[0] = words.size();
  std::memcpy(body + 1, words.data(), 8 * words.size());
  t.commit();
  sent_ = number;
}

}  // namespace ergo::rank
