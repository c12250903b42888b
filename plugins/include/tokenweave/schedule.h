/// C++: which sequences do what in the next step, for prompts that are all known at the start. The rule is that of
/// Python's runner: every running sequence generates a token; prompts take what is left of the step, first come first
/// served, in chunks of whole blocks but for their last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tokenweave/decoder_model.h"
#include "tokenweave/kv_cache.h"
#include "tokenweave/step_inputs.h"

namespace tokenweave {

struct GenerationOptions {
  int32_t max_new_tokens = 32;
  std::set<int32_t> eos;  ///< tokens that end a sequence; they are part of the result
};

class Schedule {
 public:
  /// TW_INVALID_ARGUMENT: a prompt that the engine cannot serve.
  static Result<Schedule> create(const DecoderModel& model, const std::vector<std::vector<int32_t>>& prompts,
                                 const GenerationOptions& options) {
    Schedule made(model, options);
    for (const std::vector<int32_t>& prompt : prompts) {
      TW_RETURN_IF_ERROR(made.check(prompt, "prompt " + std::to_string(made.sequences_.size())));
      made.sequences_.push_back({prompt, {}, 0});
    }
    return made;
  }

  /// Block tables of what runs.
  const BlockManager& blocks() const { return blocks_; }

  /// The next step: context chunks, then generation rows. Empty: all sequences have ended.
  Result<std::vector<SequenceStep>> next() {
    // The cache has room for all tokens of as many sequences.
    while (started_ < sequences_.size() && active_.size() < static_cast<size_t>(model_.max_batch_size))
      active_.push_back(started_++);
    std::vector<SequenceStep> steps, generation;
    for (const size_t number : active_) {
      const Sequence& one = sequences_[number];
      if (one.prefilled()) generation.push_back(one.step(number, {one.tokens.back()}, false));
    }
    int32_t budget = model_.max_num_tokens - static_cast<int32_t>(generation.size());
    const int32_t unit = model_.cache.tokens_per_block;
    for (const size_t number : active_) {
      const Sequence& one = sequences_[number];
      if (one.prefilled()) continue;
      int32_t chunk = static_cast<int32_t>(one.prompt.size()) - one.done;
      if (chunk > budget) chunk = budget / unit * unit;
      if (chunk <= 0) break;
      const auto begin = one.prompt.begin() + one.done;
      steps.push_back(one.step(number, {begin, begin + chunk}, true));
      budget -= chunk;
    }
    steps.insert(steps.end(), generation.begin(), generation.end());
    for (const SequenceStep& step : steps) TW_RETURN_IF_ERROR(blocks_.grow(step.sequence, step.end()));
    return steps;
  }

  /// The step was run; `token` is what its logits chose, where step.samples().
  void ran(const SequenceStep& step, int32_t token) {
    Sequence& sequence = sequences_[static_cast<size_t>(step.sequence)];
    sequence.done = step.end();
    if (!step.samples()) return;
    sequence.tokens.push_back(token);
    if (sequence.tokens.size() < static_cast<size_t>(options_.max_new_tokens) && options_.eos.count(token) == 0) return;
    active_.erase(std::find(active_.begin(), active_.end(), static_cast<size_t>(step.sequence)));
    blocks_.free(step.sequence);
  }

  /// What was generated so far, in the order of the prompts.
  std::vector<std::vector<int32_t>> tokens() const {
    std::vector<std::vector<int32_t>> all;
    for (const Sequence& sequence : sequences_) all.push_back(sequence.tokens);
    return all;
  }

 private:
  struct Sequence {
    std::vector<int32_t> prompt, tokens;
    int32_t done;  ///< tokens whose keys and values are in the cache

    bool prefilled() const { return done >= static_cast<int32_t>(prompt.size()); }
    SequenceStep step(size_t number, std::vector<int32_t> ids, bool is_context) const {
      return {static_cast<int32_t>(number), std::move(ids), done, static_cast<int32_t>(prompt.size()), is_context};
    }
  };

  Schedule(const DecoderModel& model, GenerationOptions options)
      : model_(model), options_(std::move(options)), blocks_(model.cache) {}

  Status check(const std::vector<int32_t>& prompt, const std::string& where) const {
    const std::string most = std::to_string(options_.max_new_tokens);
    if (prompt.empty()) return error(TW_INVALID_ARGUMENT, where + ": is empty");
    if (options_.max_new_tokens < 1)
      return error(TW_INVALID_ARGUMENT, where + ": max_new_tokens is " + most + ", expected at least 1");
    for (const int32_t token : prompt) {
      if (token >= 0 && token < model_.vocab_size) continue;
      return error(TW_INVALID_ARGUMENT, where + ": token " + std::to_string(token) + " is outside the vocabulary of " +
                                            std::to_string(model_.vocab_size));
    }
    if (static_cast<int64_t>(prompt.size()) + options_.max_new_tokens <= model_.max_seq_len) return {};
    return detail::refuse(where,
                          std::to_string(prompt.size()) + " tokens and " + most + " new ones exceed max_seq_len " +
                              std::to_string(model_.max_seq_len),
                          "shorten the prompt, lower max_new_tokens or raise max_seq_len");
  }

  DecoderModel model_;
  GenerationOptions options_;
  BlockManager blocks_;
  std::vector<Sequence> sequences_;
  std::vector<size_t> active_;
  size_t started_ = 0;
};

}  // namespace tokenweave
