// The paths of compute capability 8.0 and up: which instance serves a call.
#include "../paths.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <algorithm>

namespace paged_attn::mma {

// One instance a (type, head dimension): a .cu of its own.
template <class T, int kHeadDim>
void launch_tensor_core(const AttentionParams& p, QueryRange range, bool decode, Workspace& workspace,
                        cudaStream_t stream);
void launch_float32(const AttentionParams& p, QueryRange range, bool decode, Workspace& workspace, cudaStream_t stream);

namespace {

template <class T>
auto instance(int head_dim) {
  return head_dim <= 64    ? launch_tensor_core<T, 64>
         : head_dim <= 128 ? launch_tensor_core<T, 128>
                           : launch_tensor_core<T, 256>;
}

void launch(AttentionParams p, QueryRange range, bool decode, Workspace& workspace, cudaStream_t stream) {
  p.window_size = std::min(p.window_size, 1 << 30);  // spares the kernels an overflow
  range.max_len = std::min(range.max_len, p.cu_seqlens_q == nullptr ? 1
                                          : p.max_seqlen_q > 0      ? p.max_seqlen_q
                                                                    : p.num_tokens);
  auto run = p.dtype == DType::kFloat32   ? launch_float32
             : p.dtype == DType::kFloat16 ? instance<__half>(p.head_dim)
                                          : instance<__nv_bfloat16>(p.head_dim);
  run(p, range, decode, workspace, stream);
}

}  // namespace

int decode_max_rows(const AttentionParams& p) { return p.head_dim <= 128 ? 32 : 16; }

void launch_decode(const AttentionParams& p, QueryRange range, Workspace& workspace, cudaStream_t stream) {
  launch(p, range, true, workspace, stream);
}
void launch_prefill(const AttentionParams& p, QueryRange range, Workspace& workspace, cudaStream_t stream) {
  launch(p, range, false, workspace, stream);
}

}  // namespace paged_attn::mma
