/// C++: an engine's plan in memory, checked against its manifest. Needs OpenSSL's libcrypto.
#pragma once

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "tokenweave/manifest.h"

namespace tokenweave {

/// A file mapped into memory, to be read.
class PlanFile {
 public:
  /// The plan of the manifest's rank. Refuses a file that is not the one that the manifest names.
  static Result<PlanFile> open(const std::filesystem::path& folder, const Manifest& manifest) {
    const std::filesystem::path path = plan_file(folder, manifest.rank);
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0 && errno == ENOENT) return detail::missing(path);
    struct stat status{};
    PlanFile file;
    int failure = descriptor < 0 || fstat(descriptor, &status) != 0 ? errno : 0;
    const auto size = static_cast<size_t>(status.st_size);
    if (failure == 0 && size == manifest.plan_bytes) {
      void* const data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
      if (data == MAP_FAILED) {
        failure = errno;
      } else {
        file = PlanFile(data, size);
      }
    }
    if (descriptor >= 0) close(descriptor);
    if (failure != 0) return error(TW_INVALID_ARGUMENT, path.string() + ": cannot be read: " + std::strerror(failure));
    if (size != manifest.plan_bytes) {
      return differs(path, "plan_bytes", std::to_string(manifest.plan_bytes), std::to_string(size));
    }
    const std::string found = file.sha256();
    if (found != manifest.plan_sha256) return differs(path, "plan_sha256", manifest.plan_sha256, found);
    return file;
  }

  PlanFile(PlanFile&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  PlanFile& operator=(PlanFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~PlanFile() {
    if (data_ != nullptr) munmap(data_, size_);
  }

  const void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  PlanFile() = default;
  PlanFile(void* data, size_t size) : data_(data), size_(size) {}

  static Status differs(const std::filesystem::path& path, const std::string& field, const std::string& found,
                        const std::string& wanted) {
    return detail::refuse(path.string() + ": " + field, field + " is " + found + ", but " + wanted + " is needed here",
                          "the engine file is damaged or of another build: copy it again, or build it again");
  }

  /// In lower-case hexadecimal.
  std::string sha256() const {
    std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
    unsigned int length = 0;
    if (EVP_Digest(data_, size_, digest.data(), &length, EVP_sha256(), nullptr) != 1) return "not known: no SHA-256";
    std::string text;
    for (unsigned int i = 0; i < length; ++i) {
      for (const int half : {digest[i] >> 4, digest[i] & 15}) text += "0123456789abcdef"[half];
    }
    return text;
  }

  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tokenweave
