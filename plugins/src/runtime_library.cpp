#include "runtime_library.h"

#include <dlfcn.h>

namespace tokenweave {

Status RuntimeLibrary::open(const std::vector<std::string>& names, const std::string& fix) {
  fix_ = fix;
  std::string failures;
  for (const int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL}) {
    failures.clear();
    for (const std::string& name : names) {
      handle_ = dlopen(name.c_str(), flags);
      if (handle_ != nullptr) {
        name_ = name;
        return {};
      }
      const char* const why = dlerror();
      failures += (failures.empty() ? "" : "; ") + std::string(why != nullptr ? why : name);
    }
  }
  return error(TW_UNSUPPORTED, "cannot load " + names.front() + ": " + failures + ". Fix: " + fix_);
}

Status RuntimeLibrary::find_address(const char* symbol, void** address) const {
  *address = dlsym(handle_, symbol);
  return *address != nullptr ? Status{} : error(TW_UNSUPPORTED, name_ + " has no " + symbol + ". Fix: " + fix_);
}

}  // namespace tokenweave
