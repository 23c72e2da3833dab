// Simulated accelerator: shared declarations.
//
// A "device" is a share of host memory with a hard capacity, plus streams
// (FIFO queues served by one background thread each), events and two or three
// throttled links.  Kernels are CPU kernels run by the calling thread, after it
// has waited for everything queued on the device's current stream.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace at {
struct HostAllocator;
}

namespace sim {

using Clock = std::chrono::steady_clock;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kPoolStreams = 8; // besides the default stream, per device
constexpr int kAllStreams = kMaxDevices * (kPoolStreams + 1);

// ---------------------------------------------------------------- settings
struct Settings {
  int devices = 0;
  size_t align = 512;      // each allocation is charged in units of this
  bool queued_copies = true;      // non_blocking + pinned copies really run behind
  bool queued_kernels = false; // kernels with ready outputs are queued as well
  bool poison = true;      // fill new device memory with 0xFF
  bool sanitize = true;    // raise on accesses not ordered by stream/event
  double copy_delay_ms = 0; // added before every queued copy
  double gbps[3] = {0, 0, 0}; // H2D, D2H, D2D; 0: unthrottled
  double latency_us[3] = {0, 0, 0};
};
Settings& settings();
enum Dir { H2D = 0, D2H = 1, D2D = 2 };

// ----------------------------------------------------------------- streams
struct StreamState;
using VClock = std::vector<uint64_t>;

struct EventState {
  std::mutex m;
  std::condition_variable cv;
  uint64_t version = 0, done = 0;
  Clock::time_point when;
  VClock clock;
  bool wait(uint64_t v) {
    std::unique_lock<std::mutex> l(m);
    cv.wait(l, [&] { return done >= v; });
    return true;
  }
};
using EventPtr = std::shared_ptr<EventState>;

struct StreamState {
  StreamState(int device, int64_t id, int index)
      : device(device), id(id), index(index) {}
  const int device;
  const int64_t id;
  const int index; // dense, over all devices: position in vector clocks

  void enqueue(std::function<void()> job);
  void drain(); // the calling thread waits for all that is queued now
  bool idle() const {
    return done.load(std::memory_order_acquire) ==
        submitted.load(std::memory_order_acquire);
  }
  void record(const EventPtr& e);
  void wait_event(const EventPtr& e);

 private:
  void work();
  std::mutex m;
  std::condition_variable wake, finished;
  std::deque<std::function<void()>> queue;
  std::atomic<uint64_t> submitted{0}, done{0};
  bool started = false;
};

int current_device();
void set_current_device(int d);
void check_device(int d);
StreamState& stream(int device, int64_t id);
StreamState& current_stream(int device);
StreamState& new_stream(int device);
c10::Stream as_c10(const StreamState& s);
StreamState& from_c10(const c10::Stream& s);
c10::Stream exchange_stream(const c10::Stream& s);
void drain_all(int device); // waits, without the sanitizer taking note
void synchronize(int device);
bool forked();
void raise_pending(int device); // an error of a kernel queued earlier
void forget_pending(int device);
void reset(); // ends all work, takes the devices away, forgets what they held

struct DeviceScope {
  int before;
  explicit DeviceScope(int d) : before(current_device()) {
    set_current_device(d);
  }
  ~DeviceScope() {
    set_current_device(before);
  }
};

// ------------------------------------------------------------------ memory
struct Access {
  int stream;
  uint64_t tick;
  size_t lo, hi;
  bool write;
};

// One allocation, of a device or (device == -1) of pinned host memory.
struct Block {
  char* ptr = nullptr;
  size_t nbytes = 0, charged = 0;
  int device = -1;
  int home = -1;       // stream current when it was allocated
  uint64_t generation = 0;
  c10::Storage owner;  // memory that a CPU kernel made; else ptr is ours
  std::atomic<int> refs{1};
  std::mutex m;
  std::vector<Access> log;
  std::vector<StreamState*> recorded;
};
Block* block_of(const c10::DataPtr& p); // nullptr: not ours
void hold(Block* b);
void drop(Block* b);
struct BlockRef { // keeps the memory (not the charge) while a job uses it
  Block* b;
  explicit BlockRef(Block* b) : b(b) {
    if (b)
      hold(b);
  }
  BlockRef(const BlockRef& o) : BlockRef(o.b) {}
  BlockRef& operator=(const BlockRef&) = delete;
  ~BlockRef() {
    if (b)
      drop(b);
  }
};

c10::DeviceAllocator* device_allocator();
// Makes memory that a CPU kernel allocated the device's (may raise OOM).
c10::DataPtr adopt(const c10::Storage& cpu, int device);
bool is_pinned(const void* p);
Block* pinned_block(const void* p);
void set_capacity(int device, size_t bytes);
size_t capacity(int device);
void reset_memory(int device); // what is allocated is charged to nobody
at::HostAllocator* pinned_allocator();
c10::CachingDeviceAllocator::DeviceStats stats(int device);

// ------------------------------------------------------------------- links
struct LinkStats {
  uint64_t bytes = 0, copies = 0, queued = 0;
  double busy_s = 0;
};
// Blocking: moves the bytes over the device's link, at its speed.
void transfer(Dir dir, int device, void* dst, const void* src, size_t n);
LinkStats link_stats(int device, Dir dir);
void count_queued(int device, Dir dir);
void reset_link_stats();

// ----------------------------------------------------------------- kernels
uint64_t op_count();     // operators that came to the fallback
void count_launch();
uint64_t launch_count(); // kernels that were queued
void resize_storage(const c10::Storage& st, size_t n);

// --------------------------------------------------------------- sanitizer
// Called by the issuing thread for each access by work given to stream s.
uint64_t tick(StreamState& s); // a new piece of work on s
void note(Block* b, StreamState& s, uint64_t tick, size_t lo, size_t hi,
          bool write, const char* what);
void note_free(Block* b);
VClock knowledge(StreamState& s); // of s, after it has met the host's
void learn(StreamState& s, const VClock& c);
void host_synced(const StreamState& s);
void host_synced(const VClock& c);
std::vector<std::string> take_hazards();

} // namespace sim
