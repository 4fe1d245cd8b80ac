// write_kv: rows of new keys and values into their cache slots, K and V in one launch.
#include "kv_row.cuh"
#include "launch.cuh"
#include "launchers.h"

namespace paged_attn {
namespace {

constexpr int kThreads = 256;
constexpr int kQuantizeThreads = 128;
constexpr int kFewThreadsAnSm = 2048;  // up to there K and V rows have threads of their own

struct Alignment {
  bool key, value, key_cache, value_cache;
};

// Thread (x, y) moves the x-th 16 bytes of the K and the V row of the CTA's token y.
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ KvWriteParams p, const Alignment aligned, const Divisor block_size) {
  ptx::pdl_launch_dependents();
  const int size = element_size(p.dtype), row_bytes = p.head_dim * size;
  const int byte = (blockIdx.y * blockDim.x + threadIdx.x) * 16;
  const int head = byte / row_bytes, in_row = byte % row_bytes;
  const int token = blockIdx.x * blockDim.y + threadIdx.y;
  if (head >= p.num_kv_heads || token >= p.num_tokens) return;
  const int64_t k = token * p.key_strides.token + head * p.key_strides.head;
  const int64_t v = token * p.value_strides.token + head * p.value_strides.head;
  ptx::pdl_wait();

  const auto key = load_piece<2>(static_cast<const char*>(p.key) + k * size + in_row, aligned.key);
  const auto value = load_piece<2>(static_cast<const char*>(p.value) + v * size + in_row, aligned.value);
  const SlotPosition at = locate_slot(p, block_size, token);
  if (at.block < 0) return;
  char* key_row = static_cast<char*>(p.key_cache) + row_offset(p.key_cache_strides, at, head) * size;
  char* value_row = static_cast<char*>(p.value_cache) + row_offset(p.value_cache_strides, at, head) * size;
  store_piece(key_row + in_row, key, aligned.key_cache);
  store_piece(value_row + in_row, value, aligned.value_cache);
}

// A group of lanes (threadIdx.x) quantises the K and V row of a token and head, or one of them where blockIdx.y says
// which (kSplit).  Every load is issued before the first store: the compiler cannot move one over the other.
template <class T, class Cache, bool kAligned, bool kSplit>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_rows_kernel(const __grid_constant__ KvWriteParams p, const Alignment aligned, const Divisor num_heads,
                         const Divisor block_size) {
  ptx::pdl_launch_dependents();
  const int lanes = blockDim.x, lane = threadIdx.x, half = (p.head_dim / 8 + 1) / 2 * 8, first = lane * 8;
  const LanePieces part = {{first, half + first},
                           {first < half ? 8 : 0, first < half && half + first < p.head_dim ? 8 : 0}};
  const int row = blockIdx.x * blockDim.y + threadIdx.y, token = num_heads.quotient(row);
  const int head = row - token * num_heads.value;
  const bool in_range = token < p.num_tokens;
  ptx::pdl_wait();

  constexpr int kRows = kSplit ? 1 : 2;
  const auto is_value = [](int i) { return kSplit ? blockIdx.y == 1 : i == 1; };
  Piece<sizeof(T)> pieces[kRows][2] = {};
  float scales[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const TokenStrides& from = is_value(i) ? p.value_strides : p.key_strides;
    const T* data = static_cast<const T*>(is_value(i) ? p.value : p.key) + token * from.token + head * from.head;
    const bool row_aligned = kAligned || (is_value(i) ? aligned.value : aligned.key);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (in_range && part.count[k] > 0) pieces[i][k] = load_piece<sizeof(T)>(data + part.first[k], row_aligned);
    scales[i] = fixed_scale(is_value(i) ? p.v_scale : p.k_scale, head);
  }
  const SlotPosition at = in_range ? locate_slot(p, block_size, token) : SlotPosition{-1, 0};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const ScaleView& view = is_value(i) ? p.v_scale : p.k_scale;
    store_quantized<T, Cache>(is_value(i) ? p.value_cache : p.key_cache,
                              is_value(i) ? p.value_cache_strides : p.key_cache_strides, view,
                              kAligned || (is_value(i) ? aligned.value_cache : aligned.key_cache), pieces[i], part,
                              lanes, lane, at, head, scales[i], view.per_token());
  }
}

}  // namespace

void launch_write_kv(const KvWriteParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const Alignment aligned = {rows_aligned(p.key, p.key_strides, p.dtype),
                             rows_aligned(p.value, p.value_strides, p.dtype),
                             rows_aligned(p.key_cache, p.key_cache_strides, p.cache_dtype),
                             rows_aligned(p.value_cache, p.value_cache_strides, p.cache_dtype)};
  if (is_quantized(p.cache_dtype)) {
    const int lanes = lanes_for(p.head_dim, 16);
    const dim3 block(lanes, kQuantizeThreads / lanes);
    const int64_t rows = int64_t{p.num_tokens} * p.num_kv_heads;
    const bool all = aligned.key && aligned.value && aligned.key_cache && aligned.value_cache;
    const bool few = rows * lanes < kFewThreadsAnSm * int64_t{current_device().sm_count};
    const auto launch = [&](auto kernel, unsigned parts) {
      launch_pdl(kernel, dim3(ceil_div(rows, block.y), parts), block, stream, p, aligned, Divisor(p.num_kv_heads),
                 Divisor(p.block_size));
    };
    dispatch_float(p.dtype, [&](auto tag) {
      dispatch_quantized(p.cache_dtype, [&](auto cache_tag) {
        using T = decltype(tag);
        using Cache = decltype(cache_tag);
        if (!all) return launch(quantize_rows_kernel<T, Cache, false, false>, 1);
        few ? launch(quantize_rows_kernel<T, Cache, true, true>, 2)
            : launch(quantize_rows_kernel<T, Cache, true, false>, 1);
      });
    });
    return;
  }
  const int pieces = p.num_kv_heads * p.head_dim * element_size(p.dtype) / 16;
  const int x = pieces < kThreads ? pieces : kThreads;
  const dim3 block(x, kThreads / x);
  const dim3 grid(ceil_div(p.num_tokens, block.y), ceil_div(pieces, x));
  launch_pdl(copy_rows_kernel, grid, block, stream, p, aligned, Divisor(p.block_size));
}

}  // namespace paged_attn
