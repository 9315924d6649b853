// The rendezvous store: what torch.distributed keeps in a TCPStore, kept by the proxy that hosts rank 0.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace ergo::device {

class KeyValueStore {
 public:
  // Executes one request (wire.hpp StoreOp) and returns the reply. Never blocks. Throws ProtocolError.
  std::string apply(std::string_view request);

  const std::map<std::string, std::string>& items() const { return items_; }
  void replace(std::map<std::string, std::string> items) { items_ = std::move(items); }

 private:
  std::map<std::string, std::string> items_;
};

}  // namespace ergo::device
