// CPU tensors over the same memory as device tensors, for one call of a kernel.
#pragma once
#include "sim.h"

#include <ATen/core/Tensor.h>

namespace sim {

using at::Tensor;

inline bool on_sim(const at::TensorBase& t) {
  return t.defined() && t.device().type() == kSim;
}
inline int index_of(const at::TensorBase& t) {
  return t.device().index();
}

// Tensors that share a storage share its alias, so that kernels see their overlap.
struct Aliases {
  struct S {
    c10::Storage device, cpu;
    void* ptr;
  };
  struct T {
    Tensor device, cpu;
    bool writes;
  };
  std::vector<S> storages;
  std::vector<T> tensors;

  const c10::Storage& storage(const c10::Storage& dev) {
    for (auto& s : storages)
      if (s.device.unsafeGetStorageImpl() == dev.unsafeGetStorageImpl())
        return s.cpu;
    void* p = dev.data_ptr().get();
    storages.push_back(
        {dev,
         c10::Storage(c10::make_intrusive<c10::StorageImpl>(
             c10::StorageImpl::use_byte_size_t(), dev.nbytes(),
             c10::DataPtr(p, c10::Device(c10::kCPU)),
             c10::GetAllocator(c10::kCPU), /*resizable=*/true)),
         p});
    return storages.back().cpu;
  }

  Tensor of(const Tensor& t, bool writes) {
    for (auto& e : tensors)
      if (e.device.is_same(t)) {
        e.writes = e.writes || writes;
        return e.cpu;
      }
    TORCH_CHECK(
        t.layout() == c10::kStrided, "the simulated device has strided tensors only");
    auto cpu = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage(t.storage())),
        c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    auto* impl = cpu.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.is_conj())
      impl->_set_conj(true);
    if (t.is_neg())
      impl->_set_neg(true);
    if (t.unsafeGetTensorImpl()->is_wrapped_number())
      impl->set_wrapped_number(true);
    tensors.push_back({t, cpu, writes});
    return cpu;
  }

  // Tells the sanitizer of all accesses; `s` is the stream they are on.
  void note_all(StreamState& s, const char* what) {
    if (!settings().sanitize)
      return;
    const uint64_t t = tick(s);
    for (auto& e : tensors)
      note_tensor(e.device, s, t, e.writes, what);
  }
  static void note_tensor(
      const Tensor& x, StreamState& s, uint64_t t, bool writes,
      const char* what) {
    if (!settings().sanitize || x.numel() == 0)
      return;
    Block* b = block_of(x.storage().data_ptr());
    if (!b && !on_sim(x))
      b = pinned_block(x.const_data_ptr());
    if (!b)
      return;
    const size_t item = x.itemsize();
    auto base = static_cast<const char*>(x.const_data_ptr());
    size_t span = item;
    for (int64_t i = 0; i < x.dim(); ++i)
      span += (x.size(i) - 1) * x.stride(i) * item;
    const size_t lo = base - b->ptr;
    note(b, s, t, lo, lo + span, writes, what);
  }

  // Takes over what the kernel did to the arguments themselves.
  void write_back(int d) {
    for (auto& s : storages)
      if (s.cpu.data_ptr().get() != s.ptr) { // resized: memory is new
        auto* impl = s.device.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(adopt(s.cpu, d));
        impl->set_nbytes(s.cpu.nbytes());
      }
    for (auto& e : tensors) {
      if (!e.writes)
        continue;
      auto* to = e.device.unsafeGetTensorImpl();
      if (to->sizes() != e.cpu.sizes() || to->strides() != e.cpu.strides() ||
          to->storage_offset() != e.cpu.storage_offset())
        to->set_sizes_and_strides(
            e.cpu.sizes(), e.cpu.strides(), e.cpu.storage_offset());
    }
  }

  // A result of the kernel as a device tensor.
  Tensor result(const Tensor& cpu, int d) {
    if (!cpu.defined() || cpu.device().type() != c10::kCPU)
      return cpu;
    for (auto& e : tensors)
      if (e.cpu.is_same(cpu))
        return e.device;
    TORCH_CHECK(
        cpu.layout() == c10::kStrided, "the simulated device has strided tensors only");
    c10::Storage dev;
    for (auto& s : storages)
      if (s.cpu.unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl())
        dev = s.device;
    if (!dev) {
      dev = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), cpu.storage().nbytes(),
          adopt(cpu.storage(), d), device_allocator(), /*resizable=*/true));
      storages.push_back({dev, cpu.storage(), cpu.storage().data_ptr().get()});
    }
    auto out = at::detail::make_tensor<c10::TensorImpl>(
        std::move(dev), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        cpu.dtype());
    auto* impl = out.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(
        cpu.sizes(), cpu.strides(), cpu.storage_offset());
    if (cpu.is_conj())
      impl->_set_conj(true);
    if (cpu.is_neg())
      impl->_set_neg(true);
    return out;
  }
};

} // namespace sim
