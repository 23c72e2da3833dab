// The boxed fallback: CPU kernels run on device memory in place.
#include "aliases.h"
#include "generators.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <set>

namespace sim {

using c10::IValue;
using Stack = torch::jit::Stack;

static std::mutex g_pending_m;
static std::string g_pending[kMaxDevices];
static std::atomic<bool> g_any_pending{false};
static std::atomic<uint64_t> g_launches{0};
void count_launch() {
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

// Operators whose index tensors may lie on the CPU (as with CUDA).
static bool takes_cpu_indices(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::index", "aten::index_put", "aten::index_put_",
      "aten::_index_put_impl_", "aten::_unsafe_index",
      "aten::_unsafe_index_put"};
  return names.count(name) > 0;
}

static bool takes_generator(const c10::Argument& arg) {
  const auto& type = arg.type();
  return type->kind() == c10::TypeKind::OptionalType &&
      type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
      c10::TypeKind::GeneratorType;
}
static at::Generator cpu_generator(const at::Generator& g) {
  return static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu;
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
    } else if (v.isGenerator() || (v.isNone() && takes_generator(arg))) {
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

// The device that a call runs on; refuses tensors of several, as CUDA does.
static int device_of(
    const c10::FunctionSchema& schema, c10::ArrayRef<IValue> args) {
  const bool indices = takes_cpu_indices(schema.name());
  auto each = [&](auto&& visit) {
    for (const IValue& v : args) {
      if (v.isTensor()) {
        visit(v.toTensor(), false);
      } else if (v.isTensorList()) {
        for (const Tensor& t : v.toTensorList())
          visit(t, indices);
      } else if (v.isOptionalTensorList()) {
        for (const std::optional<Tensor>& t : v.toOptionalTensorList())
          if (t)
            visit(*t, indices);
      }
    }
  };
  int d = -1;
  each([&](const Tensor& t, bool) {
    if (!on_sim(t))
      return;
    if (d >= 0 && d != index_of(t))
      mixed(c10::Device(kSim, d), t.device(), schema);
    d = index_of(t);
  });
  for (const IValue& v : args)
    if (d < 0 && v.isDevice() && v.toDevice().type() == kSim && v.toDevice().has_index())
      d = v.toDevice().index();
  if (d < 0)
    d = current_device();
  each([&](const Tensor& t, bool is_index) {
    // CPU scalars may take part, and so may CPU indices.
    const bool allowed = !t.defined() || on_sim(t) ||
        (t.device().is_cpu() && (t.dim() == 0 || is_index));
    if (!allowed)
      mixed(c10::Device(kSim, d), t.device(), schema);
  });
  return d;
}

// Puts aliases, CPU devices and CPU generators in the place of the device's.
static void make_cpu_arguments(
    const c10::FunctionSchema& schema, Stack& stack, int d, Aliases& al) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& v = stack[stack.size() - arguments.size() + i];
    const auto& arg = arguments[i];
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
      if (v.toGenerator().device().type() == kSim)
        v = cpu_generator(v.toGenerator());
    } else if (v.isNone() && takes_generator(arg)) {
      v = cpu_generator(default_generator(d));
    }
  }
}

static void take_results(Stack& stack, size_t first, int d, Aliases& al) {
  al.write_back(d);
  for (size_t i = first; i < stack.size(); ++i) {
    IValue& v = stack[i];
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

static void run(
    const c10::OperatorHandle& op, const c10::OperatorHandle& cpu_op,
    Stack* stack) {
  const auto& name = op.schema().name();
  const size_t nargs = cpu_op.schema().arguments().size();
  const int d = device_of(op.schema(), torch::jit::last(*stack, nargs));
  DeviceScope scope(d);
  auto& s = current_stream(d);
  raise_pending(d);
  const bool queued =
      settings().queued_kernels && can_queue(cpu_op, *stack, nargs);
  std::vector<IValue> original;
  if (queued)
    original.assign(stack->end() - nargs, stack->end());
  else
    s.drain(); // work on a stream runs in the order given

  Aliases al;
  make_cpu_arguments(cpu_op.schema(), *stack, d, al);
  al.note_all(s, name.c_str());
  if (queued) {
    launch(s, cpu_op, std::move(al), stack, nargs, original);
    return;
  }
  const size_t first = stack->size() - nargs;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    cpu_op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  take_results(*stack, first, d, al);
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

// torch counts integers on CUDA but not on the CPU; transformers' grouped experts
// take the former for granted on any accelerator.
static void histogram(const c10::OperatorHandle& op, Stack* stack) {
  IValue& input = (*stack)[stack->size() - 4];
  const auto dtype = input.toTensor().scalar_type();
  const bool integral = c10::isIntegralType(dtype, /*includeBool=*/false);
  if (integral)
    input = input.toTensor().to(at::kFloat);
  fallback(op, stack);
  if (integral)
    stack->back() = stack->back().toTensor().to(dtype);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histogram>());
  // Elsewhere these are composed of other operators, with other roundings.
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "silu_backward",
        "mish_backward", "addr", "linalg__powsum"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

} // namespace sim
