#include <gtest/gtest.h>

#include "fake_driver.h"
#include "ranks.h"
#include "symmetric_buffers.h"

namespace tokenweave::test {
namespace {

void expect_fallback(const std::vector<Outcome>& outcomes, const std::string& reason) {
  expect_peers(outcomes);
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.buffer->multicast(), nullptr);
    EXPECT_EQ(outcome.buffer->multicast_reason(), outcomes[0].buffer->multicast_reason());
    EXPECT_NE(outcome.buffer->multicast_reason().find(reason), std::string::npos) << outcome.buffer->multicast_reason();
  }
}

TEST(SymmetricBuffer, MapsEveryRankAndMulticastAndLeavesNothing) {
  for (const int size : {2, 4, 8}) {
    fake_reset();
    const int files = open_files();
    auto outcomes = create_buffers(size);
    expect_peers(outcomes);
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(fake_owner_of(outcome.buffer->multicast()), 100) << outcome.buffer->multicast_reason();
      EXPECT_EQ(outcome.buffer->multicast_reason(), "");
    }
    EXPECT_EQ(fake_live().bindings, size);
    outcomes.clear();
    EXPECT_EQ(fake_live(), FakeLive{});
    EXPECT_EQ(open_files(), files);
  }
}

TEST(SymmetricBuffer, AnyFailingPeerCallIsOneErrorOnEveryRankAndLeavesNothing) {
  struct Case {
    const char* call;
    int nth;
  };
  // cuDeviceGetAttribute: 1 and 2 ask for what is needed, 3 for multicast. cuMemMap and the like: own memory, then the
  // peer's.
  const std::vector<Case> cases{{"cuDeviceGet", 1},
                                {"cuDeviceGetAttribute", 1},
                                {"cuDeviceGetAttribute", 2},
                                {"cuDeviceGetUuid", 1},
                                {"cuMemGetAllocationGranularity", 1},
                                {"cuMemCreate", 1},
                                {"cuMemExportToShareableHandle", 1},
                                {"cuMemImportFromShareableHandle", 1},
                                {"cuMemAddressReserve", 1},
                                {"cuMemAddressReserve", 2},
                                {"cuMemMap", 1},
                                {"cuMemMap", 2},
                                {"cuMemSetAccess", 1},
                                {"cuMemSetAccess", 2}};
  for (const Case& failing : cases) {
    for (int rank = 0; rank < 2; ++rank) {
      SCOPED_TRACE(std::string(failing.call) + " " + std::to_string(failing.nth) + " on rank " + std::to_string(rank));
      fake_reset({rank, failing.call, failing.nth});
      const int files = open_files();
      const auto outcomes = create_buffers(2);
      for (const Outcome& outcome : outcomes) {
        EXPECT_EQ(outcome.status.code, TW_OUT_OF_MEMORY);
        EXPECT_EQ(outcome.status.message, outcomes[0].status.message);
        EXPECT_EQ(outcome.buffer, nullptr);
      }
      EXPECT_EQ(outcomes[0].status.message.find("rank " + std::to_string(rank) + ": "), 0u)
          << outcomes[0].status.message;
      EXPECT_NE(outcomes[0].status.message.find(std::string(failing.call) + " failed: made to fail"),
                std::string::npos);
      EXPECT_EQ(fake_live(), FakeLive{});
      EXPECT_EQ(open_files(), files);
    }
  }
}

TEST(SymmetricBuffer, AnyFailingMulticastCallFallsBackToPeersOnEveryRank) {
  struct Case {
    const char* call;
    int nth;
    int rank;
  };
  // Rank 0 creates and exports the object (its second export), rank 1 imports it (after the peer's memory).
  const std::vector<Case> cases{{"cuMulticastGetGranularity", 1, 0},
                                {"cuMulticastGetGranularity", 1, 1},
                                {"cuMulticastCreate", 1, 0},
                                {"cuMemExportToShareableHandle", 2, 0},
                                {"cuMemImportFromShareableHandle", 2, 1},
                                {"cuMulticastAddDevice", 1, 0},
                                {"cuMulticastAddDevice", 1, 1},
                                {"cuMulticastBindMem", 1, 0},
                                {"cuMulticastBindMem", 1, 1},
                                {"cuMemAddressReserve", 3, 0},
                                {"cuMemAddressReserve", 3, 1},
                                {"cuMemMap", 3, 0},
                                {"cuMemMap", 3, 1},
                                {"cuMemSetAccess", 3, 0},
                                {"cuMemSetAccess", 3, 1}};
  for (const Case& failing : cases) {
    SCOPED_TRACE(std::string(failing.call) + " on rank " + std::to_string(failing.rank));
    fake_reset({failing.rank, failing.call, failing.nth, CUDA_ERROR_NOT_SUPPORTED});
    const int files = open_files();
    auto outcomes = create_buffers(2);
    expect_fallback(outcomes, "rank " + std::to_string(failing.rank) + ": " + failing.call + " failed");
    EXPECT_EQ(fake_live().bindings, 0);
    EXPECT_EQ(fake_live().mappings, 4);
    outcomes.clear();
    EXPECT_EQ(fake_live(), FakeLive{});
    EXPECT_EQ(open_files(), files);
  }
}

TEST(SymmetricBuffer, NeverTouchesMulticastWhereItIsNotAllowedOrNotThere) {
  fake_reset();
  expect_fallback(create_buffers(2, fake_driver(), /*allow_multicast=*/false), "not allowed");
  EXPECT_EQ(fake_calls(0, "cuMulticastCreate"), 0);

  DriverTable old = fake_driver();
  old.MulticastBindMem = nullptr;
  fake_reset();
  expect_fallback(create_buffers(2, old), "rank 0 has no multicast");

  fake_reset();
  fake_set_attribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0);
  expect_fallback(create_buffers(2), "rank 0 has no multicast");

  // A driver that does not know the attribute: a missing extra, not an error.
  fake_reset({1, "cuDeviceGetAttribute", 3, CUDA_ERROR_INVALID_VALUE});
  expect_fallback(create_buffers(2), "rank 1 has no multicast");
}

TEST(SymmetricBuffer, NeverTouchesMulticastWhereRanksShareAGpu) {
  struct Case {
    std::vector<int> gpu_of_rank;
    const char* reason;
  };
  const std::vector<Case> cases{{{0, 0}, "ranks 0 and 1 share a GPU"},
                                {{0, 1, 0, 1}, "ranks 0 and 2 share a GPU"},
                                {{0, 1, 2, 3, 4, 5, 6, 6}, "ranks 6 and 7 share a GPU"}};
  for (const Case& sharing : cases) {
    SCOPED_TRACE(sharing.reason);
    const int size = static_cast<int>(sharing.gpu_of_rank.size());
    fake_reset();
    // Other device numbers for the same GPU, as with another CUDA_VISIBLE_DEVICES on each rank.
    for (int rank = 0; rank < size; ++rank) fake_set_gpu(rank, sharing.gpu_of_rank[rank], rank);
    auto outcomes = create_buffers(size);
    expect_fallback(outcomes, sharing.reason);
    for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.buffer->multicast_reason(), sharing.reason);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(fake_calls(rank, "cuMulticastGetGranularity"), 0);
      EXPECT_EQ(fake_calls(rank, "cuMulticastCreate"), 0);
    }
    outcomes.clear();
    EXPECT_EQ(fake_live(), FakeLive{});
  }
}

TEST(SymmetricBuffer, RanksWithOneDeviceNumberAndAGpuEachHaveMulticast) {
  fake_reset();
  for (int rank = 0; rank < 4; ++rank) fake_set_gpu(rank, rank, 0);
  auto outcomes = create_buffers(4);
  expect_peers(outcomes);
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(fake_owner_of(outcome.buffer->multicast()), 100) << outcome.buffer->multicast_reason();
  }
  outcomes.clear();
  EXPECT_EQ(fake_live(), FakeLive{});
}

TEST(SymmetricBuffer, RefusesDevicesThatCannotShare) {
  for (const auto attribute : {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                               CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
    fake_reset();
    fake_set_attribute(attribute, 0);
    for (const Outcome& outcome : create_buffers(2)) EXPECT_EQ(outcome.status.code, TW_UNSUPPORTED);
    EXPECT_EQ(fake_live(), FakeLive{});
  }
}

}  // namespace
}  // namespace tokenweave::test
