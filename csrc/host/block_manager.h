#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "block_key.h"
#include "block_pool.h"
#include "event_log.h"
#include "host_pool.h"
#include "prefix_index.h"

namespace paged_attn::host {

using Handle = int32_t;  // names a sequence while it is registered; reused afterwards

struct Options {
  int64_t num_blocks = 0;
  int block_size = 16;
  int64_t num_host_blocks = 0;
  int64_t watermark_blocks = 0;
  bool prefix_caching = true;
  bool partial_match = false;
  bool events = false;
};

enum class Admission { kOk, kLater, kNever };

enum class PlanKind : uint8_t { kNone, kAdd, kPrepare, kSwapOut, kResume };

enum class SequenceState : uint8_t { kVacant, kRunning, kSwapped, kDropped };

// What a decode step reads and writes comes first, on one cache line.
struct alignas(64) Sequence {
  SequenceState state = SequenceState::kVacant;
  bool publishes = false;       // false without prefix caching, and after the index was reset under it
  int32_t num_released = 0;     // leading blocks given back behind a window
  int64_t num_computed = 0;     // tokens with K/V
  int64_t num_prepared = 0;     // tokens whose slots may be written
  int64_t visit = 0;            // last batch that named it
  std::vector<BlockId> blocks;  // kSwapped: host blocks. kNoBlock: released, or (kSwapped) reserved and empty
  int64_t serial = -1;          // never reused
  std::vector<Token> tokens;    // the prompt and what was committed; the first num_computed have K/V
  int64_t num_dropped = 0;      // kDropped: tokens that had K/V
  Digest root, parent;          // key of its salt; of the last full block with K/V, or the root
};

struct Stats {
  int64_t blocks_total, blocks_used, blocks_free, blocks_cached, blocks_shared, host_blocks_used;
  int64_t tokens, filled_slots, reserved_slots;
  int64_t prompt_tokens, hit_tokens, copies, evictions, swaps;
};

// Where `finish_prepare` writes the tensors of a step.
struct StepArrays {
  int64_t* slot_mapping;  // [num_tokens]
  int64_t* positions;     // [num_tokens]
  int32_t* block_table;   // [num_seqs, width], kNoBlock where there is no block
  int32_t* seq_lens;      // [num_seqs]
  int32_t* cu_seqlens_q;  // [num_seqs + 1]
};

// Decides which block holds what; moves no K/V. An operation that needs K/V moved comes in two steps: begin_x decides
// and changes nothing, the caller moves the blocks of pairs(), and finish_x, which cannot fail, makes it so. Any other
// call in between drops the plan. Every operation either happens or throws with nothing changed.
class BlockManager {
 public:
  using Pair = std::pair<int32_t, int32_t>;

  explicit BlockManager(const Options& options);

  Admission can_add(const Token* tokens, int64_t num_tokens, const Salt& salt);

  // pairs(): at most one device copy, of a block whose start is common with the prompt (partial_match).
  void begin_add(const Token* tokens, int64_t num_tokens, const Salt& salt);
  Handle finish_add() noexcept;

  // pairs(): device copies, for shared blocks that will be written.
  void begin_prepare(const int64_t* handles, const int64_t* query_lens, int64_t num_seqs);
  int64_t step_seqs() const { return static_cast<int64_t>(plan_.writes.size()); }
  int64_t step_tokens() const { return plan_.num_tokens; }
  int64_t step_width() const { return plan_.width; }
  void finish_prepare(const StepArrays& out) noexcept;

  // Count the next counts[i] tokens of sequence i as final; `tokens` holds them one sequence after the other.
  void commit(const int64_t* handles, const int64_t* counts, int64_t num_seqs, const Token* tokens);

  void rollback(Handle handle, int64_t num_tokens);
  void fork(Handle handle, int64_t count, Handle* out);
  void free(Handle handle);
  void release_before(Handle handle, int64_t position);

  // pairs(): device block, host block.
  void begin_swap_out(Handle handle);
  void finish_swap_out() noexcept;
  void drop(Handle handle);

  // pairs(): host block, device block after a swap; device copies (at most one) after a drop.
  void begin_resume(Handle handle);
  int64_t finish_resume() noexcept;  // tokens to run again

  struct Pinned {
    int64_t id;
    int64_t num_tokens;
  };
  Pinned pin(Handle handle);
  Pinned pin_prefix(const Token* tokens, int64_t num_tokens, const Salt& salt);
  bool unpin(int64_t id);
  void reset_prefix_cache();

  // What begin_x has planned, and whose finish_x may be called now.
  PlanKind plan_kind() const { return plan_.kind; }
  const std::vector<Pair>& pairs() const { return plan_.pairs; }
  void drop_plan() noexcept;

  const Options& options() const { return options_; }
  const Sequence& sequence(int64_t handle) const;  // std::invalid_argument unless registered
  const std::vector<Sequence>& sequences() const { return sequences_; }
  const std::map<int64_t, std::vector<BlockId>>& pins() const { return pins_; }
  const BlockPool& pool() const { return pool_; }
  const PrefixIndex& index() const { return index_; }
  EventLog& log() { return log_; }
  Stats stats();
  std::string check();  // the first broken invariant, or empty

  // For tests of check(): set a block's number of holders as a bug would.
  void corrupt(BlockId id, int32_t num_holders) { pool_[id].num_holders = num_holders; }

 private:
  class PlanGuard;  // drops the plan unless planning came to its end

  struct Write {
    Handle handle;
    int32_t query_len;
  };
  struct Edit {  // a block that finish_prepare puts into a table: a new entry, or in place of a shared block
    Handle handle;
    int32_t index;
  };
  struct Plan {
    PlanKind kind = PlanKind::kNone;
    Handle handle = -1;
    std::vector<Pair> pairs;
    std::vector<BlockId> hits;    // found blocks that will be held
    std::vector<BlockId> fresh;   // free blocks that will be held
    std::vector<BlockId> marked;  // blocks with `planned` or `planned_drops` set
    std::vector<Write> writes;
    std::vector<Edit> edits;       // edits[i] takes fresh[i]
    std::vector<BlockId> changed;  // written in place: their published content and host copy end
    Sequence sequence;
    Digest parent;
    int64_t num_tokens = 0, width = 0;
    int64_t num_computed = 0, copy_source = kNoBlock;
  };

  Sequence& running(int64_t handle, const char* what);
  int64_t blocks_for(int64_t num_tokens) const { return (num_tokens + options_.block_size - 1) / options_.block_size; }
  void match_prefix(const Digest& root, const Token* tokens, int64_t max_blocks);
  void plan_blocks(const std::vector<Token>& tokens, const Digest& root, int64_t max_hits, int64_t keep_free,
                   const char* what);
  void hold_planned(Sequence& sequence) noexcept;
  void mark(BlockId id);
  void plan_write(Sequence& sequence, Handle handle, int64_t query_len);
  [[noreturn]] void refuse(const char* what, int64_t needed, int64_t keep_free) const;
  void check_commit(const Sequence& sequence, const Token* tokens, int64_t count) const;
  void reserve_vacancies(size_t count);
  Handle register_sequence(Sequence&& sequence) noexcept;
  void vacate(Handle handle) noexcept;

  void take(BlockId id, int64_t serial) noexcept;
  void share(BlockId id, int64_t serial) noexcept;
  void release(BlockId id, int64_t serial) noexcept;
  void publish(BlockId id, const Digest& parent, const Digest& key, const Token* tokens, int64_t serial) noexcept;
  void unpublish(BlockId id) noexcept;
  void unlink_host(BlockId id) noexcept;
  void release_host(BlockId id) noexcept;
  void publish_filled(Sequence& sequence, int64_t first_block) noexcept;
  void reserve_release(const Sequence& sequence);
  void release_device_blocks(Sequence& sequence) noexcept;
  Digest parent_at(const Sequence& sequence, int64_t num_full_blocks) const;
  void fill_step(const StepArrays& out) const noexcept;
  void plan_swap_in(const Sequence& sequence);
  void finish_swap_in(Sequence& sequence) noexcept;
  Pinned add_pin(std::vector<BlockId>&& blocks);
  std::string check_holders() const;
  std::string check_sequence(Handle handle) const;
  std::string check_host() const;

  Options options_;
  BlockPool pool_;
  HostPool host_;
  PrefixIndex index_;
  EventLog log_;
  std::vector<Sequence> sequences_;
  std::vector<Handle> vacant_;
  std::map<int64_t, std::vector<BlockId>> pins_;
  Plan plan_;
  std::vector<Digest> released_keys_;
  std::vector<int32_t> fill_;  // [num_blocks], zero outside stats()
  std::vector<BlockId> filled_;
  int64_t next_serial_ = 0, next_pin_ = 0, visit_ = 0;
  int64_t prompt_tokens_ = 0, hit_tokens_ = 0, copies_ = 0, evictions_ = 0, swaps_ = 0;
};

class BlockManager::PlanGuard {
 public:
  explicit PlanGuard(BlockManager& manager) : manager_(manager) { manager_.drop_plan(); }
  ~PlanGuard() {
    if (manager_.plan_.kind == PlanKind::kNone) manager_.drop_plan();
  }
  void done(PlanKind kind) { manager_.plan_.kind = kind; }

 private:
  BlockManager& manager_;
};

}  // namespace paged_attn::host
