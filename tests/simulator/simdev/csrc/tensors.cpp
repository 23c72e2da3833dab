// Making, viewing and resizing device tensors.
#include "aliases.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

static int device_arg(std::optional<c10::Device> d) {
  if (!d || !d->has_index())
    return current_device();
  TORCH_CHECK(d->type() == kSim, "not a simulated device: ", *d);
  check_device(d->index());
  return d->index();
}
static void check_factory(
    std::optional<at::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(
      layout.value_or(c10::kStrided) == c10::kStrided,
      "the simulated device has strided tensors only");
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
}
static Tensor empty_memory_format(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_factory(layout, pin);
  DeviceScope scope(device_arg(device));
  return at::detail::empty_generic(
      size, device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}
static Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin) {
  check_factory(layout, pin);
  DeviceScope scope(device_arg(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

void resize_storage(const c10::Storage& st, size_t n) {
  const int d = st.device().index();
  DeviceScope scope(d);
  auto& s = current_stream(d);
  s.drain();
  auto* impl = st.unsafeGetStorageImpl();
  if (n == 0) {
    impl->set_data_ptr_noswap({nullptr, c10::Device(kSim, d)});
  } else {
    auto fresh = device_allocator()->allocate(n);
    const size_t keep = std::min(n, st.nbytes());
    if (keep) {
      if (settings().sanitize) {
        const uint64_t t = tick(s);
        note(block_of(st.data_ptr()), s, t, 0, keep, false, "resize_");
        note(block_of(fresh), s, t, 0, keep, true, "resize_");
      }
      std::memcpy(fresh.get(), st.data(), keep);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
  }
  impl->set_nbytes(n);
}
static const Tensor& resize_(
    const Tensor& self, at::IntArrayRef size,
    std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    const size_t need = at::detail::computeStorageNbytesContiguous(
        size, self.itemsize(), self.storage_offset());
    if (self.numel() && need > self.storage().nbytes())
      resize_storage(self.storage(), need);
  }
  if (format && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  return self;
}
static Tensor& set_storage_offset(
    Tensor& self, at::Storage src, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  TORCH_CHECK(
      src.device().type() == kSim, "set_: storage is on ", src.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(src);
  if (stride.data())
    impl->set_sizes_and_strides(size, stride, offset);
  else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  if (self.numel()) {
    const size_t need = at::detail::computeStorageNbytes(
        self.sizes(), self.strides(), self.itemsize(), offset);
    if (need > src.nbytes())
      resize_storage(src, need);
  }
  return self;
}
static Tensor& set_storage(Tensor& self, at::Storage src) {
  const int64_t n = src.nbytes() / self.itemsize();
  return set_storage_offset(self, src, 0, {n}, {});
}
static Tensor& set_tensor(Tensor& self, const Tensor& src) {
  return set_storage_offset(
      self, src.storage(), src.storage_offset(), src.sizes(), src.strides());
}
static Tensor& set_nothing(Tensor& self) {
  const int d = index_of(self);
  DeviceScope scope(d);
  auto st = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0,
      device_allocator()->allocate(0), device_allocator(), true));
  return set_storage_offset(self, st, 0, {0}, {});
}

static void record_stream(Tensor& self, at::Stream s) {
  device_allocator()->recordStream(self.storage().data_ptr(), s);
}

// Without this `param.data = t` refuses to go from CPU to the device, and
// Module.to() makes new Parameters, which unties tied weights.
static bool shallow_copy_compatible(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& t) {
    return t.layout() == c10::kStrided && (on_sim(t) || t.device().is_cpu());
  };
  return dense(self) && dense(from);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", shallow_copy_compatible);
}

} // namespace sim
