// NVSwitch multicast: one address whose stores reach all ranks and whose loads reduce over them.
#pragma once

#include <memory>

#include "bootstrap.h"
#include "vmm.h"

namespace tokenweave {

class Multicast {
 public:
  struct Member {
    CUdevice device;
    const MemoryHandle* memory;  ///< this rank's; outlives the Multicast
    size_t bytes;
    size_t granularity;
  };

  /// Collective. Raises *granularity to what binding memory to a multicast object needs, equal on all ranks.
  static Status granularity(const DriverTable& driver, Bootstrap& bootstrap, size_t bytes, size_t* granularity);

  /// Collective, of ranks that have a GPU each; the driver demands that every step is over on all ranks before the
  /// next: create, add all devices, bind all memory, map. The same error on every rank when any step fails on any; then
  /// nothing is kept.
  static Status create(const DriverTable& driver, Bootstrap& bootstrap, const Member& member,
                       std::unique_ptr<Multicast>* multicast);

  ~Multicast();

  uint8_t* address() const { return mapping_.get(); }

 private:
  Multicast(const DriverTable& driver, const Member& member) : driver_(driver), member_(member) {}
  Status bind();

  const DriverTable& driver_;
  Member member_;
  MemoryHandle object_;
  bool bound_ = false;
  Mapping mapping_;
};

}  // namespace tokenweave
