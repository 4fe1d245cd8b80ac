// The paths behind launch_paged_attention and what dispatch.cu asks of them.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "../../params.h"

namespace paged_attn {

// Which sequences a kernel serves: those with min_len <= query tokens <= max_len.  The kernels of one call have
// disjoint ranges that cover every length, and exactly one of them owns the empty rows: those of sequences of length 0,
// whatever their query length, and the rows of `query` past cu_seqlens_q[num_seqs] (empty_rows.cuh writes both).
//
// side_by_side: the decode kernel and the prefill kernel launched right after it, which serves all that is longer than
// the decode kernel's max_len, share the multiprocessors, so that bytes and arithmetic overlap.
struct QueryRange {
  int min_len, max_len;
  bool owns_empty;
  bool side_by_side = false;
};

// Hopper.  `supports` looks at shapes, dtypes, strides, alignment and options, never at tensor contents or at
// p.backend; it may be asked on any device.
namespace sm90 {

// The most packed rows (query tokens x group) of a sequence that the decode kernel takes for this call.
int decode_max_rows(const AttentionParams& p);
// The most packed rows that cost no more than one query token: those of its instance.
int decode_narrow_rows(const AttentionParams& p);
bool decode_supports(const AttentionParams& p);
void launch_decode(const AttentionParams& p, QueryRange range, Workspace& workspace, cudaStream_t stream);

bool prefill_supports(const AttentionParams& p);
void launch_prefill(const AttentionParams& p, QueryRange range, Workspace& workspace, cudaStream_t stream);
// From how many query tokens on a sequence is prefilled faster from a copy of its part of an 8-bit cache in the type of
// the query; INT_MAX: none is.
int widened_len(const AttentionParams& p);
// Makes that copy for the sequences of at least `least_len` query tokens, 1 or more; returns what launch_prefill takes
// for them in place of `p`, or nothing where there is no memory for a copy.
std::optional<AttentionParams> launch_widen(const AttentionParams& p, int least_len, Workspace& workspace,
                                            cudaStream_t stream);
// What launch_prefill takes of the workspace's marked memory on the current device, rounded up to an alignment for all.
size_t prefill_marked_bytes();

}  // namespace sm90

// Compute capability 8.0 and up: serves every call of paged_attention.
namespace mma {

int decode_max_rows(const AttentionParams& p);

void launch_decode(const AttentionParams& p, QueryRange range, Workspace& workspace, cudaStream_t stream);
void launch_prefill(const AttentionParams& p, QueryRange range, Workspace& workspace, cudaStream_t stream);

}  // namespace mma

}  // namespace paged_attn
