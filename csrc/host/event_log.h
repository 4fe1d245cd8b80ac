#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace paged_attn::host {

enum class EventKind : int32_t {
  kAllocated,    // block: first holder `sequence`, contents undefined
  kShared,       // block: one holder more
  kReleased,     // block: one holder fewer
  kCopied,       // block -> other, device to device
  kPublished,    // block: findable
  kUnpublished,  // block: no longer findable, its holder changes it or the index was reset
  kEvicted,      // block: no longer findable, its memory is wanted
  kSwappedOut,   // block -> host block other
  kSwappedIn,    // host block other -> block
};

struct Event {
  int64_t number;    // counts from 0 without gaps
  int64_t sequence;  // serial number of the sequence concerned, -1: a pin or none
  EventKind kind;
  int32_t block;
  int32_t other;  // -1 where the kind has no second block
  int32_t padding = 0;
};

// Off: costs a branch an event. `reserve` is called where failing is allowed, `add` where it is not.
class EventLog {
 public:
  explicit EventLog(bool enabled) : enabled_(enabled) {}

  bool enabled() const { return enabled_; }

  void reserve(size_t count) {
    if (enabled_ && events_.capacity() - events_.size() < count) {
      events_.reserve(std::max(2 * events_.capacity(), events_.size() + count));
    }
  }

  void add(EventKind kind, int64_t sequence, int32_t block, int32_t other = -1) noexcept {
    if (enabled_) events_.push_back({next_number_++, sequence, kind, block, other});
  }

  const std::vector<Event>& events() const { return events_; }
  void clear() { events_.clear(); }

 private:
  bool enabled_;
  int64_t next_number_ = 0;
  std::vector<Event> events_;
};

}  // namespace paged_attn::host
