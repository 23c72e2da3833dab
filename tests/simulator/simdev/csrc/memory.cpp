// Device memory (pages of the host, charged against a capacity) and pinned host
// memory.
#include "sim.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

namespace sim {

struct DeviceMemory {
  std::mutex m;
  size_t capacity = size_t(8) << 30;
  c10::CachingDeviceAllocator::DeviceStats stats;
  int deferred = 0;       // blocks that wait for streams before they are free
  uint64_t generation = 0; // blocks of an earlier one are charged to nobody
  // Freed pages kept for the next allocation of that size, only because first
  // touch is slow (here 1.8 GB/s against 9.7).  Not counted as in use.
  std::multimap<size_t, void*> recycled;
};
static DeviceMemory& memory(int d) {
  static auto* all = new DeviceMemory[kMaxDevices];
  return all[d];
}
void set_capacity(int d, size_t bytes) {
  std::lock_guard<std::mutex> l(memory(d).m);
  memory(d).capacity = bytes;
}
size_t capacity(int d) {
  std::lock_guard<std::mutex> l(memory(d).m);
  return memory(d).capacity;
}
c10::CachingDeviceAllocator::DeviceStats stats(int d) {
  std::lock_guard<std::mutex> l(memory(d).m);
  return memory(d).stats;
}

static std::string human(size_t n) {
  char buf[64];
  if (n >= (size_t(1) << 30))
    snprintf(buf, sizeof buf, "%.2f GiB", double(n) / (1 << 30));
  else
    snprintf(buf, sizeof buf, "%.2f MiB", double(n) / (1 << 20));
  return buf;
}

static uint64_t generation(int d) {
  std::lock_guard<std::mutex> l(memory(d).m);
  return memory(d).generation;
}
static size_t charge(int d, size_t n) {
  auto& mem = memory(d);
  const size_t unit = settings().align;
  const size_t c = (n + unit - 1) / unit * unit;
  std::unique_lock<std::mutex> l(mem.m);
  auto& s = mem.stats;
  // As CUDA's allocator: before it gives up it waits for the frees that
  // record_stream has put off.
  while (s.allocated_bytes[0].current + c > mem.capacity && mem.deferred > 0) {
    l.unlock();
    drain_all(d);
    l.lock();
  }
  const size_t used = s.allocated_bytes[0].current;
  if (used + c > mem.capacity) {
    ++s.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false,
        "Simulated device out of memory. Tried to allocate ", human(n),
        ". Device ", d, " has a total capacity of ", human(mem.capacity),
        " of which ", human(mem.capacity - std::min(used, mem.capacity)),
        " is free; ", human(used), " is allocated.");
  }
  s.allocation[0].increase(1);
  s.active[0].increase(1);
  s.segment[0].increase(1);
  for (auto* stat : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes})
    (*stat)[0].increase(c);
  s.requested_bytes[0].increase(n);
  ++s.num_device_alloc;
  return c;
}
static void uncharge(int d, size_t n, size_t c, uint64_t generation) {
  auto& mem = memory(d);
  std::lock_guard<std::mutex> l(mem.m);
  if (generation != mem.generation)
    return;
  auto& s = mem.stats;
  s.allocation[0].decrease(1);
  s.active[0].decrease(1);
  s.segment[0].decrease(1);
  for (auto* stat : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes})
    (*stat)[0].decrease(c);
  s.requested_bytes[0].decrease(n);
  ++s.num_device_free;
}

constexpr size_t kRecycle = 1 << 20;
static size_t rounded(size_t n) {
  return n < kRecycle ? n : (n + kRecycle - 1) / kRecycle * kRecycle;
}
static void* get_pages(int d, size_t n) {
  n = rounded(n);
  if (n >= kRecycle) {
    auto& mem = memory(d);
    std::lock_guard<std::mutex> l(mem.m);
    auto it = mem.recycled.find(n);
    if (it != mem.recycled.end()) {
      void* p = it->second;
      mem.recycled.erase(it);
      return p;
    }
  }
  void* p = nullptr;
  return posix_memalign(&p, n >= kRecycle ? 4096 : 64, n) == 0 ? p : nullptr;
}
static void put_pages(int d, void* p, size_t n) {
  n = rounded(n);
  if (d < 0 || n < kRecycle) {
    std::free(p);
    return;
  }
  auto& mem = memory(d);
  std::lock_guard<std::mutex> l(mem.m);
  mem.recycled.emplace(n, p);
}
static void drop_pages(int d) {
  auto& mem = memory(d);
  std::lock_guard<std::mutex> l(mem.m);
  for (auto& e : mem.recycled)
    std::free(e.second);
  mem.recycled.clear();
}

void reset_memory(int d) {
  drop_pages(d);
  auto& mem = memory(d);
  std::lock_guard<std::mutex> l(mem.m);
  mem.stats = {};
  ++mem.generation;
}

void hold(Block* b) {
  b->refs.fetch_add(1);
}
void drop(Block* b) {
  if (b->refs.fetch_sub(1) == 1) {
    if (!b->owner)
      put_pages(b->device, b->ptr, b->nbytes);
    delete b;
  }
}

static void delete_device_block(void* ctx) {
  auto* b = static_cast<Block*>(ctx);
  note_free(b);
  // As the CUDA caching allocator: the memory counts as free at once, except
  // for streams named with record_stream, whose present work must end first.
  std::vector<StreamState*> busy;
  {
    std::lock_guard<std::mutex> l(b->m);
    for (auto* s : b->recorded)
      if (!s->idle())
        busy.push_back(s);
  }
  const bool deferred = !busy.empty();
  if (deferred) {
    std::lock_guard<std::mutex> l(memory(b->device).m);
    ++memory(b->device).deferred;
  }
  auto t = std::shared_ptr<Block>(b, [deferred](Block* b) {
    uncharge(b->device, b->nbytes, b->charged, b->generation);
    if (deferred) {
      std::lock_guard<std::mutex> l(memory(b->device).m);
      --memory(b->device).deferred;
    }
    drop(b);
  });
  for (auto* s : busy)
    s->enqueue([t] {});
}

Block* block_of(const c10::DataPtr& p) {
  if (p.get_deleter() == &delete_device_block)
    return static_cast<Block*>(p.get_context());
  return nullptr;
}

static c10::DataPtr wrap(Block* b) {
  return {b->ptr, b, &delete_device_block, c10::Device(kSim, b->device)};
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    const int d = current_device();
    if (n == 0)
      return {nullptr, c10::Device(kSim, d)};
    const size_t c = charge(d, n);
    void* p = get_pages(d, n);
    if (!p) {
      for (int i = 0; i < kMaxDevices; ++i)
        drop_pages(i);
      p = get_pages(d, n);
    }
    if (!p) {
      uncharge(d, n, c, generation(d));
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "the host has no ", human(n),
          " left for simulated device ", d);
    }
    if (settings().poison)
      std::memset(p, 0xFF, n);
    auto* b = new Block();
    b->ptr = static_cast<char*>(p);
    b->nbytes = n;
    b->charged = c;
    b->device = d;
    b->home = current_stream(d).index;
    b->generation = generation(d);
    return wrap(b);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* dst, const void* src, std::size_t n) const override {
    default_copy_data(dst, src, n);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    for (int d = 0; d < settings().devices; ++d)
      drop_pages(d);
  }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    if (auto* b = block_of(p)) {
      std::lock_guard<std::mutex> l(b->m);
      b->recorded.push_back(&from_c10(s));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex d) override {
    check_device(d);
    return stats(d);
  }
  void resetAccumulatedStats(c10::DeviceIndex d) override {
    check_device(d);
    std::lock_guard<std::mutex> l(memory(d).m);
    auto& s = memory(d).stats;
    for (auto* a : {&s.allocation, &s.active, &s.segment, &s.allocated_bytes,
                    &s.reserved_bytes, &s.active_bytes, &s.requested_bytes})
      (*a)[0].reset_accumulated();
    s.num_ooms = s.num_alloc_retries = 0;
  }
  void resetPeakStats(c10::DeviceIndex d) override {
    check_device(d);
    std::lock_guard<std::mutex> l(memory(d).m);
    auto& s = memory(d).stats;
    for (auto* a : {&s.allocation, &s.active, &s.segment, &s.allocated_bytes,
                    &s.reserved_bytes, &s.active_bytes, &s.requested_bytes})
      (*a)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    check_device(d);
    std::lock_guard<std::mutex> l(memory(d).m);
    const size_t used = memory(d).stats.allocated_bytes[0].current;
    const size_t cap = memory(d).capacity;
    return {cap - std::min(used, cap), cap};
  }
};
c10::DeviceAllocator* device_allocator() {
  static auto* a = new DeviceAllocator();
  return a;
}

c10::DataPtr adopt(const c10::Storage& cpu, int d) {
  const size_t n = cpu.nbytes();
  if (n == 0)
    return {nullptr, c10::Device(kSim, d)};
  const size_t c = charge(d, n);
  auto* b = new Block();
  b->ptr = static_cast<char*>(cpu.mutable_data());
  b->nbytes = n;
  b->charged = c;
  b->device = d;
  b->home = current_stream(d).index;
  b->generation = generation(d);
  b->owner = cpu;
  return wrap(b);
}

// Pinned host memory: ordinary pages that queued copies know.
static std::mutex g_pinned_m;
static std::map<const char*, Block*>& pinned() {
  static auto* p = new std::map<const char*, Block*>();
  return *p;
}
static c10::CachingAllocator::Stat g_pinned_bytes, g_pinned_count;

static void delete_pinned(void* ctx) {
  auto* b = static_cast<Block*>(ctx);
  {
    std::lock_guard<std::mutex> l(g_pinned_m);
    pinned().erase(b->ptr);
    g_pinned_bytes.decrease(b->nbytes);
    g_pinned_count.decrease(1);
  }
  drop(b); // queued copies may still hold it
}
Block* pinned_block(const void* ptr) {
  auto* p = static_cast<const char*>(ptr);
  std::lock_guard<std::mutex> l(g_pinned_m);
  auto it = pinned().upper_bound(p);
  if (it == pinned().begin())
    return nullptr;
  --it;
  return p < it->first + it->second->nbytes ? it->second : nullptr;
}
bool is_pinned(const void* p) {
  return p && pinned_block(p);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0)
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* p = nullptr;
    TORCH_CHECK_WITH(
        OutOfMemoryError, posix_memalign(&p, 4096, n) == 0,
        "no host memory to pin: ", human(n));
    auto* b = new Block();
    b->ptr = static_cast<char*>(p);
    b->nbytes = n;
    std::lock_guard<std::mutex> l(g_pinned_m);
    pinned()[b->ptr] = b;
    g_pinned_bytes.increase(n);
    g_pinned_count.increase(1);
    return {p, b, &delete_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* dst, const void* src, std::size_t n) const override {
    default_copy_data(dst, src, n);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true; // jobs hold the block
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> l(g_pinned_m);
    at::HostStats s;
    s.allocations = s.active_requests = g_pinned_count;
    s.allocated_bytes = s.active_bytes = g_pinned_bytes;
    return s;
  }
  void reset_accumulated_stats() override {
    std::lock_guard<std::mutex> l(g_pinned_m);
    g_pinned_bytes.reset_accumulated();
    g_pinned_count.reset_accumulated();
  }
  void reset_peak_stats() override {
    std::lock_guard<std::mutex> l(g_pinned_m);
    g_pinned_bytes.reset_peak();
    g_pinned_count.reset_peak();
  }
};
at::HostAllocator* pinned_allocator() {
  static auto* a = new PinnedAllocator();
  return a;
}

} // namespace sim
