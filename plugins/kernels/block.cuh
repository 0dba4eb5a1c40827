// The thread block that kernels are written for, once for CUDA and once for the host.
//
// A kernel is a sequence of phases. In a phase every thread runs the same function over its share of the indices;
// a barrier ends it. Within a phase there is no order between indices, so a phase may only write what no other index
// of it reads, or go through the atomics. Both implementations have these members (i and n are int32):
//
//   each(n, f)              f(i) for i in [0, n)
//   sum(n, f) -> T          sum of f(i); T is the return type of f, an integer of 4 or 8 bytes
//   scan(n, get, put) -> T  put(i, sum of get(j) for j < i); returns the sum of all
//   compact(n, flag, emit)  emit(i, rank) for every i with flag(i), rank counting them in order of i; returns their
//                           number. emit(i) may run before or after flag(j) of any j that is not i
//   atomic_add / atomic_min / atomic_cas on int32
//
// Every member ends in a barrier, and what is returned is the same in all threads. Nothing here needs a standard
// header under NVRTC, which has none.
#pragma once

#if defined(__CUDACC__)
#define DHS_FN __device__ __forceinline__
#else
#define DHS_FN inline
#include <cstring>
#endif

namespace dhs {

using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint8 = unsigned char;
static_assert(sizeof(int32) == 4 && sizeof(int64) == 8, "positions are 4 bytes, offsets 8");

#if defined(__CUDACC__)

constexpr int32 kWarp = 32;
constexpr int32 kMaxWarps = 32;
constexpr int32 kBlockScratch = 2 * kMaxWarps;  // int64 of shared memory that a Block needs

// A CUDA thread block of one dimension, a multiple of 32 and at most 1024 threads.
class Block {
 public:
  DHS_FN explicit Block(int64* scratch)
      : scratch_(scratch),
        thread_(static_cast<int32>(threadIdx.x)),
        threads_(static_cast<int32>(blockDim.x)),
        lane_(thread_ % kWarp),
        warp_(thread_ / kWarp) {}

  template <class F>
  DHS_FN void each(int32 n, F f) {
    for (int32 i = thread_; i < n; i += threads_) f(i);
    __syncthreads();
  }

  template <class F>
  DHS_FN auto sum(int32 n, F f) -> decltype(f(0)) {
    decltype(f(0)) mine = 0;
    for (int32 i = thread_; i < n; i += threads_) mine += f(i);
    decltype(f(0)) total;
    before(mine, 0, total);
    __syncthreads();
    return total;
  }

  template <class Get, class Put>
  DHS_FN auto scan(int32 n, Get get, Put put) -> decltype(get(0)) {
    decltype(get(0)) base = 0;
    int32 half = 0;
    for (int32 start = 0; start < n; start += threads_, half ^= 1) {
      const int32 i = start + thread_;
      decltype(get(0)) total;
      const auto prefix = before(i < n ? get(i) : decltype(get(0)){0}, half, total);
      if (i < n) put(i, base + prefix);
      base += total;
    }
    __syncthreads();
    return base;
  }

  template <class Flag, class Emit>
  DHS_FN int32 compact(int32 n, Flag flag, Emit emit) {
    int32 base = 0;
    int32 half = 0;
    for (int32 start = 0; start < n; start += threads_, half ^= 1) {
      const int32 i = start + thread_;
      const bool chosen = i < n && flag(i);
      const uint32 ballot = __ballot_sync(kAll, chosen);
      int32 total;
      const int32 warps_before = across_warps(__popc(ballot), half, total);
      if (chosen) emit(i, base + warps_before + __popc(ballot & ((1u << lane_) - 1u)));
      base += total;
    }
    __syncthreads();
    return base;
  }

  static DHS_FN void atomic_add(int32* at, int32 value) { atomicAdd(at, value); }
  static DHS_FN void atomic_min(int32* at, int32 value) { atomicMin(at, value); }
  static DHS_FN int32 atomic_cas(int32* at, int32 expected, int32 desired) { return atomicCAS(at, expected, desired); }

 private:
  static constexpr uint32 kAll = 0xffffffffu;

  // Sum over the threads before this one; `total` over all. One barrier.
  template <class T>
  DHS_FN T before(T mine, int32 half, T& total) {
    T upto = mine;
    for (int32 step = 1; step < kWarp; step *= 2) {
      const T other = __shfl_up_sync(kAll, upto, step);
      if (lane_ >= step) upto += other;
    }
    return across_warps(__shfl_sync(kAll, upto, kWarp - 1), half, total) + upto - mine;
  }

  // Sum over the warps before this one, of a value that a warp's threads share. Consecutive calls alternate the
  // halves of the scratch: whoever writes a half again has passed the barrier after which it was last read.
  template <class T>
  DHS_FN T across_warps(T mine, int32 half, T& total) {
    int64* totals = scratch_ + half * kMaxWarps;
    if (lane_ == 0) totals[warp_] = mine;
    __syncthreads();
    T upto = lane_ < threads_ / kWarp ? static_cast<T>(totals[lane_]) : T{0};
    const T own = upto;
    for (int32 step = 1; step < kWarp; step *= 2) {
      const T other = __shfl_up_sync(kAll, upto, step);
      if (lane_ >= step) upto += other;
    }
    total = __shfl_sync(kAll, upto, kWarp - 1);
    return __shfl_sync(kAll, upto - own, warp_);
  }

  int64* scratch_;
  int32 thread_, threads_, lane_, warp_;
};

// One of the workers that share a copy: a warp of the grid.
class Copier {
 public:
  DHS_FN Copier()
      : index_(static_cast<int32>((blockIdx.x * blockDim.x + threadIdx.x) / kWarp)),
        count_(static_cast<int32>(gridDim.x * blockDim.x / kWarp)),
        lane_(static_cast<int32>(threadIdx.x % kWarp)) {}

  DHS_FN int32 index() const { return index_; }
  DHS_FN int32 count() const { return count_; }

  // Copies in the widest words that both addresses and the length allow.
  DHS_FN void copy(uint8* to, const uint8* from, int64 bytes) const {
    const auto odd = reinterpret_cast<unsigned long long>(to) | reinterpret_cast<unsigned long long>(from) |
                     static_cast<unsigned long long>(bytes);
    if (odd % sizeof(int4) == 0) {
      copy_as<int4>(to, from, bytes);
    } else if (odd % sizeof(int32) == 0) {
      copy_as<int32>(to, from, bytes);
    } else {
      copy_as<uint8>(to, from, bytes);
    }
  }

 private:
  template <class Word>
  DHS_FN void copy_as(uint8* to, const uint8* from, int64 bytes) const {
    for (int64 i = lane_; i < bytes / static_cast<int64>(sizeof(Word)); i += kWarp) {
      reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
    }
  }

  int32 index_, count_, lane_;
};

DHS_FN uint32 bits_of(float value) { return __float_as_uint(value); }

#else

// The same on the host: one thread that runs every phase in order.
class HostBlock {
 public:
  template <class F>
  void each(int32 n, F f) {
    for (int32 i = 0; i < n; ++i) f(i);
  }

  template <class F>
  auto sum(int32 n, F f) -> decltype(f(0)) {
    decltype(f(0)) total = 0;
    for (int32 i = 0; i < n; ++i) total += f(i);
    return total;
  }

  template <class Get, class Put>
  auto scan(int32 n, Get get, Put put) -> decltype(get(0)) {
    decltype(get(0)) total = 0;
    for (int32 i = 0; i < n; ++i) {
      const auto value = get(i);
      put(i, total);
      total += value;
    }
    return total;
  }

  template <class Flag, class Emit>
  int32 compact(int32 n, Flag flag, Emit emit) {
    int32 rank = 0;
    for (int32 i = 0; i < n; ++i) {
      if (flag(i)) emit(i, rank++);
    }
    return rank;
  }

  static void atomic_add(int32* at, int32 value) { *at += value; }
  static void atomic_min(int32* at, int32 value) {
    if (value < *at) *at = value;
  }
  static int32 atomic_cas(int32* at, int32 expected, int32 desired) {
    const int32 old = *at;
    if (old == expected) *at = desired;
    return old;
  }
};

class Copier {
 public:
  int32 index() const { return 0; }
  int32 count() const { return 1; }
  void copy(uint8* to, const uint8* from, int64 bytes) const {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
};

inline uint32 bits_of(float value) {
  uint32 bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

#endif

}  // namespace dhs
