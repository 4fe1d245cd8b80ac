#include "prefix_index.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace paged_attn::host {
namespace {

constexpr int kMaxPartialCandidates = 32;

size_t table_size(int64_t num_blocks) {
  size_t size = 16;
  while (size < 2 * static_cast<size_t>(num_blocks)) size *= 2;
  return size;
}

Token* zeroed_tokens(int64_t count) {
  void* const memory = std::calloc(static_cast<size_t>(count), sizeof(Token));
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<Token*>(memory);
}

}  // namespace

PrefixIndex::PrefixIndex(BlockPool& pool, int block_size, bool by_parent)
    : pool_(pool),
      block_size_(block_size),
      mask_(table_size(pool.size()) - 1),
      slots_(mask_ + 1),
      tokens_(zeroed_tokens(std::max<int64_t>(pool.size() * block_size, 1)), std::free) {
  if (!by_parent) return;
  children_.resize(static_cast<size_t>(pool.size()));
  buckets_.assign(mask_ + 1, kNoBlock);
}

uint32_t PrefixIndex::hash_of(const Digest& key) {
  uint32_t hash;
  std::memcpy(&hash, key.data(), sizeof(hash));
  return hash;
}

size_t PrefixIndex::find_slot(const Digest& key) const {
  const uint32_t hash = hash_of(key);
  size_t slot = hash & mask_;
  while (slots_[slot].block != kNoBlock && (slots_[slot].hash != hash || pool_[slots_[slot].block].key != key)) {
    slot = (slot + 1) & mask_;
  }
  return slot;
}

BlockId PrefixIndex::find(const Digest& key, const Token* tokens) const {
  const BlockId first = slots_[find_slot(key)].block;
  if (first == kNoBlock) return kNoBlock;
  if (!std::equal(tokens, tokens + block_size_, this->tokens(first))) return kNoBlock;
  for (BlockId id = first; id != kNoBlock; id = pool_[id].twin_next) {
    if (pool_[id].num_holders > 0) return id;
  }
  return first;
}

void PrefixIndex::insert(BlockId id, const Digest& parent, const Digest& key, const Token* tokens) noexcept {
  Block& block = pool_[id];
  block.key = key;
  block.published = true;
  std::copy_n(tokens, block_size_, tokens_.get() + int64_t{id} * block_size_);
  Entry& entry = slots_[find_slot(key)];
  if (entry.block == kNoBlock) {
    entry = {id, hash_of(key)};
  } else {  // second place: the entry itself stays
    Block& first = pool_[entry.block];
    block.twin_prev = entry.block;
    block.twin_next = first.twin_next;
    if (first.twin_next != kNoBlock) pool_[first.twin_next].twin_prev = id;
    first.twin_next = id;
  }
  ++num_published_;
  if (!children_.empty()) insert_child(id, parent);
}

void PrefixIndex::erase(BlockId id) noexcept {
  Block& block = pool_[id];
  if (!children_.empty()) erase_child(id);
  if (block.twin_next != kNoBlock) pool_[block.twin_next].twin_prev = block.twin_prev;
  if (block.twin_prev != kNoBlock) {
    pool_[block.twin_prev].twin_next = block.twin_next;
  } else {
    const size_t slot = find_slot(block.key);
    if (block.twin_next != kNoBlock) {
      slots_[slot].block = block.twin_next;
    } else {
      erase_slot(slot);
    }
  }
  block.twin_prev = block.twin_next = kNoBlock;
  block.published = false;
  --num_published_;
}

// Linear probing without tombstones: entries after the hole move back into it as long as their home allows.
void PrefixIndex::erase_slot(size_t hole) noexcept {
  for (size_t slot = (hole + 1) & mask_; slots_[slot].block != kNoBlock; slot = (slot + 1) & mask_) {
    const size_t home = slots_[slot].hash & mask_;
    if (((slot - home) & mask_) < ((slot - hole) & mask_)) continue;
    slots_[hole] = slots_[slot];
    hole = slot;
  }
  slots_[hole] = {};
}

size_t PrefixIndex::bucket_of(const Digest& parent, Token first) const {
  uint64_t hash;
  std::memcpy(&hash, parent.data(), sizeof(hash));
  hash = (hash ^ static_cast<uint32_t>(first)) * 0x9e3779b97f4a7c15u;
  return (hash >> 32) & mask_;
}

PrefixIndex::PartialMatch PrefixIndex::find_partial(const Digest& parent, const Token* tokens, int num_tokens) const {
  PartialMatch best;
  int candidates = kMaxPartialCandidates;
  for (BlockId id = buckets_[bucket_of(parent, tokens[0])]; id != kNoBlock && candidates > 0;
       id = children_[id].next, --candidates) {
    if (children_[id].parent != parent) continue;
    const Token* const theirs = this->tokens(id);
    const int common = static_cast<int>(std::mismatch(tokens, tokens + num_tokens, theirs).first - tokens);
    if (common > best.num_tokens) best = {id, common};
  }
  return best;
}

void PrefixIndex::insert_child(BlockId id, const Digest& parent) noexcept {
  BlockId& head = buckets_[bucket_of(parent, *tokens(id))];
  children_[id] = {parent, kNoBlock, head};
  if (head != kNoBlock) children_[head].prev = id;
  head = id;
}

void PrefixIndex::erase_child(BlockId id) noexcept {
  const Child& child = children_[id];
  BlockId& before =
      child.prev == kNoBlock ? buckets_[bucket_of(child.parent, *tokens(id))] : children_[child.prev].next;
  before = child.next;
  if (child.next != kNoBlock) children_[child.next].prev = child.prev;
}

std::string PrefixIndex::check() const {
  const auto broken = [](BlockId id, const char* what) { return "block " + std::to_string(id) + ": " + what; };
  int64_t num_published = 0;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    BlockId previous = kNoBlock;
    for (BlockId id = slots_[slot].block; id != kNoBlock; previous = id, id = pool_[id].twin_next) {
      const Block& block = pool_[id];
      if (!block.published) return broken(id, "in the prefix index, but not published");
      if (block.twin_prev != previous) return broken(id, "twin links do not meet");
      if (hash_of(block.key) != slots_[slot].hash) return broken(id, "filed under another key");
      if (previous == kNoBlock && find_slot(block.key) != slot) return broken(id, "not findable by its key");
      if (previous != kNoBlock && block.key != pool_[previous].key) return broken(id, "twin of another key");
      if (++num_published > num_published_) return "prefix index: more blocks than its counter says";
    }
  }
  if (num_published != num_published_) return "prefix index: fewer blocks than its counter says";
  int64_t flagged = 0;
  for (BlockId id = 0; id < pool_.size(); ++id) flagged += pool_[id].published;
  if (flagged != num_published) return "prefix index: a published block is missing";
  if (children_.empty()) return {};
  int64_t num_children = 0;
  for (const BlockId head : buckets_) {
    BlockId previous = kNoBlock;
    for (BlockId id = head; id != kNoBlock; previous = id, id = children_[id].next) {
      if (!pool_[id].published) return broken(id, "listed under its parent, but not published");
      if (children_[id].prev != previous) return broken(id, "sibling links do not meet");
      if (++num_children > num_published) return "prefix index: more children than blocks";
    }
  }
  if (num_children != num_published) return "prefix index: a block is missing under its parent";
  return {};
}

}  // namespace paged_attn::host
