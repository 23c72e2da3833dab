// What c10, torch.accelerator and torch.Generator ask of an out-of-tree device.
#include "generators.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

namespace sim {

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
      set_current_device(d.index());
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

const at::Generator& default_generator(int d) {
  static auto* all = [] {
    auto* v = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i)
      v->push_back(at::make_generator<Generator>(i));
    return v;
  }();
  TORCH_CHECK(d >= 0 && d < kMaxDevices, "invalid device ordinal ", d);
  return (*all)[d];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings().devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return settings().devices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    const int before = current_device();
    set_current_device(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return exchangeDevice(d);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override {
    return default_generator(d < 0 ? current_device() : d);
  }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? current_device() : d);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(
        isAvailable(), "Cannot access accelerator device when none is available.");
    return pinned_allocator();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return c10::Device(kSim, current_device());
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    resize_storage(s, n);
  }
};
static const bool registered = [] {
  c10::SetAllocator(kSim, device_allocator());
  at::setHostAllocator(kSim, pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace sim
