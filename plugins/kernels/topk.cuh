// Exact top-k of one line of scores: the k largest, ties to the lower position, in ascending order of position.
//
// Radix select over order-preserving integer keys, digits of 11 bits (of 7 among few keys), then an ordered compaction.
// As soon as the keys that may still be chosen are few, their positions are listed, and what follows reads only these;
// so a long line is read twice unless most of its scores are nearly equal.
#pragma once

#include "block.cuh"

namespace dhs {

constexpr int32 kDigitBits = 11;
constexpr int32 kBins = 1 << kDigitBits;
constexpr int32 kFewDigitBits = 7;  // among few keys it costs less to look at more digits than at many empty bins
constexpr int32 kFew = 1024;
constexpr int32 kCandidates = 4096;
constexpr int32 kTopkWorkspace = kBins + 3 + kCandidates;  // int32 words: 24.6 KB

// Larger floats have larger keys. -0 has the key of +0, NaN that of -inf.
DHS_FN uint32 score_key(float score) {
  const uint32 bits = bits_of(score + 0.0f);  // turns -0 into +0
  const uint32 key = bits ^ (static_cast<uint32>(static_cast<int32>(bits) >> 31) | 0x80000000u);
  return score == score ? key : ~0xff800000u;
}

// The bin that holds the need-th largest key of a histogram, how many of its keys are needed, how many there are.
struct Digit {
  int32 bin;
  int32 need;
  int32 population;
};

template <class B>
DHS_FN Digit pick_bin(B& block, const int32* histogram, int32 bins, int32 need, int32* state) {
  block.scan(
      bins, [&](int32 i) { return histogram[bins - 1 - i]; },
      [&](int32 i, int32 larger) {
        const int32 population = histogram[bins - 1 - i];
        if (larger < need && need <= larger + population) {
          state[0] = bins - 1 - i;
          state[1] = need - larger;
          state[2] = population;
        }
      });
  return {state[0], state[1], state[2]};
}

// How far the search for the k-th largest key has come: its leading digits, and what the last of them left open.
struct Search {
  uint32 floor;  // known digits of the key, the others 0
  uint32 known;  // mask of the known digits
  int32 top;     // bits not known
  Digit digit;

  DHS_FN bool open() const { return top > 0 && digit.population > digit.need; }
};

// Finds the next digit among the keys of positions at(0) ... at(n - 1).
template <class B, class At>
DHS_FN void search_digit(B& block, const float* scores, int32 n, At at, Search& search, int32* histogram,
                         int32* state) {
  const int32 widest = n <= kFew ? kFewDigitBits : kDigitBits;
  const int32 bits = search.top < widest ? search.top : widest;
  const int32 shift = search.top - bits;
  const uint32 mask = (1u << bits) - 1u;
  block.each(1 << bits, [&](int32 bin) { histogram[bin] = 0; });
  block.each(n, [&](int32 i) {
    const uint32 key = score_key(scores[at(i)]);
    if ((key & search.known) == search.floor) block.atomic_add(histogram + ((key >> shift) & mask), 1);
  });
  search.digit = pick_bin(block, histogram, 1 << bits, search.digit.need, state);
  search.floor |= static_cast<uint32>(search.digit.bin) << shift;
  search.known |= mask << shift;
  search.top = shift;
}

// The selection is every key >= floor, except that of keys equal to it only the first digit.need are wanted.
template <class B, class At>
DHS_FN void emit_selection(B& block, const float* scores, int32 n, At at, const Search& search, int32* selected,
                           int32* state) {
  int32 last_tie = n;
  if (search.digit.population > search.digit.need) {
    block.compact(
        n, [&](int32 i) { return score_key(scores[at(i)]) == search.floor; },
        [&](int32 i, int32 rank) {
          if (rank == search.digit.need - 1) state[0] = i;
        });
    last_tie = state[0];
  }
  block.compact(
      n,
      [&](int32 i) {
        const uint32 key = score_key(scores[at(i)]);
        return key > search.floor || (key == search.floor && i <= last_tie);
      },
      [&](int32 i, int32 rank) { selected[rank] = at(i); });
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
  int32* candidates = state + 3;

  Search search{0, 0, 32, {0, k, visible}};
  const auto whole = [](int32 i) { return i; };
  int32 left = visible;  // keys that may still be chosen
  while (search.open() && (search.top == 32 || left > kCandidates)) {
    search_digit(block, scores, visible, whole, search, histogram, state);
    left = k - search.digit.need + search.digit.population;
  }
  if (!search.open()) {
    emit_selection(block, scores, visible, whole, search, selected, state);
    return;
  }
  block.compact(
      visible, [&](int32 i) { return score_key(scores[i]) >= search.floor; },
      [&](int32 i, int32 rank) { candidates[rank] = i; });
  const auto listed = [&](int32 i) { return candidates[i]; };
  while (search.open()) search_digit(block, scores, left, listed, search, histogram, state);
  emit_selection(block, scores, left, listed, search, selected, state);
}

}  // namespace dhs
