#include "../launch.h"
#include "../ptx.cuh"
#include "plan.cuh"

namespace paged_attn::mma {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ AttentionParams p, Heads heads, QueryRange range, TileShape shape, Plan plan) {
  __shared__ PlanScratch<kThreads> scratch;
  ptx::pdl_launch_dependents();
  ptx::pdl_wait();
  make_plan(p, heads, range, shape, plan, scratch);
}

}  // namespace

void launch_plan(const AttentionParams& p, QueryRange range, TileShape shape, const Plan& plan, cudaStream_t stream,
                 bool dependent) {
  launch_kernel(plan_kernel, 1, kThreads, 0, stream, dependent, p, Heads(p), range, shape, plan);
}

}  // namespace paged_attn::mma
