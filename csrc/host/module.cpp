// paged_attn._host: the block manager for Python. Lists become flat arrays here; no Python object goes further in.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

#include <climits>
#include <cstring>

#include "block_manager.h"

namespace py = pybind11;

namespace paged_attn::host {
namespace {

[[noreturn]] void refuse(const char* name, const char* expected, py::handle got) {
  throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got " + std::string(py::str(got)));
}

[[noreturn]] void refuse_integers(const char* name, py::handle got) { refuse(name, "integers", py::type::of(got)); }

// An int below 2**30 without a call into the interpreter.
inline bool small_int(PyObject* item, int64_t& value) {
  if (!PyLong_CheckExact(item)) return false;
#if PY_VERSION_HEX >= 0x030C0000
  if (!PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject*>(item))) return false;
  value = PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject*>(item));
#else
  const Py_ssize_t num_digits = Py_SIZE(item);
  if (num_digits < 0 || num_digits > 1) return false;
  value = num_digits == 0 ? 0 : static_cast<int64_t>(reinterpret_cast<PyLongObject*>(item)->ob_digit[0]);
#endif
  return true;
}

int64_t as_int64(const char* name, PyObject* item) {
  int64_t small;
  if (small_int(item, small)) return small;
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(item));
  if (!index) {
    PyErr_Clear();
    refuse_integers(name, item);
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) throw std::invalid_argument(std::string(name) + ": an integer exceeds 64 bits");
  return value;
}

// Integers out of a list, tuple, array, CPU tensor or other iterable.
void read_integers(const char* name, py::handle source, std::vector<int64_t>& out) {
  out.clear();
  if (PyList_CheckExact(source.ptr()) || PyTuple_CheckExact(source.ptr())) {
    PyObject** const items = PySequence_Fast_ITEMS(source.ptr());
    out.resize(static_cast<size_t>(PySequence_Fast_GET_SIZE(source.ptr())));
    for (size_t i = 0; i < out.size(); ++i) out[i] = as_int64(name, items[i]);
  } else if (py::isinstance<py::array>(source) || py::hasattr(source, "__array__")) {
    const py::array array = py::array::ensure(source);
    if (!array) refuse(name, "integers on the host", py::type::of(source));
    if (array.ndim() != 1) refuse(name, "one dimension", py::int_(array.ndim()));
    const char kind = array.dtype().kind();
    if (kind != 'i' && kind != 'u' && array.size() > 0) refuse(name, "integers", array.dtype());
    const auto values = py::array_t<int64_t, py::array::c_style | py::array::forcecast>::ensure(array);
    out.assign(values.data(), values.data() + values.size());
  } else if (py::isinstance<py::iterable>(source) && !py::isinstance<py::str>(source)) {
    for (const py::handle item : py::reinterpret_borrow<py::iterable>(source))
      out.push_back(as_int64(name, item.ptr()));
  } else {
    refuse_integers(name, source);
  }
}

// `table` maps sequence ids to handles; without one the ids are handles themselves.
void read_handles(const py::object& table, py::handle seq_ids, std::vector<int64_t>& out) {
  if (table.is_none()) return read_integers("handles", seq_ids, out);
  out.clear();
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(seq_ids.ptr(), "seq_ids: expected a list"));
  if (!items) throw py::error_already_set();
  PyObject** const ids = PySequence_Fast_ITEMS(items.ptr());
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    PyObject* const handle = PyDict_GetItemWithError(table.ptr(), ids[i]);
    if (handle == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, ids[i]);
      throw py::error_already_set();
    }
    out.push_back(PyLong_AsLongLong(handle));
  }
}

// Token ids, with a scratch vector for what they are before they are known to fit.
void read_tokens(py::handle source, std::vector<int64_t>& scratch, std::vector<Token>& out) {
  read_integers("token_ids", source, scratch);
  out.resize(scratch.size());
  int64_t all_bits = 0;
  for (size_t i = 0; i < scratch.size(); ++i) {
    all_bits |= scratch[i];
    out[i] = static_cast<Token>(scratch[i]);
  }
  if (all_bits >= 0 && all_bits <= INT_MAX) return;
  for (const int64_t value : scratch) {
    if (value >= 0 && value <= INT_MAX) continue;
    throw std::invalid_argument("token_ids: expected ids from 0 to 2147483647, got " + std::to_string(value));
  }
}

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

Salt to_salt(const py::object& salt) {
  if (salt.is_none()) return std::nullopt;
  if (!py::isinstance<py::str>(salt)) refuse("salt", "a string or None", py::type::of(salt));
  // Strings that are no valid Unicode have bytes too, each its own.
  const auto bytes = py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(salt.ptr(), "utf-8", "surrogatepass"));
  if (!bytes) throw py::error_already_set();
  return static_cast<std::string>(bytes);
}

py::array pairs_array(const BlockManager& manager) {
  const auto& pairs = manager.pairs();
  py::array_t<int64_t> out({static_cast<py::ssize_t>(pairs.size()), py::ssize_t{2}});
  int64_t* next = out.mutable_data();
  for (const auto& [from, to] : pairs) *next++ = from, *next++ = to;
  return out;
}

// A step's tensors lie in one buffer, so that one copy brings them to the GPU: slot_mapping and positions (int64),
// then block_table, seq_lens and cu_seqlens_q (int32).
struct StepLayout {
  int64_t num_seqs, num_tokens, width;
  int64_t num_bytes() const { return 16 * num_tokens + 4 * (num_seqs * width + 2 * num_seqs + 1); }
  StepArrays arrays(void* buffer) const {
    int64_t* const longs = static_cast<int64_t*>(buffer);
    int32_t* const ints = reinterpret_cast<int32_t*>(longs + 2 * num_tokens);
    return {longs, longs + num_tokens, ints, ints + num_seqs * width, ints + num_seqs * (width + 1)};
  }
};

class Manager {
 public:
  explicit Manager(const Options& options) : core(options) {}

  Admission can_add(const py::object& token_ids, const py::object& salt) {
    read_prompt(token_ids);
    return core.can_add(tokens_.data(), size(tokens_), to_salt(salt));
  }

  // (result, copies): without copies to make, result is that of finish_add; otherwise finish_add is still to be called.
  py::tuple add(const py::object& token_ids, const py::object& salt) {
    read_prompt(token_ids);
    core.begin_add(tokens_.data(), size(tokens_), to_salt(salt));
    if (core.pairs().empty()) return py::make_tuple(finish_add(), py::none());
    return py::make_tuple(py::none(), pairs_array(core));
  }

  py::tuple finish_add() {
    require(PlanKind::kAdd);
    const Handle handle = core.finish_add();
    return py::make_tuple(handle, core.sequence(handle).num_computed);
  }

  // (buffer, copies, num_tokens, width, num_bytes, largest query_len). Without copies to make and with a buffer that is
  // large enough, or none, the step is done; otherwise the first is None and finish_prepare is still to be called.
  py::tuple prepare(const py::object& table, const py::object& seq_ids, const py::object& query_lens,
                    const py::object& buffer) {
    read_handles(table, seq_ids, handles_);
    read_integers("query_lens", query_lens, counts_);
    if (counts_.size() != handles_.size()) {
      throw std::invalid_argument("query_lens: expected one a sequence (" + std::to_string(handles_.size()) +
                                  "), got " + std::to_string(counts_.size()));
    }
    core.begin_prepare(handles_.data(), counts_.data(), size(handles_));
    const StepLayout layout = step_layout();
    int64_t longest = 0;
    for (const int64_t count : counts_) longest = std::max(longest, count);
    py::object copies = py::none();
    py::object step = py::none();
    if (!core.pairs().empty()) {
      copies = pairs_array(core);
    } else if (buffer.is_none() || num_bytes(buffer) >= layout.num_bytes()) {
      step = finish_prepare(buffer);
    }
    return py::make_tuple(step, copies, layout.num_tokens, layout.width, layout.num_bytes(), longest);
  }

  // Make the planned step so and write its tensors into `buffer`, or a new array; returns it.
  py::object finish_prepare(const py::object& buffer) {
    require(PlanKind::kPrepare);
    const StepLayout layout = step_layout();
    py::object out = buffer;
    if (buffer.is_none()) out = py::array_t<int64_t>((layout.num_bytes() + 7) / 8);
    if (num_bytes(out) < layout.num_bytes()) throw std::invalid_argument("buffer: too small for the step");
    core.finish_prepare(layout.arrays(out.cast<py::array>().mutable_data()));
    return out;
  }

  void commit(int64_t handle, const py::object& token_ids) {
    read_tokens(token_ids, scratch_, tokens_);
    const int64_t count = size(tokens_);
    core.commit(&handle, &count, 1, tokens_.data());
  }

  void commit_batch(const py::object& table, const py::object& seq_ids, const py::object& token_ids,
                    const py::object& counts) {
    read_handles(table, seq_ids, handles_);
    read_tokens(token_ids, scratch_, tokens_);
    if (counts.is_none()) {
      counts_.assign(handles_.size(), 1);
    } else {
      read_integers("counts", counts, counts_);
    }
    int64_t total = 0;
    for (const int64_t count : counts_) {
      if (count < 0) throw std::invalid_argument("counts: expected 0 or more, got " + std::to_string(count));
      total += count;
    }
    if (counts_.size() != handles_.size() || total != size(tokens_)) {
      throw std::invalid_argument("token_ids: expected " + std::to_string(total) + " for " +
                                  std::to_string(handles_.size()) + " sequences, got " + std::to_string(size(tokens_)));
    }
    core.commit(handles_.data(), counts_.data(), size(handles_), tokens_.data());
  }

  std::vector<Handle> fork(int64_t handle, int64_t count) {
    std::vector<Handle> out(static_cast<size_t>(count));
    core.fork(static_cast<Handle>(handle), count, out.data());
    return out;
  }

  py::array begin_swap_out(int64_t handle) {
    core.begin_swap_out(static_cast<Handle>(handle));
    return pairs_array(core);
  }

  void finish_swap_out() {
    require(PlanKind::kSwapOut);
    core.finish_swap_out();
  }

  int64_t finish_resume() {
    require(PlanKind::kResume);
    return core.finish_resume();
  }

  // (moves from the host?, pairs int64 [n, 2])
  py::tuple begin_resume(int64_t handle) {
    const bool swapped = core.sequence(handle).state == SequenceState::kSwapped;
    core.begin_resume(static_cast<Handle>(handle));
    return py::make_tuple(swapped, pairs_array(core));
  }

  py::tuple pin_prefix(const py::object& token_ids, const py::object& salt) {
    read_tokens(token_ids, scratch_, tokens_);
    const auto pinned = core.pin_prefix(tokens_.data(), size(tokens_), to_salt(salt));
    return py::make_tuple(pinned.id, pinned.num_tokens);
  }

  py::dict stats() {
    const Stats s = core.stats();
    using namespace py::literals;
    return py::dict("blocks_total"_a = s.blocks_total, "blocks_used"_a = s.blocks_used, "blocks_free"_a = s.blocks_free,
                    "blocks_cached"_a = s.blocks_cached, "blocks_shared"_a = s.blocks_shared,
                    "host_blocks_used"_a = s.host_blocks_used, "tokens"_a = s.tokens, "filled_slots"_a = s.filled_slots,
                    "reserved_slots"_a = s.reserved_slots, "prompt_tokens"_a = s.prompt_tokens,
                    "hit_tokens"_a = s.hit_tokens, "copies"_a = s.copies, "evictions"_a = s.evictions,
                    "swaps"_a = s.swaps);
  }

  // [num_blocks]: holders, and whether published.
  py::tuple snapshot() const {
    const auto count = static_cast<py::ssize_t>(core.pool().size());
    py::array_t<int32_t> holders(count);
    py::array_t<bool> published(count);
    for (py::ssize_t id = 0; id < count; ++id) {
      const Block& block = core.pool()[static_cast<BlockId>(id)];
      holders.mutable_data()[id] = block.num_holders;
      published.mutable_data()[id] = block.published;
    }
    return py::make_tuple(holders, published);
  }

  py::array events(bool clear) {
    const py::array_t<Event> out = to_array(core.log().events());
    if (clear) core.log().clear();
    return out;
  }

  py::object pins() const {
    py::dict out;
    for (const auto& [id, blocks] : core.pins()) out[py::int_(id)] = to_array(blocks);
    return out;
  }

  BlockManager core;

 private:
  template <typename T>
  static int64_t size(const std::vector<T>& values) {
    return static_cast<int64_t>(values.size());
  }

  static int64_t num_bytes(const py::object& array) { return array.cast<py::array>().nbytes(); }

  void require(PlanKind kind) const {
    if (core.plan_kind() != kind) throw std::runtime_error("nothing is planned that could be finished");
  }

  void read_prompt(const py::object& token_ids) {
    read_tokens(token_ids, scratch_, tokens_);
    if (tokens_.empty()) throw std::invalid_argument("token_ids: expected at least one token, got none");
  }

  StepLayout step_layout() const { return {core.step_seqs(), core.step_tokens(), core.step_width()}; }

  std::vector<Token> tokens_;
  std::vector<int64_t> scratch_, handles_, counts_;
};

// Keys of the full blocks of a prompt, uint8 [num_blocks, 32].
py::array hash_chain(const py::object& token_ids, int block_size, const py::object& salt) {
  std::vector<int64_t> scratch;
  std::vector<Token> tokens;
  read_tokens(token_ids, scratch, tokens);
  if (block_size < 1) throw std::invalid_argument("block_size: expected 1 or more, got " + std::to_string(block_size));
  const py::ssize_t count = static_cast<py::ssize_t>(tokens.size()) / block_size;
  py::array_t<uint8_t> out({count, py::ssize_t{32}});
  KeyChain keys(root_key(to_salt(salt)), tokens.data(), count, block_size);
  for (py::ssize_t i = 0; i < count; ++i) {
    const Digest key = keys.next();
    std::memcpy(out.mutable_data(i), key.data(), key.size());
  }
  return out;
}

const char* state_name(SequenceState state) {
  constexpr const char* kNames[] = {"vacant", "running", "swapped", "dropped"};
  return kNames[static_cast<int>(state)];
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Block manager of the paged KV cache: allocation, sharing, prefix index, preemption. Moves no tensors.";
  PYBIND11_NUMPY_DTYPE(Event, number, sequence, kind, block, other);
  auto& out_of_blocks = py::register_exception<OutOfBlocks>(m, "OutOfBlocks", PyExc_RuntimeError);
  out_of_blocks.attr("__doc__") = "Too few blocks are free, of the device or the host; nothing was changed.";
  out_of_blocks.attr("__module__") = "paged_attn";

  m.def("sha256", [](const py::bytes& data) {
    const std::string_view view = data;
    const Digest digest = sha256(view.data(), view.size());
    return py::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
  });
  m.def("sha256_has_instructions", &sha256_has_instructions);
  m.def("sha256_use_instructions", &sha256_use_instructions, py::arg("wanted"));
  m.def("hash_chain", &hash_chain, py::arg("token_ids"), py::arg("block_size"), py::arg("salt") = py::none());

  const auto seq = [](Manager& manager, int64_t handle) -> const Sequence& { return manager.core.sequence(handle); };
  py::class_<Manager>(m, "BlockManager")
      .def(py::init([](int64_t num_blocks, int block_size, int64_t num_host_blocks, int64_t watermark_blocks,
                       bool prefix_caching, bool partial_match, bool events) {
             if (num_blocks < 0 || num_blocks > INT_MAX || num_host_blocks < 0 || num_host_blocks > INT_MAX) {
               throw std::invalid_argument("num_blocks: expected 0 to 2147483647");
             }
             if (block_size < 1) throw std::invalid_argument("block_size: expected 1 or more");
             return new Manager(
                 {num_blocks, block_size, num_host_blocks, watermark_blocks, prefix_caching, partial_match, events});
           }),
           py::arg("num_blocks"), py::arg("block_size"), py::arg("num_host_blocks") = 0,
           py::arg("watermark_blocks") = 0, py::arg("prefix_caching") = true, py::arg("partial_match") = false,
           py::arg("events") = false)
      .def("can_add", [](Manager& m, const py::object& tokens,
                         const py::object& salt) { return static_cast<int>(m.can_add(tokens, salt)); })
      .def("add", &Manager::add)
      .def("finish_add", &Manager::finish_add)
      .def("prepare", &Manager::prepare, py::arg("table"), py::arg("seq_ids"), py::arg("query_lens"),
           py::arg("buffer") = py::none())
      .def("finish_prepare", &Manager::finish_prepare)
      .def("commit", &Manager::commit)
      .def("commit_batch", &Manager::commit_batch, py::arg("table"), py::arg("seq_ids"), py::arg("token_ids"),
           py::arg("counts") = py::none())
      .def("rollback", [](Manager& m, int64_t handle, int64_t n) { m.core.rollback(static_cast<Handle>(handle), n); })
      .def("fork", &Manager::fork)
      .def("free", [](Manager& m, int64_t handle) { m.core.free(static_cast<Handle>(handle)); })
      .def("release_before",
           [](Manager& m, int64_t handle, int64_t at) { m.core.release_before(static_cast<Handle>(handle), at); })
      .def("begin_swap_out", &Manager::begin_swap_out)
      .def("finish_swap_out", &Manager::finish_swap_out)
      .def("drop", [](Manager& m, int64_t handle) { m.core.drop(static_cast<Handle>(handle)); })
      .def("begin_resume", &Manager::begin_resume)
      .def("finish_resume", &Manager::finish_resume)
      .def("drop_plan", [](Manager& m) { m.core.drop_plan(); })
      .def("pin",
           [](Manager& m, int64_t handle) {
             const auto pinned = m.core.pin(static_cast<Handle>(handle));
             return py::make_tuple(pinned.id, pinned.num_tokens);
           })
      .def("pin_prefix", &Manager::pin_prefix)
      .def("unpin", [](Manager& m, int64_t id) { return m.core.unpin(id); })
      .def("pins", &Manager::pins)
      .def("reset_prefix_cache", [](Manager& m) { m.core.reset_prefix_cache(); })
      .def("length", [seq](Manager& m, int64_t handle) { return seq(m, handle).num_computed; })
      .def("num_tokens", [seq](Manager& m, int64_t handle) { return seq(m, handle).tokens.size(); })
      .def("tokens", [seq](Manager& m, int64_t handle) { return to_array(seq(m, handle).tokens); })
      .def("state", [seq](Manager& m, int64_t handle) { return state_name(seq(m, handle).state); })
      .def("serial", [seq](Manager& m, int64_t handle) { return seq(m, handle).serial; })
      .def("blocks", [seq](Manager& m, int64_t handle) { return to_array(seq(m, handle).blocks); })
      .def("num_free_blocks", [](Manager& m) { return m.core.pool().num_free(); })
      .def("stats", &Manager::stats)
      .def("snapshot", &Manager::snapshot)
      .def("events", &Manager::events, py::arg("clear") = false)
      .def("check", [](Manager& m) { return m.core.check(); })
      .def("corrupt", [](Manager& m, BlockId id, int32_t holders) { m.core.corrupt(id, holders); });
}

}  // namespace paged_attn::host
