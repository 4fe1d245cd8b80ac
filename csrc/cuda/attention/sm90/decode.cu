#include "../paths.h"

namespace paged_attn::sm90 {

int decode_max_rows() { return 0; }
bool decode_supports(const AttentionParams&) { return false; }
void launch_decode(const AttentionParams&, QueryRange, Workspace&, cudaStream_t) {}

}  // namespace paged_attn::sm90
