#include "prefill_launch.cuh"

template void paged_attn::sm90::launch_prefill_instance<__half, 96, true>(const PrefillParams&, const PrefillMaps&,
                                                                          cudaStream_t);
