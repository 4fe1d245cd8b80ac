// How raw dot products become scores, and which keys a row sees.
#pragma once

#include "../widen.cuh"
#include "config.cuh"

namespace paged_attn::mma {

// The same for all rows of a piece.
struct ScoreRule {
  float scale;      // of a raw dot product, the key scale of the head included
  float log2_rate;  // of what the softmax sees, to log2 units
  bool modified;    // softcap, ALiBi or a key scale a token: scores are worked out before the softmax sees them
};

template <class C>
__device__ inline ScoreRule score_rule(const AttentionParams& p, int head) {
  ScoreRule rule;
  rule.scale = p.scale;
  rule.modified = p.softcap > 0.f || p.alibi_slopes;
  if constexpr (C::kQuantized) {
    rule.scale *= head_scale(p.k_scale, head);
    rule.modified |= p.k_scale.per_token();
  }
  rule.modified |= !(rule.scale > 0.f);  // a maximum of raw products would be the wrong one
  rule.log2_rate = rule.modified ? kLog2e : rule.scale * kLog2e;
  return rule;
}

// Row `row` of a piece's tile.
struct RowPlace {
  int token, head;         // of this call's tokens of the sequence; query head
  int position;            // of the token in its sequence
  int key_begin, key_end;  // the keys it sees

  __device__ RowPlace(const KernelArgs& args, const Piece& piece, int row) {
    const AttentionParams& p = args.p;
    const int packed = piece.entry.first_row + row;
    token = args.heads.group.quotient(packed);
    head = piece.head * args.heads.group.value + packed - token * args.heads.group.value;
    position = piece.entry.seq_len - piece.entry.q_len + token;
    key_begin = p.window_size > 0 ? position - p.window_size + 1 : 0;
    key_end = p.causal ? min(position + 1, piece.entry.seq_len) : piece.entry.seq_len;
  }
};

}  // namespace paged_attn::mma
