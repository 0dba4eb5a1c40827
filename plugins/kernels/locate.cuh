// The direct rule: a position whose page is in the tail or READY has its row in the arena.
#pragma once

#include "block.cuh"

namespace dhs {

constexpr int32 kTailPages = 3;

// The slot tables that the direct rule reads; see `ResolverTables` in host.py for shapes and values.
struct DirectTables {
  const int32* ready_map;
  const int32* tail_first;
  const int32* tail_pages;
  int32 slots;
  int32 pages;
  int32 page_rows;
};

// One session's lines of these tables.
struct DirectLines {
  const int32* ready;
  int32 tail_first;
  int32 tail[kTailPages];
  int32 pages;
  int32 page_rows;

  DHS_FN DirectLines(const DirectTables& tables, int32 slot)
      : ready(tables.ready_map + static_cast<int64>(slot) * tables.pages),
        tail_first(tables.tail_first[slot]),
        pages(tables.pages),
        page_rows(tables.page_rows) {
    for (int32 i = 0; i < kTailPages; ++i) tail[i] = tables.tail_pages[slot * kTailPages + i];
  }

  // A negative position becomes a huge one, so that one comparison checks both ends.
  DHS_FN uint32 page_of(int32 position) const {
    return static_cast<uint32>(position) / static_cast<uint32>(page_rows);
  }
  DHS_FN bool is_position(int32 position) const {
    return position >= 0 && page_of(position) < static_cast<uint32>(pages);
  }

  // Arena row by the direct rule, or -1.
  DHS_FN int32 direct_row(int32 position) const {
    const uint32 page = page_of(position);
    if (position < 0 || page >= static_cast<uint32>(pages)) return -1;
    int32 device_page = -1;
    if (tail_first >= 0 && page - static_cast<uint32>(tail_first) < static_cast<uint32>(kTailPages)) {
      const uint32 column = page % kTailPages;
      device_page = column == 0 ? tail[0] : column == 1 ? tail[1] : tail[2];  // registers, not a stack array
    }
    if (device_page < 0) device_page = ready[page];
    if (device_page < 0) return -1;
    return device_page * page_rows + (position - static_cast<int32>(page) * page_rows);
  }
};

// Locations of one token's selection. masked: number of entries that are neither padding nor found.
template <class B>
DHS_FN void locate_token(B& block, const DirectTables& tables, const int32* selected, int32 slot, int32 k, int32* locations,
                         int32* masked) {
  if (slot < 0 || slot >= tables.slots) {
    block.each(k, [&](int32 i) { locations[i] = -1; });
    block.each(1, [&](int32) { *masked = 0; });
    return;
  }
  const DirectLines session(tables, slot);
  const int32 lost = block.sum(k, [&](int32 i) {
    const int32 position = selected[i];
    const int32 row = session.direct_row(position);
    locations[i] = row;
    return static_cast<int32>(row < 0 && position != -1);
  });
  block.each(1, [&](int32) { *masked = lost; });
}

}  // namespace dhs
