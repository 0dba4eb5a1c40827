// Launch entry points for CUDA. Compiled by NVRTC (see nvrtc.py), never by the host compiler.
//
// dhs_resolve, dhs_adopt, dhs_locate, dhs_topk: one thread block per session, recycled page, token or line (grid.x), a
// multiple of 32 threads and at most kThreads. dhs_fetch_rows, dhs_copy_pages: any grid (4 to 32 blocks as the batch
// grows), the warps share the rows; `host` may be pinned host memory, or the arena itself for what dhs_adopt planned.
#include "adopt.cuh"
#include "fetch.cuh"
#include "locate.cuh"
#include "resolve.cuh"
#include "topk.cuh"

namespace {
// A block of this size has a multiprocessor to itself as far as registers go (the 1 in the launch bounds): left to
// itself, ptxas makes room for two blocks on some architectures, and spills.
constexpr int kThreads = 1024;
constexpr int kCopyThreads = 256;
}  // namespace

using dhs::int32;
using dhs::int64;
using dhs::uint8;

extern __shared__ int32 shared_words[];

// Dynamic shared memory: resolve_workspace(k, hot_rows) int32, unless `workspace` is given: then none, and that many
// int32 of it for each block. `hot_positions` and `lru` are those of one group.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
dhs_resolve(const int32* ready_map, const int32* host_map, const int32* tail_first, const int32* tail_pages,
            const int32* hot_pages, int32 slots, int32 pages, int32 hot_page_count, int32 page_rows,
            int32* hot_positions, int32* lru, int32 hot_rows, const int32* selected, const int32* batch_slots, int32 k,
            int32* locations, int32* fetch_counts, int32* fetch_host_rows, int32* fetch_device_rows, int32* counts,
            int32* workspace) {
  __shared__ int64 scratch[dhs::kBlockScratch];
  dhs::Block block(scratch);
  const int32 n = static_cast<int32>(blockIdx.x);
  int32* words =
      workspace == nullptr ? shared_words : workspace + n * static_cast<int64>(dhs::resolve_workspace(k, hot_rows));
  const dhs::Tables tables{
      {ready_map, tail_first, tail_pages, slots, pages, page_rows}, host_map, hot_pages, hot_page_count};
  const dhs::HotCaches hot{hot_positions, lru, hot_rows};
  const dhs::Selections batch{selected, batch_slots, k};
  const dhs::PlanLines out{locations, fetch_counts, fetch_host_rows, fetch_device_rows, counts};
  dhs::resolve_session(block, tables, hot, batch, n, out, words);
}

// Dynamic shared memory: adopt_workspace(k, hot_rows, page_rows) int32, unless `workspace` is given, as above.
// `latest` is that of the group: [slots, k].
extern "C" __global__ void __launch_bounds__(kThreads, 1)
dhs_adopt(const int32* hot_pages, int32 slots, int32 hot_page_count, int32 page_rows, int32* hot_positions, int32* lru,
          int32 hot_rows, const int32* latest, int32 k, const int32* recycled_slots, const int32* recycled_index,
          const int32* recycled_pages, int32 recycled_count, int32* counts, int32* source_rows, int32* target_rows,
          int32* workspace) {
  __shared__ int64 scratch[dhs::kBlockScratch];
  dhs::Block block(scratch);
  const int32 n = static_cast<int32>(blockIdx.x);
  int32* words = workspace == nullptr
                     ? shared_words
                     : workspace + n * static_cast<int64>(dhs::adopt_workspace(k, hot_rows, page_rows));
  const dhs::HotTables tables{hot_pages, slots, hot_page_count, page_rows};
  const dhs::HotCaches hot{hot_positions, lru, hot_rows};
  const dhs::RecycledPages recycled{recycled_slots, recycled_index, recycled_pages, recycled_count};
  const dhs::AdoptionLines out{counts, source_rows, target_rows};
  dhs::adopt_session(block, tables, hot, {latest, k}, recycled, n, out, words);
}

// masked: int32 [tokens].
extern "C" __global__ void __launch_bounds__(kThreads, 1)
dhs_locate(const int32* ready_map, const int32* tail_first, const int32* tail_pages, int32 slots, int32 pages,
           int32 page_rows, const int32* selected, const int32* token_slots, int32 k, int32* locations,
           int32* masked) {
  __shared__ int64 scratch[dhs::kBlockScratch];
  dhs::Block block(scratch);
  const int64 t = blockIdx.x;
  const dhs::DirectTables tables{ready_map, tail_first, tail_pages, slots, pages, page_rows};
  dhs::locate_token(block, tables, selected + t * k, token_slots[t], k, locations + t * k, masked + t);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
dhs_topk(const float* scores, int64 line_stride, const int32* visible, int32 k, int32* selected) {
  __shared__ int64 scratch[dhs::kBlockScratch];
  __shared__ int32 words[dhs::kTopkWorkspace];
  dhs::Block block(scratch);
  const int64 t = blockIdx.x;
  dhs::topk_line(block, scores + t * line_stride, visible[t], k, selected + t * k, words);
}

extern "C" __global__ void __launch_bounds__(kCopyThreads, 1)
dhs_fetch_rows(const uint8* host, uint8* device, int64 row_bytes, const int32* fetch_counts,
               const int32* fetch_host_rows, const int32* fetch_device_rows, int32 sessions, int32 k) {
  dhs::fetch_rows(dhs::Copier(), host, device, row_bytes, fetch_counts, fetch_host_rows, fetch_device_rows, sessions,
                  k);
}

extern "C" __global__ void __launch_bounds__(kCopyThreads, 1)
dhs_copy_pages(const uint8* source, uint8* target, int64 page_bytes, const int32* source_pages,
               const int32* target_pages, int32 pages) {
  dhs::copy_pages(dhs::Copier(), source, target, page_bytes, source_pages, target_pages, pages);
}
