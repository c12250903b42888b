// Loads the libraries of its arguments as a server does, and runs the last one twice.
#include <dlfcn.h>

#include <cstdio>

int main(int argc, char** argv) {
  void* library = nullptr;
  for (int i = 1; i < argc; ++i) {
    library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      std::printf("%s\n", dlerror());
      return 1;
    }
  }
  const auto run = reinterpret_cast<void (*)()>(dlsym(library, "backend_run"));
  run();
  run();
  return 0;
}
