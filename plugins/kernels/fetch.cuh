// Copies between the two tiers: the rows of a fetch plan, and whole pages.
#pragma once

#include "block.cuh"

namespace dhs {

// Rows of `sessions` plan lines, from the host pool of one source to its arena. The workers share the rows of all
// sessions as one sequence; each carries its place in it from line to line. Adopted rows are copied by it too: from
// rows of the arena to others of it, `host` being the arena.
DHS_FN void fetch_rows(const Copier& copier, const uint8* host, uint8* device, int64 row_bytes,
                       const int32* fetch_counts, const int32* fetch_host_rows, const int32* fetch_device_rows,
                       int32 sessions, int32 k) {
  int32 r = copier.index();
  for (int32 n = 0; n < sessions; ++n) {
    const int64 line = static_cast<int64>(n) * k;
    const int32 count = fetch_counts[n];
    for (; r < count; r += copier.count()) {
      copier.copy(device + fetch_device_rows[line + r] * row_bytes, host + fetch_host_rows[line + r] * row_bytes,
                  row_bytes);
    }
    r -= count;
  }
}

// Page source_pages[i] of one store to page target_pages[i] of another.
DHS_FN void copy_pages(const Copier& copier, const uint8* source, uint8* target, int64 page_bytes,
                       const int32* source_pages, const int32* target_pages, int32 pages) {
  for (int32 i = copier.index(); i < pages; i += copier.count()) {
    copier.copy(target + target_pages[i] * page_bytes, source + source_pages[i] * page_bytes, page_bytes);
  }
}

}  // namespace dhs
