// Exact top-k of one line of scores: the k largest, ties to the lower position, in ascending order of position.
//
// Radix select over order-preserving integer keys, 11 + 11 + 10 bits, then an ordered compaction. At most five reads
// of the line; usually three, as the search ends with the first digit whose bin is taken whole.
#pragma once

#include "block.cuh"

namespace dhs {

constexpr int32 kDigitBits = 11;
constexpr int32 kBins = 1 << kDigitBits;
constexpr int32 kTopkWorkspace = kBins + 3;  // int32 words: 8.2 KB

// Larger floats have larger keys. -0 has the key of +0, NaN that of -inf.
DHS_FN uint32 score_key(float score) {
  const uint32 bits = bits_of(score);
  const uint32 magnitude = bits & 0x7fffffffu;
  constexpr uint32 kInfinity = 0x7f800000u;
  if (magnitude > kInfinity) return ~(kInfinity | 0x80000000u);
  if (magnitude == 0) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The bin that holds the need-th largest key of a histogram, how many of its keys are needed, how many there are.
struct Digit {
  int32 bin;
  int32 need;
  int32 population;
};

template <class B>
DHS_FN Digit pick_bin(B& block, const int32* histogram, int32 need, int32* state) {
  block.scan(
      kBins, [&](int32 i) { return histogram[kBins - 1 - i]; },
      [&](int32 i, int32 larger) {
        const int32 population = histogram[kBins - 1 - i];
        if (larger < need && need <= larger + population) {
          state[0] = kBins - 1 - i;
          state[1] = need - larger;
          state[2] = population;
        }
      });
  return {state[0], state[1], state[2]};
}

// `words` holds kTopkWorkspace int32; selected has room for k.
template <class B>
DHS_FN void topk_line(B& block, const float* scores, int32 visible, int32 k, int32* selected, int32* words) {
  if (visible <= k) {
    block.each(k, [&](int32 i) { selected[i] = i < visible ? i : -1; });
    return;
  }
  int32* histogram = words;
  int32* state = words + kBins;

  uint32 floor = 0, known = 0;  // the leading digits of the k-th largest key, and a mask of them
  Digit digit{0, k, visible};
  for (int32 top = 32; top > 0 && digit.population > digit.need;) {
    const int32 bits = top < kDigitBits ? top : kDigitBits;
    const int32 shift = top - bits;
    const uint32 mask = (1u << bits) - 1u;
    block.each(kBins, [&](int32 bin) { histogram[bin] = 0; });
    block.each(visible, [&](int32 i) {
      const uint32 key = score_key(scores[i]);
      if ((key & known) == floor) block.atomic_add(histogram + ((key >> shift) & mask), 1);
    });
    digit = pick_bin(block, histogram, digit.need, state);
    floor |= static_cast<uint32>(digit.bin) << shift;
    known |= mask << shift;
    top = shift;
  }

  // Now the selection is every key >= floor, except that of equal keys only the first digit.need are wanted.
  int32 last_tie = visible;
  if (digit.population > digit.need) {
    block.compact(
        visible, [&](int32 i) { return score_key(scores[i]) == floor; },
        [&](int32 i, int32 rank) {
          if (rank == digit.need - 1) state[0] = i;
        });
    last_tie = state[0];
  }
  block.compact(
      visible,
      [&](int32 i) {
        const uint32 key = score_key(scores[i]);
        return key > floor || (key == floor && i <= last_tie);
      },
      [&](int32 i, int32 rank) { selected[rank] = i; });
}

}  // namespace dhs
