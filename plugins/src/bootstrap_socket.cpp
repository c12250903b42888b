#include <algorithm>
#include <cstring>

#include "bootstrap.h"
#include "socket.h"

namespace tokenweave {
namespace {

constexpr uint32_t kMagic = 0x54574232;  // "TWB2": changes with the wire format

enum class Kind : uint32_t { kHello, kData, kAbort };

/// Before every message. The payload follows; a kAbort's payload is its error text.
struct Header {
  uint32_t magic = kMagic;
  Kind kind = Kind::kData;
  int32_t rank = 0;
  int32_t size = 0;
  uint32_t step = 0;
  uint32_t bytes = 0;
  uint32_t fd_ranks = 0;  ///< bit r: a descriptor of rank r comes along, in rank order
  TwCode code = TW_OK;    ///< of a kAbort
};

class SocketBootstrap final : public Bootstrap {
 public:
  explicit SocketBootstrap(const BootstrapOptions& options) : options_(options), links_(options.size) {}

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }

  Status connect();

  Status all_gather(const char* what, const void* mine, void* all, size_t bytes) override {
    std::vector<UniqueFd> no_fds;
    return unless_failed([&] { return exchange(what, mine, all, bytes, -1, &no_fds); });
  }

  Status share_fds(const char* what, int mine, std::vector<UniqueFd>* all) override {
    const char nothing = 0;
    std::vector<char> ignored(options_.size);
    return unless_failed([&] { return exchange(what, &nothing, ignored.data(), 1, mine, all); });
  }

 private:
  template <typename Call>
  Status unless_failed(Call call) {
    if (failure_.ok()) failure_ = call();
    return failure_;
  }
  Status exchange(const char* what, const void* mine, void* all, size_t bytes, int my_fd, std::vector<UniqueFd>* fds);
  Status gather(const char* what, char* all, size_t bytes, std::vector<UniqueFd>* fds);
  Status scatter(const char* what, const char* all, size_t bytes, const std::vector<UniqueFd>& fds, int my_fd);
  Status receive(int link, Deadline until, void* payload, size_t bytes, Header* header, std::vector<UniqueFd>* fds);
  Status send(int link, Header header, const void* payload, const std::vector<int>& fds);
  /// Rank 0 tells the others why, so that nobody waits for a step that will not come.
  Status abort(Status why);

  Deadline deadline() const { return std::chrono::steady_clock::now() + options_.timeout; }
  /// The others give rank 0 time to find out who is missing and to tell them.
  Deadline answer_deadline() const { return deadline() + options_.timeout; }
  /// Says which rank an error is about. What rank 0 sent is left as it is: all ranks say the same.
  Status name(int rank, const char* what, const Status& status) const {
    if (aborted_) return status;
    return error(status.code, std::string(what) + ": rank " + std::to_string(rank) + ": " + status.message);
  }

  BootstrapOptions options_;
  std::vector<UniqueFd> links_;  ///< rank 0: to every other rank; others: entry 0
  uint32_t step_ = 0;
  bool aborted_ = false;  // by rank 0
  Status failure_;        // the first
};

Status SocketBootstrap::send(int link, Header header, const void* payload, const std::vector<int>& fds) {
  header.rank = options_.rank;
  header.size = options_.size;
  header.step = step_;
  TW_RETURN_IF_ERROR(send_all(links_[link].get(), &header, sizeof header, fds, deadline()));
  return send_all(links_[link].get(), payload, header.bytes, {}, deadline());
}

Status SocketBootstrap::receive(int link, Deadline until, void* payload, size_t bytes, Header* header,
                                std::vector<UniqueFd>* fds) {
  TW_RETURN_IF_ERROR(receive_all(links_[link].get(), header, sizeof *header, fds, until));
  if (header->magic != kMagic) return error(TW_RANKS_DISAGREE, "speaks another version of the library");
  if (header->kind == Kind::kAbort) {
    std::string text(std::min<size_t>(header->bytes, TW_MESSAGE_BYTES), '\0');
    TW_RETURN_IF_ERROR(receive_all(links_[link].get(), text.data(), text.size(), fds, until));
    aborted_ = true;
    return error(header->code, text);
  }
  if (header->size != options_.size) {
    return error(TW_RANKS_DISAGREE, "was started with size " + std::to_string(header->size) + ", this rank with " +
                                        std::to_string(options_.size));
  }
  if (header->step != step_ || header->bytes != bytes) {
    return error(TW_RANKS_DISAGREE, "is at another step of the set-up: the ranks do not make the same calls");
  }
  return bytes == 0 ? Status{} : receive_all(links_[link].get(), payload, bytes, fds, until);
}

Status SocketBootstrap::abort(Status why) {
  if (options_.rank != 0) return why;
  Header header;
  header.kind = Kind::kAbort;
  header.bytes = static_cast<uint32_t>(std::min<size_t>(why.message.size(), TW_MESSAGE_BYTES));
  header.code = why.code;
  for (int link = 0; link < options_.size; ++link) {
    if (!links_[link]) continue;
    (void)send(link, header, why.message.data(), {}).ok();  // a rank that is gone cannot be told
    links_[link] = UniqueFd();
  }
  return why;
}

Status SocketBootstrap::connect() {
  if (options_.size == 1) return {};
  Header header;
  header.kind = Kind::kHello;
  if (options_.rank != 0) {
    TW_RETURN_IF_ERROR(connect_to(options_.address, deadline(), &links_[0]));
    const Deadline until = answer_deadline();
    const Status sent = send(0, header, nullptr, {});
    std::vector<UniqueFd> fds;
    Status status = receive(0, until, nullptr, 0, &header, &fds);  // whether or not it was sent: see exchange()
    if (status.ok()) status = sent;
    return status.ok() ? status : name(0, "bootstrap", status);
  }
  UniqueFd listener;
  TW_RETURN_IF_ERROR(listen_at(options_.address, options_.size, &listener));
  const Deadline until = deadline();
  for (int arrived = 1; arrived < options_.size; ++arrived) {
    // Entry 0 is free on rank 0: it holds a connection until it has said who it is.
    if (const Status accepted = accept_one(listener.get(), until, &links_[0]); !accepted.ok()) {
      std::string missing;
      for (int rank = 1; rank < options_.size; ++rank) {
        if (!links_[rank]) missing += " " + std::to_string(rank);
      }
      return abort(error(TW_BOOTSTRAP_ERROR,
                         "bootstrap at " + options_.address + ": missing rank" + missing + ": " + accepted.message));
    }
    std::vector<UniqueFd> fds;
    if (const Status hello = receive(0, until, nullptr, 0, &header, &fds); !hello.ok()) {
      return abort(name(header.rank, "bootstrap", hello));
    }
    if (header.rank <= 0 || header.rank >= options_.size || links_[header.rank]) {
      return abort(
          error(TW_RANKS_DISAGREE, "bootstrap: two processes say that they are rank " + std::to_string(header.rank)));
    }
    std::swap(links_[header.rank], links_[0]);
  }
  if (options_.address[0] == '/') unlink(options_.address.c_str());
  for (int rank = 1; rank < options_.size; ++rank) {
    if (const Status sent = send(rank, header, nullptr, {}); !sent.ok()) return abort(name(rank, "bootstrap", sent));
  }
  return {};
}

Status SocketBootstrap::gather(const char* what, char* all, size_t bytes, std::vector<UniqueFd>* fds) {
  const Deadline until = deadline();
  for (int rank = 1; rank < options_.size; ++rank) {
    Header header;
    std::vector<UniqueFd> received;
    const Status status = receive(rank, until, all + rank * bytes, bytes, &header, &received);
    if (!status.ok()) return name(rank, what, status);
    if (!received.empty()) (*fds)[rank] = std::move(received[0]);
  }
  return {};
}

Status SocketBootstrap::scatter(const char* what, const char* all, size_t bytes, const std::vector<UniqueFd>& fds,
                                int my_fd) {
  Header header;
  header.bytes = static_cast<uint32_t>(bytes * options_.size);
  std::vector<int> outgoing;
  for (int rank = 0; rank < options_.size; ++rank) {
    const int fd = rank == 0 ? my_fd : fds[rank].get();
    if (fd < 0) continue;
    outgoing.push_back(fd);
    header.fd_ranks |= 1u << rank;
  }
  for (int rank = 1; rank < options_.size; ++rank) {
    if (const Status sent = send(rank, header, all, outgoing); !sent.ok()) return name(rank, what, sent);
  }
  return {};
}

Status SocketBootstrap::exchange(const char* what, const void* mine, void* all, size_t bytes, int my_fd,
                                 std::vector<UniqueFd>* fds) {
  fds->clear();
  fds->resize(options_.size);
  ++step_;
  auto* everything = static_cast<char*>(all);
  std::memcpy(everything + options_.rank * bytes, mine, bytes);
  if (options_.size == 1) return {};
  if (options_.rank == 0) {
    if (Status status = gather(what, everything, bytes, fds); !status.ok()) return abort(status);
    if (Status status = scatter(what, everything, bytes, *fds, my_fd); !status.ok()) return abort(status);
    return {};
  }
  Header header;
  header.bytes = static_cast<uint32_t>(bytes);
  const Deadline until = answer_deadline();
  const Status sent = send(0, header, mine, my_fd < 0 ? std::vector<int>{} : std::vector<int>{my_fd});
  // Whether or not it was sent: rank 0 may have closed the link before, and what it said then is waiting here.
  std::vector<UniqueFd> received;
  Status status = receive(0, until, everything, bytes * options_.size, &header, &received);
  if (status.ok()) status = sent;
  if (!status.ok()) return name(0, what, status);
  size_t next = 0;
  for (int rank = 0; rank < options_.size && next < received.size(); ++rank) {
    if ((header.fd_ranks >> rank & 1u) == 0) continue;
    UniqueFd fd = std::move(received[next++]);
    if (rank != options_.rank) (*fds)[rank] = std::move(fd);  // this rank's own copy is closed here
  }
  return {};
}

}  // namespace

Status connect_bootstrap(const BootstrapOptions& options, std::unique_ptr<Bootstrap>* bootstrap) {
  auto made = std::make_unique<SocketBootstrap>(options);
  TW_RETURN_IF_ERROR(made->connect());
  *bootstrap = std::move(made);
  return {};
}

}  // namespace tokenweave
