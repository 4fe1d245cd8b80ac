// float32 queries, with a float32 or a quantised cache.
#include "launch_attention.cuh"

namespace paged_attn::mma {

void launch_float32(const AttentionParams& p, QueryRange range, bool decode, Workspace& workspace,
                    cudaStream_t stream) {
  auto launch = [&](auto head_dim) {
    constexpr int kHeadDim = decltype(head_dim)::value;
    const auto run = is_quantized(p.cache_dtype) ? launch_attention<Config<float, kHeadDim, true, false>>
                                                 : launch_attention<Config<float, kHeadDim, false, false>>;
    run(kernel_args(p, range), decode, workspace, stream, current_device());
  };
  if (p.head_dim <= 128)
    launch(std::integral_constant<int, 128>());
  else
    launch(std::integral_constant<int, 256>());
}

}  // namespace paged_attn::mma
