// merge_attn_states: two attention results over disjoint keys into the result over all of them.
#include "convert.cuh"
#include "kv_row.cuh"
#include "launch.cuh"
#include "launchers.h"

namespace paged_attn {
namespace {

constexpr int kThreads = 256;

// A group of lanes (threadIdx.x) merges one row (token, head), eight elements a lane.  A row is read and written inside
// one warp, everything read before anything is written: out may be an operand.
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ MergeParams p, bool a_aligned, bool b_aligned, bool out_aligned) {
  ptx::pdl_launch_dependents();
  ptx::pdl_wait();
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  const int token = row / p.num_heads, head = row - token * p.num_heads, element = threadIdx.x * 8;
  const bool in_range = token < p.num_tokens, active = in_range && element < p.head_dim;
  const auto offset = [&](const TokenStrides& s) { return token * s.token + head * s.head; };

  Piece<sizeof(T)> piece_a = {}, piece_b = {};
  float lse_a = -INFINITY, lse_b = -INFINITY;
  if (active) {
    piece_a = load_piece<sizeof(T)>(static_cast<const T*>(p.output_a) + offset(p.a_strides) + element, a_aligned);
    piece_b = load_piece<sizeof(T)>(static_cast<const T*>(p.output_b) + offset(p.b_strides) + element, b_aligned);
  }
  if (in_range) {
    lse_a = p.lse_a[offset(p.lse_a_strides)];
    lse_b = p.lse_b[offset(p.lse_b_strides)];
  }
  float a[8], b[8];
  to_float(piece_a, T{}, a);
  to_float(piece_b, T{}, b);
  const float largest = fmaxf(lse_a, lse_b);
  const auto weigh = [&](float lse) { return lse == -INFINITY ? 0.0f : lse == largest ? 1.0f : expf(lse - largest); };
  const float exp_a = weigh(lse_a), exp_b = weigh(lse_b), sum = exp_a + exp_b;
  const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    // The values of an empty side may be NaN.
    const float part_a = lse_a == -INFINITY ? 0.0f : exp_a * a[i], part_b = lse_b == -INFINITY ? 0.0f : exp_b * b[i];
    a[i] = (part_a + part_b) * inverse;
  }
  __syncwarp();
  if (active) store_piece(static_cast<T*>(p.out) + offset(p.out_strides) + element, from_float(a, T{}), out_aligned);
  if (in_range && threadIdx.x == 0) p.out_lse[offset(p.out_lse_strides)] = largest + logf(sum);
}

}  // namespace

void launch_merge_attn_states(const MergeParams& p, cudaStream_t stream) {
  const int64_t rows = int64_t{p.num_tokens} * p.num_heads;
  if (rows == 0) return;
  const dim3 block(lanes_for(p.head_dim, 8), kThreads / lanes_for(p.head_dim, 8));
  dispatch_float(p.dtype, [&](auto tag) {
    launch_pdl(merge_kernel<decltype(tag)>, dim3(static_cast<unsigned>((rows + block.y - 1) / block.y)), block, stream,
               p, rows_aligned(p.output_a, p.a_strides, p.dtype), rows_aligned(p.output_b, p.b_strides, p.dtype),
               rows_aligned(p.out, p.out_strides, p.dtype));
  });
}

}  // namespace paged_attn
