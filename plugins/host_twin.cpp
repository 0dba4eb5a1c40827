// Python bindings of the kernels compiled for the host. Arguments are checked here, in full, before a kernel runs;
// host.py documents them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/adopt.cuh"
#include "kernels/fetch.cuh"
#include "kernels/locate.cuh"
#include "kernels/resolve.cuh"
#include "kernels/topk.cuh"
#include "shuffled_block.hpp"

namespace nb = nanobind;

namespace {

using dhs::int32;
using dhs::int64;
using dhs::uint8;

using In = nb::ndarray<nb::ro>;
using Out = nb::ndarray<>;

[[noreturn]] void fail(const std::string& what) { throw nb::value_error(what.c_str()); }

template <class T>
constexpr const char* type_name();
template <>
constexpr const char* type_name<int32>() {
  return "int32";
}
template <>
constexpr const char* type_name<float>() {
  return "float32";
}
template <>
constexpr const char* type_name<uint8>() {
  return "uint8";
}

constexpr int64 kAny = -1;

template <class A>
std::string shape_of(const A& array) {
  std::string text = "[";
  for (std::size_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + "]";
}

std::string shape_of(std::initializer_list<int64> shape) {
  std::string text = "[";
  for (int64 size : shape) text += (text.size() > 1 ? ", " : "") + (size == kAny ? "any" : std::to_string(size));
  return text + "]";
}

// Checks dtype, device, shape (kAny: any size) and, from axis `packed_from` on, that the array is C-contiguous.
template <class T, class A>
void check(const char* name, const A& array, std::initializer_list<int64> shape, std::size_t packed_from = 0) {
  const std::string label = name;
  if (array.dtype() != nb::dtype<T>() || array.device_type() != nb::device::cpu::value) {
    fail(label + " must be of dtype " + type_name<T>() + " and in host memory; got " +
         std::to_string(array.dtype().bits) + " bits of DLPack type code " +
         std::to_string(static_cast<int>(array.dtype().code)));
  }
  bool fits = array.ndim() == shape.size();
  for (std::size_t i = 0; fits && i < shape.size(); ++i) {
    const int64 wanted = shape.begin()[i];
    fits = wanted == kAny || static_cast<int64>(array.shape(i)) == wanted;
  }
  if (!fits) fail(label + " has shape " + shape_of(array) + ", expected " + shape_of(shape));
  if (array.size() == 0) return;
  int64 stride = 1;
  for (std::size_t i = array.ndim(); i-- > packed_from;) {
    if (array.shape(i) != 1 && array.stride(i) != stride) {
      fail(label + " of shape " + shape_of(array) + " must be C-contiguous; axis " + std::to_string(i) +
           " has a stride of " + std::to_string(array.stride(i)) + " elements instead of " + std::to_string(stride));
    }
    stride *= static_cast<int64>(array.shape(i));
  }
}

template <class T>
const T* pointer(const In& array) {
  return static_cast<const T*>(array.data());
}

template <class T>
T* pointer(const Out& array) {
  return static_cast<T*>(array.data());
}

template <class A>
int32 size(const A& array, std::size_t axis) {
  const std::size_t length = array.shape(axis);
  if (length > 0x7fffffff) fail("an axis of " + std::to_string(length) + " does not fit int32");
  return static_cast<int32>(length);
}

void check_page_rows(int64 page_rows) {
  if (page_rows < 1 || page_rows > 0x7fffffff) fail("page_rows=" + std::to_string(page_rows) + " must be positive");
}

void check_threads(int32 threads) {
  if (threads < 0) fail("threads.count=" + std::to_string(threads) + " must be 0 (in order) or positive");
}

void check_slots(const int32* slots, int32 n, int32 limit, bool distinct) {
  std::vector<bool> seen(static_cast<std::size_t>(distinct ? limit : 0));
  for (int32 i = 0; i < n; ++i) {
    const int32 slot = slots[i];
    if (slot < -1 || slot >= limit) {
      fail("slots[" + std::to_string(i) + "]=" + std::to_string(slot) + "; legal range: -1 to " +
           std::to_string(limit - 1));
    }
    if (!distinct || slot < 0) continue;
    if (seen[static_cast<std::size_t>(slot)]) {
      fail("slots[" + std::to_string(i) + "]=" + std::to_string(slot) + " is in the batch twice");
    }
    seen[static_cast<std::size_t>(slot)] = true;
  }
}

// Calls f with the block that `threads` asks for; see `Threads` in host.py.
template <class F>
void with_block(int32 threads, std::uint64_t seed, F f) {
  nb::gil_scoped_release released;
  if (threads == 0) {
    dhs::HostBlock block;
    f(block);
  } else {
    dhs::ShuffledBlock block(threads, seed);
    f(block);
  }
}

// The checked hot caches of a group.
dhs::HotCaches hot_caches(const Out& positions, const Out& lru, int32 group, const In& hot_pages, int32 page_rows) {
  const int64 table_slots = static_cast<int64>(hot_pages.shape(0));
  check<int32>("hot.positions", positions, {kAny, table_slots, kAny});
  const int32 groups = size(positions, 0), rows = size(positions, 2);
  check<int32>("hot.lru", lru, {groups, table_slots, rows});
  if (static_cast<int64>(size(hot_pages, 1)) * page_rows != rows) {
    fail("hot.positions has " + std::to_string(rows) + " rows a slot, but hot_pages has " +
         std::to_string(hot_pages.shape(1)) + " pages of page_rows=" + std::to_string(page_rows));
  }
  if (group < 0 || group >= groups) {
    fail("group=" + std::to_string(group) + "; legal range: 0 to " + std::to_string(groups - 1));
  }
  const int64 offset = group * table_slots * rows;
  return {pointer<int32>(positions) + offset, pointer<int32>(lru) + offset, rows};
}

void resolve(In ready_map, In host_map, In tail_first, In tail_pages, In hot_pages, int32 page_rows,
             Out hot_positions, Out lru, int32 group, In selected, In slots, Out locations, Out fetch_counts,
             Out fetch_host_rows, Out fetch_device_rows, Out counts, int32 threads, std::uint64_t seed) {
  check<int32>("ready_map", ready_map, {kAny, kAny});
  const int32 table_slots = size(ready_map, 0), pages = size(ready_map, 1);
  check<int32>("host_map", host_map, {table_slots, pages});
  check<int32>("tail_first", tail_first, {table_slots});
  check<int32>("tail_pages", tail_pages, {table_slots, dhs::kTailPages});
  check<int32>("hot_pages", hot_pages, {table_slots, kAny});
  check_page_rows(page_rows);
  const dhs::HotCaches hot = hot_caches(hot_positions, lru, group, hot_pages, page_rows);
  check<int32>("selected", selected, {kAny, kAny});
  const int32 sessions = size(selected, 0), k = size(selected, 1);
  if (k < 1) fail("selected has shape " + shape_of(selected) + "; K must be positive");
  if (hot.rows > 0 && hot.rows < k) {
    fail("the hot cache has " + std::to_string(hot.rows) + " rows, fewer than the K=" + std::to_string(k) +
         " of one selection; legal: 0, or K and up");
  }
  check<int32>("slots", slots, {sessions});
  check_slots(pointer<int32>(slots), sessions, table_slots, true);
  check<int32>("out.locations", locations, {kAny, k});
  const int32 capacity = size(locations, 0);
  if (capacity < sessions) {
    fail("the plan has room for " + std::to_string(capacity) + " sessions, the batch has " + std::to_string(sessions));
  }
  check<int32>("out.fetch_counts", fetch_counts, {capacity});
  check<int32>("out.fetch_host_rows", fetch_host_rows, {capacity, k});
  check<int32>("out.fetch_device_rows", fetch_device_rows, {capacity, k});
  check<int32>("out.counts", counts, {capacity, dhs::kCounts});
  check_threads(threads);

  const dhs::DirectTables direct{pointer<int32>(ready_map), pointer<int32>(tail_first), pointer<int32>(tail_pages),
                                 table_slots, pages, page_rows};
  const dhs::Tables tables{direct, pointer<int32>(host_map), pointer<int32>(hot_pages), size(hot_pages, 1)};
  const dhs::Selections batch{pointer<int32>(selected), pointer<int32>(slots), k};
  const dhs::PlanLines out{pointer<int32>(locations), pointer<int32>(fetch_counts), pointer<int32>(fetch_host_rows),
                           pointer<int32>(fetch_device_rows), pointer<int32>(counts)};
  std::vector<int32> words(static_cast<std::size_t>(dhs::resolve_workspace(k, hot.rows)));
  with_block(threads, seed, [&](auto& block) {
    for (int32 n = 0; n < sessions; ++n) dhs::resolve_session(block, tables, hot, batch, n, out, words.data());
  });
}

// Checks that pages are numbered from 0 and that their rows are numbered by int32.
void check_pages(const std::string& name, const In& pages, int32 page_rows) {
  const int32 limit = 0x7fffffff / page_rows;
  for (int32 i = 0; i < size(pages, 0); ++i) {
    const int32 page = pointer<int32>(pages)[i];
    if (page >= 0 && page < limit) continue;
    fail(name + "[" + std::to_string(i) + "]=" + std::to_string(page) + "; legal range: 0 to " +
         std::to_string(limit - 1));
  }
}

void adopt(In hot_pages, int32 page_rows, Out hot_positions, Out lru, int32 group, In latest, In slots, In index,
           In pages, Out counts, Out source_rows, Out target_rows, int32 threads, std::uint64_t seed) {
  check<int32>("hot_pages", hot_pages, {kAny, kAny});
  check_page_rows(page_rows);
  const int32 table_slots = size(hot_pages, 0);
  const dhs::HotCaches hot = hot_caches(hot_positions, lru, group, hot_pages, page_rows);
  check<int32>("latest", latest, {table_slots, kAny});
  const int32 k = size(latest, 1);
  check<int32>("slots", slots, {kAny});
  const int32 lines = size(slots, 0);
  check_slots(pointer<int32>(slots), lines, table_slots, false);
  check<int32>("index", index, {lines});
  check<int32>("pages", pages, {lines});
  check_pages("index", index, page_rows);
  check_pages("pages", pages, page_rows);
  check<int32>("out.counts", counts, {lines});
  check<int32>("out.source_rows", source_rows, {lines, page_rows});
  check<int32>("out.target_rows", target_rows, {lines, page_rows});
  check_threads(threads);

  const dhs::HotTables tables{pointer<int32>(hot_pages), table_slots, size(hot_pages, 1), page_rows};
  const dhs::Latest selections{pointer<int32>(latest), k};
  const dhs::RecycledPages recycled{pointer<int32>(slots), pointer<int32>(index), pointer<int32>(pages), lines};
  const dhs::AdoptionLines out{pointer<int32>(counts), pointer<int32>(source_rows), pointer<int32>(target_rows)};
  std::vector<int32> words(static_cast<std::size_t>(dhs::adopt_workspace(k, hot.rows, page_rows)));
  with_block(threads, seed, [&](auto& block) {
    for (int32 n = 0; n < lines; ++n) {
      dhs::adopt_session(block, tables, hot, selections, recycled, n, out, words.data());
    }
  });
}

int64 locate(In ready_map, In tail_first, In tail_pages, int32 page_rows, In selected, In slots, Out locations,
             int32 threads, std::uint64_t seed) {
  check<int32>("ready_map", ready_map, {kAny, kAny});
  const int32 table_slots = size(ready_map, 0), pages = size(ready_map, 1);
  check<int32>("tail_first", tail_first, {table_slots});
  check<int32>("tail_pages", tail_pages, {table_slots, dhs::kTailPages});
  check_page_rows(page_rows);
  check<int32>("selected", selected, {kAny, kAny});
  const int32 tokens = size(selected, 0), k = size(selected, 1);
  check<int32>("slots", slots, {tokens});
  check_slots(pointer<int32>(slots), tokens, table_slots, false);
  check<int32>("out", locations, {tokens, k});
  check_threads(threads);

  const dhs::DirectTables tables{pointer<int32>(ready_map), pointer<int32>(tail_first), pointer<int32>(tail_pages),
                                 table_slots, pages, page_rows};
  int64 masked = 0;
  with_block(threads, seed, [&](auto& block) {
    for (int32 t = 0; t < tokens; ++t) {
      const int64 line = static_cast<int64>(t) * k;
      int32 lost = 0;
      dhs::locate_token(block, tables, pointer<int32>(selected) + line, pointer<int32>(slots)[t], k,
                        pointer<int32>(locations) + line, &lost);
      masked += lost;
    }
  });
  return masked;
}

void topk(In scores, In visible, int32 k, Out selected, int32 threads, std::uint64_t seed) {
  check<float>("scores", scores, {kAny, kAny}, 1);
  const int32 lines = size(scores, 0), stride = size(scores, 1);
  if (k < 1) fail("k=" + std::to_string(k) + " must be positive");
  check<int32>("visible", visible, {lines});
  check<int32>("out", selected, {lines, k});
  check_threads(threads);
  for (int32 t = 0; t < lines; ++t) {
    const int32 seen = pointer<int32>(visible)[t];
    if (seen < 0 || seen > stride) {
      fail("visible[" + std::to_string(t) + "]=" + std::to_string(seen) + "; legal range: 0 to " +
           std::to_string(stride) + ", the length of a line of scores");
    }
  }

  const int64 line_stride = lines > 1 ? scores.stride(0) : 0;
  std::vector<int32> words(static_cast<std::size_t>(dhs::kTopkWorkspace));
  with_block(threads, seed, [&](auto& block) {
    for (int32 t = 0; t < lines; ++t) {
      dhs::topk_line(block, pointer<float>(scores) + t * line_stride, pointer<int32>(visible)[t], k,
                     pointer<int32>(selected) + static_cast<int64>(t) * k, words.data());
    }
  });
}

// Checks that each line of a copy plan has room for its count.
void check_counts(const std::string& name, const int32* counts, int32 lines, int32 room) {
  for (int32 n = 0; n < lines; ++n) {
    if (counts[n] >= 0 && counts[n] <= room) continue;
    fail(name + "[" + std::to_string(n) + "]=" + std::to_string(counts[n]) + "; legal range: 0 to " +
         std::to_string(room));
  }
}

// Checks that the rows which the lines of a copy plan name are in their store.
void check_rows(const std::string& name, const In& rows, const int32* counts, int32 lines,
                std::size_t store_rows) {
  for (int32 n = 0; n < lines; ++n) {
    const int32* line = pointer<int32>(rows) + static_cast<int64>(n) * size(rows, 1);
    for (int32 r = 0; r < counts[n]; ++r) {
      if (line[r] >= 0 && static_cast<std::size_t>(line[r]) < store_rows) continue;
      fail(name + "[" + std::to_string(n) + ", " + std::to_string(r) + "]=" + std::to_string(line[r]) +
           "; its store has " + std::to_string(store_rows) + " rows");
    }
  }
}

void fetch_rows(In host, Out device, In fetch_counts, In fetch_host_rows, In fetch_device_rows, int32 sessions) {
  check<uint8>("host", host, {kAny, kAny});
  check<uint8>("device", device, {kAny, static_cast<int64>(host.shape(1))});
  check<int32>("plan.fetch_host_rows", fetch_host_rows, {kAny, kAny});
  const int32 capacity = size(fetch_host_rows, 0), k = size(fetch_host_rows, 1);
  check<int32>("plan.fetch_device_rows", fetch_device_rows, {capacity, k});
  check<int32>("plan.fetch_counts", fetch_counts, {capacity});
  if (sessions < 0 || sessions > capacity) {
    fail("plan.sessions=" + std::to_string(sessions) + "; legal range: 0 to " + std::to_string(capacity));
  }
  const int32* counts = pointer<int32>(fetch_counts);
  check_counts("plan.fetch_counts", counts, sessions, k);
  check_rows("plan.fetch_host_rows", fetch_host_rows, counts, sessions, host.shape(0));
  check_rows("plan.fetch_device_rows", fetch_device_rows, counts, sessions, device.shape(0));
  nb::gil_scoped_release released;
  dhs::fetch_rows(dhs::Copier(), pointer<uint8>(host), pointer<uint8>(device), static_cast<int64>(host.shape(1)),
                  counts, pointer<int32>(fetch_host_rows), pointer<int32>(fetch_device_rows), sessions, k);
}

void copy_rows(Out arena, In counts, In source_rows, In target_rows) {
  check<uint8>("arena", arena, {kAny, kAny});
  check<int32>("adoption.source_rows", source_rows, {kAny, kAny});
  const int32 lines = size(source_rows, 0), width = size(source_rows, 1);
  check<int32>("adoption.target_rows", target_rows, {lines, width});
  check<int32>("adoption.counts", counts, {lines});
  check_counts("adoption.counts", pointer<int32>(counts), lines, width);
  check_rows("adoption.source_rows", source_rows, pointer<int32>(counts), lines, arena.shape(0));
  check_rows("adoption.target_rows", target_rows, pointer<int32>(counts), lines, arena.shape(0));
  nb::gil_scoped_release released;
  dhs::fetch_rows(dhs::Copier(), pointer<uint8>(arena), pointer<uint8>(arena), static_cast<int64>(arena.shape(1)),
                  pointer<int32>(counts), pointer<int32>(source_rows), pointer<int32>(target_rows), lines, width);
}

void copy_pages(In source, Out target, In source_pages, In target_pages, int32 page_rows) {
  check<uint8>("source", source, {kAny, kAny});
  check<uint8>("target", target, {kAny, static_cast<int64>(source.shape(1))});
  check<int32>("source_pages", source_pages, {kAny});
  const int32 pages = size(source_pages, 0);
  check<int32>("target_pages", target_pages, {pages});
  check_page_rows(page_rows);
  const auto check_ids = [&](const char* name, const int32* ids, std::size_t rows) {
    const int64 store_pages = static_cast<int64>(rows) / page_rows;
    for (int32 i = 0; i < pages; ++i) {
      if (ids[i] >= 0 && ids[i] < store_pages) continue;
      fail(std::string(name) + "[" + std::to_string(i) + "]=" + std::to_string(ids[i]) + "; its store has " +
           std::to_string(store_pages) + " pages");
    }
  };
  check_ids("source_pages", pointer<int32>(source_pages), source.shape(0));
  check_ids("target_pages", pointer<int32>(target_pages), target.shape(0));
  nb::gil_scoped_release released;
  dhs::copy_pages(dhs::Copier(), pointer<uint8>(source), pointer<uint8>(target),
                  static_cast<int64>(source.shape(1)) * page_rows, pointer<int32>(source_pages),
                  pointer<int32>(target_pages), pages);
}

}  // namespace

NB_MODULE(_host, m) {
  m.def("resolve", &resolve);
  m.def("locate", &locate);
  m.def("topk", &topk);
  m.def("adopt", &adopt);
  m.def("fetch_rows", &fetch_rows);
  m.def("copy_rows", &copy_rows);
  m.def("copy_pages", &copy_pages);
}
