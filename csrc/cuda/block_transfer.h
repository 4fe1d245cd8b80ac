// Moving whole blocks between arrays of blocks in one launch: the kernel behind copy_blocks and swap_blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "../params.h"

namespace paged_attn {

// The pairs of a transfer, in an order that keeps sources intact (copy_blocks.cu makes it); lives in device memory.
struct BlockPlan {
  struct Move {
    int src, dst;  // -1 as dst: keep the block's bytes aside; -1 as src: write those kept
  };
  int num_free;     // moves that touch no block another move touches in conflict
  int num_ordered;  // moves to make one after the other
  Move* free;
  Move* ordered;
};

// Where the pairs of a transfer are.  Each thread owns a few bytes of every block, so a pair whose source is another
// pair's destination is a matter of order inside one thread alone.
struct TransferPairs {
  const int64_t* host = nullptr;    // [count, 2] in host memory: conflict-free, or at most kTransferBatch pairs
  const int64_t* device = nullptr;  // [count, 2] in device memory, at most kTransferBatch pairs; others are skipped
  const BlockPlan* plan = nullptr;  // in device memory
  int64_t count = 0;
};
// Pairs whose sources a thread reads before it writes the first of their destinations.
constexpr int kTransferBatch = 8;

// src[i] and dst[i] have equal row_bytes and sizes.  `max_ctas` bounds the grid; 0: as many as fill the device.
void launch_transfer(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const TransferPairs& pairs,
                     int max_ctas, Workspace& workspace, cudaStream_t stream);

// Host memory to device memory inside launch parameters: nothing refers to `from` afterwards.  `bytes` and `to`:
// multiples of 8.
void upload(const void* from, void* to, size_t bytes, cudaStream_t stream);

}  // namespace paged_attn
