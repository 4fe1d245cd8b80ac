#pragma once
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "block_manager.h"

// Ends the test with the place and the condition that failed.
#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

#define CHECK_THROWS(expression, Exception) \
  do {                                      \
    bool thrown = false;                    \
    try {                                   \
      expression;                           \
    } catch (const Exception&) {            \
      thrown = true;                        \
    }                                       \
    CHECK(thrown && #expression);           \
  } while (false)

namespace paged_attn::host {

using Tokens = std::vector<Token>;
using Ids = std::vector<BlockId>;
using Pairs = std::vector<BlockManager::Pair>;

inline Tokens range(Token first, Token last) {
  Tokens out;
  while (first < last) out.push_back(first++);
  return out;
}

inline void check(BlockManager& manager) {
  const std::string fault = manager.check();
  if (!fault.empty()) std::fprintf(stderr, "%s\n", fault.c_str());
  CHECK(fault.empty());
}

inline Handle add(BlockManager& manager, const Tokens& tokens, const Salt& salt = {}) {
  manager.begin_add(tokens.data(), static_cast<int64_t>(tokens.size()), salt);
  return manager.finish_add();
}

struct Step {
  Pairs copies;
  int64_t width;
  std::vector<int64_t> slot_mapping, positions;
  std::vector<int32_t> block_table, seq_lens, cu_seqlens_q;
};

inline Step prepare(BlockManager& manager, const std::vector<int64_t>& handles, const std::vector<int64_t>& lens) {
  manager.begin_prepare(handles.data(), lens.data(), static_cast<int64_t>(handles.size()));
  Step step;
  step.copies = manager.pairs();
  step.width = manager.step_width();
  step.slot_mapping.resize(manager.step_tokens());
  step.positions.resize(manager.step_tokens());
  step.block_table.resize(handles.size() * manager.step_width());
  step.seq_lens.resize(handles.size());
  step.cu_seqlens_q.resize(handles.size() + 1);
  manager.finish_prepare({step.slot_mapping.data(), step.positions.data(), step.block_table.data(),
                          step.seq_lens.data(), step.cu_seqlens_q.data()});
  return step;
}

inline void commit(BlockManager& manager, int64_t handle, const Tokens& tokens) {
  const int64_t count = static_cast<int64_t>(tokens.size());
  manager.commit(&handle, &count, 1, tokens.data());
}

// Prepare and commit: what a step of the model does to the manager. Returns the blocks copied.
inline Pairs run(BlockManager& manager, Handle handle, const Tokens& tokens) {
  Pairs copies = prepare(manager, {handle}, {static_cast<int64_t>(tokens.size())}).copies;
  commit(manager, handle, tokens);
  return copies;
}

inline Handle add_and_run(BlockManager& manager, const Tokens& tokens, const Salt& salt = {}) {
  const Handle handle = add(manager, tokens, salt);
  const int64_t done = manager.sequence(handle).num_computed;
  run(manager, handle, Tokens(tokens.begin() + done, tokens.end()));
  return handle;
}

inline Handle fork(BlockManager& manager, Handle handle) {
  Handle child;
  manager.fork(handle, 1, &child);
  return child;
}

inline int64_t hits(BlockManager& manager, const Tokens& tokens, const Salt& salt = {}) {
  const Handle handle = add(manager, tokens, salt);
  const int64_t found = manager.sequence(handle).num_computed;
  manager.free(handle);
  return found;
}

}  // namespace paged_attn::host
