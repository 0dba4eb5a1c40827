// The resolver for one query per session: selected positions to arena rows, with an exact LRU hot cache.
//
// Entries found by the direct rule are done in the first phase; if that is all of them, nothing else is read. The
// rest are "pending": their distinct positions go into an open-addressing hash table, one walk over the hot slots in
// LRU order finds those that are hot and compacts the others, and the positions still missing take the first of these.
// Cost: O(K + B) per session, however long its history is.
#pragma once

#include "locate.cuh"

namespace dhs {

// The slot tables; see `ResolverTables` in host.py for shapes and values.
struct Tables {
  DirectTables direct;
  const int32* host_map;
  const int32* hot_pages;
  int32 hot_page_count;
};

// The device pages of one session's hot cache.
struct HotPages {
  const int32* pages;
  int32 count;
  int32 page_rows;

  // Arena row of a slot of the hot cache.
  DHS_FN int32 row(int32 hot_slot) const {
    const int32 page = hot_slot / page_rows;
    return pages[page] * page_rows + (hot_slot - page * page_rows);
  }

  template <class B>
  DHS_FN bool complete(B& block) const {
    return block.sum(count, [&](int32 i) { return static_cast<int32>(pages[i] < 0); }) == 0;
  }
};

// One session's lines of them.
struct SessionTables : DirectLines {
  const int32* host;
  HotPages hot;

  DHS_FN SessionTables(const Tables& tables, int32 slot)
      : DirectLines(tables.direct, slot),
        host(tables.host_map + static_cast<int64>(slot) * tables.direct.pages),
        hot{tables.hot_pages + static_cast<int64>(slot) * tables.hot_page_count, tables.hot_page_count,
            tables.direct.page_rows} {}

  // Row in the host pool, or -1. The position must be one.
  DHS_FN int32 host_row(int32 position) const {
    const int32 page = static_cast<int32>(page_of(position));
    const int32 host_page = host[page];
    return host_page < 0 ? -1 : host_page * page_rows + (position - page * page_rows);
  }
};

enum Count { kDirect, kHot, kHost, kPadding, kMasked, kCounts };

// Hot caches of one index group: [slots, rows] each.
struct HotCaches {
  int32* positions;
  int32* lru;
  int32 rows;
};

struct Selections {
  const int32* selected;  // [sessions, k]
  const int32* slots;     // [sessions]
  int32 k;
};

// See `Plan` in host.py.
struct PlanLines {
  int32* locations;
  int32* fetch_counts;
  int32* fetch_host_rows;
  int32* fetch_device_rows;
  int32* counts;
};

// A power of two, at most half full.
DHS_FN constexpr int32 hash_size(int32 entries) {
  int32 size = 2;
  while (size < 2 * entries) size *= 2;
  return size;
}

// int32 words of workspace for one session. K = 2048 and B = 4096: 20,480 words, 80 KiB; with B = 32,768 it is
// 192 KiB, still within the 227 KiB of shared memory that a block of SM 9.0 can have. Beyond that it may be global.
DHS_FN constexpr int32 resolve_workspace(int32 k, int32 hot_rows) { return 3 * hash_size(k) + 2 * k + hot_rows; }

struct Workspace {
  int32* keys;       // [hash size] position, -1 empty
  int32* first;      // [hash size] first pending entry with that position
  int32* found;      // [hash size] kNotFound, hot slot h, or fetched_into(h)
  int32* pending;    // [k] index in the selection
  int32* place;      // [k] place in the hash table, or -1 if the entry is not a position
  int32* untouched;  // [hot rows] slots that hold nothing of this step, the least recently used first

  DHS_FN Workspace(int32* words, int32 k)
      : keys(words),
        first(keys + hash_size(k)),
        found(first + hash_size(k)),
        pending(found + hash_size(k)),
        place(pending + k),
        untouched(place + k) {}
};

constexpr int32 kNotFound = -1;
DHS_FN int32 fetched_into(int32 hot_slot) { return -2 - hot_slot; }
DHS_FN int32 slot_of(int32 found) { return found >= 0 ? found : -2 - found; }

// Multiplicative hashing (Knuth, The Art of Computer Programming, volume 3, 6.4), linear probing.
class PositionHash {
 public:
  DHS_FN PositionHash(int32* keys, int32 entries) : keys_(keys), size_(hash_size(entries)), shift_(32) {
    for (int32 size = size_; size > 1; size /= 2) --shift_;
  }

  DHS_FN int32 size() const { return size_; }

  template <class B>
  DHS_FN int32 insert(B& block, int32 position) const {
    for (int32 at = start(position);; at = (at + 1) & (size_ - 1)) {
      const int32 key = block.atomic_cas(keys_ + at, -1, position);
      if (key == -1 || key == position) return at;
    }
  }

  DHS_FN int32 find(int32 position) const {
    for (int32 at = start(position);; at = (at + 1) & (size_ - 1)) {
      const int32 key = keys_[at];
      if (key == position) return at;
      if (key == -1) return -1;
    }
  }

 private:
  DHS_FN int32 start(int32 position) const {
    return static_cast<int32>((static_cast<uint32>(position) * 2654435769u) >> shift_);
  }

  int32* keys_;
  int32 size_, shift_;
};

// Writes the location of every entry found directly, lists the others that are not padding. Returns their number.
template <class B>
DHS_FN int32 split_direct(B& block, const SessionTables& session, const int32* selected, int32 k, int32* locations,
                          int32* pending) {
  return block.compact(
      k,
      [&](int32 i) {
        const int32 row = session.direct_row(selected[i]);
        locations[i] = row;
        return row < 0 && selected[i] != -1;
      },
      [&](int32 i, int32 rank) { pending[rank] = i; });
}

// Hashes the distinct pending positions with their first appearance.
template <class B>
DHS_FN PositionHash hash_pending(B& block, const SessionTables& session, const int32* selected, int32 pending,
                                 const Workspace& work) {
  const PositionHash hash(work.keys, pending);
  block.each(hash.size(), [&](int32 at) {
    work.keys[at] = -1;
    work.first[at] = pending;
    work.found[at] = kNotFound;
  });
  block.each(pending, [&](int32 j) {
    const int32 position = selected[work.pending[j]];
    int32 at = -1;
    if (session.is_position(position)) {
      at = hash.insert(block, position);
      block.atomic_min(work.first + at, j);
    }
    work.place[j] = at;
  });
  return hash;
}

// Marks the pending positions that are hot; lists the slots of no use to this step. Returns the number of these.
template <class B>
DHS_FN int32 walk_hot(B& block, const PositionHash& hash, const int32* positions, const int32* lru, int32 hot_rows,
                      const Workspace& work) {
  return block.compact(
      hot_rows,
      [&](int32 r) {
        const int32 hot_slot = lru[r];
        const int32 position = positions[hot_slot];
        const int32 at = position < 0 ? -1 : hash.find(position);
        if (at >= 0) work.found[at] = hot_slot;
        return at < 0;
      },
      [&](int32 r, int32 rank) { work.untouched[rank] = lru[r]; });
}

// Gives each missing position that the host has the least recently used slot, in order of first appearance, and
// writes the fetch plan. Returns the number of rows to fetch.
template <class B>
DHS_FN int32 take_victims(B& block, const SessionTables& session, const int32* selected, int32 pending,
                          int32* positions, const Workspace& work, int32* host_rows, int32* device_rows) {
  return block.compact(
      pending,
      [&](int32 j) {
        const int32 at = work.place[j];
        return at >= 0 && work.first[at] == j && work.found[at] == kNotFound &&
               session.host_row(selected[work.pending[j]]) >= 0;
      },
      [&](int32 j, int32 rank) {
        const int32 position = selected[work.pending[j]];
        const int32 victim = work.untouched[rank];
        work.found[work.place[j]] = fetched_into(victim);
        positions[victim] = position;
        host_rows[rank] = session.host_row(position);
        device_rows[rank] = session.hot.row(victim);
      });
}

// New order: the untouched slots that were not taken, then those used in this step by first appearance.
template <class B>
DHS_FN void reorder(B& block, int32 pending, int32 untouched, int32 taken, const Workspace& work, int32* lru) {
  const int32 stale = untouched - taken;
  block.each(stale, [&](int32 r) { lru[r] = work.untouched[taken + r]; });
  block.compact(
      pending,
      [&](int32 j) {
        const int32 at = work.place[j];
        return at >= 0 && work.first[at] == j && work.found[at] != kNotFound;
      },
      [&](int32 j, int32 rank) { lru[stale + rank] = slot_of(work.found[work.place[j]]); });
}

// Writes the locations of the pending entries. Returns how many were hot, plus 2^32 times how many are fetched.
template <class B>
DHS_FN int64 locate_pending(B& block, const SessionTables& session, int32 pending, const Workspace& work,
                            int32* locations) {
  return block.sum(pending, [&](int32 j) -> int64 {
    const int32 found = work.place[j] < 0 ? kNotFound : work.found[work.place[j]];
    if (found == kNotFound) return 0;
    locations[work.pending[j]] = session.hot.row(slot_of(found));
    return found >= 0 ? int64{1} : int64{1} << 32;
  });
}

// Resolves line n of a batch. `words` holds resolve_workspace(k, hot rows) int32.
template <class B>
DHS_FN void resolve_session(B& block, const Tables& tables, const HotCaches& hot, const Selections& batch, int32 n,
                            const PlanLines& out, int32* words) {
  const int32 k = batch.k;
  const int32 slot = batch.slots[n];
  const int64 line = static_cast<int64>(n) * k;
  const int32* selected = batch.selected + line;
  int32* locations = out.locations + line;
  int32* host_rows = out.fetch_host_rows + line;
  int32* device_rows = out.fetch_device_rows + line;

  int32 pending = 0, padding = 0, fetched = 0;
  int64 found = 0;
  const bool real = slot >= 0 && slot < tables.direct.slots;
  if (real) {
    const SessionTables session(tables, slot);
    const Workspace work(words, k);
    padding = block.sum(k, [&](int32 i) { return static_cast<int32>(selected[i] == -1); });
    pending = split_direct(block, session, selected, k, locations, work.pending);
    if (pending > 0 && hot.rows > 0 && session.hot.complete(block)) {
      int32* positions = hot.positions + static_cast<int64>(slot) * hot.rows;
      int32* lru = hot.lru + static_cast<int64>(slot) * hot.rows;
      const PositionHash hash = hash_pending(block, session, selected, pending, work);
      const int32 untouched = walk_hot(block, hash, positions, lru, hot.rows, work);
      fetched = take_victims(block, session, selected, pending, positions, work, host_rows, device_rows);
      reorder(block, pending, untouched, fetched, work, lru);
      found = locate_pending(block, session, pending, work, locations);
    }
  } else {
    block.each(k, [&](int32 i) { locations[i] = -1; });
  }

  block.each(k - fetched, [&](int32 i) {
    host_rows[fetched + i] = -1;
    device_rows[fetched + i] = -1;
  });
  block.each(1, [&](int32) {
    const int32 hits = static_cast<int32>(found & 0xffffffff);
    const int32 misses = static_cast<int32>(found >> 32);
    int32* counts = out.counts + n * kCounts;
    counts[kDirect] = real ? k - padding - pending : 0;
    counts[kHot] = hits;
    counts[kHost] = misses;
    counts[kPadding] = padding;
    counts[kMasked] = pending - hits - misses;
    out.fetch_counts[n] = fetched;
  });
}

}  // namespace dhs
