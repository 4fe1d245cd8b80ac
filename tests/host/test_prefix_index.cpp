#include <map>
#include <random>

#include "check.h"

using namespace paged_attn::host;

namespace {

// Keys that collide in their first bytes, so that probing, deletion and twins meet in one cluster.
Digest key_of(int value) {
  Digest key = {};
  key[0] = static_cast<uint8_t>(value % 3);
  key[31] = static_cast<uint8_t>(value);
  return key;
}

void test_random_inserts_and_erases_against_a_map() {
  constexpr int kBlocks = 40;
  BlockPool pool(kBlocks);
  PrefixIndex index(pool, 2, true);
  std::multimap<int, BlockId> model;
  std::vector<int> value_of(kBlocks, -1);
  std::mt19937 random(7);
  for (int step = 0; step < 20000; ++step) {
    const BlockId id = static_cast<BlockId>(random() % kBlocks);
    if (value_of[id] < 0) {
      const int value = static_cast<int>(random() % 25);
      const Token tokens[] = {value, value + 1};
      index.insert(id, key_of(200), key_of(value), tokens);
      model.emplace(value, id);
      value_of[id] = value;
    } else {
      index.erase(id);
      for (auto it = model.find(value_of[id]);; ++it) {
        if (it->second != id) continue;
        model.erase(it);
        break;
      }
      value_of[id] = -1;
    }
    CHECK(index.check().empty());
    for (int value = 0; value < 25; ++value) {
      const Token tokens[] = {value, value + 1};
      const BlockId found = index.find(key_of(value), tokens);
      CHECK((found != kNoBlock) == (model.count(value) > 0));
      CHECK(found == kNoBlock || value_of[found] == value);
    }
  }
}

void test_equal_key_with_other_tokens_is_no_hit() {
  BlockPool pool(4);
  PrefixIndex index(pool, 2, false);
  const Token tokens[] = {1, 2}, others[] = {1, 3};
  index.insert(0, key_of(9), key_of(1), tokens);
  CHECK(index.find(key_of(1), tokens) == 0);
  CHECK(index.find(key_of(1), others) == kNoBlock);
}

void test_twin_in_use_is_found_first() {
  BlockPool pool(4);
  PrefixIndex index(pool, 1, false);
  const Token token = 5;
  index.insert(0, key_of(9), key_of(1), &token);
  index.insert(1, key_of(9), key_of(1), &token);
  CHECK(index.find(key_of(1), &token) == 0);
  pool[1].num_holders = 1;
  CHECK(index.find(key_of(1), &token) == 1);
  index.erase(1);
  CHECK(index.find(key_of(1), &token) == 0);
}

void test_longest_common_part_wins() {
  BlockPool pool(4);
  PrefixIndex index(pool, 4, true);
  const Token a[] = {1, 2, 3, 4}, b[] = {1, 2, 9, 9}, wanted[] = {1, 2, 3, 7};
  index.insert(0, key_of(50), key_of(1), a);
  index.insert(1, key_of(50), key_of(2), b);
  const auto match = index.find_partial(key_of(50), wanted, 4);
  CHECK(match.block == 0 && match.num_tokens == 3);
  CHECK(index.find_partial(key_of(50), wanted, 2).num_tokens == 2);
  CHECK(index.find_partial(key_of(51), wanted, 4).block == kNoBlock);
  index.erase(0);
  CHECK(index.find_partial(key_of(50), wanted, 4).num_tokens == 2);
}

}  // namespace

int main() {
  test_random_inserts_and_erases_against_a_map();
  test_equal_key_with_other_tokens_is_no_hit();
  test_twin_in_use_is_found_first();
  test_longest_common_part_wins();
}
