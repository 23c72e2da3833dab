// scaled_dot_product_attention: the CPU's choice of kernel, and the CPU's kernel.
#include "sim.h"

#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <torch/library.h>

namespace sim {

using at::Tensor;

static int64_t choice(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, double dropout, bool causal,
    std::optional<double> scale, bool grouped) {
  const int64_t cpu = at::_ops::_fused_sdp_choice::redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CPU), query, key, value, mask,
      dropout, causal, scale, grouped);
  return cpu == int64_t(at::SDPBackend::flash_attention)
      ? int64_t(at::SDPBackend::overrideable)
      : cpu;
}

static std::tuple<
    Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor,
    Tensor>
forward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& bias, double dropout, bool causal,
    bool /*return_debug_mask*/, std::optional<double> scale) {
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, dropout, causal, bias, scale);
  return {out, logsumexp, {}, {}, query.sym_size(2), key.sym_size(2), {}, {}, {}};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& bias, std::array<bool, 4>,
    const Tensor& out, const Tensor& logsumexp, const Tensor&, const Tensor&,
    c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor&,
    const Tensor&, std::optional<double> scale) {
  const std::optional<Tensor> mask =
      bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, query, key, value, out, logsumexp, dropout, causal, mask, scale);
  return {dq, dk, dv, {}};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", forward);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", backward);
}

} // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choice)
}
