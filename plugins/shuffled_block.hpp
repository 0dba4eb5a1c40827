// A Block that does what a GPU may do and a test must survive: threads in any order.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/block.cuh"

namespace dhs {

// Emulates `threads` threads. The indices of a phase run in a random order; a compaction goes chunk by chunk like the
// CUDA one, and what it emits for a chunk runs, at random, before or after the flags of the next chunk.
class ShuffledBlock {
 public:
  ShuffledBlock(int32 threads, std::uint64_t seed) : threads_(threads), random_(seed * 2 + 1) {}

  template <class F>
  void each(int32 n, F f) {
    for (int32 i : shuffled(0, n)) f(i);
  }

  template <class F>
  auto sum(int32 n, F f) -> decltype(f(0)) {
    decltype(f(0)) total = 0;
    for (int32 i : shuffled(0, n)) total += f(i);
    return total;
  }

  template <class Get, class Put>
  auto scan(int32 n, Get get, Put put) -> decltype(get(0)) {
    using T = decltype(get(0));
    T total = 0;
    for (int32 start = 0; start < n; start += threads_) {
      const int32 end = start + threads_ < n ? start + threads_ : n;
      std::vector<T> values(static_cast<std::size_t>(end - start));
      for (int32 i : shuffled(start, end)) values[static_cast<std::size_t>(i - start)] = get(i);
      std::vector<T> prefix(values.size());
      std::exclusive_scan(values.begin(), values.end(), prefix.begin(), total);
      total = prefix.back() + values.back();
      for (int32 i : shuffled(start, end)) put(i, prefix[static_cast<std::size_t>(i - start)]);
    }
    return total;
  }

  template <class Flag, class Emit>
  int32 compact(int32 n, Flag flag, Emit emit) {
    using Ranked = std::pair<int32, int32>;
    int32 rank = 0;
    std::vector<Ranked> late;
    for (int32 start = 0; start < n; start += threads_) {
      const int32 end = start + threads_ < n ? start + threads_ : n;
      std::vector<bool> flags(static_cast<std::size_t>(end - start));
      for (int32 i : shuffled(start, end)) flags[static_cast<std::size_t>(i - start)] = flag(i);
      for (const auto& [i, r] : late) emit(i, r);
      late.clear();
      std::vector<Ranked> now;
      for (int32 i = start; i < end; ++i) {
        if (flags[static_cast<std::size_t>(i - start)]) now.emplace_back(i, rank++);
      }
      shuffle(now);
      for (const Ranked& one : now) {
        if (next() % 2 == 0) {
          emit(one.first, one.second);
        } else {
          late.push_back(one);
        }
      }
    }
    for (const auto& [i, r] : late) emit(i, r);
    return rank;
  }

  static void atomic_add(int32* at, int32 value) { HostBlock::atomic_add(at, value); }
  static void atomic_min(int32* at, int32 value) { HostBlock::atomic_min(at, value); }
  static int32 atomic_cas(int32* at, int32 expected, int32 desired) {
    return HostBlock::atomic_cas(at, expected, desired);
  }

 private:
  // xorshift64* (Vigna, An experimental exploration of Marsaglia's xorshift generators, scrambled, 2016).
  std::uint64_t next() {
    random_ ^= random_ >> 12;
    random_ ^= random_ << 25;
    random_ ^= random_ >> 27;
    return (random_ * 2685821657736338717ull) >> 32;
  }

  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[next() % i]);
  }

  std::vector<int32> shuffled(int32 start, int32 end) {
    std::vector<int32> order(static_cast<std::size_t>(end > start ? end - start : 0));
    std::iota(order.begin(), order.end(), start);
    shuffle(order);
    return order;
  }

  int32 threads_;
  std::uint64_t random_;
};

}  // namespace dhs
