// Libraries that a rank has loaded and its operators come from.
#include "failure.hpp"
#include "rank_server.hpp"

namespace ergo::device {

void RankServer::library(Message type, WordReader body) {
  uint64_t size = body.word(), hash = body.word(), n_name = body.word();
  std::string name(body.bytes(n_name), n_name);
  if (type == Message::Library) {
    if (body.left() != 0) throw ProtocolError("the name of a library with more words than it says");
    const char loaded = state_.libraries.load(name, size, hash) ? 1 : 0;
    ring_.respond(Status::Ok, &loaded, 1);
  } else {
    uint64_t n = body.word();
    const char* part = body.bytes(n);
    try {
      state_.libraries.receive(name, size, hash, {part, n});
    } catch (const c10::Error&) {
      // Not an error of the job yet: it may never use the library here. The rank asks again and learns it.
    }
  }
}

}  // namespace ergo::device
