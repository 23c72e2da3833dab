#include "sim.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <pthread.h>
#include <unistd.h>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>

namespace sim {

Settings& settings() {
  static Settings* s = new Settings();
  return *s;
}

static const pid_t g_pid = getpid();
bool forked() {
  return getpid() != g_pid;
}

// ----------------------------------------------------------------- devices
static thread_local int t_device = 0;
static thread_local int64_t t_stream[kMaxDevices] = {};

int current_device() {
  return t_device;
}
void check_device(int d) {
  TORCH_CHECK(
      d >= 0 && d < settings().devices,
      "invalid device ordinal ", d, ": there are ", settings().devices,
      " simulated devices");
}
void set_current_device(int d) {
  check_device(d);
  t_device = d;
}

// ----------------------------------------------------------------- streams
// All of this is leaked on purpose: worker threads may outlive static objects.
static StreamState& stream_at(int device, int64_t id) {
  static auto* table = [] {
    auto* t = new std::vector<StreamState*>();
    for (int d = 0; d < kMaxDevices; ++d)
      for (int64_t i = 0; i <= kPoolStreams; ++i)
        t->push_back(new StreamState(d, i, d * (kPoolStreams + 1) + i));
    return t;
  }();
  return *(*table)[device * (kPoolStreams + 1) + id];
}
constexpr int kAllStreams = kMaxDevices * (kPoolStreams + 1);

StreamState& stream(int device, int64_t id) {
  check_device(device);
  TORCH_CHECK(id >= 0 && id <= kPoolStreams, "no such stream: ", id);
  return stream_at(device, id);
}
StreamState& current_stream(int device) {
  return stream(device, t_stream[device]);
}
StreamState& new_stream(int device) {
  static std::atomic<unsigned> next[kMaxDevices];
  return stream(device, 1 + next[device]++ % kPoolStreams);
}
c10::Stream as_c10(const StreamState& s) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(kSim, s.device), s.id);
}
StreamState& from_c10(const c10::Stream& s) {
  return stream(s.device_index(), s.id());
}
c10::Stream exchange_stream(const c10::Stream& s) {
  auto& next = from_c10(s);
  auto before = as_c10(current_stream(next.device));
  t_stream[next.device] = next.id;
  return before;
}

void StreamState::enqueue(std::function<void()> job) {
  if (forked()) { // no worker came along
    job();
    return;
  }
  std::unique_lock<std::mutex> l(m);
  finished.wait(l, [&] { return queue.size() < 1024; }); // as launch queues
  if (!started) {
    started = true;
    std::thread([this] { work(); }).detach();
  }
  queue.push_back(std::move(job));
  submitted.fetch_add(1, std::memory_order_release);
  wake.notify_one();
}

void StreamState::work() {
  for (;;) {
    std::function<void()> job;
    {
      std::unique_lock<std::mutex> l(m);
      wake.wait(l, [&] { return !queue.empty(); });
      job = std::move(queue.front());
      queue.pop_front();
    }
    job();
    job = nullptr; // what it held goes before the stream is seen idle
    {
      std::lock_guard<std::mutex> l(m);
      done.fetch_add(1, std::memory_order_release);
    }
    finished.notify_all();
  }
}

void StreamState::drain() {
  if (idle() || forked())
    return;
  std::unique_lock<std::mutex> l(m);
  const uint64_t goal = submitted.load();
  finished.wait(l, [&] { return done.load() >= goal; });
}

// ---------------------------------------------------------------- sanitizer
// Vector clocks: each stream's knowledge of every stream's work so far.  The
// host has one too (all threads as one: never reports too much for that).
static std::mutex g_clock_m;
static std::vector<VClock>& clocks() {
  static auto* c =
      new std::vector<VClock>(kAllStreams + 1, VClock(kAllStreams, 0));
  return *c;
}
static VClock& host_clock() {
  return clocks()[kAllStreams];
}
static void merge(VClock& into, const VClock& from) {
  for (size_t i = 0; i < from.size(); ++i)
    into[i] = std::max(into[i], from[i]);
}
static std::vector<std::string>& hazards() {
  static auto* h = new std::vector<std::string>();
  return *h;
}

uint64_t tick(StreamState& s) {
  if (!settings().sanitize)
    return 0;
  std::lock_guard<std::mutex> l(g_clock_m);
  auto& c = clocks()[s.index];
  merge(c, host_clock());
  return ++c[s.index];
}
void host_synced(const StreamState& s) {
  if (!settings().sanitize)
    return;
  std::lock_guard<std::mutex> l(g_clock_m);
  merge(host_clock(), clocks()[s.index]);
}
void host_synced(const VClock& c) {
  if (!settings().sanitize || c.empty())
    return;
  std::lock_guard<std::mutex> l(g_clock_m);
  merge(host_clock(), c);
}
std::vector<std::string> take_hazards() {
  std::lock_guard<std::mutex> l(g_clock_m);
  return std::exchange(hazards(), {});
}

static std::string name(int stream_index) {
  std::ostringstream o;
  o << "stream " << stream_index % (kPoolStreams + 1) << " of device "
    << stream_index / (kPoolStreams + 1);
  return o.str();
}

void note(Block* b, StreamState& s, uint64_t t, size_t lo, size_t hi,
          bool write, const char* what) {
  if (!settings().sanitize || !b || lo >= hi)
    return;
  std::lock_guard<std::mutex> lb(b->m);
  std::lock_guard<std::mutex> lc(g_clock_m);
  const auto& c = clocks()[s.index];
  auto& log = b->log;
  for (size_t i = 0; i < log.size();) {
    auto& a = log[i];
    if (a.hi <= lo || a.lo >= hi) {
      ++i;
      continue;
    }
    const bool ordered = c[a.stream] >= a.tick;
    if (!ordered && (a.write || write)) {
      std::ostringstream o;
      o << what << " on " << name(s.index) << (write ? " writes" : " reads")
        << " memory that " << name(a.stream)
        << (a.write ? " writes" : " reads")
        << ", with no event, stream or device synchronization between them";
      hazards().push_back(o.str());
      log.erase(log.begin() + i);
      TORCH_CHECK(false, "unordered access: ", o.str());
    }
    // Superseded by this one: drop it, so that the log stays short.
    if (ordered && (write || !a.write) && a.lo >= lo && a.hi <= hi)
      log.erase(log.begin() + i);
    else
      ++i;
  }
  log.push_back({s.index, t, lo, hi, write});
}

// ------------------------------------------------------------------- events
void StreamState::record(const EventPtr& e) {
  uint64_t v;
  {
    std::lock_guard<std::mutex> l(e->m);
    v = ++e->version;
    if (settings().sanitize) {
      std::lock_guard<std::mutex> lc(g_clock_m);
      merge(clocks()[index], host_clock());
      e->clock = clocks()[index];
    }
  }
  auto mark = [e, v] {
    std::lock_guard<std::mutex> l(e->m);
    e->done = std::max(e->done, v);
    e->when = Clock::now();
    e->cv.notify_all();
  };
  if (idle())
    mark();
  else
    enqueue(mark);
}
void StreamState::wait_event(const EventPtr& e) {
  uint64_t v;
  bool done_already;
  {
    std::lock_guard<std::mutex> l(e->m);
    v = e->version;
    done_already = e->done >= v;
    if (settings().sanitize && !e->clock.empty()) {
      std::lock_guard<std::mutex> lc(g_clock_m);
      merge(clocks()[index], e->clock);
    }
  }
  if (!done_already)
    enqueue([e, v] { e->wait(v); });
}
void synchronize(int device) {
  for (int64_t i = 0; i <= kPoolStreams; ++i) {
    auto& s = stream(device, i);
    s.drain();
    host_synced(s);
  }
}

// ------------------------------------------------------------------- memory
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
    for (int64_t i = 0; i <= kPoolStreams; ++i)
      stream_at(d, i).drain();
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
  // As the CUDA caching allocator: the memory counts as free at once, except
  // for streams named with record_stream, whose present work must end first.
  std::vector<StreamState*> busy;
  {
    std::lock_guard<std::mutex> l(b->m);
    for (auto* s : b->recorded)
      if (!s->idle())
        busy.push_back(s);
    if (settings().sanitize) {
      std::lock_guard<std::mutex> lc(g_clock_m);
      VClock known = clocks()[b->home];
      merge(known, host_clock());
      for (auto& a : b->log) {
        bool rec = false;
        for (auto* s : b->recorded)
          rec = rec || s->index == a.stream;
        if (a.stream != b->home && !rec && known[a.stream] < a.tick)
          hazards().push_back(
              "memory allocated on " + name(b->home) + " was freed while " +
              name(a.stream) + " may still use it (no record_stream)");
      }
    }
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

// -------------------------------------------------------- pinned host memory
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
at::Allocator* pinned_allocator_base() {
  return pinned_allocator();
}

// ------------------------------------------------------------------- links
struct Link {
  std::mutex busy; // one transfer at a time, as one DMA engine
  std::mutex m;
  LinkStats stats;
};
static Link& link(int d, Dir dir) {
  static auto* all = new Link[kMaxDevices * 3];
  return all[d * 3 + dir];
}

void transfer(Dir dir, int d, void* dst, const void* src, size_t n) {
  auto& ln = link(d, dir);
  std::lock_guard<std::mutex> serial(ln.busy);
  const double gbps = settings().gbps[dir];
  const double lat = settings().latency_us[dir] * 1e-6;
  const auto t0 = Clock::now();
  if (gbps <= 0 && lat <= 0) {
    std::memmove(dst, src, n);
  } else {
    // Each piece arrives when its time is up, never early.
    const size_t piece =
        gbps > 0 ? std::max<size_t>(1 << 16, size_t(gbps * 1e9 * 2e-3)) : n;
    for (size_t at = 0; at < n || at == 0;) {
      const size_t k = std::min(piece, n - at);
      const double due = lat + (gbps > 0 ? double(at + k) / (gbps * 1e9) : 0);
      std::this_thread::sleep_until(
          t0 + std::chrono::duration_cast<Clock::duration>(
                   std::chrono::duration<double>(due)));
      std::memmove(
          static_cast<char*>(dst) + at, static_cast<const char*>(src) + at, k);
      at += k;
      if (n == 0)
        break;
    }
  }
  std::lock_guard<std::mutex> l(ln.m);
  ln.stats.bytes += n;
  ++ln.stats.copies;
  ln.stats.busy_s += std::chrono::duration<double>(Clock::now() - t0).count();
}
void count_queued(int d, Dir dir) {
  std::lock_guard<std::mutex> l(link(d, dir).m);
  ++link(d, dir).stats.queued;
}
LinkStats link_stats(int d, Dir dir) {
  std::lock_guard<std::mutex> l(link(d, dir).m);
  return link(d, dir).stats;
}
void reset_link_stats() {
  for (int d = 0; d < kMaxDevices; ++d)
    for (int k = 0; k < 3; ++k) {
      std::lock_guard<std::mutex> l(link(d, Dir(k)).m);
      link(d, Dir(k)).stats = LinkStats();
    }
}

void reset() {
  for (int d = 0; d < kMaxDevices; ++d)
    for (int64_t i = 0; i <= kPoolStreams; ++i) {
      auto& s = stream_at(d, i);
      s.drain();
      host_synced(s);
    }
  for (int d = 0; d < kMaxDevices; ++d) {
    drop_pages(d);
    forget_pending(d);
    t_stream[d] = 0;
    auto& mem = memory(d);
    std::lock_guard<std::mutex> l(mem.m);
    mem.stats = {};
    ++mem.generation;
  }
  t_device = 0;
  take_hazards();
  reset_link_stats();
  settings() = Settings();
}

// ------------------------------------------------------------ c10's guard
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override {
    return kSim;
  }
  Device exchangeDevice(Device d) const override {
    Device before(kSim, current_device());
    set_current_device(d.index());
    return before;
  }
  Device getDevice() const override {
    return Device(kSim, current_device());
  }
  void setDevice(Device d) const override {
    set_current_device(d.index());
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < settings().devices)
      t_device = d.index();
  }
  static int index(Device d) {
    return d.has_index() ? d.index() : current_device();
  }
  Stream getStream(Device d) const override {
    return as_c10(current_stream(index(d)));
  }
  Stream getDefaultStream(Device d) const override {
    return as_c10(stream(index(d), 0));
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override {
    return as_c10(new_stream(index(d)));
  }
  Stream getNewStream(Device d, int) const override {
    return as_c10(new_stream(index(d)));
  }
  Stream exchangeStream(Stream s) const override {
    return exchange_stream(s);
  }
  void* getStreamNativeHandle(const Stream s) const override {
    return &from_c10(s);
  }
  static EventPtr& event(void* e) {
    return *static_cast<EventPtr*>(e);
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(e);
  }
  void record(
      void** e, const Stream& s, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (!*e)
      *e = new EventPtr(std::make_shared<EventState>());
    from_c10(s).record(event(*e));
  }
  void block(void* e, const Stream& s) const override {
    if (e)
      from_c10(s).wait_event(event(e));
  }
  bool queryEvent(void* e) const override {
    if (!e)
      return true;
    auto& ev = event(e);
    bool done;
    VClock c;
    {
      std::lock_guard<std::mutex> l(ev->m);
      done = ev->done >= ev->version;
      c = ev->clock;
    }
    if (done)
      host_synced(c);
    return done;
  }
  void synchronizeEvent(void* e) const override {
    if (!e)
      return;
    auto ev = event(e);
    uint64_t v;
    VClock c;
    {
      std::lock_guard<std::mutex> l(ev->m);
      v = ev->version;
      c = ev->clock;
    }
    ev->wait(v);
    host_synced(c);
  }
  double elapsedTime(
      void* a, void* b, const c10::DeviceIndex) const override {
    TORCH_CHECK(a && b, "both events must be recorded first");
    auto when = [](const EventPtr& e) {
      std::lock_guard<std::mutex> l(e->m);
      TORCH_CHECK(e->done >= e->version, "an event is not completed yet");
      return e->when;
    };
    return std::chrono::duration<double, std::milli>(
               when(event(b)) - when(event(a)))
        .count();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return settings().devices;
  }
  bool queryStream(const Stream& s) const override {
    auto& st = from_c10(s);
    if (!st.idle())
      return false;
    host_synced(st);
    return true;
  }
  void synchronizeStream(const Stream& s) const override {
    auto& st = from_c10(s);
    st.drain();
    host_synced(st);
    raise_pending(st.device);
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    const int i = d < 0 ? current_device() : d;
    synchronize(i);
    raise_pending(i);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s)
      const override {
    device_allocator()->recordStream(p, s);
  }
  c10::DeviceCapability getDeviceCapability(Device) const override {
    return {};
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

static const bool registered = [] {
  c10::SetAllocator(kSim, device_allocator());
  at::setHostAllocator(kSim, pinned_allocator());
  return true;
}();

} // namespace sim
