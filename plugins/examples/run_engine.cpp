// Greedy generation with an engine folder of `trtllm-tokenweave build`, one process a GPU:
//
//   mpirun -n 2 run_engine ENGINE_FOLDER --prompt-ids 1,2,3 --prompt-ids 4,5 --max-new-tokens 32
//
// Rank 0 prints the tokens and the times of the steps. Exit code: 0, 2 for bad input, 1 for anything else.
#include <mpi.h>
#include <tokenweave/decoder.h>

#include <CLI/CLI.hpp>
#include <cstdio>

namespace {

struct Logger final : nvinfer1::ILogger {
  void log(Severity severity, const char* message) noexcept override {
    if (severity <= Severity::kWARNING) std::fprintf(stderr, "%s\n", message);
  }
};

struct Arguments {
  std::string folder;
  std::vector<std::string> prompts, plugins{tokenweave::reference_library_file()};
  tokenweave::GenerationOptions options;
};

tokenweave::Result<std::vector<int32_t>> token_ids(const std::string& text) {
  std::vector<int32_t> ids;
  for (const std::string& word : CLI::detail::split(text, ',')) {
    if (!CLI::detail::lexical_cast(word, ids.emplace_back()))
      return tokenweave::error(TW_INVALID_ARGUMENT,
                               "--prompt-ids: '" + word + "' is no token id. Fix: give ids as in 1,2,3");
  }
  return ids;
}

tokenweave::Status run(const Arguments& arguments, int rank, int size) {
  std::vector<std::vector<int32_t>> prompts;
  for (const std::string& text : arguments.prompts) {
    const auto ids = token_ids(text);
    if (!ids.ok()) return ids.status();
    prompts.push_back(*ids);
  }
  TW_RETURN_IF_ERROR(tokenweave::use_device_of_rank(rank));
  for (const std::string& file : arguments.plugins) TW_RETURN_IF_ERROR(tokenweave::register_plugins_of(file));
  static Logger logger;
  const auto engine = tokenweave::Engine::open(arguments.folder, rank, size, logger);
  if (!engine.ok()) return engine.status();
  auto decoder = tokenweave::Decoder::create(*engine);
  if (!decoder.ok()) return decoder.status();
  const auto print = [&](const tokenweave::Decoder::Step& step) {
    if (rank == 0)
      std::printf("step: %d tokens, %d sequences, %.3f ms\n", step.num_tokens, step.batch, step.milliseconds);
  };
  const auto tokens = decoder->generate(prompts, arguments.options, print);
  if (!tokens.ok()) return tokens.status();
  for (size_t i = 0; rank == 0 && i < tokens->size(); ++i) {
    std::printf("prompt %zu:", i);
    for (const int32_t token : (*tokens)[i]) std::printf(" %d", token);
    std::printf("\n");
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Greedy generation with an engine folder of trtllm-tokenweave, under mpirun");
  app.add_option("folder", arguments.folder, "Engine folder")->required();
  app.add_option("--prompt-ids", arguments.prompts, "Token ids, as in 1,2,3; may be repeated")
      ->required()
      ->allow_extra_args(false);
  app.add_option("--max-new-tokens", arguments.options.max_new_tokens, "Tokens to generate for each prompt");
  app.add_option("--eos", arguments.options.eos, "Token that ends a sequence; may be repeated")
      ->allow_extra_args(false);
  app.add_option("--plugins", arguments.plugins, "Library of the network's other plugins; may be repeated")
      ->capture_default_str()
      ->allow_extra_args(false);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  MPI_Init(&argc, &argv);  // the plugins find the other ranks through it
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const tokenweave::Status status = run(arguments, rank, size);
  if (!status.ok()) {
    std::fprintf(stderr, "rank %d: error: %s\n", rank, status.message.c_str());
    return status.code == TW_INVALID_ARGUMENT ? 2 : 1;  // without MPI_Finalize: mpirun ends the other ranks
  }
  MPI_Finalize();
  return 0;
}
