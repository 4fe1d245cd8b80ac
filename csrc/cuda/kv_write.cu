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

// Thread (x, y) moves the x-th 16 bytes of the K and the V row of the CTA's token y.
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ KvWriteParams p, const Alignment aligned) {
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
  const SlotPosition at = locate_slot(p, token);
  if (at.block < 0) return;
  char* key_row = static_cast<char*>(p.key_cache) + row_offset(p.key_cache_strides, at, head) * size;
  char* value_row = static_cast<char*>(p.value_cache) + row_offset(p.value_cache_strides, at, head) * size;
  store_piece(key_row + in_row, key, aligned.key_cache);
  store_piece(value_row + in_row, value, aligned.value_cache);
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
  const dim3 grid(ceil_div(p.num_tokens, block.y), ceil_div(pieces, x));
  launch_pdl(copy_rows_kernel, grid, block, stream, p, aligned);
}

}  // namespace paged_attn
