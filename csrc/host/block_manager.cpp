#include "block_manager.h"

#include <algorithm>
#include <climits>
#include <stdexcept>

namespace paged_attn::host {
namespace {

template <typename T>
void reserve_doubling(std::vector<T>& items, size_t size) {
  if (items.capacity() < size) items.reserve(std::max(size, 2 * items.capacity()));
}

}  // namespace

BlockManager::BlockManager(const Options& options)
    : options_(options),
      pool_(options.num_blocks),
      host_(options.num_host_blocks),
      index_(pool_, options.block_size, options.partial_match),
      log_(options.events) {}

// ---- planning

void BlockManager::mark(BlockId id) {
  plan_.marked.push_back(id);
  pool_[id].planned = true;
}

void BlockManager::drop_plan() noexcept {
  for (const BlockId id : plan_.marked) {
    pool_[id].planned = false;
    pool_[id].planned_drops = 0;
  }
  plan_.kind = PlanKind::kNone;
  plan_.handle = -1;
  plan_.pairs.clear();
  plan_.hits.clear();
  plan_.fresh.clear();
  plan_.marked.clear();
  plan_.writes.clear();
  plan_.edits.clear();
  plan_.changed.clear();
  plan_.copy_source = kNoBlock;
}

void BlockManager::refuse(const char* what, int64_t needed, int64_t keep_free) const {
  std::string message =
      std::string(what) + ": needs " + std::to_string(needed) + " free blocks, has " + std::to_string(pool_.num_free());
  if (keep_free > 0) message += ", of which the watermark keeps " + std::to_string(keep_free);
  throw OutOfBlocks(message);
}

void BlockManager::match_prefix(const Digest& root, const Token* tokens, int64_t max_blocks) {
  plan_.parent = root;
  if (!options_.prefix_caching) return;
  KeyChain keys(root, tokens, max_blocks, options_.block_size);
  for (int64_t i = 0; i < max_blocks; ++i, tokens += options_.block_size) {
    const Digest key = keys.next();
    const BlockId id = index_.find(key, tokens);
    if (id == kNoBlock) return;
    plan_.hits.push_back(id);
    plan_.parent = key;
  }
}

// The blocks for all of `tokens`: found ones first, at most `max_hits` tokens of them, free ones for the rest.
void BlockManager::plan_blocks(const std::vector<Token>& tokens, const Digest& root, int64_t max_hits,
                               int64_t keep_free, const char* what) {
  const int block_size = options_.block_size;
  match_prefix(root, tokens.data(), max_hits / block_size);
  const int64_t num_hits = static_cast<int64_t>(plan_.hits.size());
  const int64_t num_fresh = blocks_for(static_cast<int64_t>(tokens.size())) - num_hits;
  int64_t needed = num_fresh;
  for (const BlockId id : plan_.hits) {
    if (pool_[id].num_holders > 0) continue;
    mark(id);
    ++needed;
  }
  if (needed + keep_free > pool_.num_free()) refuse(what, needed, keep_free);

  plan_.num_computed = num_hits * block_size;
  const int rest = static_cast<int>(std::min<int64_t>(max_hits - plan_.num_computed, block_size));
  if (options_.partial_match && options_.prefix_caching && num_fresh > 0 && rest > 0) {
    const auto match = index_.find_partial(plan_.parent, tokens.data() + plan_.num_computed, rest);
    const bool idle = match.block != kNoBlock && pool_[match.block].num_holders == 0 && !pool_[match.block].planned;
    if (match.num_tokens > 0 && needed + idle <= pool_.num_free()) {
      if (idle) mark(match.block);
      plan_.copy_source = match.block;
      plan_.num_computed += match.num_tokens;
    }
  }
  pool_.peek(num_fresh, plan_.fresh);
  if (plan_.copy_source != kNoBlock) plan_.pairs.emplace_back(plan_.copy_source, plan_.fresh[0]);
  log_.reserve(plan_.hits.size() + 2 * plan_.fresh.size() + 1);
}

void BlockManager::hold_planned(Sequence& sequence) noexcept {
  for (const BlockId id : plan_.hits) {
    share(id, sequence.serial);
    sequence.blocks.push_back(id);
  }
  for (const BlockId id : plan_.fresh) {
    take(id, sequence.serial);
    sequence.blocks.push_back(id);
  }
  for (const auto& [from, to] : plan_.pairs) log_.add(EventKind::kCopied, sequence.serial, from, to);
  copies_ += static_cast<int64_t>(plan_.pairs.size());
  sequence.parent = plan_.parent;
  sequence.num_computed = sequence.num_prepared = plan_.num_computed;
}

// ---- blocks

void BlockManager::take(BlockId id, int64_t serial) noexcept {
  if (pool_[id].published) {
    index_.erase(id);
    unlink_host(id);
    ++evictions_;
    log_.add(EventKind::kEvicted, -1, id);
  }
  pool_.take(id);
  log_.add(EventKind::kAllocated, serial, id);
}

void BlockManager::share(BlockId id, int64_t serial) noexcept {
  pool_.share(id);
  log_.add(EventKind::kShared, serial, id);
}

void BlockManager::release(BlockId id, int64_t serial) noexcept {
  if (pool_.release(id) && !pool_[id].published) unlink_host(id);
  log_.add(EventKind::kReleased, serial, id);
}

void BlockManager::publish(BlockId id, const Digest& parent, const Digest& key, const Token* tokens,
                           int64_t serial) noexcept {
  if (pool_[id].published) return;
  index_.insert(id, parent, key, tokens);
  log_.add(EventKind::kPublished, serial, id);
}

void BlockManager::unpublish(BlockId id) noexcept {
  if (!pool_[id].published) return;
  index_.erase(id);
  if (pool_[id].num_holders == 0) {
    pool_.forget(id);
    unlink_host(id);
  }
  log_.add(EventKind::kUnpublished, -1, id);
}

void BlockManager::unlink_host(BlockId id) noexcept {
  int32_t& copy = pool_[id].host_copy;
  if (copy != kNoBlock) host_[copy].device_copy = kNoBlock;
  copy = kNoBlock;
}

void BlockManager::publish_filled(Sequence& sequence, int64_t first_block) noexcept {
  if (!sequence.publishes) return;
  const int block_size = options_.block_size;
  const int64_t end = sequence.num_computed / block_size;
  if (first_block == end) return;
  KeyChain keys(sequence.parent, sequence.tokens.data() + first_block * block_size, end - first_block, block_size);
  for (int64_t i = first_block; i < end; ++i) {
    const Token* const tokens = sequence.tokens.data() + i * block_size;
    const Digest key = keys.next();
    if (sequence.blocks[i] != kNoBlock) publish(sequence.blocks[i], sequence.parent, key, tokens, sequence.serial);
    sequence.parent = key;
  }
}

// ---- sequences

const Sequence& BlockManager::sequence(int64_t handle) const {
  if (handle < 0 || handle >= static_cast<int64_t>(sequences_.size()) ||
      sequences_[handle].state == SequenceState::kVacant) {
    throw std::invalid_argument("handle: no sequence has " + std::to_string(handle));
  }
  return sequences_[handle];
}

Sequence& BlockManager::running(int64_t handle, const char* what) {
  Sequence& found = const_cast<Sequence&>(sequence(handle));
  if (found.state != SequenceState::kRunning) {
    throw std::invalid_argument(std::string(what) + ": the sequence is preempted, resume it first");
  }
  return found;
}

void BlockManager::reserve_vacancies(size_t count) {
  if (vacant_.size() >= count) return;
  reserve_doubling(sequences_, sequences_.size() + count - vacant_.size());
  vacant_.reserve(sequences_.capacity());
}

Handle BlockManager::register_sequence(Sequence&& sequence) noexcept {
  if (vacant_.empty()) {
    sequences_.push_back(std::move(sequence));
    return static_cast<Handle>(sequences_.size() - 1);
  }
  const Handle handle = vacant_.back();
  vacant_.pop_back();
  sequences_[handle] = std::move(sequence);
  return handle;
}

// ---- add

Admission BlockManager::can_add(const Token* tokens, int64_t num_tokens, const Salt& salt) {
  PlanGuard guard(*this);
  const int64_t total = blocks_for(num_tokens);
  if (total + options_.watermark_blocks > pool_.size()) return Admission::kNever;
  match_prefix(root_key(salt), tokens, (num_tokens - 1) / options_.block_size);
  int64_t needed = total;
  for (const BlockId id : plan_.hits) needed -= pool_[id].num_holders > 0;
  return needed + options_.watermark_blocks <= pool_.num_free() ? Admission::kOk : Admission::kLater;
}

void BlockManager::begin_add(const Token* tokens, int64_t num_tokens, const Salt& salt) {
  PlanGuard guard(*this);
  if (num_tokens < 1) throw std::invalid_argument("token_ids: expected at least one token, got none");
  Sequence planned;
  planned.state = SequenceState::kRunning;
  planned.publishes = options_.prefix_caching;
  planned.root = root_key(salt);
  planned.tokens.assign(tokens, tokens + num_tokens);
  planned.blocks.reserve(static_cast<size_t>(blocks_for(num_tokens)));
  plan_blocks(planned.tokens, planned.root, num_tokens - 1, options_.watermark_blocks, "add");
  reserve_vacancies(1);
  plan_.sequence = std::move(planned);
  guard.done(PlanKind::kAdd);
}

Handle BlockManager::finish_add() noexcept {
  Sequence& sequence = plan_.sequence;
  sequence.serial = next_serial_++;
  hold_planned(sequence);
  prompt_tokens_ += static_cast<int64_t>(sequence.tokens.size());
  hit_tokens_ += sequence.num_computed;
  const Handle handle = register_sequence(std::move(sequence));
  drop_plan();
  return handle;
}

// ---- prepare

void BlockManager::plan_write(Sequence& sequence, Handle handle, int64_t query_len) {
  const int64_t start = sequence.num_computed;
  const int64_t end = start + query_len;
  const int64_t existing = static_cast<int64_t>(sequence.blocks.size());
  const int64_t last = blocks_for(end);
  plan_.num_tokens += query_len;
  plan_.width = std::max(plan_.width, last);
  plan_.writes.push_back({handle, static_cast<int32_t>(query_len)});
  if (query_len == 0) return;
  for (int64_t i = start / options_.block_size; i < std::min(existing, last); ++i) {
    const BlockId id = sequence.blocks[i];
    Block& block = pool_[id];
    if (block.num_holders - block.planned_drops > 1) {
      plan_.marked.push_back(id);
      ++block.planned_drops;
      if (i * options_.block_size < start) plan_.pairs.emplace_back(id, static_cast<int32_t>(plan_.edits.size()));
      plan_.edits.push_back({handle, static_cast<int32_t>(i)});
    } else if (block.published || block.host_copy != kNoBlock) {
      plan_.changed.push_back(id);
    }
  }
  const int64_t needed = static_cast<int64_t>(plan_.edits.size()) + std::max<int64_t>(last - existing, 0);
  if (needed > pool_.num_free()) refuse("prepare", needed, 0);  // before there is room for a list of them all
  for (int64_t i = existing; i < last; ++i) plan_.edits.push_back({handle, static_cast<int32_t>(i)});
  reserve_doubling(sequence.blocks, static_cast<size_t>(last));
}

void BlockManager::begin_prepare(const int64_t* handles, const int64_t* query_lens, int64_t num_seqs) {
  PlanGuard guard(*this);
  plan_.num_tokens = plan_.width = 0;
  ++visit_;
  for (int64_t i = 0; i < num_seqs; ++i) {
    Sequence& sequence = running(handles[i], "seq_ids");
    if (sequence.visit == visit_) throw std::invalid_argument("seq_ids: names a sequence twice");
    if (query_lens[i] < 0 || query_lens[i] > INT_MAX - sequence.num_computed) {
      throw std::invalid_argument("query_lens: expected 0 or more tokens, got " + std::to_string(query_lens[i]));
    }
    sequence.visit = visit_;
    plan_write(sequence, static_cast<Handle>(handles[i]), query_lens[i]);
  }
  pool_.peek(static_cast<int64_t>(plan_.edits.size()), plan_.fresh);
  for (Pair& pair : plan_.pairs) pair.second = plan_.fresh[pair.second];
  log_.reserve(4 * plan_.edits.size() + plan_.changed.size());
  guard.done(PlanKind::kPrepare);
}

void BlockManager::finish_prepare(const StepArrays& out) noexcept {
  for (size_t i = 0; i < plan_.edits.size(); ++i) {
    const Edit edit = plan_.edits[i];
    Sequence& sequence = sequences_[edit.handle];
    take(plan_.fresh[i], sequence.serial);
    if (edit.index < static_cast<int64_t>(sequence.blocks.size())) {
      release(sequence.blocks[edit.index], sequence.serial);
      sequence.blocks[edit.index] = plan_.fresh[i];
    } else {
      sequence.blocks.push_back(plan_.fresh[i]);
    }
  }
  for (const auto& [from, to] : plan_.pairs) log_.add(EventKind::kCopied, -1, from, to);
  copies_ += static_cast<int64_t>(plan_.pairs.size());
  for (const BlockId id : plan_.changed) {
    unlink_host(id);
    unpublish(id);
  }
  for (const Write write : plan_.writes) {
    Sequence& sequence = sequences_[write.handle];
    sequence.num_prepared = sequence.num_computed + write.query_len;
  }
  fill_step(out);
  drop_plan();
}

void BlockManager::fill_step(const StepArrays& out) const noexcept {
  const int block_size = options_.block_size;
  int64_t* slot = out.slot_mapping;
  int64_t* position = out.positions;
  int32_t* row = out.block_table;
  int32_t num_tokens = 0;
  for (size_t i = 0; i < plan_.writes.size(); ++i, row += plan_.width) {
    const Sequence& sequence = sequences_[plan_.writes[i].handle];
    const int64_t end = sequence.num_prepared;
    const int64_t used = blocks_for(end);
    std::copy_n(sequence.blocks.data(), used, row);
    std::fill(row + used, row + plan_.width, kNoBlock);
    for (int64_t at = sequence.num_computed; at < end;) {
      const int64_t offset = at % block_size;
      const int64_t run = std::min<int64_t>(block_size - offset, end - at);
      const int64_t first = int64_t{sequence.blocks[at / block_size]} * block_size + offset;
      for (int64_t k = 0; k < run; ++k) {
        *slot++ = first + k;
        *position++ = at + k;
      }
      at += run;
    }
    out.seq_lens[i] = static_cast<int32_t>(end);
    out.cu_seqlens_q[i] = num_tokens;
    num_tokens += plan_.writes[i].query_len;
  }
  out.cu_seqlens_q[plan_.writes.size()] = num_tokens;
}

// ---- commit

void BlockManager::check_commit(const Sequence& sequence, const Token* tokens, int64_t count) const {
  const int64_t start = sequence.num_computed;
  const int64_t known = std::min<int64_t>(count, static_cast<int64_t>(sequence.tokens.size()) - start);
  if (known > 0) {
    const auto [ours, theirs] = std::mismatch(tokens, tokens + known, sequence.tokens.data() + start);
    if (ours != tokens + known) {
      throw std::invalid_argument("token_ids: token " + std::to_string(ours - tokens + start) + " is " +
                                  std::to_string(*theirs) + " in the registered prompt, got " + std::to_string(*ours));
    }
  }
  if (start + count <= sequence.num_prepared) return;
  for (int64_t i = start / options_.block_size; i < blocks_for(start + count); ++i) {
    const bool held = i < static_cast<int64_t>(sequence.blocks.size());
    if (held && pool_[sequence.blocks[i]].num_holders == 1 && !pool_[sequence.blocks[i]].published) continue;
    throw std::invalid_argument("token_ids: " + std::to_string(count) + " tokens to commit after " +
                                std::to_string(start) + ", but prepare made room for " +
                                std::to_string(std::max(sequence.num_prepared, start) - start));
  }
}

void BlockManager::commit(const int64_t* handles, const int64_t* counts, int64_t num_seqs, const Token* tokens) {
  drop_plan();
  ++visit_;
  const Token* next = tokens;
  size_t num_events = 0;
  for (int64_t i = 0; i < num_seqs; next += counts[i++]) {
    Sequence& sequence = running(handles[i], "seq_ids");
    if (sequence.visit == visit_) throw std::invalid_argument("seq_ids: names a sequence twice");
    sequence.visit = visit_;
    check_commit(sequence, next, counts[i]);
    reserve_doubling(sequence.tokens, static_cast<size_t>(sequence.num_computed + counts[i]));
    num_events += static_cast<size_t>(counts[i] / options_.block_size + 1);
  }
  log_.reserve(num_events);
  for (int64_t i = 0; i < num_seqs; tokens += counts[i++]) {
    Sequence& sequence = sequences_[handles[i]];
    const int64_t start = sequence.num_computed;
    const int64_t end = start + counts[i];
    if (host_.size() > 0 && counts[i] > 0) {  // a fork of the sequence may have been swapped out since prepare
      for (int64_t b = start / options_.block_size; b < blocks_for(end); ++b) unlink_host(sequence.blocks[b]);
    }
    const int64_t known = static_cast<int64_t>(sequence.tokens.size()) - start;
    if (counts[i] > known) sequence.tokens.insert(sequence.tokens.end(), tokens + known, tokens + counts[i]);
    sequence.num_computed = end;
    sequence.num_prepared = std::max(sequence.num_prepared, end);
    publish_filled(sequence, start / options_.block_size);
  }
}

}  // namespace paged_attn::host
