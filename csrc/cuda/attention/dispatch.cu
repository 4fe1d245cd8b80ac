// launch_paged_attention: which path serves a call.  Shapes, options and hints decide, never tensor contents.
#include <climits>
#include <stdexcept>

#include "../launchers.h"
#include "launch.h"
#include "paths.h"

namespace paged_attn {

#ifndef PAGED_ATTN_SM90
// A build without compute capability 9.0 leaves the sources of these out.
namespace sm90 {
int decode_max_rows(const AttentionParams&) { return 0; }
bool decode_supports(const AttentionParams&) { return false; }
void launch_decode(const AttentionParams&, QueryRange, Workspace&, cudaStream_t) {}
bool prefill_supports(const AttentionParams&) { return false; }
void launch_prefill(const AttentionParams&, QueryRange, Workspace&, cudaStream_t) {}
}  // namespace sm90
#endif

// A sequence of few packed rows (query tokens x group) is decoded, a longer one prefilled.  Which it is follows from
// its own query length, so batch_invariant holds; a bound on the query lengths only spares a launch that would find
// nothing.
void launch_paged_attention(const AttentionParams& p, Workspace& workspace, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const bool hopper = current_device().major == 9 && p.backend != AttentionBackend::kMma;
  const bool forced = p.backend == AttentionBackend::kSm90;
  const bool sm90_decode = hopper && sm90::decode_supports(p);
  const bool sm90_prefill = hopper && sm90::prefill_supports(p);
  const int decode_rows = sm90_decode || forced ? sm90::decode_max_rows(p) : mma::decode_max_rows();
  const int decode_len = decode_rows / (p.num_heads / p.num_kv_heads);
  const int bound = p.cu_seqlens_q == nullptr ? 1 : p.max_seqlen_q > 0 ? p.max_seqlen_q : p.num_tokens;
  const bool decodes = decode_len > 0, prefills = bound > decode_len;
  if (forced) {
    if (!hopper) throw std::invalid_argument("backend 'sm90' needs a GPU of compute capability 9.0");
    const char* missing = decodes && !sm90_decode ? "decode" : prefills && !sm90_prefill ? "prefill" : nullptr;
    if (missing)
      throw std::invalid_argument(std::string("backend 'sm90': its ") + missing +
                                  " kernel cannot serve these shapes, dtypes, strides and options");
  }
  const auto decode = sm90_decode ? sm90::launch_decode : mma::launch_decode;
  const auto prefill = sm90_prefill ? sm90::launch_prefill : mma::launch_prefill;
  if (decodes) decode(p, {0, prefills ? decode_len : INT_MAX, true}, workspace, stream);
  if (prefills) prefill(p, {decodes ? decode_len + 1 : 0, INT_MAX, !decodes}, workspace, stream);
}

}  // namespace paged_attn
