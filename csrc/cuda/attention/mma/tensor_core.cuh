// Launches the kernel of one 16-bit type and head dimension; one .cu an instance.
#pragma once

#include "launch_attention.cuh"

namespace paged_attn::mma {

template <class T, int kHeadDim>
void launch_tensor_core(const AttentionParams& p, QueryRange range, bool decode, Workspace& workspace,
                        cudaStream_t stream) {
  const DeviceInfo device = current_device();
  const KernelArgs args = kernel_args(p, range);
  // Where shared memory is small, either kernel can do the other's work.
  auto launch = [&](auto quantized) {
    using Decode = Config<T, kHeadDim, decltype(quantized)::value, true>;
    using Prefill = Config<T, kHeadDim, decltype(quantized)::value, false>;
    if constexpr (kHeadDim <= 128) {
      using WideDecode = Config<T, kHeadDim, decltype(quantized)::value, true, 32>;
      if (decode && range.max_len * args.heads.group.value > Decode::kRows)
        return launch_attention<WideDecode>(args, decode, workspace, stream, device);
    }
    if (decode ? stages_that_fit<Decode>(device, 1) > 0 : stages_that_fit<Prefill>(device, 1) == 0)
      launch_attention<Decode>(args, decode, workspace, stream, device);
    else
      launch_attention<Prefill>(args, decode, workspace, stream, device);
  };
  if (is_quantized(p.cache_dtype))
    launch(std::true_type());
  else
    launch(std::false_type());
}

}  // namespace paged_attn::mma
