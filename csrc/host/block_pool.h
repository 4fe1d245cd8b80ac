#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "block_key.h"

namespace paged_attn::host {

using BlockId = int32_t;
constexpr BlockId kNoBlock = -1;

class OutOfBlocks : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What the manager knows of one device block: a cache line, so that a block costs one miss.
struct alignas(64) Block {
  Digest key;                                          // while published
  int32_t num_holders = 0;                             // sequences and pins; 0: free
  BlockId lru_prev = kNoBlock, lru_next = kNoBlock;    // while cached and free
  BlockId twin_prev = kNoBlock, twin_next = kNoBlock;  // published blocks with the same key
  int32_t host_copy = kNoBlock;                        // host block that holds the same bytes
  int32_t planned_drops = 0;                           // holders that the plan at hand takes away
  bool planned = false;                                // the plan at hand needs this free block kept
  bool published = false;
};
static_assert(sizeof(Block) == 64);

// Device blocks, their holders, and the two kinds of free block: those with nothing to find in them (a stack), and
// cached ones that nobody holds (a list from least to most recently used).
class BlockPool {
 public:
  explicit BlockPool(int64_t num_blocks);

  int64_t size() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(unused_.size()) + num_evictable_; }
  int64_t num_used() const { return size() - num_free(); }
  int64_t num_shared() const { return num_shared_; }

  Block& operator[](BlockId id) { return blocks_[static_cast<size_t>(id)]; }
  const Block& operator[](BlockId id) const { return blocks_[static_cast<size_t>(id)]; }

  // Append the `count` blocks that would be handed out next, in order, past those with `planned` set.
  // There must be as many.
  void peek(int64_t count, std::vector<BlockId>& out) const;

  // First holder of a free block: one that `peek` named, in its order, or a cached one.
  void take(BlockId id) noexcept;

  // One more holder of a block, free and cached or held.
  void share(BlockId id) noexcept;

  // One holder fewer. The last one leaves a published block at the most recently used end, another on the stack.
  // True when the block became free.
  bool release(BlockId id) noexcept;

  // Move a free cached block to the most recently used end.
  void touch(BlockId id) noexcept;

  // A free cached block that is no longer published goes to the stack.
  void forget(BlockId id) noexcept;

  BlockId lru_first() const { return lru_first_; }
  const std::vector<BlockId>& unused() const { return unused_; }

  // The first broken invariant of the free lists and counters, or an empty string.
  std::string check() const;

 private:
  void lru_remove(BlockId id) noexcept;
  void lru_append(BlockId id) noexcept;

  std::vector<Block> blocks_;
  std::vector<BlockId> unused_;  // capacity for every block: pushing never allocates
  BlockId lru_first_ = kNoBlock, lru_last_ = kNoBlock;
  int64_t num_evictable_ = 0;
  int64_t num_shared_ = 0;
};

}  // namespace paged_attn::host
