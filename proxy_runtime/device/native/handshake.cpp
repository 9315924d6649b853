// TCP connections between proxies: everybody listens, connects with retries, and both ends prove the job's
// token before a byte of the fabric flows. One poll loop, no blocking call, one deadline.
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "streams.hpp"

namespace ergo {

namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t kHelloMagic = 0x4F4C4C4548474645ull;
constexpr size_t kMaxToken = 256;
constexpr auto kRetry = std::chrono::milliseconds(10);

struct Hello {
  uint64_t magic = kHelloMagic;
  uint32_t version = kFabricVersion;
  int32_t from = -1, to = -1;
  uint32_t token_length = 0;
  std::array<uint8_t, kMaxToken> token{};
};
static_assert(sizeof(Hello) == 24 + kMaxToken);

// Takes the same time wherever the first difference is; the whole padded array, so the length leaks nothing.
bool same_token(const Hello& a, const Hello& b) {
  uint32_t difference = a.token_length ^ b.token_length;
  for (size_t i = 0; i < kMaxToken; ++i) difference |= static_cast<uint32_t>(a.token[i] ^ b.token[i]);
  return difference == 0;
}

struct AddressList {
  addrinfo* head = nullptr;
  AddressList(const TcpPeer& peer, bool passive) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
    int rc = getaddrinfo(peer.host.c_str(), std::to_string(peer.port).c_str(), &hints, &head);
    if (rc != 0)
      throw FabricError(
          "fabric_address", peer.peer,
          "cannot resolve " + peer.host + " for proxy " + std::to_string(peer.peer) + ": " + gai_strerror(rc));
  }
  ~AddressList() {
    if (head) freeaddrinfo(head);
  }
  AddressList(const AddressList&) = delete;
};

UniqueFd listen_on(const TcpPeer& peer) {
  AddressList addresses(peer, true);
  UniqueFd fd(socket(addresses.head->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!fd || bind(fd.get(), addresses.head->ai_addr, addresses.head->ai_addrlen) != 0 || listen(fd.get(), 64) != 0)
    throw FabricError("fabric_listen", peer.peer,
                      "cannot listen on " + peer.host + ":" + std::to_string(peer.port) + " for proxy " +
                          std::to_string(peer.peer) + ": " + error_text(errno));
  return fd;
}

// A connection on its way: ours to a peer, or a stranger's until it has proved who it is.
struct Attempt {
  const TcpPeer* spec = nullptr;  // null: accepted, not identified yet
  UniqueFd fd;
  Clock::time_point retry_at{};
  Hello outgoing, incoming;
  size_t sent = 0, got = 0;
  bool sending = false, connecting = false, done = false;
};

class Rendezvous {
 public:
  Rendezvous(int self, const std::vector<TcpPeer>& peers, std::string_view token, Deadline deadline)
      : self_(self), peers_(peers), deadline_(deadline) {
    if (token.size() > kMaxToken)
      throw FabricError("fabric_handshake", -1, "the fabric token is longer than 256 bytes");
    mine_.from = self;
    mine_.token_length = static_cast<uint32_t>(token.size());
    std::copy(token.begin(), token.end(), mine_.token.begin());
  }

  std::map<int, UniqueFd> run() {
    std::map<std::pair<std::string, uint16_t>, UniqueFd> listeners;
    for (const auto& peer : peers_) {
      if (!peer.listen) {
        attempts_.push_back(std::make_unique<Attempt>());
        attempts_.back()->spec = &peer;
      } else if (!listeners.count({peer.host, peer.port})) {
        listeners.emplace(std::pair{peer.host, peer.port}, listen_on(peer));
      }
    }
    while (connected_.size() < peers_.size()) {
      auto now = Clock::now();
      if (now >= deadline_) give_up();
      auto wake = deadline_;
      std::vector<pollfd> polled;
      for (auto& [address, fd] : listeners) polled.push_back({fd.get(), POLLIN, 0});
      for (auto& attempt : attempts_) {
        if (!attempt->fd && attempt->retry_at <= now) connect_now(*attempt);
        if (!attempt->fd) wake = std::min(wake, attempt->retry_at);
        short events = attempt->connecting || attempt->sending ? POLLOUT : POLLIN;
        polled.push_back({attempt->fd.get(), events, 0});  // poll skips negative descriptors
      }
      auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(wake - now).count() + 1;
      poll(polled.data(), polled.size(), static_cast<int>(std::clamp<long>(wait, 0, 1000)));
      size_t at = 0;
      std::vector<int> ready_listeners;
      for (auto& [address, fd] : listeners)
        if (polled[at++].revents) ready_listeners.push_back(fd.get());
      for (auto& attempt : attempts_)
        if (polled[at++].revents) drive(*attempt);
      std::erase_if(attempts_, [](const auto& attempt) { return attempt->done; });
      for (int fd : ready_listeners) accept_all(fd);
    }
    return std::move(connected_);
  }

 private:
  void connect_now(Attempt& attempt) {
    AddressList addresses(*attempt.spec, false);
    attempt.fd = UniqueFd(socket(addresses.head->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!attempt.fd)
      throw FabricError("fabric_system", attempt.spec->peer, "cannot make a socket: " + error_text(errno));
    attempt.outgoing = mine_;
    attempt.outgoing.to = attempt.spec->peer;
    attempt.sent = attempt.got = 0;
    attempt.sending = attempt.connecting = true;
    int rc = connect(attempt.fd.get(), addresses.head->ai_addr, addresses.head->ai_addrlen);
    if (rc != 0 && errno != EINPROGRESS) again(attempt, error_text(errno));
  }

  void again(Attempt& attempt, const std::string& why, bool handshake = false) {
    attempt.fd.reset();
    if (!attempt.spec) {
      attempt.done = true;  // a stranger, dropped without a word
      return;
    }
    // A refusal says more than what retrying found afterwards (a listener that has given up).
    auto& known = why_[attempt.spec->peer];
    if (known.empty() || handshake) known = why;
    attempt.retry_at = Clock::now() + kRetry;
  }

  void accept_all(int listener) {
    for (;;) {
      UniqueFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd) return;
      if (attempts_.size() >= 2 * peers_.size() + 64) continue;  // strangers cannot hold descriptors without bound
      attempts_.push_back(std::make_unique<Attempt>());
      attempts_.back()->fd = std::move(fd);
    }
  }

  void drive(Attempt& attempt) {
    if (attempt.connecting) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(attempt.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error) return again(attempt, error_text(error));
      attempt.connecting = false;
    }
    if (attempt.sending) {
      auto bytes = std::as_bytes(std::span(&attempt.outgoing, 1)).subspan(attempt.sent);
      ssize_t n = send(attempt.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n < 0) return errno == EAGAIN ? void() : again(attempt, error_text(errno));
      attempt.sent += static_cast<size_t>(n);
      if (attempt.sent < sizeof(Hello)) return;
      attempt.sending = false;
      if (!attempt.spec) return succeed(attempt, attempt.incoming.from);  // the acceptor's reply is out
      return;
    }
    auto into = std::as_writable_bytes(std::span(&attempt.incoming, 1)).subspan(attempt.got);
    ssize_t n = recv(attempt.fd.get(), into.data(), into.size(), 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0)
      return again(attempt, n == 0 ? "it refused the handshake (its token or index differs)" : error_text(errno),
                   n == 0);
    attempt.got += static_cast<size_t>(n);
    if (attempt.got == sizeof(Hello)) judge(attempt);
  }

  void judge(Attempt& attempt) {
    const Hello& hello = attempt.incoming;
    bool known = hello.magic == kHelloMagic && same_token(hello, mine_);
    if (!known) return again(attempt, "it answered with another token", true);
    if (hello.to != self_ || !expected(attempt, hello.from))
      return again(attempt, "it is proxy " + std::to_string(hello.from), true);
    if (attempt.spec) {
      check_version(hello);
      return succeed(attempt, hello.from);
    }
    attempt.outgoing = mine_;  // also on another version: so that both ends can say so
    attempt.outgoing.to = hello.from;
    attempt.sent = 0;
    attempt.sending = true;
  }

  bool expected(const Attempt& attempt, int from) const {
    if (attempt.spec) return from == attempt.spec->peer;
    return std::any_of(peers_.begin(), peers_.end(),
                       [&](const TcpPeer& peer) { return peer.listen && peer.peer == from; }) &&
           !connected_.count(from);
  }

  void check_version(const Hello& hello) const {
    if (hello.version != kFabricVersion)
      throw FabricError("fabric_handshake", hello.from,
                        "proxy " + std::to_string(hello.from) + " speaks fabric version " +
                            std::to_string(hello.version) + ", this build speaks " + std::to_string(kFabricVersion) +
                            ": run the same build on all nodes of a job");
  }

  void succeed(Attempt& attempt, int peer) {
    check_version(attempt.incoming);
    attempt.done = true;
    if (!connected_.count(peer)) connected_.emplace(peer, std::move(attempt.fd));
  }

  [[noreturn]] void give_up() const {
    std::string missing;
    int first = -1;
    for (const auto& peer : peers_) {
      if (connected_.count(peer.peer)) continue;
      if (first < 0) first = peer.peer;
      missing += (missing.empty() ? "" : "; ") + std::string("proxy ") + std::to_string(peer.peer) +
                 (peer.listen ? " did not connect to " : " could not be reached at ") + peer.host + ":" +
                 std::to_string(peer.port);
      if (auto why = why_.find(peer.peer); why != why_.end()) missing += " (" + why->second + ")";
    }
    throw FabricError("fabric_connect", first,
                      "proxy " + std::to_string(self_) + ": not all peers by the deadline: " + missing);
  }

  int self_;
  const std::vector<TcpPeer>& peers_;
  Deadline deadline_;
  Hello mine_;
  std::vector<std::unique_ptr<Attempt>> attempts_;
  std::map<int, UniqueFd> connected_;
  std::map<int, std::string> why_;
};

}  // namespace

void Fabric::connect_tcp_peers(const std::vector<TcpPeer>& peers, std::string_view token, Deadline deadline) {
  auto connected = Rendezvous(self_, peers, token, deadline).run();
  for (auto& [peer, fd] : connected) add_tcp_peer(peer, fd.release());
}

}  // namespace ergo
