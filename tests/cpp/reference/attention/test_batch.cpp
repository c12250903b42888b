// What the host arrays say, how work is cut, and how much memory that takes.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "batch.h"
#include "workspace.h"

namespace tokenweave::reference {
namespace {

using nlohmann::json;

const json& vectors() {
  static const json document = json::parse(std::ifstream(TOKENWEAVE_ATTENTION_VECTORS));
  return document;
}

/// Host arrays that are alive.
struct Step {
  std::vector<int32_t> types, contexts, past;
  int32_t tokens = 0;

  explicit Step(const json& step)
      : types(step["host_request_types"]),
        contexts(step["host_context_lengths"]),
        past(step["host_past_key_value_lengths"]) {
    for (size_t i = 0; i < types.size(); ++i) tokens += types[i] == 0 ? contexts[i] : 1;
  }
  Step(std::vector<int32_t> t, std::vector<int32_t> c, std::vector<int32_t> p)
      : Step(json{{"host_request_types", t}, {"host_context_lengths", c}, {"host_past_key_value_lengths", p}}) {}

  HostBatch host() const {
    return {static_cast<int32_t>(types.size()), tokens, types.data(), contexts.data(), past.data()};
  }
};

std::string batch_error(const Step& step) {
  Batch batch;
  return read_batch(step.host(), &batch).message;
}

TEST(Batch, OfEveryHalfOfEveryCutIsRead) {
  int32_t seen = 0;
  for (const json& cut : vectors()["cuts"]) {
    for (const json& half : {cut["step"], cut["prefix"], cut["suffix"]}) {
      const Step step(half);
      const std::vector<int32_t> lengths = half["sequence_length"];
      Batch batch;
      ASSERT_TRUE(read_batch(step.host(), &batch).ok()) << cut["name"];
      const auto contexts = static_cast<int32_t>(std::count(step.types.begin(), step.types.end(), 0));
      EXPECT_EQ(batch.context.rows, contexts);
      EXPECT_EQ(batch.generation.rows, static_cast<int32_t>(lengths.size()) - contexts);
      EXPECT_EQ(batch.context.tokens, std::accumulate(step.contexts.begin(), step.contexts.begin() + contexts, 0));
      EXPECT_EQ(batch.generation.tokens, batch.generation.rows);
      EXPECT_EQ(batch.context.first_row, 0);
      EXPECT_EQ(batch.context.first_token, 0);
      if (batch.generation.rows > 0) {
        EXPECT_EQ(batch.generation.first_row, contexts);
        EXPECT_EQ(batch.generation.first_token, batch.context.tokens);
      }
      const auto longest = [&](int32_t first, int32_t end) {
        return first == end ? 0 : *std::max_element(lengths.begin() + first, lengths.begin() + end);
      };
      EXPECT_EQ(batch.context.longest, longest(0, contexts));
      EXPECT_EQ(batch.generation.longest, longest(contexts, static_cast<int32_t>(lengths.size())));
      ++seen;
    }
  }
  EXPECT_GT(seen, 500);
}

TEST(Batch, OfAnotherFormIsRefused) {
  EXPECT_NE(batch_error({{1, 0}, {4, 4}, {9, 4}}).find("comes after a generation sequence"), std::string::npos);
  EXPECT_NE(batch_error({{2}, {4}, {4}}).find("has type 2"), std::string::npos);
  EXPECT_NE(batch_error({{0}, {0}, {0}}).find("expected at least 1"), std::string::npos);
  EXPECT_EQ(batch_error({{0, 0}, {4, 5}, {4, 4}}), "host_past_key_value_lengths of sequence 1 is 4 with 5 new tokens");
  EXPECT_EQ(batch_error({{1}, {4}, {-1}}), "host_past_key_value_lengths of sequence 0 is -1 with 1 new tokens");
  Step other({0, 1}, {4, 2}, {4, 7});
  for (const int32_t tokens : {4, 6}) {
    other.tokens = tokens;
    EXPECT_EQ(batch_error(other), "qkv has " + std::to_string(tokens) + " rows, the sequences have 5 tokens");
  }
}

class ReachTest : public testing::Test {
 protected:
  ReachTest() : step_({0, 1}, {40, 9}, {70, 63}) {
    for (int32_t i = 0; i < 3; ++i) {
      for (const int32_t row : {0, 6}) {
        blocks_[row + i] = 20 * i + row;
        blocks_[row + 3 + i] = 20 * i + row + 1;
      }
    }
  }
  std::string error(const Reach& changed) const { return check_reach(step_.host(), changed).message; }

  Step step_;
  std::vector<int32_t> blocks_ = std::vector<int32_t>(12);
  Reach reach_{70, 70, 3, 32, blocks_.data()};
};

TEST_F(ReachTest, MayBeUsedUp) {
  EXPECT_EQ(error(reach_), "");
  reach_.positions = 0;
  EXPECT_EQ(error(reach_), "");
  blocks_[6 + 2] = -1;  // the block behind the 64 tokens of the second row
  EXPECT_EQ(error(reach_), "");
}

TEST_F(ReachTest, OfAWindowOrATableIsNotExceeded) {
  reach_.window = 69;
  EXPECT_NE(error(reach_).find("sequence 0 has 70 tokens, more than the attention window 69"), std::string::npos);
  reach_.window = 70;
  reach_.positions = 69;
  EXPECT_EQ(error(reach_), "sequence 0 has 70 tokens, more than the 69 positions of rotary_cos_sin");
  reach_.positions = 70;
  reach_.max_blocks = 2;
  EXPECT_EQ(error(reach_), "sequence 0 has 70 tokens, more than its 2 blocks hold");
}

TEST_F(ReachTest, OfBlocksIsThePrimaryPool) {
  blocks_[2] = -1;
  EXPECT_NE(error(reach_).find("block 2 of sequence 0 has pages -1 (K) and 41 (V)"), std::string::npos);
  blocks_[2] = 40;
  blocks_[6 + 3 + 1] = 26;
  EXPECT_NE(error(reach_).find("block 1 of sequence 1 has pages 26 (K) and 26 (V)"), std::string::npos);
}

Grid grid_of(const std::vector<int32_t>& context_lengths, int32_t longest, int32_t group, int32_t slots,
             bool any_lengths = false) {
  RowGroup rows;
  rows.rows = static_cast<int32_t>(context_lengths.size());
  rows.tokens = std::accumulate(context_lengths.begin(), context_lengths.end(), 0);
  rows.longest = longest;
  return make_grid(rows, context_lengths.data(), group, slots, any_lengths);
}

TEST(Grid, HasATileForTheQueries) {
  EXPECT_EQ(make_grid({}, nullptr, 8, 264).ctas, 0);
  const Grid decode = make_grid({0, 40, 0, 40, 900}, nullptr, 8, 33);
  EXPECT_EQ(decode.tile, kSmallTile);
  EXPECT_EQ(decode.ctas, 40);
  EXPECT_FALSE(decode.split);
  const Grid wide = make_grid({0, 40, 0, 40, 900}, nullptr, 17, 33);
  EXPECT_EQ(wide.tile, kLargeTile);
  const Grid chunks = grid_of({33, 1}, 40, 8, 2);
  EXPECT_EQ(chunks.tile, kLargeTile);
  EXPECT_EQ(chunks.ctas, 3 + 1);
}

TEST(Grid, SplitsKeysWhereMostOfTheGpuWouldBeIdle) {
  EXPECT_FALSE(grid_of({16, 16}, 4096, 8, 3).split);
  const Grid split = grid_of({16, 16}, 4096, 8, 4);
  EXPECT_TRUE(split.split);
  EXPECT_EQ(split.ctas, 4);
  EXPECT_TRUE(grid_of({1}, kSmallestChunk + 1, 8, 4).split);
  EXPECT_FALSE(grid_of({1}, kSmallestChunk, 8, 4).split);
  EXPECT_EQ(cta_slots(132, 1), 264);
  EXPECT_EQ(cta_slots(132, 3), 88);
  EXPECT_EQ(cta_slots(2, 64), 1);
}

TEST(Grid, HoldsOtherLengthsOfTheSameSumWhereAsked) {
  EXPECT_EQ(grid_of({512, 512}, 512, 8, 2).ctas, 64);
  EXPECT_EQ(grid_of({504, 520}, 520, 8, 2).ctas, 65);
  EXPECT_EQ(grid_of({512, 512}, 512, 8, 2, true).ctas, 66);
  // Keys are shared out only where the tiles of all such lengths leave half of the slots.
  EXPECT_TRUE(grid_of({512, 512}, 512, 8, 128).split);
  EXPECT_FALSE(grid_of({512, 512}, 512, 8, 131, true).split);
  const Grid split = grid_of({512, 512}, 512, 8, 132, true);
  EXPECT_TRUE(split.split);
  EXPECT_EQ(split.ctas, 132);
  // A generation row has one token, in a graph as well.
  EXPECT_EQ(make_grid({0, 40, 0, 40, 900}, nullptr, 8, 33, true).ctas, 40);
}

/// What make_schedule (schedule.cu) makes of the lengths that it finds, on the host.
struct Cut {
  int64_t ctas = 0;            ///< cta_starts[rows]
  int64_t partial_tokens = 0;  ///< partial_starts[rows]
  bool uneven = false;         ///< some rows have more chunks than others
};

Cut cut_of(const Grid& grid, const std::vector<int32_t>& tokens, const std::vector<int32_t>& lengths, int32_t group) {
  const auto with = [&](int64_t chunk_tokens) {
    Cut cut;
    int64_t first = 0;
    for (size_t row = 0; row < tokens.size(); ++row) {
      const int64_t chunks = grid.split ? (lengths[row] + chunk_tokens - 1) / chunk_tokens : 1;
      cut.ctas += (int64_t{tokens[row]} * group + grid.tile - 1) / grid.tile * chunks;
      cut.partial_tokens += tokens[row] * chunks;
      first = row == 0 ? chunks : first;
      cut.uneven = cut.uneven || chunks != first;
    }
    return cut;
  };
  const int32_t longest = *std::max_element(lengths.begin(), lengths.end());
  int64_t chunk = kSmallestChunk;
  while (chunk < longest && with(chunk).ctas > grid.ctas) chunk += kSmallestChunk;
  return with(chunk);
}

/// As many lengths of at least 1, of the same sum.
std::vector<int32_t> others(const std::vector<int32_t>& lengths, std::mt19937* random) {
  std::vector<int32_t> result = lengths;
  for (size_t i = 0; i < result.size(); ++i) {
    int32_t& from = result[(*random)() % result.size()];
    const auto moved = static_cast<int32_t>((*random)() % static_cast<uint32_t>(from));
    from -= moved;
    result[(*random)() % result.size()] += moved;
  }
  return result;
}

TEST(Grid, AndItsMemoryHoldWhatReplaysFind) {
  std::mt19937 random(2);
  const auto below = [&random](int32_t end) { return static_cast<int32_t>(random() % static_cast<uint32_t>(end)); };
  int32_t split = 0, uneven = 0, beyond = 0;
  for (int32_t i = 0; i < 3000; ++i) {
    const int32_t group = 1 + below(20), kv_heads = 1 + below(9), slots = cta_slots(1 + below(200), kv_heads);
    std::vector<int32_t> tokens(static_cast<size_t>(1 + below(20)));
    const int32_t most = 1 + below(i % 3 == 0 ? 3 : 300);
    for (int32_t& count : tokens) count = 1 + below(most);
    const int32_t sum = std::accumulate(tokens.begin(), tokens.end(), 0);
    const Grid grid = grid_of(tokens, 4000, group, slots, true), exact = grid_of(tokens, 4000, group, slots);
    const WorkspaceSizes sizes{sum, static_cast<int32_t>(tokens.size()), group * kv_heads, kv_heads, 64, slots};
    Workspace workspace;
    auto* const base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 20);
    const size_t bytes = lay_out(sizes, base, &workspace);
    EXPECT_GE(reinterpret_cast<uint8_t*>(workspace.generation.q_starts) -
                  reinterpret_cast<uint8_t*>(workspace.context.cta_valid),
              grid.ctas);
    for (int32_t replay = 0; replay < 4; ++replay) {
      if (replay > 0) tokens = others(tokens, &random);
      std::vector<int32_t> lengths = tokens;
      for (int32_t& length : lengths) length += below(below(3) == 0 ? 20000 : 200);
      const Cut cut = cut_of(grid, tokens, lengths, group);
      ASSERT_LE(cut.ctas, grid.ctas);
      beyond += cut_of(exact, tokens, lengths, group).ctas > exact.ctas ? 1 : 0;
      if (!grid.split) continue;
      ++split;
      uneven += cut.uneven ? 1 : 0;
      const auto room = [&](const void* from, const void* to) {
        return static_cast<const uint8_t*>(to) - static_cast<const uint8_t*>(from);
      };
      ASSERT_GE(room(workspace.partial_out, workspace.partial_lse), cut.partial_tokens * sizes.num_heads * 64 * 2);
      ASSERT_GE(room(workspace.partial_lse, base + bytes), cut.partial_tokens * sizes.num_heads * 4);
    }
  }
  EXPECT_GT(split, 1000);
  EXPECT_GT(uneven, 500);
  EXPECT_GT(beyond, 100);  // a grid for the first lengths alone does not do
}

/// Where the arrays of a schedule end must be where the next one may start.
TEST(Workspace, HoldsTheArraysOfAnyStep) {
  std::mt19937 random(1);
  const auto below = [&random](int32_t end) { return static_cast<int32_t>(random() % static_cast<uint32_t>(end)); };
  for (int32_t i = 0; i < 3000; ++i) {
    const int32_t group = 1 + below(20), kv_heads = 1 + below(9), slots = cta_slots(1 + below(200), kv_heads);
    std::vector<int32_t> lengths(static_cast<size_t>(1 + below(40)));
    const int32_t longest = 1 + below(i % 3 == 0 ? 3 : 300);
    for (int32_t& length : lengths) length = 1 + below(longest);
    const int32_t tokens = std::accumulate(lengths.begin(), lengths.end(), 0);
    const Grid grid = grid_of(lengths, 4000, group, slots);
    Workspace workspace;
    auto* const base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 20);
    const WorkspaceSizes sizes{tokens, static_cast<int32_t>(lengths.size()), group * kv_heads, kv_heads, 64, slots};
    const size_t bytes = lay_out(sizes, base, &workspace);
    const Schedule& s = workspace.context;
    const auto room = [](const void* from, const void* to) {
      return static_cast<const uint8_t*>(to) - static_cast<const uint8_t*>(from);
    };
    EXPECT_GE(room(s.cta_rows, s.cta_tiles), int64_t{4} * grid.ctas);
    EXPECT_GE(room(s.cta_chunks, s.chunk_tokens), int64_t{4} * grid.ctas);
    EXPECT_GE(room(s.cta_valid, workspace.generation.q_starts), grid.ctas);
    EXPECT_GE(room(s.q_starts, s.page_starts), int64_t{4} * (sizes.rows + 1));
    EXPECT_GE(room(s.merge_starts, s.cta_rows), int64_t{4} * (tokens + 1));
    if (grid.split) {
      // A row of n tokens has ceil(n * group / tile) tiles in each chunk; all fit `slots`.
      int64_t tiles = 0;
      for (const int32_t length : lengths) tiles += (int64_t{length} * group + grid.tile - 1) / grid.tile;
      const int64_t partial_tokens = slots / tiles * tokens;
      EXPECT_GE(room(workspace.partial_out, workspace.partial_lse), partial_tokens * sizes.num_heads * 64 * 2);
      EXPECT_GE(room(workspace.partial_lse, base + bytes), partial_tokens * sizes.num_heads * 4);
    }
  }
}

TEST(Workspace, GrowsWithTheStepAndIsAligned) {
  size_t before = 0;
  for (const int32_t tokens : {1, 64, 65, 4096, 8192}) {
    const size_t bytes = lay_out({tokens, 64, 8, 1, 128, 264}, nullptr, nullptr);
    EXPECT_GE(bytes, before);
    before = bytes;
  }
  EXPECT_LT(before, size_t{16} << 20);
  EXPECT_LE(lay_out({64, 63, 8, 1, 128, 264}, nullptr, nullptr), lay_out({64, 64, 8, 1, 128, 264}, nullptr, nullptr));
  Workspace workspace;
  lay_out({100, 3, 9, 3, 64, 88}, reinterpret_cast<void*>(uintptr_t{4096}), &workspace);
  for (const void* place : {static_cast<void*>(workspace.generation.cta_chunks), workspace.partial_out,
                            static_cast<void*>(workspace.partial_lse)}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(place) % 256, 0u);
  }
}

}  // namespace
}  // namespace tokenweave::reference
