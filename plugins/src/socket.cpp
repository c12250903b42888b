#include "socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

namespace tokenweave {
namespace {

constexpr size_t kMaxFds = 16;
constexpr auto kRetryEvery = std::chrono::milliseconds(20);
constexpr const char* kGone = "the process is gone";

Status socket_error(const std::string& what) {
  return error(TW_BOOTSTRAP_ERROR, what + " failed: " + std::strerror(errno));
}

/// Of a connection that failed. A process that ends with data unread resets its connections; that is no other error.
Status connection_error() {
  if (errno == EPIPE || errno == ECONNRESET) return error(TW_BOOTSTRAP_ERROR, kGone);
  return error(TW_BOOTSTRAP_ERROR, std::string("connection lost: ") + std::strerror(errno));
}

struct SocketAddress {
  sockaddr_un value{};
  socklen_t bytes = 0;

  const sockaddr* pointer() const { return reinterpret_cast<const sockaddr*>(&value); }
};

Status parse_address(const std::string& text, SocketAddress* address) {
  if (text.size() < 2 || (text[0] != '/' && text[0] != '@') || text.size() >= sizeof address->value.sun_path) {
    return error(TW_INVALID_ARGUMENT, "bootstrap address '" + text +
                                          "' is not '/path' or '@name' of fewer than 108 characters. Fix: set "
                                          "TOKENWEAVE_BOOTSTRAP or TwGroupConfig.bootstrap");
  }
  address->value.sun_family = AF_UNIX;
  std::memcpy(address->value.sun_path, text.data(), text.size());
  if (text[0] == '@') address->value.sun_path[0] = '\0';
  address->bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size() + (text[0] == '/' ? 1 : 0));
  return {};
}

/// Waits until the socket is ready for `events`.
Status wait_ready(int socket, short events, Deadline deadline) {
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return error(TW_BOOTSTRAP_ERROR, "no answer within the timeout");
    pollfd entry{socket, events, 0};
    const int ready = poll(&entry, 1, static_cast<int>(left.count()) + 1);
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return socket_error("poll");
  }
}

/// Whether a process of this user is at the other end: GPU memory is not for strangers.
bool is_ours(const UniqueFd& connection) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

UniqueFd make_socket(int type) { return UniqueFd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

/// `why` an address cannot be had. Names it, and what to do; `or_else` is the last way out.
Status not_free(const std::string& address, const std::string& why, const char* or_else) {
  return error(TW_BOOTSTRAP_ERROR,
               address + why +
                   ". Fix: choose another TOKENWEAVE_BOOTSTRAP or TwGroupConfig.bootstrap for all ranks, or " +
                   or_else);
}

Status taken(const std::string& address) {
  return not_free(address, " is taken: the rank 0 of another job listens there", "end that job");
}

/// Removes the file at "/path" unless a process holds a socket there.
Status remove_if_dead(const std::string& path, const SocketAddress& parsed) {
  // A connection would be one of the other job's ranks to its rank 0. A socket of another type gets none: where there
  // is a process the kernel says EPROTOTYPE, and ECONNREFUSED where there is only a file.
  const UniqueFd probe = make_socket(SOCK_DGRAM);
  if (!probe) return socket_error("socket");
  const bool connected = connect(probe.get(), parsed.pointer(), parsed.bytes) == 0;
  if (connected || (errno != ECONNREFUSED && errno != ENOENT)) return taken(path);
  if (unlink(path.c_str()) == 0 || errno == ENOENT) return {};
  return not_free(path, std::string(" is in the way and cannot be removed: ") + std::strerror(errno), "remove it");
}

}  // namespace

Status listen_at(const std::string& address, int backlog, UniqueFd* listener) {
  SocketAddress parsed;
  TW_RETURN_IF_ERROR(parse_address(address, &parsed));
  *listener = make_socket(SOCK_STREAM);
  if (!*listener) return socket_error("socket");
  const auto try_bind = [&] { return bind(listener->get(), parsed.pointer(), parsed.bytes); };
  int result = try_bind();
  if (result != 0 && errno == EADDRINUSE && address[0] == '/') {
    TW_RETURN_IF_ERROR(remove_if_dead(address, parsed));
    result = try_bind();
  }
  if (result != 0) return errno == EADDRINUSE ? taken(address) : socket_error("binding " + address);
  if (listen(listener->get(), backlog) != 0) return socket_error("listening at " + address);
  return {};
}

Status connect_to(const std::string& address, Deadline deadline, UniqueFd* connection) {
  SocketAddress parsed;
  TW_RETURN_IF_ERROR(parse_address(address, &parsed));
  while (true) {
    *connection = make_socket(SOCK_STREAM);
    if (!*connection) return socket_error("socket");
    if (connect(connection->get(), parsed.pointer(), parsed.bytes) == 0) {
      if (is_ours(*connection)) return {};
      *connection = UniqueFd();
      return error(TW_BOOTSTRAP_ERROR,
                   "a process of another user listens at " + address + ". Fix: run all ranks as one user");
    }
    const bool not_yet = errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR;
    if (!not_yet) return socket_error("connecting to rank 0 at " + address);
    if (std::chrono::steady_clock::now() > deadline) {
      return error(TW_BOOTSTRAP_ERROR, "rank 0 does not listen at " + address +
                                           ". Fix: start all ranks with the same bootstrap address, on one machine");
    }
    std::this_thread::sleep_for(kRetryEvery);
  }
}

Status accept_one(int listener, Deadline deadline, UniqueFd* connection) {
  while (true) {
    TW_RETURN_IF_ERROR(wait_ready(listener, POLLIN, deadline));
    *connection = UniqueFd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!*connection) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) continue;
      return socket_error("accept");
    }
    if (is_ours(*connection)) return {};
    *connection = UniqueFd();
  }
}

Status send_all(int socket, const void* data, size_t bytes, const std::vector<int>& fds, Deadline deadline) {
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  size_t sent = 0;
  while (sent < bytes) {
    iovec part{const_cast<char*>(static_cast<const char*>(data)) + sent, bytes - sent};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (sent == 0 && !fds.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
    }
    const ssize_t n = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      TW_RETURN_IF_ERROR(wait_ready(socket, POLLOUT, deadline));
    } else if (errno != EINTR) {
      return connection_error();
    }
  }
  return {};
}

Status receive_all(int socket, void* data, size_t bytes, std::vector<UniqueFd>* fds, Deadline deadline) {
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  size_t received = 0;
  while (received < bytes) {
    TW_RETURN_IF_ERROR(wait_ready(socket, POLLIN, deadline));
    iovec part{static_cast<char*>(data) + received, bytes - received};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (n == 0) return error(TW_BOOTSTRAP_ERROR, kGone);
    if (n < 0) {
      if (errno == EAGAIN || errno == EINTR) continue;
      return connection_error();
    }
    received += static_cast<size_t>(n);
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
        fds->emplace_back(fd);
      }
    }
  }
  return {};
}

}  // namespace tokenweave
