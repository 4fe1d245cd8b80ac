// write_kv: rows of new keys and values into their cache slots, K and V in one launch.
#include "kv_row.cuh"
#include "launch.cuh"
#include "launchers.h"

namespace paged_attn {
namespace {

constexpr int kThreads = 256;
constexpr int kQuantizeThreads = 128;
constexpr int kPrefetchBytesAnSm = 48 << 10;
constexpr int kFewThreadsAnSm = 2048;  // up to there K and V rows have threads of their own

struct Alignment {
  bool key, value, key_cache, value_cache;
};

// Thread (x, y) moves the x-th 16 bytes of the K and the V row of the CTA's token y.
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const __grid_constant__ KvWriteParams p, const Alignment aligned, const Divisor block_size,
                     int prefetching_ctas) {
  ptx::pdl_launch_dependents();
  const int size = element_size(p.dtype), row_bytes = p.head_dim * size;
  const int byte = (blockIdx.y * blockDim.x + threadIdx.x) * 16;
  const int head = byte / row_bytes, in_row = byte % row_bytes;
  const int token = blockIdx.x * blockDim.y + threadIdx.y;
  if (head >= p.num_kv_heads || token >= p.num_tokens) return;
  const int64_t k = token * p.key_strides.token + head * p.key_strides.head;
  const int64_t v = token * p.value_strides.token + head * p.value_strides.head;
  const char* key_data = static_cast<const char*>(p.key) + k * size + in_row;
  const char* value_data = static_cast<const char*>(p.value) + v * size + in_row;
  if (blockIdx.x < prefetching_ctas) {
    prefetch_sector(key_data);
    prefetch_sector(value_data);
  }
  ptx::pdl_wait();

  const auto key = load_piece<2>(key_data, aligned.key);
  const auto value = load_piece<2>(value_data, aligned.value);
  const SlotPosition at = locate_slot(p, block_size, token);
  if (at.block < 0) return;
  char* key_row = static_cast<char*>(p.key_cache) + row_offset(p.key_cache_strides, at, head) * size;
  char* value_row = static_cast<char*>(p.value_cache) + row_offset(p.value_cache_strides, at, head) * size;
  store_piece(key_row + in_row, key, aligned.key_cache);
  store_piece(value_row + in_row, value, aligned.value_cache);
}

// A group of lanes (threadIdx.x), sixteen elements each, quantises the K and then the V row of a token and head.
template <class T, class Cache>
__global__ void __launch_bounds__(kQuantizeThreads, 8)
    quantize_rows_kernel(const __grid_constant__ KvWriteParams p, const Alignment aligned, const Divisor num_heads,
                         const Divisor block_size) {
  ptx::pdl_launch_dependents();
  const int lane = threadIdx.x, first = lane * 16;
  const int row = blockIdx.x * blockDim.y + threadIdx.y, token = num_heads.quotient(row);
  const int head = row - token * num_heads.value;
  const bool in_range = token < p.num_tokens;
  ptx::pdl_wait();

  const SlotPosition at = in_range ? locate_slot(p, block_size, token) : SlotPosition{-1, 0};
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const bool is_value = i == 1;
    const T* from = static_cast<const T*>(is_value ? p.value : p.key) +
                    row_offset(is_value ? p.value_strides : p.key_strides, token, head) + first;
    Piece<sizeof(T)> pieces[2] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (in_range && first + k * 8 < p.head_dim)
        pieces[k] = load_piece<sizeof(T)>(from + k * 8, is_value ? aligned.value : aligned.key);
    const ScaleView& scales = is_value ? p.v_scale : p.k_scale;
    float scale = fixed_scale(scales, head);
    if (scales.per_token()) {
      scales_of_rows<T, Cache, 1>(&pieces, blockDim.x, &scale);
      if (at.block >= 0 && lane == 0) scales.data[row_offset(scales.strides, at, head)] = scale;
    }
    if (at.block < 0) continue;
    Piece<1> stored[2];
    quantize_row<T, Cache>(pieces, scale, stored);
    uint8_t* to = static_cast<uint8_t*>(is_value ? p.value_cache : p.key_cache) +
                  row_offset(is_value ? p.value_cache_strides : p.key_cache_strides, at, head) + first;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (first + k * 8 < p.head_dim)
        store_piece(to + k * 8, stored[k], is_value ? aligned.value_cache : aligned.key_cache);
  }
}

// What quantize_plain_rows_kernel takes: strides and sizes in bytes, the same for K and V.
struct PlainWriteParams {
  const char* rows[2];  // K and V
  char* caches[2];
  char* scales[2];  // of float; null: every scale is 1
  const char* slots;
  int num_rows, head_dim, prefetching_ctas;  // num_rows: tokens x heads
  bool scales_per_token;
  Divisor num_heads, block_size;
  uint32_t num_slots, last_word;  // last_word: which 32 bits of a slot are its last, 0 or 1
  uint32_t slot_stride, token_stride, head_stride;
  struct Strides {
    uint32_t block, slot, head;
  } cache_strides, scale_strides;
};

__device__ __forceinline__ uint64_t multiply_add(uint32_t a, uint32_t b, uint64_t c) {
  uint64_t sum;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(c));
  return sum;
}
__device__ __forceinline__ uint64_t row_offset(const PlainWriteParams::Strides& s, int block, int offset, int head) {
  return multiply_add(block, s.block, multiply_add(offset, s.slot, multiply_add(head, s.head, 0)));
}

// The same in the common case, in as few instructions as it takes.  kSplit: a group has one row of the two, blockIdx.y
// says which.  Every load is issued before anything is computed.  Lanes and groups beyond the last one load what others
// load, so that all of them are alike until they store.
template <class T, class Cache, bool kSplit>
__global__ void __launch_bounds__(kQuantizeThreads, 8)
    quantize_plain_rows_kernel(const __grid_constant__ PlainWriteParams p) {
  ptx::pdl_launch_dependents();
  constexpr int kRows = kSplit ? 1 : 2, kLaneBytes = 16 * sizeof(T);
  const auto tensor = [](int i) { return kSplit ? blockIdx.y : i; };
  const int group = blockIdx.x * blockDim.y + threadIdx.y, first = threadIdx.x * 16;
  const bool in_range = group < p.num_rows && first < p.head_dim;
  const int row = min(group, p.num_rows - 1), token = p.num_heads.quotient(row), head = row - token * p.num_heads.value;
  const uint64_t at_lane = multiply_add(first < p.head_dim ? threadIdx.x : 0, kLaneBytes, 0);
  const uint64_t from = multiply_add(token, p.token_stride, multiply_add(head, p.head_stride, at_lane));
  if (blockIdx.x < p.prefetching_ctas)
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int byte = 0; byte < kLaneBytes; byte += 32) prefetch_sector(p.rows[tensor(i)] + from + byte);
  ptx::pdl_wait();

  const auto* slot = reinterpret_cast<const uint32_t*>(p.slots + multiply_add(token, p.slot_stride, 0));
  const uint32_t first_word = slot[0], last_word = slot[p.last_word];
  Piece<sizeof(T)> pieces[kRows][2];
  float scales[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      pieces[i][k] = *reinterpret_cast<const Piece<sizeof(T)>*>(p.rows[tensor(i)] + from + k * (kLaneBytes / 2));
    scales[i] = 1.0f;
    if (!p.scales_per_token && p.scales[tensor(i)])
      scales[i] = *reinterpret_cast<const float*>(p.scales[tensor(i)] + multiply_add(head, p.scale_strides.head, 0));
  }
  const bool stores = in_range && first_word < p.num_slots && (last_word == 0 || p.last_word == 0);
  const int block = p.block_size.quotient(first_word), offset = first_word - block * p.block_size.value;
  if (p.scales_per_token) {
    scales_of_rows<T, Cache, kRows>(pieces, blockDim.x, scales);
    if (stores && first == 0) {
      const uint64_t to = row_offset(p.scale_strides, block, offset, head);
#pragma unroll
      for (int i = 0; i < kRows; ++i) *reinterpret_cast<float*>(p.scales[tensor(i)] + to) = scales[i];
    }
  }
  if (!stores) return;
  const uint64_t to = row_offset(p.cache_strides, block, offset, head) + first;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Piece<1> stored[2];
    quantize_row<T, Cache>(pieces[i], scales[i], stored);
    store_pieces(p.caches[tensor(i)] + to, stored);
  }
}

// The call as quantize_plain_rows_kernel takes it; false where it does not.
bool as_plain(const KvWriteParams& p, PlainWriteParams& plain) {
  bool fits = true;
  const auto bytes = [&](int64_t stride, int64_t other, int64_t size, int64_t alignment) {
    fits &= stride == other && stride >= 0 && stride <= INT32_MAX / size && stride * size % alignment == 0;
    return static_cast<uint32_t>(stride * size);
  };
  const auto all_bytes = [&](const BlockStrides& s, const BlockStrides& other, int64_t size, int64_t alignment) {
    return PlainWriteParams::Strides{bytes(s.block, other.block, size, alignment),
                                     bytes(s.slot, other.slot, size, alignment),
                                     bytes(s.head, other.head, size, alignment)};
  };
  const int size = element_size(p.dtype);
  const int64_t num_rows = int64_t{p.num_tokens} * p.num_kv_heads, num_slots = p.num_blocks * p.block_size;
  plain = {{static_cast<const char*>(p.key), static_cast<const char*>(p.value)},
           {static_cast<char*>(p.key_cache), static_cast<char*>(p.value_cache)},
           {reinterpret_cast<char*>(p.k_scale.data), reinterpret_cast<char*>(p.v_scale.data)},
           static_cast<const char*>(p.slot_mapping),
           static_cast<int>(num_rows),
           p.head_dim,
           prefetching_ctas(kQuantizeThreads * 2 * 16 * size, kPrefetchBytesAnSm),
           p.k_scale.per_token(),
           Divisor(p.num_kv_heads),
           Divisor(p.block_size),
           static_cast<uint32_t>(num_slots),
           p.slots_are_int64,
           bytes(p.slot_stride, p.slot_stride, p.slots_are_int64 ? 8 : 4, 4),
           bytes(p.key_strides.token, p.value_strides.token, size, 16),
           bytes(p.key_strides.head, p.value_strides.head, size, 16),
           all_bytes(p.key_cache_strides, p.value_cache_strides, 1, 16),
           all_bytes(p.k_scale.strides, p.v_scale.strides, sizeof(float), 4)};
  return fits && p.head_dim % 16 == 0 && num_rows <= INT32_MAX && num_slots <= INT32_MAX && is_aligned(p.key, 16) &&
         is_aligned(p.value, 16) && is_aligned(p.key_cache, 16) && is_aligned(p.value_cache, 16);
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
    const auto launch = [&](auto kernel, unsigned parts, const auto&... args) {
      launch_pdl(kernel, dim3(ceil_div(rows, block.y), parts), block, stream, args...);
    };
    PlainWriteParams plain;
    const bool is_plain = as_plain(p, plain);
    const bool few = rows * lanes < kFewThreadsAnSm * int64_t{current_device().sm_count};
    dispatch_float(p.dtype, [&](auto tag) {
      dispatch_quantized(p.cache_dtype, [&](auto cache_tag) {
        using T = decltype(tag);
        using Cache = decltype(cache_tag);
        if (!is_plain)
          return launch(quantize_rows_kernel<T, Cache>, 1, p, aligned, Divisor(p.num_kv_heads), Divisor(p.block_size));
        few ? launch(quantize_plain_rows_kernel<T, Cache, true>, 2, plain)
            : launch(quantize_plain_rows_kernel<T, Cache, false>, 1, plain);
      });
    });
    return;
  }
  const int pieces = p.num_kv_heads * p.head_dim * element_size(p.dtype) / 16;
  const int x = pieces < kThreads ? pieces : kThreads;
  const dim3 block(x, kThreads / x);
  const dim3 grid(ceil_div(p.num_tokens, block.y), ceil_div(pieces, x));
  launch_pdl(copy_rows_kernel, grid, block, stream, p, aligned, Divisor(p.block_size),
             prefetching_ctas(kThreads * 2 * 16, kPrefetchBytesAnSm));
}

}  // namespace paged_attn
