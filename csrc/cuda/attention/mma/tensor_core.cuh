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
    if constexpr (kHeadDim == 128 && !decltype(quantized)::value) {
      // Where sequences fill tiles, tiles the multiprocessors, and few of a tile's keys lie on the diagonal.
      using WidePrefill = Config<T, kHeadDim, false, false, 16, 8>;
      constexpr int64_t kRows = WidePrefill::kRows;
      const int64_t group = args.heads.group.value;
      const bool wide = !decode && p.num_tokens * group >= kRows * p.num_seqs &&
                        2 * int64_t{p.num_tokens} * p.num_heads >= 3 * kRows * device.sm_count &&
                        kRows <= 128 * group && args.query_bytes == 16 && args.cache_bytes == 16;
      if (wide && stages_that_fit<WidePrefill>(device, 1) == WidePrefill::kMaxStages)
        return launch_attention<WidePrefill>(args, decode, workspace, stream, device);
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
