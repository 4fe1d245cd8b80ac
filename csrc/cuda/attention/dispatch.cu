// launch_paged_attention: which path serves a call.  Shapes, options and hints decide, never tensor contents.
#include <climits>
#include <stdexcept>

#include "../launchers.h"
#include "launch.h"
#include "paths.h"

namespace paged_attn {
namespace {

// One kernel for sequences of up to max_rows packed rows (query tokens x group), one for longer ones.
struct Path {
  int max_rows;
  void (*launch)(const AttentionParams&, QueryRange, Workspace&, cudaStream_t);
};

// Which kernel serves a sequence follows from its own query length, so batch_invariant holds; a bound on the query
// lengths only spares the launch that would find nothing to do.
void launch_by_length(const AttentionParams& p, Path decode, Path prefill, Workspace& workspace, cudaStream_t stream) {
  const int max_decode_len = decode.max_rows / (p.num_heads / p.num_kv_heads);
  const int bound = p.cu_seqlens_q == nullptr ? 1 : p.max_seqlen_q > 0 ? p.max_seqlen_q : p.num_tokens;
  if (bound <= max_decode_len) {
    decode.launch(p, {0, INT_MAX, true}, workspace, stream);
  } else if (max_decode_len == 0) {
    prefill.launch(p, {0, INT_MAX, true}, workspace, stream);
  } else {
    decode.launch(p, {0, max_decode_len, true}, workspace, stream);
    prefill.launch(p, {max_decode_len + 1, INT_MAX, false}, workspace, stream);
  }
}

}  // namespace

void launch_paged_attention(const AttentionParams& p, Workspace& workspace, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const bool hopper = current_device().major == 9 && p.backend != AttentionBackend::kMma;
  const bool sm90_decode = hopper && sm90::decode_supports(p);
  const bool sm90_prefill = hopper && sm90::prefill_supports(p);
  if (p.backend == AttentionBackend::kSm90) {
    if (!hopper) throw std::invalid_argument("backend 'sm90' needs a GPU of compute capability 9.0");
    const bool decode_only = p.cu_seqlens_q == nullptr;
    if (!sm90_decode || (!decode_only && !sm90_prefill))
      throw std::invalid_argument(std::string("backend 'sm90': its ") + (sm90_decode ? "prefill" : "decode") +
                                  " kernel cannot serve these shapes, dtypes, strides and options");
  }
  const Path decode = sm90_decode ? Path{sm90::decode_max_rows(p), sm90::launch_decode}
                                  : Path{mma::decode_max_rows(), mma::launch_decode};
  const Path prefill = {INT_MAX, sm90_prefill ? sm90::launch_prefill : mma::launch_prefill};
  launch_by_length(p, decode, prefill, workspace, stream);
}

}  // namespace paged_attn
