#pragma once
#include <cstdint>
#include <vector>

#include "block_pool.h"

namespace paged_attn::host {

// Blocks in host memory that hold swapped-out sequences.
class HostPool {
 public:
  struct HostBlock {
    int32_t num_holders = 0;         // swapped sequences
    BlockId device_copy = kNoBlock;  // device block that holds the same bytes
  };

  explicit HostPool(int64_t num_blocks) : blocks_(static_cast<size_t>(num_blocks)) {
    unused_.reserve(blocks_.size());
    for (int64_t id = num_blocks - 1; id >= 0; --id) unused_.push_back(static_cast<BlockId>(id));
  }

  int64_t size() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(unused_.size()); }
  HostBlock& operator[](BlockId id) { return blocks_[static_cast<size_t>(id)]; }
  const HostBlock& operator[](BlockId id) const { return blocks_[static_cast<size_t>(id)]; }

  // The block that the take after `later` others will hand out.
  BlockId peek(int64_t later) const { return unused_[unused_.size() - 1 - static_cast<size_t>(later)]; }
  void take(BlockId id) noexcept {
    unused_.pop_back();
    (*this)[id] = {1, kNoBlock};
  }
  void give_back(BlockId id) noexcept { unused_.push_back(id); }

  const std::vector<BlockId>& unused() const { return unused_; }

 private:
  std::vector<HostBlock> blocks_;
  std::vector<BlockId> unused_;
};

}  // namespace paged_attn::host
