#include "block_pool.h"

namespace paged_attn::host {

BlockPool::BlockPool(int64_t num_blocks) : blocks_(static_cast<size_t>(num_blocks)) {
  unused_.reserve(blocks_.size());
  for (int64_t id = num_blocks - 1; id >= 0; --id) unused_.push_back(static_cast<BlockId>(id));
}

void BlockPool::peek(int64_t count, std::vector<BlockId>& out) const {
  for (auto it = unused_.rbegin(); count > 0 && it != unused_.rend(); ++it, --count) out.push_back(*it);
  for (BlockId id = lru_first_; count > 0; id = (*this)[id].lru_next) {
    if ((*this)[id].planned) continue;
    out.push_back(id);
    --count;
  }
}

void BlockPool::take(BlockId id) noexcept {
  Block& block = (*this)[id];
  if (!unused_.empty() && unused_.back() == id) {
    unused_.pop_back();
  } else {
    lru_remove(id);
  }
  block.num_holders = 1;
}

void BlockPool::share(BlockId id) noexcept {
  Block& block = (*this)[id];
  if (block.num_holders == 0) lru_remove(id);
  if (++block.num_holders == 2) ++num_shared_;
}

bool BlockPool::release(BlockId id) noexcept {
  Block& block = (*this)[id];
  if (--block.num_holders == 1) --num_shared_;
  if (block.num_holders > 0) return false;
  if (block.published) {
    lru_append(id);
  } else {
    unused_.push_back(id);
  }
  return true;
}

void BlockPool::touch(BlockId id) noexcept {
  lru_remove(id);
  lru_append(id);
}

void BlockPool::forget(BlockId id) noexcept {
  lru_remove(id);
  unused_.push_back(id);
}

void BlockPool::lru_remove(BlockId id) noexcept {
  Block& block = (*this)[id];
  (block.lru_prev == kNoBlock ? lru_first_ : (*this)[block.lru_prev].lru_next) = block.lru_next;
  (block.lru_next == kNoBlock ? lru_last_ : (*this)[block.lru_next].lru_prev) = block.lru_prev;
  block.lru_prev = block.lru_next = kNoBlock;
  --num_evictable_;
}

void BlockPool::lru_append(BlockId id) noexcept {
  Block& block = (*this)[id];
  block.lru_prev = lru_last_;
  block.lru_next = kNoBlock;
  (lru_last_ == kNoBlock ? lru_first_ : (*this)[lru_last_].lru_next) = id;
  lru_last_ = id;
  ++num_evictable_;
}

std::string BlockPool::check() const {
  const auto broken = [](BlockId id, const char* what) { return "block " + std::to_string(id) + ": " + what; };
  std::vector<uint8_t> is_free(blocks_.size(), 0);
  for (const BlockId id : unused_) {
    if (id < 0 || id >= size()) return broken(id, "on the free stack, but not in the pool");
    if (is_free[id]++) return broken(id, "twice on the free stack");
    if ((*this)[id].num_holders != 0) return broken(id, "on the free stack, but held");
    if ((*this)[id].published) return broken(id, "on the free stack, but published");
    if ((*this)[id].host_copy != kNoBlock) return broken(id, "on the free stack, but linked to a host block");
  }
  int64_t num_evictable = 0;
  BlockId previous = kNoBlock;
  for (BlockId id = lru_first_; id != kNoBlock; previous = id, id = (*this)[id].lru_next) {
    if (id < 0 || id >= size()) return broken(id, "in the LRU list, but not in the pool");
    if (is_free[id]++) return broken(id, "twice in the free lists");
    if ((*this)[id].num_holders != 0) return broken(id, "in the LRU list, but held");
    if (!(*this)[id].published) return broken(id, "in the LRU list, but not published");
    if ((*this)[id].lru_prev != previous) return broken(id, "LRU links do not meet");
    ++num_evictable;
  }
  if (previous != lru_last_) return broken(lru_last_, "not the end of the LRU list");
  if (num_evictable != num_evictable_) return "LRU list: length differs from its counter";
  int64_t num_shared = 0;
  for (BlockId id = 0; id < size(); ++id) {
    const Block& block = (*this)[id];
    if (block.num_holders < 0) return broken(id, "negative reference count");
    if (block.num_holders == 0 && !is_free[id]) return broken(id, "held by nobody, but not free");
    if (block.planned || block.planned_drops != 0) return broken(id, "marked by a plan that is gone");
    num_shared += block.num_holders > 1;
  }
  if (num_shared != num_shared_) return "shared blocks: number differs from its counter";
  return {};
}

}  // namespace paged_attn::host
