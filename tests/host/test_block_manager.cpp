#include "check.h"

using namespace paged_attn::host;

namespace {

Options options(int64_t num_blocks, int block_size = 4, int64_t num_host_blocks = 0) {
  Options out;
  out.num_blocks = num_blocks;
  out.block_size = block_size;
  out.num_host_blocks = num_host_blocks;
  return out;
}

void test_step_arrays() {
  BlockManager manager(options(8));
  const Handle a = add(manager, range(0, 6));
  const Handle b = add(manager, range(50, 53));
  const Step step = prepare(manager, {a, b}, {6, 3});
  CHECK(step.width == 2);
  CHECK((step.block_table == std::vector<int32_t>{0, 1, 2, -1}));
  CHECK((step.seq_lens == std::vector<int32_t>{6, 3}));
  CHECK((step.cu_seqlens_q == std::vector<int32_t>{0, 6, 9}));
  CHECK((step.slot_mapping == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 8, 9, 10}));
  CHECK((step.positions == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 0, 1, 2}));
  check(manager);
}

void test_prepare_does_not_advance() {
  BlockManager manager(options(8));
  const Handle a = add(manager, range(0, 4));
  const auto first = prepare(manager, {a}, {7}).slot_mapping;
  CHECK(prepare(manager, {a}, {7}).slot_mapping == first);
  CHECK(manager.sequence(a).num_computed == 0 && manager.sequence(a).blocks.size() == 2);
  commit(manager, a, range(0, 5));
  CHECK(prepare(manager, {a}, {1}).slot_mapping == std::vector<int64_t>{5});
  check(manager);
}

void test_fork_copies_on_first_write() {
  BlockManager manager(options(8));
  const Handle parent = add_and_run(manager, range(0, 6));
  const Handle one = fork(manager, parent), two = fork(manager, parent);
  CHECK(manager.pool()[0].num_holders == 3 && manager.pool()[1].num_holders == 3);
  CHECK((run(manager, one, {7}) == Pairs{{1, 2}}));
  CHECK((run(manager, two, {8}) == Pairs{{1, 3}}));
  CHECK(run(manager, parent, {9}).empty());
  check(manager);
}

void test_fork_in_one_batch_copies_all_but_one() {
  BlockManager manager(options(8));
  const Handle parent = add_and_run(manager, range(0, 6));
  const Handle one = fork(manager, parent), two = fork(manager, parent);
  CHECK((prepare(manager, {one, parent, two}, {1, 1, 1}).copies == Pairs{{1, 2}, {1, 3}}));
  CHECK(manager.sequence(two).blocks == (Ids{0, 1}));
  check(manager);
}

void test_fork_at_a_block_edge_copies_nothing() {
  BlockManager manager(options(8));
  const Handle parent = add_and_run(manager, range(0, 8));
  const Handle child = fork(manager, parent);
  CHECK(run(manager, child, {9}).empty() && run(manager, parent, {9}).empty());
  CHECK(manager.sequence(parent).blocks[1] == manager.sequence(child).blocks[1]);
  check(manager);
}

void test_eviction_takes_the_tail_first() {
  BlockManager manager(options(3));
  manager.free(add_and_run(manager, range(0, 12)));
  const Handle other = add(manager, {99});
  CHECK(manager.sequence(other).blocks == Ids{2});
  manager.free(other);
  CHECK(hits(manager, range(0, 9)) == 8);
  check(manager);
}

void test_released_heads_outlive_the_tail() {
  BlockManager manager(options(4));
  const Handle a = add_and_run(manager, range(0, 12));
  manager.release_before(a, 8);
  CHECK((manager.sequence(a).blocks == Ids{-1, -1, 2}));
  manager.free(a);
  const Handle b = add(manager, {90, 91, 92, 93, 94});
  CHECK((manager.sequence(b).blocks == Ids{3, 2}));
  manager.free(b);
  CHECK(hits(manager, range(0, 12)) == 8);
  check(manager);
}

void test_nothing_is_findable_before_commit() {
  BlockManager manager(options(8));
  const Handle a = add(manager, range(0, 8));
  prepare(manager, {a}, {8});
  CHECK(hits(manager, range(0, 9)) == 0);
  commit(manager, a, range(0, 5));
  CHECK(hits(manager, range(0, 9)) == 4);
  commit(manager, a, range(5, 8));
  CHECK(hits(manager, range(0, 9)) == 8);
  check(manager);
}

void test_rollback_unpublishes_what_it_changes() {
  BlockManager manager(options(8));
  const Handle a = add_and_run(manager, range(0, 10));
  manager.rollback(a, 4);
  CHECK(manager.sequence(a).blocks.size() == 2 && hits(manager, range(0, 9)) == 4);
  run(manager, a, {70, 71, 72});
  Tokens changed = range(0, 6);
  changed.insert(changed.end(), {70, 71, 72});
  CHECK(hits(manager, changed) == 8 && hits(manager, range(0, 9)) == 4);
  CHECK_THROWS(manager.rollback(a, 100), std::invalid_argument);
  check(manager);
}

void test_rollback_of_a_fork_leaves_the_other() {
  BlockManager manager(options(8));
  const Handle a = add_and_run(manager, range(0, 8));
  const Handle b = fork(manager, a);
  manager.rollback(b, 2);
  CHECK(hits(manager, range(0, 9)) == 8);
  CHECK((run(manager, b, {50}) == Pairs{{1, 2}}));
  check(manager);
}

void test_swap_moves_shared_blocks_once() {
  BlockManager manager(options(6, 4, 4));
  const Handle a = add_and_run(manager, range(0, 6));
  const Handle b = fork(manager, a);
  manager.begin_swap_out(a);
  CHECK((manager.pairs() == Pairs{{0, 0}, {1, 1}}));
  manager.finish_swap_out();
  check(manager);
  manager.begin_swap_out(b);
  CHECK(manager.pairs().empty());
  manager.finish_swap_out();
  check(manager);
  const Handle filler = add(manager, range(100, 124));  // overwrites what lay on the device
  check(manager);
  CHECK_THROWS(manager.begin_resume(a), OutOfBlocks);
  check(manager);
  manager.free(filler);
  manager.begin_resume(a);
  CHECK(manager.pairs().size() == 2);
  CHECK(manager.finish_resume() == 0);
  manager.begin_resume(b);
  CHECK(manager.pairs().empty());
  CHECK(manager.finish_resume() == 0);
  CHECK(manager.sequence(a).blocks == manager.sequence(b).blocks);
  CHECK(manager.stats().host_blocks_used == 0);
  check(manager);
}

void test_host_copy_ends_where_the_block_is_written() {
  BlockManager manager(options(6, 4, 4));
  const Handle a = add_and_run(manager, range(0, 6));
  const Handle b = fork(manager, a);
  manager.begin_swap_out(a);
  manager.finish_swap_out();
  CHECK(run(manager, b, {60}).empty());
  manager.begin_swap_out(b);
  CHECK((manager.pairs() == Pairs{{1, 2}}));  // block 0 is unchanged and already there
  manager.finish_swap_out();
  check(manager);
}

void test_recompute_keeps_the_tokens() {
  BlockManager manager(options(4, 16));
  const Handle a = add_and_run(manager, range(0, 6));
  run(manager, a, range(50, 55));
  manager.drop(a);
  CHECK(manager.pool().num_free() == 4);
  manager.begin_resume(a);
  CHECK(manager.finish_resume() == 11);
  prepare(manager, {a}, {11});
  CHECK_THROWS(commit(manager, a, range(0, 11)), std::invalid_argument);
  commit(manager, a, range(0, 6));
  commit(manager, a, range(50, 55));
  check(manager);
}

void test_pins_and_reset() {
  BlockManager manager(options(3));
  const Handle a = add_and_run(manager, range(0, 8));
  const auto pin = manager.pin(a);
  CHECK(pin.num_tokens == 8);
  manager.free(a);
  CHECK(manager.pool().num_free() == 1);
  CHECK_THROWS(add(manager, range(100, 105)), OutOfBlocks);
  CHECK(hits(manager, range(0, 9)) == 8);
  check(manager);
  CHECK(manager.unpin(pin.id) && !manager.unpin(pin.id));
  CHECK(manager.pin_prefix(range(0, 11).data(), 11, {}).num_tokens == 8);
  manager.reset_prefix_cache();
  CHECK(manager.pool().num_free() == 3 && hits(manager, range(0, 9)) == 0);
  check(manager);
}

void test_reset_under_a_running_sequence() {
  BlockManager manager(options(8));
  const Handle a = add_and_run(manager, range(0, 6));
  manager.reset_prefix_cache();
  run(manager, a, range(6, 9));
  CHECK(hits(manager, range(0, 10)) == 0);
  check(manager);
}

void test_partial_match_copies() {
  Options with_partial = options(4);
  with_partial.partial_match = true;
  BlockManager manager(with_partial);
  const Handle a = add_and_run(manager, range(0, 8));
  const Tokens prompt = range(0, 8);
  manager.begin_add(prompt.data(), 8, {});
  CHECK((manager.pairs() == Pairs{{1, 2}}));
  const Handle b = manager.finish_add();
  CHECK(manager.sequence(b).num_computed == 7);
  CHECK((manager.sequence(b).blocks == Ids{0, 2}));
  run(manager, b, {7});
  manager.free(a);
  check(manager);
}

void test_admission() {
  Options with_watermark = options(10);
  with_watermark.watermark_blocks = 2;
  BlockManager manager(with_watermark);
  const Tokens most = range(0, 32), too_many = range(0, 33);
  CHECK(manager.can_add(too_many.data(), 33, {}) == Admission::kNever);
  CHECK(manager.can_add(most.data(), 32, {}) == Admission::kOk);
  const Handle a = add_and_run(manager, most);
  CHECK(manager.can_add(most.data() + 1, 4, {}) == Admission::kLater);
  run(manager, a, range(100, 108));  // growth may use what the watermark keeps
  CHECK(manager.pool().num_free() == 0);
  check(manager);
}

void test_check_names_the_first_fault() {
  BlockManager manager(options(4));
  add_and_run(manager, range(0, 6));
  manager.corrupt(1, 2);
  CHECK(manager.check().find("shared blocks") != std::string::npos);
  manager.corrupt(1, 1);
  manager.corrupt(3, 1);
  CHECK(manager.check() == "block 3: on the free stack, but held");
  manager.corrupt(3, 0);
  check(manager);
}

void test_events_replay_to_the_pool() {
  Options with_events = options(4, 4, 4);
  with_events.events = true;
  BlockManager manager(with_events);
  const Handle a = add_and_run(manager, range(0, 8));
  const Handle b = fork(manager, a);
  manager.begin_swap_out(b);
  manager.finish_swap_out();
  manager.free(a);
  add(manager, range(100, 116));
  std::vector<int> holders(4, 0);
  int64_t number = 0;
  for (const Event& event : manager.log().events()) {
    CHECK(event.number == number++);
    if (event.kind == EventKind::kAllocated) CHECK(holders[event.block]++ == 0);
    if (event.kind == EventKind::kShared) ++holders[event.block];
    if (event.kind == EventKind::kReleased) --holders[event.block];
  }
  for (BlockId id = 0; id < 4; ++id) CHECK(holders[id] == manager.pool()[id].num_holders);
}

}  // namespace

int main() {
  test_step_arrays();
  test_prepare_does_not_advance();
  test_fork_copies_on_first_write();
  test_fork_in_one_batch_copies_all_but_one();
  test_fork_at_a_block_edge_copies_nothing();
  test_eviction_takes_the_tail_first();
  test_released_heads_outlive_the_tail();
  test_nothing_is_findable_before_commit();
  test_rollback_unpublishes_what_it_changes();
  test_rollback_of_a_fork_leaves_the_other();
  test_swap_moves_shared_blocks_once();
  test_host_copy_ends_where_the_block_is_written();
  test_recompute_keeps_the_tokens();
  test_pins_and_reset();
  test_reset_under_a_running_sequence();
  test_partial_match_copies();
  test_admission();
  test_check_names_the_first_fault();
  test_events_replay_to_the_pool();
}
