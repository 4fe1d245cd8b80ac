// Work on torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace paged_attn::cpu {

// f(i) for each i in [0, count), at least `grain` of them to a thread.
template <class F>
void parallel_each(int64_t count, int64_t grain, const F& f) {
  if (count <= 0) return;
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// f(worker, i) for each i in [0, count), handed out in order to whichever of `workers` threads is free.
template <class F>
void parallel_queue(int workers, int64_t count, const F& f) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(int(worker), i);
  });
}

}  // namespace paged_attn::cpu
