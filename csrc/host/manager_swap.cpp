// Preemption: to host blocks and back, or by giving the blocks up.
#include <algorithm>
#include <stdexcept>

#include "block_manager.h"

namespace paged_attn::host {

// A device block and the host block with the same bytes stay linked while both last and the device block is not
// written: a block shared by several sequences moves once, and one that others still hold on the device need not move
// back. One that nobody holds is taken again and written again: what lies in a free block does not count.

void BlockManager::begin_swap_out(Handle handle) {
  PlanGuard guard(*this);
  const Sequence& sequence = running(handle, "seq_id");
  int64_t needed = 0;
  const int64_t num_filled = blocks_for(sequence.num_computed);
  plan_.fresh.reserve(sequence.blocks.size());
  plan_.pairs.reserve(sequence.blocks.size());
  for (int64_t i = 0; i < static_cast<int64_t>(sequence.blocks.size()); ++i) {
    const BlockId id = sequence.blocks[i];
    BlockId target = kNoBlock;
    if (id != kNoBlock && i < num_filled) {
      target = pool_[id].host_copy;
      if (target == kNoBlock) {
        if (needed < host_.num_free()) target = host_.peek(needed);
        plan_.pairs.emplace_back(id, target);
        ++needed;
      }
    }
    plan_.fresh.push_back(target);
  }
  if (needed > host_.num_free()) {
    throw OutOfBlocks("preempt: needs " + std::to_string(needed) + " free host blocks, has " +
                      std::to_string(host_.num_free()));
  }
  reserve_release(sequence);
  log_.reserve(2 * sequence.blocks.size() + plan_.pairs.size());
  plan_.handle = handle;
  guard.done(PlanKind::kSwapOut);
}

void BlockManager::finish_swap_out() noexcept {
  Sequence& sequence = sequences_[plan_.handle];
  for (const auto& [device, host] : plan_.pairs) {
    host_.take(host);
    host_[host] = {0, device};
    pool_[device].host_copy = host;
    log_.add(EventKind::kSwappedOut, sequence.serial, device, host);
  }
  for (const BlockId id : plan_.fresh) {
    if (id != kNoBlock) ++host_[id].num_holders;
  }
  swaps_ += static_cast<int64_t>(plan_.pairs.size());
  release_device_blocks(sequence);
  std::copy(plan_.fresh.begin(), plan_.fresh.end(), sequence.blocks.begin());
  sequence.state = SequenceState::kSwapped;
  sequence.num_prepared = sequence.num_computed;
  drop_plan();
}

void BlockManager::release_host(BlockId id) noexcept {
  HostPool::HostBlock& block = host_[id];
  if (--block.num_holders > 0) return;
  if (block.device_copy != kNoBlock) unlink_host(block.device_copy);
  host_.give_back(id);
}

void BlockManager::drop(Handle handle) {
  drop_plan();
  Sequence& sequence = running(handle, "seq_id");
  reserve_release(sequence);
  release_device_blocks(sequence);
  sequence.blocks.clear();
  sequence.num_dropped = sequence.num_computed;
  sequence.num_computed = sequence.num_prepared = sequence.num_released = 0;
  sequence.parent = sequence.root;
  sequence.state = SequenceState::kDropped;
}

void BlockManager::begin_resume(Handle handle) {
  PlanGuard guard(*this);
  Sequence& sequence = const_cast<Sequence&>(this->sequence(handle));
  if (sequence.state == SequenceState::kRunning) throw std::invalid_argument("seq_id: the sequence is not preempted");
  if (sequence.state == SequenceState::kDropped) {
    const int64_t num_tokens = static_cast<int64_t>(sequence.tokens.size());
    const bool whole = sequence.num_dropped == num_tokens;  // otherwise its prompt still has a last token to run
    sequence.blocks.reserve(static_cast<size_t>(blocks_for(num_tokens)));
    plan_blocks(sequence.tokens, sequence.root, whole ? num_tokens : num_tokens - 1, 0, "resume");
  } else {
    plan_swap_in(sequence);
  }
  plan_.handle = handle;
  guard.done(PlanKind::kResume);
}

void BlockManager::plan_swap_in(const Sequence& sequence) {
  int64_t needed = 0;
  int64_t num_fresh = 0;
  for (size_t i = sequence.num_released; i < sequence.blocks.size(); ++i) {
    const BlockId host = sequence.blocks[i];
    const BlockId device = host == kNoBlock ? kNoBlock : host_[host].device_copy;
    if (device == kNoBlock) {
      ++num_fresh;
    } else if (pool_[device].num_holders == 0) {
      mark(device);
      ++needed;
    }
  }
  needed += num_fresh;
  if (needed > pool_.num_free()) refuse("resume", needed, 0);
  pool_.peek(num_fresh, plan_.fresh);
  auto fresh = plan_.fresh.begin();
  for (size_t i = sequence.num_released; i < sequence.blocks.size(); ++i) {
    const BlockId host = sequence.blocks[i];
    const BlockId device = host == kNoBlock ? kNoBlock : host_[host].device_copy;
    const bool held = device != kNoBlock && pool_[device].num_holders > 0;
    plan_.hits.push_back(device != kNoBlock ? device : *fresh++);
    if (host != kNoBlock && !held) plan_.pairs.emplace_back(host, plan_.hits.back());
  }
  log_.reserve(4 * sequence.blocks.size());
}

int64_t BlockManager::finish_resume() noexcept {
  Sequence& sequence = sequences_[plan_.handle];
  int64_t to_run = 0;
  if (sequence.state == SequenceState::kDropped) {
    hold_planned(sequence);
    to_run = std::max<int64_t>(sequence.num_dropped - sequence.num_computed, 0);
  } else {
    finish_swap_in(sequence);
  }
  sequence.state = SequenceState::kRunning;
  drop_plan();
  return to_run;
}

void BlockManager::finish_swap_in(Sequence& sequence) noexcept {
  auto fresh = plan_.fresh.begin();
  for (size_t i = sequence.num_released; i < sequence.blocks.size(); ++i) {
    const BlockId host = sequence.blocks[i];
    const BlockId device = plan_.hits[i - sequence.num_released];
    if (fresh != plan_.fresh.end() && *fresh == device) {
      ++fresh;
      take(device, sequence.serial);
      if (host != kNoBlock) {
        host_[host].device_copy = device;
        pool_[device].host_copy = host;
        log_.add(EventKind::kSwappedIn, sequence.serial, device, host);
      }
    } else {
      const bool moved = pool_[device].num_holders == 0;
      share(device, sequence.serial);
      if (moved) log_.add(EventKind::kSwappedIn, sequence.serial, device, host);
    }
    if (host != kNoBlock) release_host(host);
    sequence.blocks[i] = device;
  }
  swaps_ += static_cast<int64_t>(plan_.pairs.size());
  if (!sequence.publishes) return;
  sequence.parent = parent_at(sequence, sequence.num_released);
  publish_filled(sequence, sequence.num_released);
}

}  // namespace paged_attn::host
