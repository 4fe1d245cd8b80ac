#include "../paths.h"

namespace paged_attn::sm90 {

bool prefill_supports(const AttentionParams&) { return false; }
void launch_prefill(const AttentionParams&, QueryRange, Workspace&, cudaStream_t) {}

}  // namespace paged_attn::sm90
