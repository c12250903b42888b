// What the ranks do whose tensors lie elsewhere in symmetric memory than the other ranks'.
#include <cstddef>
#include <memory>

#include "layers.h"

namespace tokenweave::test {
namespace {

using Calls = std::vector<std::string>;

constexpr size_t kMemoryBytes = 4 * sizeof(Tensors);
constexpr const char* kCompare = "compare 24 bytes";

FieldList fields_of(int site, int half) { return start_fields().set("site", site).set("half", half); }

Tensors* symmetric_memory() {
  void* memory = nullptr;
  EXPECT_EQ(twPluginTensorMemory(0, kMemoryBytes, &memory, nullptr), TW_OK);
  return static_cast<Tensors*>(memory);
}

/// The halves of one site, with their tensors in symmetric memory.
struct SymmetricSite {
  explicit SymmetricSite(const FieldList& prefix_fields = fields_of(0, 0)) : prefix(prefix_fields) {
    Tensors* const memory = symmetric_memory();
    prefix.move_to(memory);
    suffix.move_to(memory + 1);
    join = std::make_unique<WaitFor>(suffix, join_fields().set("half", 1));
  }
  Start prefix;
  Start suffix{fields_of(0, 1)};
  std::unique_ptr<WaitFor> join;

  /// A step whose halves have these rows. Returns what was queued, without events.
  Calls step(int64_t prefix_rows, int64_t suffix_rows) {
    const int64_t tokens = prefix_rows + suffix_rows;
    (void)gpu().take();
    EXPECT_EQ(prefix.run({prefix_rows, tokens}) + suffix.run({suffix_rows, tokens}), 0) << last_error().message;
    EXPECT_EQ(join->run(), 0) << last_error().message;
    Calls queued;
    for (const std::string& call : gpu().take()) {
      if (call.find("collective") == 0 || call == kCompare) queued.push_back(call.substr(0, call.find(" side")));
    }
    return queued;
  }
};

class Offsets : public PluginTest {};

TEST_F(Offsets, AreComparedBeforeALayersFirstCollective) {
  SymmetricSite site;
  EXPECT_EQ(site.step(0, 0), Calls{});
  EXPECT_EQ(site.step(8, 0), (Calls{kCompare, "collective 8 main started none"}));
  EXPECT_EQ(site.step(6, 4), (Calls{"collective 6", kCompare, "collective 4"}));
  EXPECT_EQ(site.step(6, 4), (Calls{"collective 6", "collective 4"}));
  EXPECT_EQ(gpu().op.staged, 0);
  EXPECT_EQ(counters().staged, 0u);
  EXPECT_EQ(counters().offset_fallbacks, 0u);
}

TEST_F(Offsets, AreComparedBeforeAnythingIsQueued) {
  SymmetricSite site;
  gpu().failing = "twGroupAllGather";
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_NE(site.prefix.run({6, 10}), 0);
    EXPECT_EQ(gpu().take().back(), kCompare);
    EXPECT_EQ(std::string(last_error().message), "AllReduceRmsNorm site 0 prefix: rank 1 did not come");
  }
}

TEST_F(Offsets, ThatDifferStageEveryCollectiveFromThereOn) {
  SymmetricSite site;
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  EXPECT_EQ(gpu().op.staged, 0);
  gpu().peer_offset = [](int64_t offset) { return offset + 32; };
  testing::internal::CaptureStderr();
  EXPECT_EQ(site.suffix.run({4, 10}), 0);
  EXPECT_EQ(gpu().op.staged, 1);
  EXPECT_EQ(site.join->run(), 0);
  // The other layers as well, and nothing is compared or said any more.
  EXPECT_EQ(site.step(6, 4), (Calls{"collective 6", "collective 4"}));
  EXPECT_EQ(gpu().op.staged, 1);
  const std::string input = std::to_string(sizeof(Tensors) + offsetof(Tensors, input));
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "[TokenWeave] site 0 suffix: input lies at byte " + std::to_string(std::stoi(input) + 32) +
                " of tensor memory on rank 0 and at byte " + input +
                " of tensor memory on rank 1. From here on all collectives of this engine are copied through staging "
                "memory, on all ranks. Fix: build the ranks' engines together, with the same timing cache\n");
  EXPECT_EQ(counters().staged, 3u);
  EXPECT_EQ(counters().offset_fallbacks, 3u);
  EXPECT_EQ(gpu().tensors.input, site.suffix.tensors().input);
}

TEST_F(Offsets, OfATensorThatLiesElsewhereOnOneRankDiffer) {
  SymmetricSite site;
  gpu().peer_offset = [](int64_t offset) { return offset == offsetof(Tensors, normed) ? -1 : offset; };
  testing::internal::CaptureStderr();
  EXPECT_EQ(site.prefix.run({6, 10}), 0);
  EXPECT_EQ(gpu().op.staged, 1);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("normed lies outside of tensor memory on rank 0 and at byte " +
                                                        std::to_string(offsetof(Tensors, normed))),
            std::string::npos);
}

TEST_F(Offsets, OfResidualOutMatterWhereItIsGathered) {
  for (const int gathered : {0, 1}) {
    gpu() = FakeGpu{};
    SymmetricSite site{fields_of(0, 0).flag("gather_residual", gathered)};
    gpu().peer_offset = [](int64_t offset) { return offset == offsetof(Tensors, residual_out) ? offset + 8 : offset; };
    EXPECT_EQ(site.prefix.run({6, 10}), 0);
    EXPECT_EQ(gpu().op.staged, gathered);
  }
}

TEST_F(Offsets, AreNotComparedWithoutSymmetricMemoryOrOtherRanks) {
  gpu().peer_offset = [](int64_t offset) { return offset + 8; };
  {
    Start plain;
    EXPECT_EQ(plain.change_shape() + plain.run({6, 10}), 0);
  }
  Start alone{fields_of(0, 0).set("group", {2}).set("tp_rank", 0)};
  alone.move_to(symmetric_memory());
  EXPECT_EQ(alone.run({6, 10}), 0);
  for (const std::string& call : gpu().take()) EXPECT_NE(call, kCompare);
  EXPECT_EQ(counters().offset_fallbacks, 0u);
}

}  // namespace
}  // namespace tokenweave::test
