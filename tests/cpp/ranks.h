// Runs one function per rank: as threads that share a fake driver, or as processes like in production.
#pragma once

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace tokenweave::test {

/// An address that no other test uses.
inline std::string fresh_address() {
  static int serial = 0;
  return "@tokenweave-test-" + std::to_string(getpid()) + "-" + std::to_string(serial++);
}

inline void run_threads(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

/// Forks one process per rank; returns what each returned, or "died".
inline std::vector<std::string> run_processes(int size, const std::function<std::string(int)>& body) {
  std::vector<int> pipes;
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) return {};
    const pid_t child = fork();
    if (child == 0) {
      const std::string text = body(rank);
      _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
    }
    close(ends[1]);
    pipes.push_back(ends[0]);
    children.push_back(child);
  }
  std::vector<std::string> results;
  for (int rank = 0; rank < size; ++rank) {
    std::string text(4096, '\0');
    const ssize_t n = read(pipes[rank], text.data(), text.size());
    text.resize(n > 0 ? n : 0);
    close(pipes[rank]);
    int code = 0;
    waitpid(children[rank], &code, 0);
    results.push_back(WIFEXITED(code) && WEXITSTATUS(code) == 0 ? text : "died");
  }
  return results;
}

inline int open_files() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

}  // namespace tokenweave::test
