// write_kv: rows of new keys and values into their cache slots, K and V in one launch.
#include "kv_row.cuh"
#include "launch.cuh"
#include "launchers.h"

namespace paged_attn {
namespace {

constexpr int kThreads = 256;

struct Alignment {
  bool key, value, key_cache, value_cache;
};

// Thread (x, y) moves the x-th 16 bytes of the rows of kTokens tokens, blockDim.y apart, K and V: all loads of a thread
// are in flight before its first store.
template <int kTokens>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ KvWriteParams p, const Alignment aligned) {
  ptx::pdl_launch_dependents();
  const int size = element_size(p.dtype), row_bytes = p.head_dim * size;
  const int byte = (blockIdx.y * blockDim.x + threadIdx.x) * 16;
  const int head = byte / row_bytes, in_row = byte % row_bytes;
  if (head >= p.num_kv_heads) return;
  const int first = blockIdx.x * blockDim.y * kTokens + threadIdx.y;
  const auto* key = static_cast<const char*>(p.key) + head * p.key_strides.head * size + in_row;
  const auto* value = static_cast<const char*>(p.value) + head * p.value_strides.head * size + in_row;
  ptx::pdl_wait();

  Piece<2> keys[kTokens], values[kTokens];
  SlotPosition at[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int token = first + i * blockDim.y;
    at[i].block = -1;
    if (token >= p.num_tokens) continue;
    keys[i] = load_piece<2>(key + token * p.key_strides.token * size, aligned.key);
    values[i] = load_piece<2>(value + token * p.value_strides.token * size, aligned.value);
    at[i] = locate_slot(p, token);
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    if (at[i].block < 0) continue;
    store_piece(static_cast<char*>(p.key_cache) + row_offset(p.key_cache_strides, at[i], head) * size + in_row, keys[i],
                aligned.key_cache);
    store_piece(static_cast<char*>(p.value_cache) + row_offset(p.value_cache_strides, at[i], head) * size + in_row,
                values[i], aligned.value_cache);
  }
}

// A group of lanes (threadIdx.x) quantises the K and V rows of kRows pairs of token and head, blockDim.y apart.
template <class T, int kRows>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_kernel(const __grid_constant__ KvWriteParams p, const Alignment aligned) {
  ptx::pdl_launch_dependents();
  const RowGroup group = {static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x)};
  const int first = blockIdx.x * blockDim.y * kRows + threadIdx.y;
  ptx::pdl_wait();

  Piece<sizeof(T)> keys[kRows], values[kRows];
  SlotPosition at[kRows];
  int heads[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i * blockDim.y, token = row / p.num_kv_heads;
    heads[i] = row - token * p.num_kv_heads;
    keys[i] = values[i] = {};
    at[i] = {-1, 0};
    if (token >= p.num_tokens) continue;
    at[i] = locate_slot(p, token);
    if (group.lane * 8 >= p.head_dim) continue;
    const int64_t k = token * p.key_strides.token + heads[i] * p.key_strides.head + group.lane * 8;
    const int64_t v = token * p.value_strides.token + heads[i] * p.value_strides.head + group.lane * 8;
    keys[i] = load_piece<sizeof(T)>(static_cast<const T*>(p.key) + k, aligned.key);
    values[i] = load_piece<sizeof(T)>(static_cast<const T*>(p.value) + v, aligned.value);
  }
  const bool active = group.lane * 8 < p.head_dim;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float v[8];
    to_float(keys[i], T{}, v);
    store_quantized(v, group, active, static_cast<uint8_t*>(p.key_cache), p.key_cache_strides, aligned.key_cache,
                    p.k_scale, at[i], heads[i], p.cache_dtype);
    to_float(values[i], T{}, v);
    store_quantized(v, group, active, static_cast<uint8_t*>(p.value_cache), p.value_cache_strides, aligned.value_cache,
                    p.v_scale, at[i], heads[i], p.cache_dtype);
  }
}

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

}  // namespace

void launch_write_kv(const KvWriteParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const Alignment aligned = {rows_aligned(p.key, p.key_strides, p.dtype),
                             rows_aligned(p.value, p.value_strides, p.dtype),
                             rows_aligned(p.key_cache, p.key_cache_strides, p.cache_dtype),
                             rows_aligned(p.value_cache, p.value_cache_strides, p.cache_dtype)};
  if (is_quantized(p.cache_dtype)) {
    dispatch_float(p.dtype, [&](auto tag) {
      constexpr int kRows = 2;
      const dim3 block(lanes_for(p.head_dim), kThreads / lanes_for(p.head_dim));
      const dim3 grid(ceil_div(int64_t{p.num_tokens} * p.num_kv_heads, int64_t{block.y} * kRows));
      launch_pdl(quantize_rows_kernel<decltype(tag), kRows>, grid, block, stream, p, aligned);
    });
    return;
  }
  const int pieces = p.num_kv_heads * p.head_dim * element_size(p.dtype) / 16;
  const int x = pieces < kThreads ? pieces : kThreads;
  const dim3 block(x, kThreads / x);
  const int columns = ceil_div(pieces, x);
  const auto grid = [&](int tokens) { return dim3(ceil_div(p.num_tokens, int64_t{block.y} * tokens), columns); };
  // Few tokens: one a thread, so that the work reaches every multiprocessor.
  if (static_cast<int>(grid(4).x) * columns >= 2 * current_device().sm_count)
    launch_pdl(copy_rows_kernel<4>, grid(4), block, stream, p, aligned);
  else
    launch_pdl(copy_rows_kernel<1>, grid(1), block, stream, p, aligned);
}

}  // namespace paged_attn
