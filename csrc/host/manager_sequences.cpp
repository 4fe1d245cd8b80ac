// Sequences after they were added: fork, rollback, release, free; pins and the index as a whole.
#include <algorithm>
#include <stdexcept>

#include "block_manager.h"

namespace paged_attn::host {

Digest BlockManager::parent_at(const Sequence& sequence, int64_t num_full_blocks) const {
  Digest key = sequence.root;
  if (!sequence.publishes || num_full_blocks == 0) return key;
  if (sequence.state == SequenceState::kRunning) {
    const BlockId last = sequence.blocks[num_full_blocks - 1];
    if (last != kNoBlock && pool_[last].published) return pool_[last].key;
  }
  KeyChain keys(key, sequence.tokens.data(), num_full_blocks, options_.block_size);
  for (int64_t i = 0; i < num_full_blocks; ++i) key = keys.next();
  return key;
}

void BlockManager::rollback(Handle handle, int64_t num_tokens) {
  drop_plan();
  Sequence& sequence = running(handle, "seq_id");
  const int64_t block_size = options_.block_size;
  const int64_t length = sequence.num_computed - num_tokens;
  if (num_tokens < 0 || length < 0) {
    throw std::invalid_argument("num_tokens: expected 0 to " + std::to_string(sequence.num_computed) + ", got " +
                                std::to_string(num_tokens));
  }
  if (length < sequence.num_released * block_size) {
    throw std::invalid_argument("num_tokens: " + std::to_string(num_tokens) + " reaches behind position " +
                                std::to_string(sequence.num_released * block_size) + ", whose blocks were released");
  }
  if (num_tokens == 0) return;
  const int64_t known = static_cast<int64_t>(sequence.tokens.size());
  const int64_t kept_tokens = sequence.num_computed < known ? known : length;  // a prompt under way stays registered
  const int64_t kept_blocks = blocks_for(kept_tokens);
  log_.reserve(2 * sequence.blocks.size());
  const Digest parent = parent_at(sequence, length / block_size);

  for (int64_t i = static_cast<int64_t>(sequence.blocks.size()) - 1; i >= length / block_size; --i) {
    const BlockId id = sequence.blocks[i];
    if (pool_[id].num_holders == 1) unpublish(id);
    if (i >= kept_blocks) {
      release(id, sequence.serial);
      sequence.blocks.pop_back();
    }
  }
  sequence.tokens.resize(static_cast<size_t>(kept_tokens));
  sequence.num_computed = sequence.num_prepared = length;
  sequence.parent = parent;
}

void BlockManager::fork(Handle handle, int64_t count, Handle* out) {
  drop_plan();
  const Sequence& parent = running(handle, "seq_id");
  std::vector<Sequence> children(static_cast<size_t>(count), parent);
  log_.reserve(static_cast<size_t>(count) * parent.blocks.size());
  reserve_vacancies(children.size());
  for (Sequence& child : children) {
    child.serial = next_serial_++;
    child.num_prepared = child.num_computed;
    for (const BlockId id : child.blocks) {
      if (id != kNoBlock) share(id, child.serial);
    }
    *out++ = register_sequence(std::move(child));
  }
}

// Room for what release_device_blocks and release_host need.
void BlockManager::reserve_release(const Sequence& sequence) {
  log_.reserve(2 * sequence.blocks.size());
  released_keys_.clear();
  if (!sequence.publishes) return;
  released_keys_.reserve(static_cast<size_t>(sequence.num_released));
  KeyChain keys(sequence.root, sequence.tokens.data(), sequence.num_released, options_.block_size);
  for (int64_t i = 0; i < sequence.num_released; ++i) released_keys_.push_back(keys.next());
}

// Tail first, so that eviction takes the tail of a chain before its head. Blocks released earlier behind a window are
// heads of what is released now: they move behind it.
void BlockManager::release_device_blocks(Sequence& sequence) noexcept {
  for (auto id = sequence.blocks.rbegin(); id != sequence.blocks.rend(); ++id) {
    if (*id != kNoBlock) release(*id, sequence.serial);
  }
  for (int64_t i = static_cast<int64_t>(released_keys_.size()) - 1; i >= 0; --i) {
    const BlockId id = index_.find(released_keys_[i], sequence.tokens.data() + i * options_.block_size);
    if (id != kNoBlock && pool_[id].num_holders == 0) pool_.touch(id);
  }
}

void BlockManager::vacate(Handle handle) noexcept {
  sequences_[handle] = Sequence();
  vacant_.push_back(handle);
}

void BlockManager::free(Handle handle) {
  drop_plan();
  Sequence& sequence = const_cast<Sequence&>(this->sequence(handle));
  reserve_release(sequence);
  if (sequence.state == SequenceState::kRunning) {
    release_device_blocks(sequence);
  } else {
    for (const BlockId id : sequence.blocks) {
      if (id != kNoBlock) release_host(id);
    }
  }
  vacate(handle);
}

void BlockManager::release_before(Handle handle, int64_t position) {
  drop_plan();
  Sequence& sequence = running(handle, "seq_id");
  if (position < 0 || position > sequence.num_computed) {
    throw std::invalid_argument("position: expected 0 to " + std::to_string(sequence.num_computed) + ", got " +
                                std::to_string(position));
  }
  log_.reserve(sequence.blocks.size());
  const int64_t end = position / options_.block_size;
  for (int64_t i = end - 1; i >= sequence.num_released; --i) {
    release(sequence.blocks[i], sequence.serial);
    sequence.blocks[i] = kNoBlock;
  }
  sequence.num_released = std::max(sequence.num_released, static_cast<int32_t>(end));
}

// ---- pins and the index

BlockManager::Pinned BlockManager::add_pin(std::vector<BlockId>&& blocks) {
  const Pinned pinned = {next_pin_, static_cast<int64_t>(blocks.size()) * options_.block_size};
  log_.reserve(blocks.size());
  const auto& held = pins_.emplace(next_pin_++, std::move(blocks)).first->second;
  for (const BlockId id : held) share(id, -1);
  return pinned;
}

BlockManager::Pinned BlockManager::pin(Handle handle) {
  drop_plan();
  const Sequence& sequence = running(handle, "seq_id");
  std::vector<BlockId> blocks;
  for (int64_t i = sequence.num_released; i < sequence.num_computed / options_.block_size; ++i) {
    if (pool_[sequence.blocks[i]].published) blocks.push_back(sequence.blocks[i]);
  }
  return add_pin(std::move(blocks));
}

BlockManager::Pinned BlockManager::pin_prefix(const Token* tokens, int64_t num_tokens, const Salt& salt) {
  drop_plan();
  match_prefix(root_key(salt), tokens, num_tokens / options_.block_size);
  return add_pin(std::vector<BlockId>(plan_.hits));
}

bool BlockManager::unpin(int64_t id) {
  drop_plan();
  const auto pin = pins_.find(id);
  if (pin == pins_.end()) return false;
  log_.reserve(pin->second.size());
  for (auto block = pin->second.rbegin(); block != pin->second.rend(); ++block) release(*block, -1);
  pins_.erase(pin);
  return true;
}

void BlockManager::reset_prefix_cache() {
  drop_plan();
  size_t num_pinned = 0;
  for (const auto& [id, blocks] : pins_) num_pinned += blocks.size();
  log_.reserve(num_pinned + static_cast<size_t>(index_.size()));
  while (!pins_.empty()) unpin(pins_.begin()->first);
  while (pool_.lru_first() != kNoBlock) unpublish(pool_.lru_first());
  for (Sequence& sequence : sequences_) {
    if (sequence.state == SequenceState::kDropped) continue;
    sequence.publishes = false;  // what it computes next rests on K/V from before
    if (sequence.state != SequenceState::kRunning) continue;
    for (const BlockId id : sequence.blocks) {
      if (id != kNoBlock) unpublish(id);
    }
  }
}

Stats BlockManager::stats() {
  Stats stats = {};
  stats.blocks_total = pool_.size();
  stats.blocks_used = pool_.num_used();
  stats.blocks_free = pool_.num_free();
  stats.blocks_cached = index_.size();
  stats.blocks_shared = pool_.num_shared();
  stats.host_blocks_used = host_.size() - host_.num_free();
  stats.prompt_tokens = prompt_tokens_;
  stats.hit_tokens = hit_tokens_;
  stats.copies = copies_;
  stats.evictions = evictions_;
  stats.swaps = swaps_;

  const int64_t block_size = options_.block_size;
  stats.reserved_slots = stats.blocks_used * block_size;
  fill_.resize(static_cast<size_t>(pool_.size()));
  // Each held block counts once, with the longest content that one of its holders has in it.
  const auto count = [&](BlockId id, int64_t filled) {
    if (filled <= fill_[id]) return;
    stats.filled_slots += filled - fill_[id];
    fill_[id] = static_cast<int32_t>(filled);
    filled_.push_back(id);
  };
  filled_.clear();
  for (const Sequence& sequence : sequences_) {
    if (sequence.state != SequenceState::kRunning) continue;
    stats.tokens += sequence.num_computed;
    for (size_t i = sequence.num_released; i < sequence.blocks.size(); ++i) {
      const int64_t begin = static_cast<int64_t>(i) * block_size;
      count(sequence.blocks[i], std::min(block_size, sequence.num_computed - begin));
    }
  }
  for (const auto& [id, blocks] : pins_) {
    for (const BlockId block : blocks) count(block, block_size);
  }
  for (const BlockId id : filled_) fill_[id] = 0;
  return stats;
}

}  // namespace paged_attn::host
