// The CPU ops behind the same names.  Arguments were checked by the caller.
#pragma once

#include <vector>

#include "../params.h"

namespace paged_attn::cpu {

void paged_attention(const AttentionParams& p);
void check_slots(const KvWriteParams& p);  // refuses those past the end
void write_kv(const KvWriteParams& p);
void rope_write_kv(const RopeWriteParams& p);
void gather_kv(const GatherParams& p);
void merge_attn_states(const MergeParams& p);
// Pairs as in cuda/launchers.h: all sources are read before any destination is written.
void copy_blocks(const std::vector<BlockArray>& caches, const int64_t* pairs, int64_t num_pairs);
void swap_blocks(const std::vector<BlockArray>& src, const std::vector<BlockArray>& dst, const int64_t* pairs,
                 int64_t num_pairs, Overlap overlap);

}  // namespace paged_attn::cpu
