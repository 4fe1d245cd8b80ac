// copy_blocks: every cache in one launch, as if all sources were read before any destination is written.
#include <algorithm>

#include "block_transfer.h"
#include "launch.cuh"
#include "launchers.h"

namespace paged_attn {
namespace {

constexpr int kPlanThreads = 1024;

struct PlanParams {
  const int64_t* pairs;  // [num_pairs, 2]; a pair with an id out of range is skipped
  int num_pairs;
  int64_t num_blocks;
  int* writer;  // [num_blocks], all -1 before and after: the pair that writes a block
  int* next;    // [num_pairs]: the pair that overwrites this pair's source and so must come later; -1: none
  int* before;  // [num_pairs]: pairs not yet ordered that must come earlier; -1: this one is ordered
  BlockPlan::Move *free, *ordered;
  BlockPlan* plan;
};

// Orders the pairs that conflict.  Every pair has at most one `next`, so what is left once the pairs with nothing
// before them are taken off, one after the other, are cycles. Returns the number of moves.
__device__ int order_conflicts(const PlanParams& p) {
  int num_ordered = 0;
  const auto emit = [&](int64_t src, int64_t dst) {
    p.ordered[num_ordered++] = {static_cast<int>(src), static_cast<int>(dst)};
  };
  for (int start = 0; start < p.num_pairs; ++start) {
    if (p.before[start] != 0 || p.next[start] < 0) continue;
    for (int i = start; i >= 0;) {
      emit(p.pairs[2 * i], p.pairs[2 * i + 1]);
      p.before[i] = -1;
      const int later = p.next[i];
      i = later >= 0 && --p.before[later] == 0 ? later : -1;
    }
  }
  for (int start = 0; start < p.num_pairs; ++start) {
    if (p.before[start] <= 0) continue;
    emit(p.pairs[2 * start + 1], -1);
    for (int i = start; p.before[i] > 0; i = p.next[i]) {
      p.before[i] = -1;
      const bool last = p.next[i] == start;
      emit(last ? -1 : p.pairs[2 * i], p.pairs[2 * i + 1]);
    }
  }
  return num_ordered;
}

// One CTA.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  ptx::pdl_launch_dependents();
  ptx::pdl_wait();
  __shared__ int num_free, num_conflicts;
  if (threadIdx.x == 0) num_free = num_conflicts = 0;

  const auto moves = [&](int i) {
    const int64_t src = p.pairs[2 * i], dst = p.pairs[2 * i + 1];
    return src != dst && src >= 0 && src < p.num_blocks && dst >= 0 && dst < p.num_blocks;
  };
  for (int i = threadIdx.x; i < p.num_pairs; i += kPlanThreads) {
    p.before[i] = 0;
    if (moves(i)) p.writer[p.pairs[2 * i + 1]] = i;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_pairs; i += kPlanThreads) {
    const int later = moves(i) ? p.writer[p.pairs[2 * i]] : -1;
    p.next[i] = later;
    if (later >= 0) atomicAdd(&p.before[later], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_pairs; i += kPlanThreads) {
    if (!moves(i)) continue;
    p.writer[p.pairs[2 * i + 1]] = -1;
    if (p.next[i] >= 0 || p.before[i] > 0)
      num_conflicts = 1;
    else
      p.free[atomicAdd(&num_free, 1)] = {static_cast<int>(p.pairs[2 * i]), static_cast<int>(p.pairs[2 * i + 1])};
  }
  __syncthreads();
  if (threadIdx.x == 0) *p.plan = {num_free, num_conflicts ? order_conflicts(p) : 0, p.free, p.ordered};
}

const BlockPlan* plan_pairs(const int64_t* pairs, int64_t num_pairs, int64_t num_blocks, Workspace& workspace,
                            cudaStream_t stream) {
  const int64_t num_ordered = num_pairs + num_pairs / 2;  // a cycle of two or more takes one move more
  PlanParams p = {};
  p.pairs = pairs;
  p.num_pairs = static_cast<int>(num_pairs);
  p.num_blocks = num_blocks;
  p.writer = static_cast<int*>(workspace.marked(num_blocks * sizeof(int)));
  p.plan = static_cast<BlockPlan*>(workspace.scratch(
      sizeof(BlockPlan) + (num_pairs + num_ordered) * sizeof(BlockPlan::Move) + 2 * num_pairs * sizeof(int)));
  p.free = reinterpret_cast<BlockPlan::Move*>(p.plan + 1);
  p.ordered = p.free + num_pairs;
  p.next = reinterpret_cast<int*>(p.ordered + num_ordered);
  p.before = p.next + num_pairs;
  launch_pdl(plan_kernel, dim3(1), dim3(kPlanThreads), stream, p);
  return p.plan;
}

// Whether some pair reads a block that another one writes.
bool conflicts(const int64_t* pairs, int64_t num_pairs, int64_t num_blocks) {
  std::vector<bool> written(num_blocks);
  for (int64_t i = 0; i < num_pairs; ++i)
    if (pairs[2 * i] != pairs[2 * i + 1]) written[pairs[2 * i + 1]] = true;
  for (int64_t i = 0; i < num_pairs; ++i)
    if (pairs[2 * i] != pairs[2 * i + 1] && written[pairs[2 * i]]) return true;
  return false;
}

}  // namespace

void launch_copy_blocks(const std::vector<BlockArray>& caches, const int64_t* pairs, int64_t num_pairs,
                        bool pairs_on_host, Workspace& workspace, cudaStream_t stream) {
  if (caches.empty() || num_pairs == 0 || caches[0].num_blocks == 0) return;
  TransferPairs transfer;
  transfer.count = num_pairs;
  if (num_pairs <= kTransferBatch) {
    (pairs_on_host ? transfer.host : transfer.device) = pairs;
  } else if (pairs_on_host && !conflicts(pairs, num_pairs, caches[0].num_blocks)) {
    transfer.host = pairs;
  } else {
    if (pairs_on_host) {
      const size_t bytes = num_pairs * 2 * sizeof(int64_t);
      auto* uploaded = static_cast<int64_t*>(workspace.scratch(bytes));
      upload(pairs, uploaded, bytes, stream);
      pairs = uploaded;
    }
    transfer.plan = plan_pairs(pairs, num_pairs, caches[0].num_blocks, workspace, stream);
  }
  launch_transfer(caches, caches, transfer, 0, workspace, stream);
}

}  // namespace paged_attn
