#include "block_transfer.h"

#include <algorithm>
#include <cstring>

#include "launch.cuh"

namespace paged_attn {
namespace {

constexpr int kThreads = 256;
constexpr int kPrefetchBytesAnSm = 48 << 10;
constexpr int kMaxArrays = 256;
constexpr int kFewPairs = 16, kManyPairs = 3000;  // a launch's parameters hold 32,764 bytes at most

template <int kPairs>
struct TransferParams {
  int64_t units;  // of a block, each of the width of one access
  int num_arrays, num_pairs, prefetching_ctas;
  int64_t src_block_stride, dst_block_stride, num_src_blocks, num_dst_blocks;
  BlockShape src_shape, dst_shape;
  const int64_t* device_pairs;
  const BlockPlan* plan;
  const char* src[kMaxArrays];
  char* dst[kMaxArrays];
  BlockPlan::Move pairs[kPairs];
};

__device__ __forceinline__ int64_t offset_in_block(const BlockShape& shape, int64_t byte) {
  int64_t row = byte / shape.row_bytes, offset = byte % shape.row_bytes;
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    if (shape.sizes[i] == 1) continue;
    offset += row % shape.sizes[i] * shape.strides[i];
    row /= shape.sizes[i];
  }
  return offset;
}

template <int kPairs>
__device__ __forceinline__ BlockPlan::Move checked_pair(const TransferParams<kPairs>& p, int i) {
  const int64_t src = p.device_pairs[2 * i], dst = p.device_pairs[2 * i + 1];
  if (src < 0 || src >= p.num_src_blocks || dst < 0 || dst >= p.num_dst_blocks) return {-1, -1};
  return {static_cast<int>(src), static_cast<int>(dst)};
}

// A thread owns one unit (sizeof(Unit) bytes) of every block of one array at a time and makes the moves with it; rows
// of the grid (blockIdx.y) share out the moves that are free of conflicts.
template <class Unit, int kPairs>
__global__ void __launch_bounds__(kThreads) transfer_kernel(const __grid_constant__ TransferParams<kPairs> p) {
  ptx::pdl_launch_dependents();
  bool waited = false;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.units * p.num_arrays;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t array = i / p.units, byte = i % p.units * sizeof(Unit);
    const char* src = p.src[array] + offset_in_block(p.src_shape, byte);
    char* dst = p.dst[array] + offset_in_block(p.dst_shape, byte);
    if (!waited) {
      if (blockIdx.x < p.prefetching_ctas)
        for (int k = blockIdx.y * kTransferBatch; k < min(p.num_pairs, (blockIdx.y + 1) * kTransferBatch); ++k)
          prefetch_sector(src + p.pairs[k].src * p.src_block_stride);
      ptx::pdl_wait();
      waited = true;
    }
    const BlockPlan::Move* moves = p.plan ? p.plan->free : p.pairs;
    const int num_moves = p.plan ? p.plan->num_free : p.num_pairs;

    if (p.plan && blockIdx.y == 0) {
      Unit aside = {};
      for (int k = 0; k < p.plan->num_ordered; ++k) {
        const BlockPlan::Move move = p.plan->ordered[k];
        const Unit unit = move.src < 0 ? aside : *reinterpret_cast<const Unit*>(src + move.src * p.src_block_stride);
        if (move.dst < 0)
          aside = unit;
        else
          *reinterpret_cast<Unit*>(dst + move.dst * p.dst_block_stride) = unit;
      }
    }
    for (int first = blockIdx.y * kTransferBatch; first < num_moves; first += gridDim.y * kTransferBatch) {
      Unit units[kTransferBatch];
      int to[kTransferBatch];
#pragma unroll
      for (int k = 0; k < kTransferBatch; ++k) {
        to[k] = -1;
        if (first + k >= num_moves) continue;
        const BlockPlan::Move move = p.device_pairs ? checked_pair(p, first + k) : moves[first + k];
        if (move.src < 0) continue;
        to[k] = move.dst;
        units[k] = *reinterpret_cast<const Unit*>(src + move.src * p.src_block_stride);
      }
#pragma unroll
      for (int k = 0; k < kTransferBatch; ++k)
        if (to[k] >= 0) *reinterpret_cast<Unit*>(dst + to[k] * p.dst_block_stride) = units[k];
    }
  }
}

bool same_shape(const BlockArray& a, const BlockArray& b) {
  return a.block_stride == b.block_stride && a.shape.row_bytes == b.shape.row_bytes &&
         std::equal(a.shape.sizes, a.shape.sizes + 3, b.shape.sizes) &&
         std::equal(a.shape.strides, a.shape.strides + 3, b.shape.strides);
}

// The lowest bit set here divides every address and stride of the array.
uint64_t alignment_bits(const BlockArray& a) {
  uint64_t bits = reinterpret_cast<uintptr_t>(a.data) | a.block_stride | a.shape.row_bytes;
  for (int i = 0; i < 3; ++i)
    if (a.shape.sizes[i] > 1) bits |= a.shape.strides[i];
  return bits;
}

template <class Unit, int kPairs>
void launch(TransferParams<kPairs>& p, int max_ctas, cudaStream_t stream) {
  p.units = p.src_shape.bytes() / sizeof(Unit);
  const int limit = max_ctas > 0 ? max_ctas : 64 * current_device().sm_count;
  const int64_t columns = (p.units * p.num_arrays + kThreads - 1) / kThreads;
  const int64_t batches = (p.num_pairs + kTransferBatch - 1) / kTransferBatch;
  const int64_t x = max_ctas > 0 ? std::min<int64_t>(columns, limit) : std::min<int64_t>(columns, INT32_MAX);
  const int64_t y = std::min<int64_t>({std::max<int64_t>(limit / x, 1), batches, 65535});
  // Sources in device memory that are known ahead of the kernel.
  const bool known = max_ctas == 0 && !p.device_pairs && !p.plan;
  p.prefetching_ctas = known
                           ? prefetching_ctas(kThreads * sizeof(Unit) * y * std::min<int>(p.num_pairs, kTransferBatch),
                                              kPrefetchBytesAnSm)
                           : 0;
  launch_pdl(transfer_kernel<Unit, kPairs>, dim3(x, y), dim3(kThreads), stream, p);
}

template <int kPairs>
void launch_arrays(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const TransferPairs& pairs,
                   int max_ctas, cudaStream_t stream) {
  TransferParams<kPairs> p;
  p.device_pairs = pairs.device;
  p.plan = pairs.plan;
  p.num_pairs = static_cast<int>(pairs.count);
  for (int i = 0; pairs.host && i < p.num_pairs; ++i)
    p.pairs[i] = {static_cast<int>(pairs.host[2 * i]), static_cast<int>(pairs.host[2 * i + 1])};
  // One launch takes up to kMaxArrays arrays of one shape: commonly all of them.
  std::vector<bool> done(src.size());
  for (size_t begin = 0; begin < src.size(); ++begin) {
    if (done[begin] || src[begin].shape.bytes() == 0) continue;
    p.num_arrays = 0;
    uint64_t bits = 0;
    for (size_t i = begin; i < src.size() && p.num_arrays < kMaxArrays; ++i) {
      if (done[i] || !same_shape(src[i], src[begin]) || !same_shape(dst[i], dst[begin])) continue;
      done[i] = true;
      bits |= alignment_bits(src[i]) | alignment_bits(dst[i]);
      p.src[p.num_arrays] = static_cast<const char*>(src[i].data);
      p.dst[p.num_arrays++] = static_cast<char*>(dst[i].data);
    }
    p.src_block_stride = src[begin].block_stride;
    p.dst_block_stride = dst[begin].block_stride;
    p.num_src_blocks = src[begin].num_blocks;
    p.num_dst_blocks = dst[begin].num_blocks;
    p.src_shape = src[begin].shape;
    p.dst_shape = dst[begin].shape;
    if (bits % 16 == 0)
      launch<uint4>(p, max_ctas, stream);
    else if (bits % 4 == 0)
      launch<uint32_t>(p, max_ctas, stream);
    else
      launch<uint8_t>(p, max_ctas, stream);
  }
}

constexpr int kUploadBytes = 32000;

struct UploadParams {
  uint64_t words[kUploadBytes / 8];
};

__global__ void __launch_bounds__(kThreads)
    upload_kernel(const __grid_constant__ UploadParams p, uint64_t* to, int count) {
  ptx::pdl_launch_dependents();
  ptx::pdl_wait();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < count) to[i] = p.words[i];
}

// The pairs of the host as a plan without conflicts.
const BlockPlan* upload_plan(const TransferPairs& pairs, Workspace& workspace, cudaStream_t stream) {
  const size_t bytes = sizeof(BlockPlan) + pairs.count * sizeof(BlockPlan::Move);
  auto* plan = static_cast<BlockPlan*>(workspace.scratch(bytes));
  std::vector<char> host(bytes);
  const BlockPlan header = {static_cast<int>(pairs.count), 0, reinterpret_cast<BlockPlan::Move*>(plan + 1), nullptr};
  std::memcpy(host.data(), &header, sizeof(header));
  auto* moves = reinterpret_cast<BlockPlan::Move*>(host.data() + sizeof(header));
  for (int64_t i = 0; i < pairs.count; ++i)
    moves[i] = {static_cast<int>(pairs.host[2 * i]), static_cast<int>(pairs.host[2 * i + 1])};
  upload(host.data(), plan, bytes, stream);
  return plan;
}

}  // namespace

void upload(const void* from, void* to, size_t bytes, cudaStream_t stream) {
  for (size_t first = 0; first < bytes; first += kUploadBytes) {
    UploadParams params;
    const size_t size = std::min<size_t>(kUploadBytes, bytes - first);
    std::memcpy(params.words, static_cast<const char*>(from) + first, size);
    const int count = static_cast<int>(size / 8);
    launch_pdl(upload_kernel, dim3((count + kThreads - 1) / kThreads), dim3(kThreads), stream, params,
               static_cast<uint64_t*>(to) + first / 8, count);
  }
}

void launch_transfer(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const TransferPairs& pairs,
                     int max_ctas, Workspace& workspace, cudaStream_t stream) {
  if (!pairs.host || pairs.count <= kFewPairs) return launch_arrays<kFewPairs>(src, dst, pairs, max_ctas, stream);
  if (pairs.count <= kManyPairs) return launch_arrays<kManyPairs>(src, dst, pairs, max_ctas, stream);
  TransferPairs uploaded;
  uploaded.plan = upload_plan(pairs, workspace, stream);
  uploaded.count = pairs.count;
  launch_arrays<kFewPairs>(src, dst, uploaded, max_ctas, stream);
}

}  // namespace paged_attn
