// The bodies of messages, read from their words (channel/messages.hpp). What does not fit is a ProtocolError, or the
// WordReader's own exception; nothing beyond the end is read.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "failure.hpp"
#include "wire.hpp"

namespace ergo::device {

// Operands of a message whose body is nothing but words.
template <size_t N>
std::array<uint64_t, N> operands(WordReader body) {
  std::array<uint64_t, N> words{};
  for (uint64_t& word : words) word = body.word();
  if (body.left() != 0) throw ProtocolError("a message longer than its type");
  return words;
}

struct DefineBody {
  uint64_t id = 0, base = 0;
  std::string name;
  const uint64_t* key = nullptr;
  size_t n_key = 0, n_handles = 0;
  const uint64_t* handles = nullptr;
  WordReader payload{nullptr, 0};

  explicit DefineBody(WordReader body) {
    id = body.word(), base = body.word();
    size_t n_name = body.word();
    n_key = body.word(), n_handles = body.word();
    size_t n_payload = body.word();
    if (n_name > 4096) throw ProtocolError("an operator name of " + std::to_string(n_name) + " bytes");
    name.assign(body.bytes(n_name), n_name);
    key = body.words(n_key);
    handles = body.words(n_handles);
    payload = WordReader(body.words(n_payload), n_payload);
    if (body.left() != 0) throw ProtocolError("a definition with more words than it says");
  }
};

struct ExecBody {
  uint64_t id = 0, base = 0;
  size_t n_handles = 0;
  const uint64_t* handles = nullptr;
  WordReader payload{nullptr, 0};

  explicit ExecBody(WordReader body) {
    id = body.word(), base = body.word();
    n_handles = body.word();
    size_t n_payload = body.word();
    handles = body.words(n_handles);
    payload = WordReader(body.words(n_payload), n_payload);
    if (body.left() != 0) throw ProtocolError("a call with more words than it says");
  }
};

}  // namespace ergo::device
