// float32 queries on plain fp32 arithmetic, with a float32 or a quantised cache.
#include <cuda_fp8.h>

#include "../empty_rows.cuh"
#include "epilogue.cuh"
#include "launch_attention.cuh"
#include "scales.cuh"

namespace paged_attn::mma {
namespace {

// A CTA works on 16 packed rows and 32 keys at a time; eight lanes share a row.
constexpr int kRows = 16, kKeys = 32, kThreads = 128, kRowLanes = kThreads / kRows, kWarps = kThreads / 32;
constexpr int kCtas = 3;  // an SM, at most
constexpr int kLaneKeys = kKeys / kRowLanes;
constexpr int kMaxVectors = 256 / (kRowLanes * 4);  // of four output elements a lane

// Rows of shared memory are head_dim + 4 apart: eight rows then lie in different banks.
__host__ __device__ constexpr int pitch(int head_dim) { return head_dim + 4; }
constexpr int smem_bytes(int head_dim) { return (kRows + 2 * kKeys) * pitch(head_dim) * 4 + kRows * (kKeys + 1) * 4; }

__device__ float load_element(const void* data, int64_t i, DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return static_cast<float>(static_cast<const __nv_fp8_e4m3*>(data)[i]);
    case DType::kFloat8E5M2:
      return static_cast<float>(static_cast<const __nv_fp8_e5m2*>(data)[i]);
    case DType::kInt8:
      return static_cast<float>(static_cast<const int8_t*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

// A warp copies one row of head_dim elements; null: zeros.
__device__ void load_row(float* to, const void* data, int64_t from, DType dtype, int head_dim, bool present) {
  const int lane = threadIdx.x % 32;
  const float* source = static_cast<const float*>(data) + from;
  if (!present) {
    for (int d = lane; d < head_dim; d += 32) to[d] = 0.f;
  } else if (dtype == DType::kFloat32 && reinterpret_cast<uintptr_t>(source) % 16 == 0) {
    for (int d = lane * 4; d < head_dim; d += 128)
      *reinterpret_cast<float4*>(to + d) = *reinterpret_cast<const float4*>(source + d);
  } else {
    for (int d = lane; d < head_dim; d += 32) to[d] = load_element(data, from + d, dtype);
  }
}

__device__ float row_max(float x) {
  for (int d = 1; d < kRowLanes; d *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
__device__ float row_sum(float x) {
  for (int d = 1; d < kRowLanes; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

__global__ void __launch_bounds__(kThreads, kCtas) float32_kernel(const __grid_constant__ KernelArgs args) {
  extern __shared__ __align__(16) float shared[];
  const AttentionParams& p = args.p;
  const int row_pitch = pitch(p.head_dim), group = p.num_heads / p.num_kv_heads;
  float* query = shared;                    // [kRows]
  float* keys = query + kRows * row_pitch;  // [kKeys]
  float* values = keys + kKeys * row_pitch;
  float* probabilities = values + kKeys * row_pitch;  // [kRows][kKeys + 1]
  const int warp = threadIdx.x / 32;
  const int row = threadIdx.x / kRowLanes, sub = threadIdx.x % kRowLanes;
  ptx::pdl_launch_dependents();
  ptx::pdl_wait();

  Walk walk(p, {kRows, kKeys}, args.plan, args.min_share, args.partials.unit_tiles);
  CutItem cut = {0, 0, 0};
  Piece piece;
  while (walk.next(p, piece)) {
    const PlanEntry& e = piece.entry;
    const int num_rows = piece.num_rows;
    const int my_row = e.first_row + min(row, num_rows - 1);
    const int position = e.seq_len - e.q_len + my_row / group;
    const float slope = p.alibi_slopes ? p.alibi_slopes[piece.head * group + my_row % group] : 0.f;
    const int key_begin = p.window_size > 0 ? max(0, position - p.window_size + 1) : 0;
    const int key_end = p.causal ? min(position + 1, e.seq_len) : e.seq_len;
    __syncthreads();
    for (int r = warp; r < kRows; r += kWarps) {
      const int packed = e.first_row + r;
      const int64_t from = (e.q_begin + packed / group) * p.query_strides.token +
                           (piece.head * group + packed % group) * p.query_strides.head;
      load_row(query + r * row_pitch, p.query, from, DType::kFloat32, p.head_dim, r < num_rows);
    }
    float maximum = -INFINITY, sum = 0.f;  // of this row; natural units
    float4 out[kMaxVectors] = {};
    for (int tile = piece.tile_begin; tile < piece.tile_end; ++tile) {
      const int first_key = tile * kKeys;
      __syncthreads();
      for (int r = warp; r < kKeys; r += kWarps) {
        const int key = first_key + r;
        const bool present = key >= piece.span.key_begin && key < piece.span.key_end;
        int64_t k = 0, v = 0;
        if (present) {
          const int64_t block = p.block_table[e.seq * p.block_table_stride + key / p.block_size];
          const int slot = key % p.block_size;
          k = block * p.key_strides.block + slot * p.key_strides.slot + piece.head * p.key_strides.head;
          v = block * p.value_strides.block + slot * p.value_strides.slot + piece.head * p.value_strides.head;
        }
        load_row(keys + r * row_pitch, p.key_cache, k, p.cache_dtype, p.head_dim, present);
        load_row(values + r * row_pitch, p.value_cache, v, p.cache_dtype, p.head_dim, present);
      }
      __syncthreads();

      float score[kLaneKeys], largest = maximum;
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
        const int key = first_key + sub + j * kRowLanes;
        const float* q = query + row * row_pitch;
        const float* k = keys + (sub + j * kRowLanes) * row_pitch;
        float4 acc = {};
        for (int d = 0; d < p.head_dim; d += 4) {
          const float4 a = *reinterpret_cast<const float4*>(q + d), b = *reinterpret_cast<const float4*>(k + d);
          acc.x += a.x * b.x, acc.y += a.y * b.y, acc.z += a.z * b.z, acc.w += a.w * b.w;
        }
        float s = ((acc.x + acc.y) + (acc.z + acc.w)) * p.scale;
        if (key < key_begin || key >= key_end) {
          score[j] = -INFINITY;
          continue;
        }
        s *= token_scale(p, p.k_scale, e.seq, key, piece.head);
        if (p.softcap > 0.f) s = p.softcap * tanhf(s / p.softcap);
        if (p.alibi_slopes) s += slope * static_cast<float>(key - position);
        score[j] = s;
        largest = fmaxf(largest, s);
      }
      largest = row_max(largest);
      const float reference = exp2_reference(largest);
      const float factor = ptx::exp2((maximum - reference) * kLog2e);
      maximum = largest;
      float total = 0.f;
#pragma unroll
      for (int j = 0; j < kLaneKeys; ++j) {
        const int key = first_key + sub + j * kRowLanes;
        float probability = ptx::exp2((score[j] - reference) * kLog2e);
        total += probability;
        if (key >= key_begin && key < key_end) probability *= token_scale(p, p.v_scale, e.seq, key, piece.head);
        probabilities[row * (kKeys + 1) + sub + j * kRowLanes] = probability;
      }
      sum = sum * factor + row_sum(total);
      __syncwarp();  // a row's probabilities come from and go to lanes of one warp
#pragma unroll
      for (int i = 0; i < kMaxVectors; ++i) {
        const int d = (sub + i * kRowLanes) * 4;
        if (d >= p.head_dim) break;
        float4 acc = make_float4(out[i].x * factor, out[i].y * factor, out[i].z * factor, out[i].w * factor);
#pragma unroll 4
        for (int j = 0; j < kKeys; ++j) {
          const float w = probabilities[row * (kKeys + 1) + j];
          const float4 v = *reinterpret_cast<const float4*>(values + j * row_pitch + d);
          acc.x += w * v.x, acc.y += w * v.y, acc.z += w * v.z, acc.w += w * v.w;
        }
        out[i] = acc;
      }
    }
    if (args.partials.unit_tiles == 0 && piece.first && !piece.last) cut = walk.cut_item(piece);
    Writer<float> writer(p, {kRows, kKeys}, args.partials, piece);
    if (row < num_rows) {
      writer.begin_row(row, maximum * kLog2e, sum, sub == 0);
#pragma unroll
      for (int i = 0; i < kMaxVectors; ++i) {
        const int d = (sub + i * kRowLanes) * 4;
        if (d >= p.head_dim) break;
        writer.store_pair(d, out[i].x, out[i].y);
        writer.store_pair(d + 2, out[i].z, out[i].w);
      }
    }
  }
  if (threadIdx.x == 0) args.partials.items[blockIdx.x] = cut;
  if (args.range.owns_empty) write_empty_rows<float>(p);
}

}  // namespace

void launch_float32(const AttentionParams& p, QueryRange range, bool, Workspace& workspace, cudaStream_t stream) {
  const DeviceInfo device = current_device();
  KernelArgs args = {};
  args.p = p;
  args.range = range;
  const int smem = smem_bytes(p.head_dim);
  const int ctas = std::max(1, std::min(kCtas, device.smem_per_sm / (smem + device.smem_reserved)));
  KernelShape shape;
  shape.tile = {kRows, kKeys};
  shape.threads = kThreads;
  shape.smem_bytes = smem;
  shape.num_ctas = device.sm_count * ctas;
  shape.row_stride = p.head_dim;
  shape.min_share = 4;
  shape.splits_units = range.max_len * (p.num_heads / p.num_kv_heads) <= kRows;
  launch_attention(float32_kernel, shape, args, workspace, stream, device);
}

}  // namespace paged_attn::mma
