#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "block_pool.h"

namespace paged_attn::host {

// Finds published blocks by key, with the tokens compared. Blocks with the same content ("twins") hang on one entry,
// so that any of them keeps it findable. Sized once for the whole pool: nothing here allocates after construction.
class PrefixIndex {
 public:
  // With `by_parent`, blocks are also found by parent and first token, for matches inside a block.
  PrefixIndex(BlockPool& pool, int block_size, bool by_parent);

  int64_t size() const { return num_published_; }

  // A block with this key and these tokens, one in use before others, or kNoBlock.
  BlockId find(const Digest& key, const Token* tokens) const;

  struct PartialMatch {
    BlockId block = kNoBlock;
    int num_tokens = 0;
  };
  // Among the newest blocks that follow `parent`, the one with the longest common start with `tokens`.
  PartialMatch find_partial(const Digest& parent, const Token* tokens, int num_tokens) const;

  void insert(BlockId id, const Digest& parent, const Digest& key, const Token* tokens) noexcept;
  void erase(BlockId id) noexcept;

  // Tokens of a published block, [block_size].
  const Token* tokens(BlockId id) const { return tokens_.get() + int64_t{id} * block_size_; }

  std::string check() const;

 private:
  struct Entry {
    BlockId block = kNoBlock;  // first of its twins
    uint32_t hash = 0;
  };
  struct Child {  // while published, with by_parent
    Digest parent;
    BlockId prev = kNoBlock, next = kNoBlock;  // blocks of the same bucket, newest first
  };

  static uint32_t hash_of(const Digest& key);
  size_t bucket_of(const Digest& parent, Token first) const;
  size_t find_slot(const Digest& key) const;  // its entry, or the empty slot where it would go
  void erase_slot(size_t slot) noexcept;
  void insert_child(BlockId id, const Digest& parent) noexcept;
  void erase_child(BlockId id) noexcept;

  BlockPool& pool_;
  const int block_size_;
  size_t mask_;
  std::vector<Entry> slots_;                          // linear probing, at most half full
  std::unique_ptr<Token[], void (*)(void*)> tokens_;  // [num_blocks, block_size], pages touched as they are used
  std::vector<Child> children_;
  std::vector<BlockId> buckets_;
  int64_t num_published_ = 0;
};

}  // namespace paged_attn::host
