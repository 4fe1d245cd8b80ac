// Every operation is tried with each of its memory allocations failing, and with each number of free blocks that is
// too small: it must throw and leave the manager exactly as it was.
#include <cstdlib>
#include <functional>
#include <new>
#include <sstream>

#include "check.h"

namespace {

long allocations_left = -1;  // -1: no failure

}  // namespace

void* operator new(std::size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* const memory = std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

using namespace paged_attn::host;

namespace {

// Everything that later behaviour depends on.
std::string dump(const BlockManager& manager) {
  std::ostringstream out;
  for (const Sequence& s : manager.sequences()) {
    out << "seq " << int(s.state) << s.publishes << ' ' << s.num_released << ' ' << s.num_computed << ' '
        << s.num_prepared << ' ' << s.num_dropped << ' ' << s.serial << " tokens";
    for (const Token token : s.tokens) out << ' ' << token;
    out << " blocks";
    for (const BlockId id : s.blocks) out << ' ' << id;
    out << " parent " << int(s.parent[0]) << ' ' << int(s.parent[31]) << '\n';
  }
  for (BlockId id = 0; id < manager.pool().size(); ++id) {
    const Block& b = manager.pool()[id];
    out << b.num_holders << b.published << b.planned << b.planned_drops << ' ' << b.host_copy << ' ' << b.lru_prev
        << ' ' << b.lru_next << ' ' << b.twin_prev << ' ' << b.twin_next << '\n';
  }
  for (const BlockId id : manager.pool().unused()) out << id << ' ';
  for (const auto& [pin, blocks] : manager.pins()) out << "pin " << pin << ' ' << blocks.size();
  return out.str();
}

struct Scene {
  BlockManager manager;
  Handle running, forked, swapped, dropped, prepared;

  // Two sequences that share a block that is being filled, a swapped, a dropped and a prepared one, and cached blocks.
  explicit Scene(int64_t num_blocks)
      : manager([&] {
          Options options;
          options.num_blocks = num_blocks;
          options.block_size = 4;
          options.num_host_blocks = 8;
          options.partial_match = true;
          options.events = true;
          return options;
        }()) {
    manager.free(add_and_run(manager, range(200, 212)));
    running = add_and_run(manager, range(0, 6));
    forked = fork(manager, running);
    swapped = add_and_run(manager, range(20, 26));
    manager.begin_swap_out(swapped);
    manager.finish_swap_out();
    dropped = add_and_run(manager, range(40, 46));
    manager.drop(dropped);
    prepared = add(manager, range(60, 66));
    prepare(manager, {prepared}, {15});
    manager.drop_plan();
  }
};

using Operation = std::function<void(Scene&)>;

const std::vector<std::pair<const char*, Operation>> kOperations = {
    {"add", [](Scene& s) { add(s.manager, range(0, 23)); }},
    {"add with a partial match", [](Scene& s) { add(s.manager, {200, 201, 202, 203, 204, 205, 9, 9}); }},
    {"prepare",
     [](Scene& s) {
       const int64_t handles[] = {s.running, s.forked}, lens[] = {9, 3};
       s.manager.begin_prepare(handles, lens, 2);
       int64_t longs[24];
       int32_t ints[16];
       s.manager.finish_prepare({longs, longs + 12, ints, ints + 10, ints + 12});
     }},
    {"commit", [](Scene& s) { commit(s.manager, s.prepared, range(60, 75)); }},
    {"fork",
     [](Scene& s) {
       Handle children[40];
       s.manager.fork(s.running, 40, children);
     }},
    {"rollback", [](Scene& s) { s.manager.rollback(s.running, 3); }},
    {"free", [](Scene& s) { s.manager.free(s.running); }},
    {"release_before", [](Scene& s) { s.manager.release_before(s.running, 5); }},
    {"swap out",
     [](Scene& s) {
       s.manager.begin_swap_out(s.running);
       s.manager.finish_swap_out();
     }},
    {"drop", [](Scene& s) { s.manager.drop(s.running); }},
    {"swap in",
     [](Scene& s) {
       s.manager.begin_resume(s.swapped);
       s.manager.finish_resume();
     }},
    {"resume",
     [](Scene& s) {
       s.manager.begin_resume(s.dropped);
       s.manager.finish_resume();
     }},
    {"pin", [](Scene& s) { s.manager.pin(s.running); }},
    {"pin a prefix", [](Scene& s) { s.manager.pin_prefix(range(200, 212).data(), 12, {}); }},
    {"reset", [](Scene& s) { s.manager.reset_prefix_cache(); }},
};

void test_failing_allocations(const char* name, const Operation& operation) {
  Scene reference(30);
  const std::string before = dump(reference.manager);
  for (long count = 0;; ++count) {
    CHECK(count < 1000);
    Scene scene(30);
    bool failed = false;
    allocations_left = count;
    try {
      operation(scene);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    check(scene.manager);
    if (!failed) break;
    if (dump(scene.manager) != before) std::fprintf(stderr, "%s changed state at allocation %ld\n", name, count);
    CHECK(dump(scene.manager) == before);
    operation(scene);
    check(scene.manager);
  }
}

void test_exhausted_pool(const char* name, const Operation& operation) {
  bool refused = false;
  for (int64_t num_free = 0; num_free < 12; ++num_free) {
    Scene scene(20);
    const int64_t hogged = scene.manager.pool().num_free() - num_free;
    if (hogged > 0) add(scene.manager, Tokens(static_cast<size_t>(4 * hogged), 7));
    scene.manager.drop_plan();
    const std::string before = dump(scene.manager);
    try {
      operation(scene);
    } catch (const OutOfBlocks&) {
      refused = true;
      CHECK(dump(scene.manager) == before);
    }
    check(scene.manager);
  }
  const std::string what = name;
  CHECK(refused == (what.rfind("add", 0) == 0 || what == "prepare" || what == "swap in" || what == "resume"));
}

}  // namespace

int main() {
  for (const auto& [name, operation] : kOperations) {
    test_failing_allocations(name, operation);
    test_exhausted_pool(name, operation);
  }
}
