// Links: copies between memories, at the speed that the settings give.
#include "sim.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace sim {

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

} // namespace sim
