// A device's generator is a CPU generator of its own.
#pragma once
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>

namespace sim {

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

const at::Generator& default_generator(int device);

} // namespace sim
