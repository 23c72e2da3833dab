// Dispatcher side: the boxed fallback that runs CPU kernels on device memory in
// place, the few operators that must be written by hand, copies, generators,
// and the hooks behind torch.accelerator.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_native.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>
#include <thread>

namespace sim {

at::Allocator* pinned_allocator_base();

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

static bool on_sim(const at::TensorBase& t) {
  return t.defined() && t.device().type() == kSim;
}
static int index_of(const at::TensorBase& t) {
  return t.device().index();
}

// ------------------------------------------------------------- generators
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int d, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(
            c10::Device(kSim, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator(seed)) {}
  at::Generator cpu;
  void set_current_seed(uint64_t s) override { cpu.set_current_seed(s); }
  void set_offset(uint64_t o) override { cpu.set_offset(o); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& s) override {
    cpu.unsafeGetGeneratorImpl()->set_state(s);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
 private:
  Generator* clone_impl() const override {
    auto* g = new Generator(device().index());
    g->cpu = cpu.clone();
    return g;
  }
};
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

// ------------------------------------------------------------------ aliases
// CPU tensors over the same memory as device tensors, for one call.  Tensors
// that share a storage share its alias, so that kernels see their overlap.
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

// --------------------------------------------------- errors of queued kernels
static std::mutex g_pending_m;
static std::string g_pending[kMaxDevices];
static std::atomic<bool> g_any_pending{false};
static std::atomic<uint64_t> g_launches{0};
static void count_launch() {
  ++g_launches;
}
uint64_t launch_count() {
  return g_launches;
}
static void set_pending(int d, const char* what) {
  std::lock_guard<std::mutex> l(g_pending_m);
  if (g_pending[d].empty())
    g_pending[d] = what;
  g_any_pending = true;
}
void raise_pending(int d) {
  if (!g_any_pending)
    return;
  std::string what;
  {
    std::lock_guard<std::mutex> l(g_pending_m);
    what = std::exchange(g_pending[d], {});
    g_any_pending = false;
    for (auto& p : g_pending)
      g_any_pending = g_any_pending || !p.empty();
  }
  TORCH_CHECK(what.empty(), "error in a kernel queued earlier: ", what);
}

void forget_pending(int d) {
  std::lock_guard<std::mutex> l(g_pending_m);
  g_pending[d].clear();
}

// ----------------------------------------------------------------- fallback
// Operators whose index tensors may lie on the CPU (as with CUDA).
static bool takes_cpu_indices(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::index", "aten::index_put", "aten::index_put_",
      "aten::_index_put_impl_", "aten::_unsafe_index",
      "aten::_unsafe_index_put"};
  return names.count(name) > 0;
}

[[noreturn]] static void mixed(
    c10::Device a, c10::Device b, const c10::FunctionSchema& schema) {
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two devices, ",
      a, " and ", b, "! (when checking the arguments of ", schema.name(), ")");
}

// Kernels whose outputs exist beforehand (out= and in-place variants, which is
// also how structured operators come) can be queued like a GPU's; the others
// run at once, after the stream has been waited for.
static bool can_queue(
    const c10::OperatorHandle& op, const Stack& stack, size_t nargs) {
  const auto& schema = op.schema();
  if (schema.name().compare(0, 6, "aten::") != 0)
    return false; // may be written in Python
  bool writes = false;
  for (const auto& r : schema.returns())
    if (!r.alias_info() || !r.alias_info()->isWrite())
      return false;
  if (op.hasTag(at::Tag::dynamic_output_shape))
    return false;
  auto fine = [&](const Tensor& t, bool w) {
    return !t.defined() || (on_sim(t) ? !w || t.numel() > 0 : t.dim() == 0);
  };
  for (size_t i = 0; i < nargs; ++i) {
    const IValue& v = stack[stack.size() - nargs + i];
    const auto& arg = schema.arguments()[i];
    const bool w = arg.alias_info() && arg.alias_info()->isWrite();
    writes = writes || w;
    if (v.isTensor()) {
      if (!fine(v.toTensor(), w))
        return false;
    } else if (v.isTensorList()) {
      for (const Tensor& t : v.toTensorList())
        if (!fine(t, w))
          return false;
    } else if (v.isOptionalTensorList()) {
      for (const std::optional<Tensor>& t : v.toOptionalTensorList())
        if (t && !fine(*t, w))
          return false;
    } else if (v.isGenerator()) {
      return false;
    } else if (v.isNone()) {
      const auto& type = arg.type();
      if (type->kind() == c10::TypeKind::OptionalType &&
          type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
              c10::TypeKind::GeneratorType)
        return false;
    }
  }
  return writes;
}

static void launch(
    StreamState& s, const c10::OperatorHandle& op, Aliases al, Stack* stack,
    size_t nargs, const std::vector<IValue>& original) {
  const auto& schema = op.schema();
  std::vector<IValue> args(stack->end() - nargs, stack->end());
  for (auto& v : args) // CPU scalars are read when launched
    if (v.isTensor() && v.toTensor().defined() && !original.empty()) {
      const Tensor& t = v.toTensor();
      bool alias = false;
      for (auto& e : al.tensors)
        alias = alias || e.cpu.is_same(t);
      if (!alias) {
        Tensor c = t.detach().clone();
        if (t.unsafeGetTensorImpl()->is_wrapped_number())
          c.unsafeGetTensorImpl()->set_wrapped_number(true);
        v = c;
      }
    }
  // The job must own no tensor that Python knows: only memory and aliases.
  std::vector<BlockRef> memory;
  std::vector<std::pair<c10::Storage, void*>> places;
  for (auto& st : al.storages) {
    memory.emplace_back(block_of(st.device.data_ptr()));
    places.emplace_back(st.cpu, st.ptr);
  }
  torch::jit::drop(*stack, nargs);
  for (const auto& r : schema.returns())
    for (size_t i = 0; i < nargs; ++i) {
      const auto* a = schema.arguments()[i].alias_info();
      if (a && a->isWrite() &&
          a->beforeSets() == r.alias_info()->beforeSets()) {
        stack->push_back(original[i]);
        break;
      }
    }
  count_launch();
  s.enqueue([op, dev = s.device, n = at::get_num_threads(),
             args = std::move(args),
             memory = std::move(memory), places = std::move(places)]() mutable {
    try {
      if (at::get_num_threads() != n)
        at::set_num_threads(n); // a setting of each thread
      at::AutoDispatchBelowADInplaceOrView guard;
      Stack st = std::move(args);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &st);
      for (auto& p : places)
        TORCH_CHECK(
            p.first.data_ptr().get() == p.second,
            "a queued kernel resized its output: ", op.schema().name());
    } catch (const std::exception& e) {
      set_pending(dev, e.what());
    }
  });
}

static void run(
    const c10::OperatorHandle& op, const c10::OperatorHandle& cpu_op,
    Stack* stack) {
  const auto& schema = op.schema();
  const auto& cpu_schema = cpu_op.schema();
  const size_t nargs = cpu_schema.arguments().size();
  auto args = torch::jit::last(*stack, nargs);

  // Which device?
  int d = -1;
  auto see = [&](const Tensor& t, bool index_arg) {
    if (!t.defined())
      return;
    if (on_sim(t)) {
      if (d < 0)
        d = index_of(t);
      else if (d != index_of(t))
        mixed(c10::Device(kSim, d), t.device(), schema);
    }
    (void)index_arg;
  };
  auto refuse = [&](const Tensor& t, bool index_arg) {
    if (!t.defined() || on_sim(t))
      return;
    // As CUDA: a CPU scalar may take part, so may CPU indices.
    if (t.device().is_cpu() && (t.dim() == 0 || index_arg))
      return;
    mixed(c10::Device(kSim, d), t.device(), schema);
  };
  auto each = [&](auto&& f) {
    const bool cpu_idx = takes_cpu_indices(schema.name());
    for (size_t i = 0; i < nargs; ++i) {
      const IValue& v = args[i];
      if (v.isTensor()) {
        f(v.toTensor(), false);
      } else if (v.isTensorList()) {
        for (const Tensor& t : v.toTensorList())
          f(t, cpu_idx);
      } else if (v.isOptionalTensorList()) {
        for (const std::optional<Tensor>& t : v.toOptionalTensorList())
          if (t)
            f(*t, cpu_idx);
      }
    }
  };
  each(see);
  if (d < 0)
    for (size_t i = 0; i < nargs; ++i)
      if (args[i].isDevice() && args[i].toDevice().type() == kSim) {
        auto dev = args[i].toDevice();
        d = dev.has_index() ? dev.index() : current_device();
      }
  if (d < 0)
    d = current_device();
  each(refuse);
  DeviceScope scope(d);
  auto& s = current_stream(d);
  raise_pending(d);
  const bool wait_later =
      settings().queued_kernels && can_queue(cpu_op, *stack, nargs);
  std::vector<IValue> original;
  if (wait_later)
    original.assign(stack->end() - nargs, stack->end());
  else
    s.drain(); // work on a stream runs in the order given

  // Arguments.
  Aliases al;
  for (size_t i = 0; i < nargs; ++i) {
    IValue& v = (*stack)[stack->size() - nargs + i];
    const auto& arg = cpu_schema.arguments()[i];
    const bool w = arg.alias_info() && arg.alias_info()->isWrite();
    if (v.isTensor()) {
      const Tensor& t = v.toTensor();
      if (on_sim(t))
        v = al.of(t, w);
    } else if (v.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& t : v.toTensorList())
        out.push_back(on_sim(t) ? al.of(t, w) : t);
      v = std::move(out);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> out;
      for (const std::optional<Tensor>& t : v.toOptionalTensorList())
        out.push_back(
            t && on_sim(*t) ? std::optional<Tensor>(al.of(*t, w)) : t);
      v = std::move(out);
    } else if (v.isDevice()) {
      if (v.toDevice().type() == kSim)
        v = c10::Device(c10::kCPU);
    } else if (v.isGenerator()) {
      auto g = v.toGenerator();
      if (g.device().type() == kSim)
        v = static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu;
    } else if (v.isNone()) {
      const auto& type = arg.type();
      if (type->kind() == c10::TypeKind::OptionalType &&
          type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
              c10::TypeKind::GeneratorType)
        v = static_cast<Generator*>(
                default_generator(d).unsafeGetGeneratorImpl())
                ->cpu;
    }
  }
  al.note_all(s, schema.name().c_str());
  if (wait_later) {
    launch(s, cpu_op, std::move(al), stack, nargs, original);
    return;
  }

  // The kernel.
  const size_t below = stack->size() - nargs;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    cpu_op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }

  // Results.
  al.write_back(d);
  for (size_t i = below; i < stack->size(); ++i) {
    IValue& v = (*stack)[i];
    if (v.isTensor()) {
      v = al.result(v.toTensor(), d);
    } else if (v.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& t : v.toTensorList())
        out.push_back(al.result(t, d));
      v = std::move(out);
    }
  }
}

static std::atomic<uint64_t> g_ops{0};
uint64_t op_count() {
  return g_ops;
}

static void fallback(const c10::OperatorHandle& op, Stack* stack) {
  ++g_ops;
  run(op, op, stack);
}

static c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}
// Convolutions of out-of-tree backends come as *_overrideable.
static void convolution(const c10::OperatorHandle& op, Stack* stack) {
  run(op, find("aten::convolution"), stack);
}
static void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  stack->insert(stack->end() - 7, IValue()); // bias_sizes
  auto mask = stack->back().toBoolList();
  if (mask[2]) {
    const Tensor& grad = (*stack)[stack->size() - 11].toTensor();
    (*stack)[stack->size() - 8] = c10::List<int64_t>({grad.size(1)});
  }
  run(op, find("aten::convolution_backward"), stack);
}

// ---------------------------------------------------------------- factories
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

// ------------------------------------------------------ storages and resizing
static void resize_storage(const c10::Storage& st, size_t n) {
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

// -------------------------------------------------------------------- copies
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

static int64_t sdp_choice(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
    double, bool, std::optional<double>, bool) {
  return 0; // math: made of plain operators
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
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
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", shallow_copy_compatible);
  m.impl("convolution_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// Else the lazy-conjugation fallback clones, which copies, which comes back.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// --------------------------------------------------------------------- hooks
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
    return pinned_allocator_base();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return c10::Device(kSim, current_device());
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    resize_storage(s, n);
  }
};
static const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
} // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::sdp_choice)
}
