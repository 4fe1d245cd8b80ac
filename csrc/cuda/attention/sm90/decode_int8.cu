#include "decode_instances.h"

namespace paged_attn::sm90 {
template void launch_for<int8_t>(DecodeArgs&, Workspace&, cudaStream_t);
}
