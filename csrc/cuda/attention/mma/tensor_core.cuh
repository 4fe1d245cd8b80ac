// Launches the kernel of one 16-bit type and head dimension; one .cu an instance.
#pragma once

#include <climits>

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
      // Where rows fill the multiprocessors, those of a tile see the same tiles of keys, and there may be many of
      // these: nothing runs beside the start and the end of a piece.
      using WidePrefill = Config<T, kHeadDim, false, false, 16, 8>;
      constexpr int64_t kRows = WidePrefill::kRows;
      const int64_t keys =
          std::min(int64_t{p.max_blocks} * p.block_size, int64_t{p.window_size > 0 ? p.window_size : INT_MAX});
      const bool wide = !decode && 2 * int64_t{p.num_tokens} * p.num_heads >= 3 * kRows * device.sm_count &&
                        p.num_tokens >= int64_t{2048} * p.num_seqs && keys >= 4096 &&
                        kRows <= WidePrefill::kKeys * args.heads.group.value && args.query_bytes == 16 &&
                        args.cache_bytes == 16;
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
