// Every invariant of the manager, recomputed from nothing.
#include <algorithm>
#include <unordered_set>

#include "block_manager.h"

namespace paged_attn::host {
namespace {

std::string broken(const char* kind, int64_t id, const std::string& what) {
  return std::string(kind) + " " + std::to_string(id) + ": " + what;
}

}  // namespace

std::string BlockManager::check() {
  drop_plan();
  std::string fault = pool_.check();
  if (fault.empty()) fault = index_.check();
  if (fault.empty()) fault = check_holders();
  for (size_t handle = 0; fault.empty() && handle < sequences_.size(); ++handle) {
    fault = check_sequence(static_cast<Handle>(handle));
  }
  if (fault.empty()) fault = check_host();
  return fault;
}

std::string BlockManager::check_holders() const {
  std::vector<int32_t> holders(static_cast<size_t>(pool_.size()), 0);
  for (size_t handle = 0; handle < sequences_.size(); ++handle) {
    const Sequence& sequence = sequences_[handle];
    if (sequence.state != SequenceState::kRunning) continue;
    for (const BlockId id : sequence.blocks) {
      if (id == kNoBlock) continue;
      if (id < 0 || id >= pool_.size()) {
        return broken("sequence", sequence.serial, "holds block " + std::to_string(id) + ", which is not in the pool");
      }
      ++holders[id];
    }
  }
  for (const auto& [pin, blocks] : pins_) {
    for (const BlockId id : blocks) {
      ++holders[id];
      if (!pool_[id].published) return broken("pin", pin, "holds block " + std::to_string(id) + ", not published");
    }
  }
  for (BlockId id = 0; id < pool_.size(); ++id) {
    if (pool_[id].num_holders != holders[id]) {
      return broken("block", id,
                    "reference count " + std::to_string(pool_[id].num_holders) + ", but " +
                        std::to_string(holders[id]) + " holders");
    }
  }
  return {};
}

std::string BlockManager::check_sequence(Handle handle) const {
  const Sequence& sequence = sequences_[handle];
  const auto fault = [&](const std::string& what) { return broken("sequence", sequence.serial, what); };
  const int64_t block_size = options_.block_size;
  const int64_t num_blocks = static_cast<int64_t>(sequence.blocks.size());
  if (sequence.state == SequenceState::kVacant) {
    const bool listed = std::find(vacant_.begin(), vacant_.end(), handle) != vacant_.end();
    return listed ? std::string() : broken("handle", handle, "vacant, but not on the free list of handles");
  }
  if (sequence.num_computed > static_cast<int64_t>(sequence.tokens.size())) return fault("more K/V than tokens");
  if (sequence.state == SequenceState::kDropped) {
    return sequence.blocks.empty() && sequence.num_computed == 0 ? std::string() : fault("dropped, but has K/V");
  }
  if (blocks_for(static_cast<int64_t>(sequence.tokens.size())) > num_blocks) return fault("table shorter than tokens");
  if (sequence.num_prepared < sequence.num_computed) return fault("prepared less than committed");
  if (blocks_for(sequence.num_prepared) > num_blocks) return fault("table shorter than the prepared tokens");
  if (sequence.state == SequenceState::kSwapped) return {};

  std::unordered_set<BlockId> seen;
  Digest key = sequence.root;
  for (int64_t i = 0; i < num_blocks; ++i) {
    const BlockId id = sequence.blocks[i];
    if ((id == kNoBlock) != (i < sequence.num_released)) return fault("hole in its table at " + std::to_string(i));
    if (id != kNoBlock && !seen.insert(id).second) return fault("block " + std::to_string(id) + " twice in its table");
    if (!sequence.publishes || (i + 1) * block_size > sequence.num_computed) continue;
    const Token* const tokens = sequence.tokens.data() + i * block_size;
    key = block_key(key, tokens, options_.block_size);
    if (id == kNoBlock) continue;
    if (!pool_[id].published) return fault("full block " + std::to_string(id) + " is not published");
    if (pool_[id].key != key) return fault("block " + std::to_string(id) + " is published under another key");
    if (!std::equal(tokens, tokens + block_size, index_.tokens(id))) {
      return fault("block " + std::to_string(id) + " is published with other tokens");
    }
  }
  if (sequence.publishes && sequence.parent != key) return fault("parent key does not match its tokens");
  return {};
}

std::string BlockManager::check_host() const {
  std::vector<int32_t> holders(static_cast<size_t>(host_.size()), 0);
  for (const Sequence& sequence : sequences_) {
    if (sequence.state != SequenceState::kSwapped) continue;
    const int64_t filled = blocks_for(sequence.num_computed);
    for (int64_t i = 0; i < static_cast<int64_t>(sequence.blocks.size()); ++i) {
      const BlockId id = sequence.blocks[i];
      if ((id != kNoBlock) != (i >= sequence.num_released && i < filled)) {
        return broken("sequence", sequence.serial, "hole in its host table at " + std::to_string(i));
      }
      if (id != kNoBlock) ++holders[id];
    }
  }
  std::vector<uint8_t> is_free(static_cast<size_t>(host_.size()), 0);
  for (const BlockId id : host_.unused()) {
    if (is_free[id]++) return broken("host block", id, "twice on the free stack");
  }
  for (BlockId id = 0; id < host_.size(); ++id) {
    const auto& block = host_[id];
    if (is_free[id] ? holders[id] != 0 : block.num_holders != holders[id] || holders[id] == 0) {
      return broken("host block", id, "reference count differs from its holders");
    }
    if (is_free[id] || block.device_copy == kNoBlock) continue;
    if (pool_[block.device_copy].host_copy != id) return broken("host block", id, "link to the device is one-sided");
  }
  for (BlockId id = 0; id < pool_.size(); ++id) {
    const BlockId host = pool_[id].host_copy;
    if (host != kNoBlock && (is_free[host] || host_[host].device_copy != id)) {
      return broken("block", id, "link to the host is one-sided");
    }
  }
  return {};
}

}  // namespace paged_attn::host
