// The launchers behind the CUDA ops.  Arguments were checked by the caller; the current device is the tensors' device.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "../params.h"

namespace paged_attn {

// Throws std::invalid_argument where p.backend was forced and cannot serve the call.
void launch_paged_attention(const AttentionParams& p, Workspace& workspace, cudaStream_t stream);
void launch_write_kv(const KvWriteParams& p, cudaStream_t stream);
void launch_rope_write_kv(const RopeWriteParams& p, cudaStream_t stream);
void launch_gather_kv(const GatherParams& p, cudaStream_t stream);
void launch_merge_attn_states(const MergeParams& p, cudaStream_t stream);

// Copies block pairs[i][0] to pairs[i][1] in every cache as if all were read before any is written.  `pairs` is int64
// [num_pairs, 2], in device memory or (`pairs_on_host`) in host memory that the caller may change as soon as the call
// returns.
void launch_copy_blocks(const std::vector<BlockArray>& caches, const int64_t* pairs, int64_t num_pairs,
                        bool pairs_on_host, Workspace& workspace, cudaStream_t stream);

enum class CopyDirection { kHostToDevice, kDeviceToHost, kDeviceToDevice };
// src[i] and dst[i] have equal block shapes in bytes; `pairs` is in host memory that the caller may change as soon as
// the call returns.  `overlap` is not kOnePool: that is launch_copy_blocks.
void launch_swap_blocks(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const int64_t* pairs,
                        int64_t num_pairs, CopyDirection direction, Overlap overlap, bool host_is_pinned,
                        Workspace& workspace, cudaStream_t stream);

}  // namespace paged_attn
