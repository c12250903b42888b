// Unix sockets with deadlines, whole messages, and file descriptors on board.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "status.h"
#include "unique_fd.h"

namespace tokenweave {

using Deadline = std::chrono::steady_clock::time_point;

/// Listens at "/path" or at "@name" in the abstract namespace. A path left behind by a dead process is replaced; of two
/// that replace one at the same moment the second may replace the first. TW_BOOTSTRAP_ERROR where another process of
/// this machine has the address. Sockets in a file system that machines share belong to one of them: the others see
/// dead ones.
Status listen_at(const std::string& address, int backlog, UniqueFd* listener);

/// Tries until the deadline, for the listener may come later. TW_BOOTSTRAP_ERROR at once where it is another user's.
Status connect_to(const std::string& address, Deadline deadline, UniqueFd* connection);

/// Accepts processes of the same user only. TW_BOOTSTRAP_ERROR at the deadline.
Status accept_one(int listener, Deadline deadline, UniqueFd* connection);

/// Sends all bytes, and `fds` with the first of them.
Status send_all(int socket, const void* data, size_t bytes, const std::vector<int>& fds, Deadline deadline);

/// Receives exactly `bytes`, and appends the descriptors that came along.
Status receive_all(int socket, void* data, size_t bytes, std::vector<UniqueFd>* fds, Deadline deadline);

}  // namespace tokenweave
