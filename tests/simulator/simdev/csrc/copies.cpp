// Copies: between host and device, between devices, on one device, to a scalar.
#include "aliases.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <thread>

namespace sim {

static bool plain(const Tensor& a, const Tensor& b) { // one memcpy will do
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() &&
      a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
      ((a.is_contiguous() && b.is_contiguous()) ||
       (a.is_non_overlapping_and_dense() && a.strides() == b.strides()));
}
static Block* block_for(const Tensor& t) {
  return on_sim(t) ? block_of(t.storage().data_ptr())
                   : pinned_block(t.const_data_ptr());
}

// Bytes over a link: the one place where memory of different owners meets.
static void move_bytes(const Tensor& src, const Tensor& dst, bool non_blocking) {
  const size_t n = src.nbytes();
  if (n == 0)
    return;
  const Dir dir = !on_sim(src) ? H2D : !on_sim(dst) ? D2H : D2D;
  const int d = on_sim(src) ? index_of(src) : index_of(dst);
  auto& s = current_stream(d);
  void* to = const_cast<void*>(dst.const_data_ptr());
  const void* from = src.const_data_ptr();
  StreamState* peer = nullptr;
  EventPtr ready;
  if (dir == D2D && index_of(dst) != d) {
    // As CUDA: the copy waits for, and is waited for by, the other device's
    // current stream.
    peer = &current_stream(index_of(dst));
    ready = std::make_shared<EventState>();
    peer->record(ready);
    s.wait_event(ready);
  }
  if (settings().sanitize) {
    const uint64_t t = tick(s);
    Aliases::note_tensor(src, s, t, false, "copy");
    Aliases::note_tensor(dst, s, t, true, "copy");
  }
  const bool queued = settings().queued_copies && non_blocking &&
      (dir == D2D || is_pinned(dir == H2D ? from : to));
  if (queued) {
    count_queued(d, dir);
    s.enqueue([dir, d, to, from, n, a = BlockRef(block_for(src)),
               b = BlockRef(block_for(dst))] {
      if (settings().copy_delay_ms > 0)
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(
            settings().copy_delay_ms));
      transfer(dir, d, to, from, n);
    });
  } else {
    s.drain();
    transfer(dir, d, to, from, n);
    if (dir != D2D)
      host_synced(s); // such copies block the host
  }
  if (peer) {
    auto finished = std::make_shared<EventState>();
    s.record(finished);
    peer->wait_event(finished);
  }
}

// dst.copy_(src) where both lie on one device.
static void copy_on_device(const Tensor& src, const Tensor& dst) {
  const int d = index_of(dst);
  DeviceScope scope(d);
  auto& s = current_stream(d);
  Aliases al;
  Tensor from = al.of(src, false), to = al.of(dst, true);
  al.note_all(s, "copy_");
  auto work = [from, to]() mutable {
    at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  };
  if (settings().queued_kernels) {
    if (src.sizes() != dst.sizes())
      (void)src.expand(dst.sizes()); // raises here rather than there
    count_launch();
    s.enqueue([work, a = BlockRef(block_of(src.storage().data_ptr())),
               b = BlockRef(block_of(dst.storage().data_ptr()))]() mutable {
      work();
    });
  } else {
    s.drain();
    work();
  }
}

static Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  TORCH_CHECK(src.defined() && dst.defined(), "copy of an undefined tensor");
  if (dst.numel() == 0)
    return dst;
  if (on_sim(src) && on_sim(dst) && index_of(src) == index_of(dst)) {
    copy_on_device(src, dst);
    return dst;
  }
  if (plain(src, dst)) {
    move_bytes(src, dst, non_blocking);
    return dst;
  }
  // Conversion and gathering happen at the source, scattering at the target.
  Tensor from = src.to(dst.scalar_type()).expand_as(dst).resolve_conj()
                    .resolve_neg().contiguous();
  if (dst.is_contiguous() && !dst.is_conj() && !dst.is_neg()) {
    move_bytes(from, dst, non_blocking);
  } else {
    Tensor staged = at::empty(dst.sizes(), dst.options().pinned_memory(false));
    move_bytes(from, staged, false);
    if (on_sim(dst)) {
      copy_on_device(staged, dst);
    } else {
      at::AutoDispatchBelowADInplaceOrView guard;
      const_cast<Tensor&>(dst).copy_(staged);
    }
  }
  return dst;
}
static Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  if (dst.sizes() != src.sizes())
    const_cast<Tensor&>(dst).resize_(src.sizes());
  return copy_from(src, dst, false);
}
static at::Scalar local_scalar_dense(const Tensor& self) {
  const int d = index_of(self);
  auto& s = current_stream(d);
  Aliases al;
  Tensor t = al.of(self, false);
  al.note_all(s, "item");
  char buf[16];
  s.drain();
  transfer(D2H, d, buf, t.const_data_ptr(), t.itemsize());
  host_synced(s);
  raise_pending(d);
  return at::_local_scalar_dense(t);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// Else the lazy-conjugation fallback clones, which copies, which comes back.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace sim
