// A CPU allocator that counts what torch asks for: bytes now, and the most there ever were.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

constexpr std::size_t kHeader = 64;  // keeps torch's own alignment

std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> most{0};

void give_back(void* pointer) {
  if (pointer == nullptr) return;
  char* begin = static_cast<char*>(pointer) - kHeader;
  live -= *reinterpret_cast<std::int64_t*>(begin);
  std::free(begin);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &give_back, cpu};
    void* begin = nullptr;
    if (posix_memalign(&begin, kHeader, bytes + kHeader) != 0) throw std::bad_alloc();
    *static_cast<std::int64_t*>(begin) = static_cast<std::int64_t>(bytes);
    const std::int64_t now = live += static_cast<std::int64_t>(bytes);
    std::int64_t seen = most;
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    char* pointer = static_cast<char*>(begin) + kHeader;
    return {pointer, pointer, &give_back, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Counting counting;

}  // namespace

extern "C" {
void install() { c10::SetCPUAllocator(&counting, 100); }
std::int64_t live_bytes() { return live; }
std::int64_t peak_bytes() { return most; }
void reset_peak() { most = live.load(); }
}
