// launch_paged_attention: which path serves a call.  Shapes, options and hints decide, never tensor contents.
#include <algorithm>
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
int decode_narrow_rows(const AttentionParams&) { return 0; }
bool decode_supports(const AttentionParams&) { return false; }
void launch_decode(const AttentionParams&, QueryRange, Workspace&, cudaStream_t) {}
bool prefill_supports(const AttentionParams&) { return false; }
void launch_prefill(const AttentionParams&, QueryRange, Workspace&, cudaStream_t) {}
int widened_len(const AttentionParams&) { return INT_MAX; }
std::optional<AttentionParams> launch_widen(const AttentionParams&, int, Workspace&, cudaStream_t) { return {}; }
size_t prefill_marked_bytes() { return 0; }
}  // namespace sm90
#endif

namespace {

// Marked memory that begins past that of a launch that runs at the same time.
class WorkspaceBeside final : public Workspace {
 public:
  WorkspaceBeside(Workspace& whole, size_t offset) : whole_(whole), offset_(offset) {}
  void* scratch(size_t bytes) override { return whole_.scratch(bytes); }
  void* marked(size_t bytes) override { return static_cast<char*>(whole_.marked(offset_ + bytes)) + offset_; }

 private:
  Workspace& whole_;
  size_t offset_;
};

// A batch that may hold any lengths.  Most sequences of a serving step have one query token: they get the instance for
// that, beside which the prefill kernel runs.  Those of more rows go before, up to kWideRows of them: the instance for
// 64 is too slow for who has fewer, and who has more is served as well by a prefill tile.
void launch_mixed(const AttentionParams& p, int decode_len, int widened_len, Workspace& workspace,
                  cudaStream_t stream) {
  const int group = p.num_heads / p.num_kv_heads, narrow_len = sm90::decode_narrow_rows(p) / group;
  constexpr int kWideRows = 32;
  const int wide_len = std::max(narrow_len, std::min(decode_len, kWideRows / group));
  WorkspaceBeside beside(workspace, sm90::prefill_marked_bytes());
  AttentionParams longest = p;
  int longest_len = wide_len + 1;
  if (widened_len < INT_MAX) {
    longest_len = std::max(longest_len, widened_len);
    longest = sm90::launch_widen(p, longest_len, workspace, stream).value_or(p);
  }
  if (narrow_len < wide_len) sm90::launch_decode(p, {narrow_len + 1, wide_len, false}, beside, stream);
  if (wide_len + 1 < longest_len) sm90::launch_prefill(p, {wide_len + 1, longest_len - 1, false}, workspace, stream);
  sm90::launch_decode(p, {0, narrow_len, true, true}, beside, stream);
  sm90::launch_prefill(longest, {longest_len, INT_MAX, false, true}, workspace, stream);
}

}  // namespace

// A sequence of few packed rows (query tokens x group) is decoded, a longer one prefilled.  Which it is follows from
// its own query length, so batch_invariant holds; a bound on the query lengths only spares a launch that would find
// nothing.
void launch_paged_attention(const AttentionParams& p, Workspace& workspace, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const bool hopper = current_device().major == 9 && p.backend != AttentionBackend::kMma;
  const bool forced = p.backend == AttentionBackend::kSm90;
  const bool sm90_decode = hopper && sm90::decode_supports(p);
  const bool sm90_prefill = hopper && sm90::prefill_supports(p);
  const int decode_rows = sm90_decode || forced ? sm90::decode_max_rows(p) : mma::decode_max_rows(p);
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
  int widened_len = sm90_prefill ? sm90::widened_len(p) : INT_MAX;
  if (widened_len > bound) widened_len = INT_MAX;
  if (sm90_decode && sm90_prefill && decodes && prefills && p.num_seqs > 1)
    return launch_mixed(p, decode_len, widened_len, workspace, stream);
  const auto decode = sm90_decode ? sm90::launch_decode : mma::launch_decode;
  const auto prefill = sm90_prefill ? sm90::launch_prefill : mma::launch_prefill;
  if (decodes) decode(p, {0, prefills ? decode_len : INT_MAX, true}, workspace, stream);
  if (!prefills) return;
  const int prefill_len = decodes ? decode_len + 1 : 0;
  if (widened_len == INT_MAX) return prefill(p, {prefill_len, INT_MAX, !decodes}, workspace, stream);
  const int longest_len = std::max(prefill_len, widened_len);
  if (prefill_len < longest_len) prefill(p, {prefill_len, longest_len - 1, !decodes}, workspace, stream);
  const AttentionParams longest = sm90::launch_widen(p, longest_len, workspace, stream).value_or(p);
  prefill(longest, {longest_len, INT_MAX, !decodes && prefill_len == longest_len}, workspace, stream);
}

}  // namespace paged_attn
