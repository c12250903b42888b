// Symmetric buffers of ranks that are threads, over the fakes.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "fake_driver.h"
#include "ranks.h"
#include "symmetric_buffer.h"

namespace tokenweave::test {

/// Runs `body` on `size` ranks that have met.
inline void run_connected(int size, const std::function<void(int, Bootstrap&)>& body) {
  const std::string address = fresh_address();
  run_threads(size, [&](int rank) {
    fake_be_rank(rank);
    BootstrapOptions options;
    options.rank = rank;
    options.size = size;
    options.timeout = std::chrono::seconds(10);
    options.address = address;
    std::unique_ptr<Bootstrap> bootstrap;
    const Status status = connect_bootstrap(options, &bootstrap);
    ASSERT_TRUE(status.ok()) << status.message;
    body(rank, *bootstrap);
  });
}

struct Outcome {
  Status status;
  std::unique_ptr<SymmetricBuffer> buffer;
};

/// Sets a buffer up on `size` ranks over the driver, and over NCCL where that is given.
inline std::vector<Outcome> create_buffers(int size, const DriverTable& driver = fake_driver(),
                                           bool allow_multicast = true, const NcclTable* nccl = nullptr) {
  std::vector<Outcome> outcomes(size);
  run_connected(size, [&](int rank, Bootstrap& bootstrap) {
    const SymmetricBuffer::Options options{rank, 5 << 20, allow_multicast, nccl};
    outcomes[rank].status = SymmetricBuffer::create(driver, bootstrap, options, &outcomes[rank].buffer);
  });
  return outcomes;
}

/// That every rank addresses every rank's memory of the driver.
inline void expect_peers(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.message;
    for (size_t rank = 0; rank < outcomes.size(); ++rank) {
      EXPECT_EQ(fake_owner_of(outcome.buffer->of_rank(static_cast<int>(rank))), static_cast<int>(rank));
    }
  }
}

}  // namespace tokenweave::test
