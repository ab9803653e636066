// Calls as recording.py wrote them, of a library for any little-endian machine of 64 bits: the memory before each, its
// arguments, the memory after it, bit for bit.  replay LIBRARY FILE
//
// A region of memory ends where a page that may not be touched begins.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string& why) {
  fprintf(stderr, "%s\n", why.c_str());
  exit(2);
}

struct Reader {
  const char *at, *end;

  const char* bytes(int64_t count) {
    if (count < 0 || count > end - at) fail("the file is cut off");
    return at += count, at - count;
  }
  int64_t number() {
    int64_t value;
    memcpy(&value, bytes(sizeof(value)), sizeof(value));
    return value;
  }
};

// The bytes of a region, and which words of them are addresses: [offset, region, offset in it].
struct Image {
  std::vector<char> bytes;
  std::vector<int64_t> addresses;

  Image(Reader& file, const std::vector<std::pair<const char*, int64_t>>& blobs) {
    const auto& [data, size] = blobs.at(file.number());
    bytes.assign(data, data + size);
    addresses.resize(3 * file.number());
    for (int64_t& each : addresses) each = file.number();
  }
  void resolve(const std::vector<char*>& regions) {
    for (size_t i = 0; i < addresses.size(); i += 3) {
      const char* target = regions.at(addresses[i + 1]) + addresses[i + 2];
      memcpy(bytes.data() + addresses[i], &target, sizeof(target));
    }
  }
};

class Region {
 public:
  explicit Region(size_t size) {
    const size_t page = sysconf(_SC_PAGESIZE), usable = (size + page - 1) / page * page;
    mapped_ = usable + page;
    start_ = (char*)mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start_ == MAP_FAILED || mprotect(start_ + usable, page, PROT_NONE) != 0) fail("no memory");
    data = start_ + usable - size;
  }
  Region(Region&& other) : data(other.data), start_(other.start_), mapped_(other.mapped_) { other.start_ = nullptr; }
  ~Region() {
    if (start_ != nullptr) munmap(start_, mapped_);
  }
  char* data;

 private:
  char* start_;
  size_t mapped_;
};

// Whole numbers and addresses are in registers of their own and then in words on the stack, floats in others: so one
// type of function stands for all, on AArch64 and x86-64.
using W = int64_t;
using Function = void (*)(W, W, W, W, W, W, W, W, W, W, W, W, float, float);

bool replay(void* library, Reader& file, const std::vector<std::pair<const char*, int64_t>>& blobs, long index,
            std::set<std::string>& names) {
  const std::string name(file.bytes(64));
  names.insert(name);
  W words[12] = {};
  std::vector<std::pair<int, std::pair<int64_t, int64_t>>> pointers;
  float floats[2] = {};
  int num_words = 0, num_floats = 0;
  for (int64_t left = file.number(); left > 0; left--) {
    const int64_t kind = file.number(), value = file.number(), offset = file.number();
    if (num_words + (kind != 1) > 12 || num_floats + (kind == 1) > 2) fail(name + " has too many arguments");
    if (kind == 1) memcpy(&floats[num_floats++], &value, sizeof(float));
    else if (kind == 2) pointers.push_back({num_words++, {value, offset}});
    else words[num_words++] = value;
  }
  std::vector<Image> before, after;
  std::vector<Region> regions;
  std::vector<char*> places;
  for (int64_t left = file.number(); left > 0; left--) {
    before.emplace_back(file, blobs), after.emplace_back(file, blobs);
    regions.emplace_back(before.back().bytes.size());
    places.push_back(regions.back().data);
  }
  for (size_t r = 0; r < regions.size(); r++) {
    before[r].resolve(places), after[r].resolve(places);
    memcpy(places[r], before[r].bytes.data(), before[r].bytes.size());
  }
  for (const auto& [word, target] : pointers) words[word] = (W)(places.at(target.first) + target.second);
  const auto function = (Function)dlsym(library, name.c_str());
  if (function == nullptr) fail(name + " is missing");
  const W* w = words;
  function(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], floats[0], floats[1]);
  bool is_same = true;
  for (size_t r = 0; r < regions.size(); r++) {
    size_t count = 0, first = 0;
    for (size_t i = after[r].bytes.size(); i-- > 0;)
      if (places[r][i] != after[r].bytes[i]) count++, first = i;
    if (count == 0) continue;
    is_same = false;
    const size_t at = first / 4 * 4 + 4 <= after[r].bytes.size() ? first / 4 * 4 : 0;
    float found = 0, expected = 0;
    if (after[r].bytes.size() >= 4) memcpy(&found, places[r] + at, 4), memcpy(&expected, &after[r].bytes[at], 4);
    printf("call %ld, %s: %zu of %zu bytes of region %zu differ, from %zu on: %.9g, not %.9g as a float\n", index,
           name.c_str(), count, after[r].bytes.size(), r, first, found, expected);
  }
  return is_same;
}

}  // namespace

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) fail(dlerror());
  const auto text = [&](const char* name) { return ((const char* (*)())dlsym(library, name))(); };
  std::ifstream stream(argv[2], std::ios::binary);
  const std::vector<char> content((std::istreambuf_iterator<char>(stream)), {});
  Reader file = {content.data(), content.data() + content.size()};
  std::vector<std::pair<const char*, int64_t>> blobs(file.number());
  for (auto& [data, size] : blobs) size = file.number(), data = file.bytes(size);
  const int64_t calls = file.number();
  std::set<std::string> names;
  long differing = 0;
  for (int64_t i = 0; i < calls; i++) differing += !replay(library, file, blobs, i, names);
  printf("%s on a processor with %s: %ld calls of %zu functions, %ld with other bits\n", text("loraplex_isa"),
         text("loraplex_best_isa"), (long)calls, names.size(), differing);
  return calls == 0 || differing != 0;
}
