// Vector clocks: each stream's knowledge of every stream's work so far.  The
// host has one too (all threads as one: it never reports too much for that).
#include "sim.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

namespace sim {

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
VClock knowledge(StreamState& s) {
  std::lock_guard<std::mutex> l(g_clock_m);
  merge(clocks()[s.index], host_clock());
  return clocks()[s.index];
}
void learn(StreamState& s, const VClock& c) {
  if (!settings().sanitize || c.empty())
    return;
  std::lock_guard<std::mutex> l(g_clock_m);
  merge(clocks()[s.index], c);
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

void note_free(Block* b) {
  if (!settings().sanitize)
    return;
  std::lock_guard<std::mutex> lb(b->m);
  std::lock_guard<std::mutex> lc(g_clock_m);
  VClock known = clocks()[b->home];
  merge(known, host_clock());
  for (auto& a : b->log) {
    const bool recorded = std::any_of(
        b->recorded.begin(), b->recorded.end(),
        [&](StreamState* s) { return s->index == a.stream; });
    if (a.stream != b->home && !recorded && known[a.stream] < a.tick)
      hazards().push_back(
          "memory allocated on " + name(b->home) + " was freed while " +
          name(a.stream) + " may still use it (no record_stream)");
  }
}

} // namespace sim
