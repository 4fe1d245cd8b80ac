// A long seeded run of everything, with every invariant recomputed after each step.
#include <random>

#include "check.h"

using namespace paged_attn::host;

namespace {

void run_steps(unsigned seed, int num_steps, const Options& options) {
  BlockManager manager(options);
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<Handle> live;
  std::vector<int64_t> pins;
  for (int step = 0; step < num_steps; ++step) {
    const int action = below(16);
    const size_t pick = live.empty() ? 0 : static_cast<size_t>(below(static_cast<int>(live.size())));
    const Handle handle = live.empty() ? -1 : live[pick];
    const SequenceState state = live.empty() ? SequenceState::kVacant : manager.sequence(handle).state;
    try {
      if (live.empty() || action == 0) {
        Tokens prompt;
        for (int i = below(24) + 1; i > 0; --i) prompt.push_back(below(2));
        live.push_back(add(manager, prompt, below(4) == 0 ? Salt("s") : Salt()));
      } else if (action == 1 || live.size() > 12) {
        manager.free(handle);
        live.erase(live.begin() + static_cast<long>(pick));
      } else if (state != SequenceState::kRunning) {
        manager.begin_resume(handle);
        if (below(8) > 0) manager.finish_resume();
      } else if (action < 8) {
        const Sequence& sequence = manager.sequence(handle);
        Tokens tokens;
        for (int i = below(7); i > 0; --i) {
          const size_t at = static_cast<size_t>(sequence.num_computed) + tokens.size();
          tokens.push_back(at < sequence.tokens.size() ? sequence.tokens[at] : below(2));
        }
        prepare(manager, {handle}, {static_cast<int64_t>(tokens.size())});
        tokens.resize(static_cast<size_t>(below(static_cast<int>(tokens.size()) + 1)));
        if (below(8) > 0) commit(manager, handle, tokens);
      } else if (action == 8) {
        live.push_back(fork(manager, handle));
      } else if (action == 9) {
        const int64_t room = manager.sequence(handle).num_computed - manager.sequence(handle).num_released * 4;
        if (room > 0) manager.rollback(handle, below(static_cast<int>(room) + 1));
      } else if (action == 10) {
        manager.release_before(handle, below(static_cast<int>(manager.sequence(handle).num_computed) + 1));
      } else if (action == 11) {
        manager.begin_swap_out(handle);
        if (below(8) > 0) manager.finish_swap_out();
      } else if (action == 12) {
        manager.drop(handle);
      } else if (action == 13 && pins.size() < 3) {
        pins.push_back(manager.pin(handle).id);
      } else if (action == 14 && !pins.empty()) {
        manager.unpin(pins.back());
        pins.pop_back();
      } else if (action == 15 && below(50) == 0) {
        manager.reset_prefix_cache();
        pins.clear();
      }
    } catch (const OutOfBlocks&) {
    }
    check(manager);
    CHECK(manager.pool().num_free() + manager.pool().num_used() == options.num_blocks);
    manager.log().clear();
  }
  for (const Handle handle : live) manager.free(handle);
  for (const int64_t pin : pins) manager.unpin(pin);
  check(manager);
  CHECK(manager.pool().num_free() == options.num_blocks);
  CHECK(manager.stats().host_blocks_used == 0);
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 8; ++seed) {
    Options options;
    options.num_blocks = 37;
    options.block_size = 4;
    options.num_host_blocks = 16;
    options.partial_match = seed % 2 == 1;
    options.events = seed % 4 >= 2;
    options.prefix_caching = seed != 4;
    run_steps(seed, 3000, options);
  }
}
