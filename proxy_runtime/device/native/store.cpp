#include "store.hpp"

#include <charconv>
#include <cstdint>
#include <cstring>

#include "failure.hpp"
#include "wire.hpp"

namespace ergo::device {
namespace {

class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view text() { return take(number<uint32_t>()); }
  std::string_view rest() { return take(bytes_.size()); }

 private:
  std::string_view take(size_t n) {
    if (n > bytes_.size()) throw ProtocolError("a store request shorter than its contents say");
    std::string_view taken = bytes_.substr(0, n);
    bytes_.remove_prefix(n);
    return taken;
  }
  std::string_view bytes_;
};

std::string missing() { return std::string(1, '\0'); }
std::string bytes_reply(std::string_view value) { return std::string(1, '\1').append(value); }
std::string number_reply(int64_t value) {
  return bytes_reply(std::string_view(reinterpret_cast<const char*>(&value), sizeof value));
}

}  // namespace

std::string KeyValueStore::apply(std::string_view request) {
  ByteReader reader(request);
  auto op = static_cast<StoreOp>(reader.number<uint8_t>());
  std::string key(reader.text());
  std::string_view value = reader.text();
  auto number = reader.number<int64_t>();
  auto it = items_.find(key);
  switch (op) {
    case StoreOp::Set:
      items_[key] = value;
      return bytes_reply({});
    case StoreOp::Get:
      return it == items_.end() ? missing() : bytes_reply(it->second);
    case StoreOp::Add: {
      int64_t sum = number;
      if (it != items_.end()) {
        int64_t old = 0;
        const std::string& text = it->second;
        std::from_chars(text.data(), text.data() + text.size(), old);
        __builtin_add_overflow(sum, old, &sum);  // wraps, as TCPStore's does
      }
      items_[key] = std::to_string(sum);
      return number_reply(sum);
    }
    case StoreOp::Check:
      return number_reply(it != items_.end());
    case StoreOp::CompareSet: {  // as TCPStore: the value after the operation, or what was expected if nothing is there
      ByteReader pair(value);
      std::string expected(pair.text()), desired(pair.rest());
      if (it == items_.end()) {
        if (!expected.empty()) return bytes_reply(expected);
        items_[key] = desired;
        return bytes_reply(desired);
      }
      if (it->second == expected) it->second = desired;
      return bytes_reply(it->second);
    }
    case StoreOp::Delete:
      return number_reply(static_cast<int64_t>(items_.erase(key)));
    case StoreOp::NumKeys:
      return number_reply(static_cast<int64_t>(items_.size()));
    case StoreOp::Append:
      items_[key].append(value);
      return bytes_reply({});
  }
  throw ProtocolError("an unknown store operation");
}

}  // namespace ergo::device
