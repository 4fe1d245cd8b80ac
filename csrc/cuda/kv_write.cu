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

// A group of lanes (threadIdx.x), sixteen elements each, quantises the K and V row of a token and head, or one of them
// where blockIdx.y says which (kSplit).  kPlain: all accesses are of 16 bytes, and strides are small.  Every load is
// issued before anything is computed, that of the slot first: a branch on it would hold up the others.
template <class T, class Cache, bool kPlain, bool kSplit>
__global__ void __launch_bounds__(kQuantizeThreads, 8)
    quantize_rows_kernel(const __grid_constant__ KvWriteParams p, const Alignment aligned, const Divisor num_heads,
                         const Divisor block_size) {
  ptx::pdl_launch_dependents();
  const int lanes = blockDim.x, lane = threadIdx.x, first = lane * 16;
  const int row = blockIdx.x * blockDim.y + threadIdx.y, token = num_heads.quotient(row);
  const int head = row - token * num_heads.value;
  const bool in_range = token < p.num_tokens;
  const auto holds = [&](int piece) { return kPlain ? first < p.head_dim : first + piece * 8 < p.head_dim; };
  constexpr int kRows = kSplit ? 1 : 2;
  const auto is_value = [](int i) { return kSplit ? blockIdx.y == 1 : i == 1; };
  const T* data[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    data[i] = static_cast<const T*>(is_value(i) ? p.value : p.key) +
              row_offset<kPlain>(is_value(i) ? p.value_strides : p.key_strides, token, head) + first;
  ptx::pdl_wait();

  const SlotWords slot = in_range ? load_slot(p, token) : SlotWords{0, -1};
  Piece<sizeof(T)> pieces[kRows][2] = {};
  float scales[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool row_aligned = kPlain || (is_value(i) ? aligned.value : aligned.key);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (in_range && holds(k)) pieces[i][k] = load_piece<sizeof(T)>(data[i] + k * 8, row_aligned);
    scales[i] = fixed_scale<kPlain>(is_value(i) ? p.v_scale : p.k_scale, head);
  }
  const SlotPosition at = locate<kPlain>(p, block_size, slot);
  uint32_t largest[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) largest[i] = largest_magnitude(pieces[i]);
  if (p.k_scale.per_token() || p.v_scale.per_token()) {
    float own[kRows];
    scales_of_rows<T, Cache, kRows>(pieces, largest, lanes, own);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const ScaleView& view = is_value(i) ? p.v_scale : p.k_scale;
      if (!view.per_token()) continue;
      scales[i] = own[i];
      if (at.block >= 0 && lane == 0) view.data[row_offset<kPlain>(view.strides, at, head)] = own[i];
    }
  }
  if (at.block < 0) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Piece<1> stored[2];
    quantize_row<T, Cache>(pieces[i], largest[i], scales[i], stored);
    uint8_t* to = static_cast<uint8_t*>(is_value(i) ? p.value_cache : p.key_cache) +
                  row_offset<kPlain>(is_value(i) ? p.value_cache_strides : p.key_cache_strides, at, head) + first;
    if constexpr (kPlain) {
      if (holds(0)) store_pieces(to, stored);
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (holds(k)) store_piece(to + k * 8, stored[k], is_value(i) ? aligned.value_cache : aligned.key_cache);
    }
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
    const auto adjacent = [&](const void* cache, BlockStrides s) {  // pieces, 16 bytes of a row
      return is_aligned(cache, 16) && s.block % 16 == 0 && s.slot % 16 == 0 && s.head % 16 == 0 && is_small(s);
    };
    const bool plain = p.head_dim % 16 == 0 && p.num_blocks * p.block_size <= INT32_MAX && aligned.key &&
                       aligned.value && is_small(p.key_strides) && is_small(p.value_strides) &&
                       adjacent(p.key_cache, p.key_cache_strides) && adjacent(p.value_cache, p.value_cache_strides) &&
                       is_small(p.k_scale.strides) && is_small(p.v_scale.strides);
    const bool few = rows * lanes < kFewThreadsAnSm * int64_t{current_device().sm_count};
    const auto launch = [&](auto kernel, unsigned parts) {
      launch_pdl(kernel, dim3(ceil_div(rows, block.y), parts), block, stream, p, aligned, Divisor(p.num_kv_heads),
                 Divisor(p.block_size));
    };
    dispatch_float(p.dtype, [&](auto tag) {
      dispatch_quantized(p.cache_dtype, [&](auto cache_tag) {
        using T = decltype(tag);
        using Cache = decltype(cache_tag);
        if (!plain) return launch(quantize_rows_kernel<T, Cache, false, false>, 1);
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
