// Adoption: the rows of a page that leaves the tail enter the hot cache from where they are on the device.
//
// Of the page's rows those that the latest resolve selected are taken, in order of position, as if that resolve had
// missed them: each gets the least recently used slot of the hot cache that holds nothing of the selection.
// Where nothing of the page was selected, or all of it is hot, that is found out in O(K + B) and nothing is written.
#pragma once

#include "resolve.cuh"

namespace dhs {

// The slot table that adoption reads; see `ResolverTables` in host.py for shapes and values.
struct HotTables {
  const int32* hot_pages;
  int32 slots;
  int32 hot_page_count;
  int32 page_rows;
};

// What the latest resolve of every slot selected.
struct Latest {
  const int32* selected;  // [slots, k]
  int32 k;
};

// See `adopt` in host.py: [count] each.
struct RecycledPages {
  const int32* slots;
  const int32* index;
  const int32* pages;
  int32 count;
};

// See `Adoption` in host.py.
struct AdoptionLines {
  int32* counts;
  int32* source_rows;
  int32* target_rows;
};

// The hot cache of one session.
struct HotLines {
  HotPages pages;
  int32* positions;
  int32* lru;
  int32 rows;

  DHS_FN HotLines(const HotTables& tables, const HotCaches& hot, int32 slot)
      : pages{tables.hot_pages + static_cast<int64>(slot) * tables.hot_page_count, tables.hot_page_count,
              tables.page_rows},
        positions(hot.positions + static_cast<int64>(slot) * hot.rows),
        lru(hot.lru + static_cast<int64>(slot) * hot.rows),
        rows(hot.rows) {}
};

// int32 words of workspace for one session. K = 2048, B = 4096 and pages of 64 rows: 8,384 words, 33 KiB.
DHS_FN constexpr int32 adopt_workspace(int32 k, int32 hot_rows, int32 page_rows) {
  return hash_size(k) + hot_rows + 3 * page_rows;
}

struct AdoptionWorkspace {
  int32* keys;     // [hash size] position, -1 empty
  int32* order;    // [hot rows] the new LRU order
  int32* missed;   // [page rows] 1 where a row is selected and not hot
  int32* rows;     // [page rows] these rows, ascending
  int32* victims;  // [page rows] places in the LRU order whose slots they take

  DHS_FN AdoptionWorkspace(int32* words, int32 k, int32 hot_rows, int32 page_rows)
      : keys(words),
        order(keys + hash_size(k)),
        missed(order + hot_rows),
        rows(missed + page_rows),
        victims(rows + page_rows) {}
};

// The positions of one page.
struct PageSpan {
  int32 first;
  int32 rows;

  DHS_FN bool holds(int32 position) const {
    return static_cast<uint32>(position) - static_cast<uint32>(first) < static_cast<uint32>(rows);
  }
};

// Hashes the distinct positions of a selection.
template <class B>
DHS_FN PositionHash hash_selection(B& block, const int32* selected, int32 k, int32* keys) {
  const PositionHash hash(keys, k);
  block.each(hash.size(), [&](int32 at) { keys[at] = -1; });
  block.each(k, [&](int32 i) {
    if (selected[i] >= 0) hash.insert(block, selected[i]);
  });
  return hash;
}

// Lists the rows of a page that are selected and not hot, in ascending order. Returns their number.
template <class B>
DHS_FN int32 list_missed(B& block, const PageSpan& page, const int32* selected, int32 k, const HotLines& hot,
                         const AdoptionWorkspace& work) {
  block.each(page.rows, [&](int32 row) { work.missed[row] = 0; });
  block.each(k, [&](int32 i) {
    if (page.holds(selected[i])) work.missed[selected[i] - page.first] = 1;
  });
  block.each(hot.rows, [&](int32 hot_slot) {
    if (page.holds(hot.positions[hot_slot])) work.missed[hot.positions[hot_slot] - page.first] = 0;
  });
  return block.compact(
      page.rows, [&](int32 row) { return work.missed[row] != 0; },
      [&](int32 row, int32 rank) { work.rows[rank] = row; });
}

// Chooses the victims of `missed` rows and writes the order without them. Returns their number.
template <class B>
DHS_FN int32 choose_victims(B& block, const PositionHash& selection, int32 missed, const HotLines& hot,
                            const AdoptionWorkspace& work) {
  const auto selected = [&](int32 r) {
    const int32 position = hot.positions[hot.lru[r]];
    return position >= 0 && selection.find(position) >= 0;
  };
  const int32 unselected = block.compact(
      hot.rows, [&](int32 r) { return !selected(r); },
      [&](int32 r, int32 rank) {
        if (rank < missed) work.victims[rank] = r;
      });
  const int32 taken = missed < unselected ? missed : unselected;
  const int32 last = taken > 0 ? work.victims[taken - 1] : -1;
  block.compact(
      hot.rows, [&](int32 r) { return r > last || selected(r); },
      [&](int32 r, int32 rank) { work.order[rank] = hot.lru[r]; });
  return taken;
}

// Gives the victims' slots to the first `taken` missed rows, which become the most recent, and writes the copies.
template <class B>
DHS_FN void take_over(B& block, const PageSpan& page, int32 device_page, int32 taken, const HotLines& hot,
                      const AdoptionWorkspace& work, int32* source_rows, int32* target_rows) {
  block.each(taken, [&](int32 j) {
    const int32 victim = hot.lru[work.victims[j]];
    work.order[hot.rows - taken + j] = victim;
    hot.positions[victim] = page.first + work.rows[j];
    source_rows[j] = device_page * page.rows + work.rows[j];
    target_rows[j] = hot.pages.row(victim);
  });
  block.each(hot.rows, [&](int32 r) { hot.lru[r] = work.order[r]; });
}

// Adopts the rows of line n.
template <class B>
DHS_FN void adopt_page(B& block, const HotTables& tables, const HotCaches& caches, const Latest& latest,
                       const RecycledPages& recycled, int32 n, const AdoptionLines& out, int32* words) {
  const int32 slot = recycled.slots[n];
  const PageSpan page{recycled.index[n] * tables.page_rows, tables.page_rows};
  int32* source_rows = out.source_rows + static_cast<int64>(n) * page.rows;
  int32* target_rows = out.target_rows + static_cast<int64>(n) * page.rows;

  int32 taken = 0;
  if (slot >= 0 && slot < tables.slots && caches.rows > 0) {
    const HotLines hot(tables, caches, slot);
    const AdoptionWorkspace work(words, latest.k, hot.rows, page.rows);
    const int32* selected = latest.selected + static_cast<int64>(slot) * latest.k;
    const int32 missed = list_missed(block, page, selected, latest.k, hot, work);
    if (missed > 0 && hot.pages.complete(block)) {
      const PositionHash selection = hash_selection(block, selected, latest.k, work.keys);
      taken = choose_victims(block, selection, missed, hot, work);
      take_over(block, page, recycled.pages[n], taken, hot, work, source_rows, target_rows);
    }
  }

  block.each(page.rows - taken, [&](int32 i) {
    source_rows[taken + i] = -1;
    target_rows[taken + i] = -1;
  });
  block.each(1, [&](int32) { out.counts[n] = taken; });
}

// Adopts all pages of the session of line n, in order, if n is its first line. `words` holds
// adopt_workspace(k, hot rows, page rows) int32.
template <class B>
DHS_FN void adopt_session(B& block, const HotTables& tables, const HotCaches& hot, const Latest& latest,
                          const RecycledPages& recycled, int32 n, const AdoptionLines& out, int32* words) {
  const int32 slot = recycled.slots[n];
  const auto same_slot = [&](int32 i) { return recycled.slots[i] == slot; };
  if (block.sum(n, [&](int32 i) { return static_cast<int32>(same_slot(i)); }) > 0) return;
  for (int32 i = n; i < recycled.count; ++i) {
    if (same_slot(i)) adopt_page(block, tables, hot, latest, recycled, i, out, words);
  }
}

}  // namespace dhs
