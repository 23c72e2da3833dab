// Devices, streams, events: one background thread serves each stream's queue.
#include "sim.h"

#include <c10/util/Exception.h>

#include <unistd.h>
#include <algorithm>
#include <thread>

namespace sim {

Settings& settings() {
  static Settings* s = new Settings();
  return *s;
}

static const pid_t g_pid = getpid();
bool forked() {
  return getpid() != g_pid;
}

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

void StreamState::record(const EventPtr& e) {
  uint64_t v;
  {
    std::lock_guard<std::mutex> l(e->m);
    v = ++e->version;
    if (settings().sanitize) {
      e->clock = knowledge(*this);
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
    learn(*this, e->clock);
  }
  if (!done_already)
    enqueue([e, v] { e->wait(v); });
}
void drain_all(int device) {
  for (int64_t i = 0; i <= kPoolStreams; ++i)
    stream_at(device, i).drain();
}
void synchronize(int device) {
  check_device(device);
  drain_all(device);
  for (int64_t i = 0; i <= kPoolStreams; ++i)
    host_synced(stream_at(device, i));
}

void reset() {
  for (int d = 0; d < kMaxDevices; ++d) { // a copy between devices uses both
    drain_all(d);
    for (int64_t i = 0; i <= kPoolStreams; ++i)
      host_synced(stream_at(d, i));
  }
  for (int d = 0; d < kMaxDevices; ++d) {
    reset_memory(d);
    forget_pending(d);
    t_stream[d] = 0;
  }
  t_device = 0;
  take_hazards();
  reset_link_stats();
  settings() = Settings();
}

} // namespace sim
