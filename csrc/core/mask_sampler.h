// The disjoint sampler on the host, one sample at a time. What it draws is said in dmjd/ops/masks.py.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cut.h"
#include "keyed.h"
#include "mask_plan.h"
#include "philox_row.h"
#include "rectangle.h"

// Loops over units are written for the vectoriser, and the version for the machine at hand is chosen when the library is
// loaded, so that one wheel serves every x86-64.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define DMJD_VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DMJD_VECTORISED
#endif

namespace dmjd {
namespace sampler {

DMJD_VECTORISED inline int count_below(const uint32_t* words, const uint8_t* eligible, int units, uint32_t limit) {
  int count = 0;
  for (int unit = 0; unit < units; ++unit) count += (words[unit] < limit) & eligible[unit];
  return count;
}

DMJD_VECTORISED inline void add(const uint8_t* more, int units, uint8_t* set) {
  for (int unit = 0; unit < units; ++unit) set[unit] |= more[unit];
}

DMJD_VECTORISED inline void complement(int units, uint8_t* set) {
  for (int unit = 0; unit < units; ++unit) set[unit] ^= 1;
}

// chosen[u] |= eligible[u] and words[u] is below the limit.
DMJD_VECTORISED inline void choose_below(const uint32_t* words, const uint8_t* eligible, int units, uint32_t limit,
                                         uint8_t* chosen) {
  for (int unit = 0; unit < units; ++unit) chosen[unit] |= (words[unit] < limit) & eligible[unit];
}

// eligible[u] = 1 where covered is `wanted` and the view has not hidden u.
DMJD_VECTORISED inline void find_eligible(const uint8_t* covered, const uint8_t* hidden, int units, uint8_t wanted,
                                          uint8_t* eligible) {
  for (int unit = 0; unit < units; ++unit) eligible[unit] = (covered[unit] == wanted) & (hidden[unit] ^ 1);
}

constexpr int kByte = 8;  // flags that are listed at once

// at[byte]: the positions of its set bits in ascending order, then zeros.
struct SetBits {
  int32_t at[256][kByte] = {};

  constexpr SetBits() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int bit = 0, count = 0; bit < kByte; ++bit) {
        if (byte >> bit & 1) at[byte][count++] = bit;
      }
    }
  }
};

inline constexpr SetBits kSetBits;

inline void list_bits(int byte, int first, int32_t* out) {
  int32_t ids[kByte];
  for (int i = 0; i < kByte; ++i) ids[i] = kSetBits.at[byte][i] + first;
  std::memcpy(out, ids, sizeof(ids));
}

// Lists the tokens whose flag is 0 and those whose flag is 1, without a branch that would be random. Reads flags, and
// writes both lists, up to kByte beyond their ends.
DMJD_VECTORISED inline void list_tokens(const uint8_t* hidden, int tokens, int32_t* shown, int32_t* gone) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "flag i must be byte i of the word");
  int masked = 0;
  for (int token = 0; token < tokens; token += kByte) {
    uint64_t flags;
    std::memcpy(&flags, hidden + token, sizeof(flags));
    const int byte = static_cast<int>(flags * 0x0102040810204080u >> 56);  // bit i = flag i
    list_bits(byte, token, gone + masked);
    list_bits(byte ^ 255, token, shown + token - masked);
    masked += static_cast<int>(flags * 0x0101010101010101u >> 56);  // their sum
  }
}

// Slots from `first` on hold the listed tokens.
DMJD_VECTORISED inline void write_list(const int32_t* list, int length, int first, int64_t* out, int64_t* restore) {
  for (int i = 0; i < length; ++i) out[i] = list[i];
  for (int i = 0; i < length; ++i) restore[list[i]] = first + i;
}

}  // namespace sampler

// The first view's row of each output; view k's lies k * batch rows further on.
struct MaskRows {
  int64_t* visible;
  int64_t* masked;
  int64_t* restore;
  bool* mask;

  MaskRows advanced(int64_t count, const MaskShape& shape) const {
    return {visible + count * shape.visible(), masked + count * shape.masked(), restore + count * shape.tokens(),
            mask + count * shape.tokens()};
  }
};

// Holds the scratch memory of one thread. The plan must outlive it.
class MaskSampler {
 public:
  explicit MaskSampler(const MaskPlan& plan)
      : plan_(plan),
        units_(plan.units()),
        words_(4 * static_cast<size_t>(blocks() + kPhiloxStep - 1)),
        covered_(units_),
        hidden_(units_ + sampler::kByte),
        eligible_(units_),
        unit_of_(plan.tokens()),
        token_hidden_(plan.tokens() + sampler::kByte),
        shown_(plan.tokens() + 2 * sampler::kByte),
        gone_(plan.tokens() + 2 * sampler::kByte) {
    for (int token = 0; token < plan.tokens(); ++token) unit_of_[token] = plan.unit_of(token);
  }

  void draw(int64_t sample, PhiloxKey key, int64_t batch, MaskRows rows) {
    std::fill(covered_.begin(), covered_.end(), 0);
    for (int view = 0; view < plan_.views; ++view) {
      std::fill(hidden_.begin(), hidden_.end(), 0);
      if (plan_.regulation == Regulation::complementary) {
        keep_next(sample, key, view);
      } else {
        hide_view(sample, key, view);
      }
      write(rows);
      rows = rows.advanced(batch, plan_);
    }
  }

 private:
  int blocks() const { return (units_ + 3) / 4; }

  void draw_words(int64_t sample, PhiloxKey key, int view) {
    philox_row(keyed_counter(0, Domain::mask, view, sample), key, blocks(), words_.data());
  }

  // Each view keeps the lowest of what no earlier view kept, by the words of the first.
  void keep_next(int64_t sample, PhiloxKey key, int view) {
    if (view == 0) draw_words(sample, key, 0);
    const int kept = units_ - plan_.hidden;
    choose(0, units_ - view * kept, kept);
    sampler::add(hidden_.data(), units_, covered_.data());
    sampler::complement(units_, hidden_.data());
  }

  void hide_view(int64_t sample, PhiloxKey key, int view) {
    const bool independent = plan_.regulation == Regulation::none;
    int quota[2] = {independent ? plan_.hidden : plan_.fresh[view], 0};  // of units never hidden, of units hidden before
    quota[1] = plan_.hidden - quota[0];
    if (independent) std::fill(covered_.begin(), covered_.end(), 0);
    int free[2] = {units_ - covered_units(view), covered_units(view)};  // units of each kind not yet hidden in this view

    if (!plan_.aspects.empty()) draw_rectangles(sample, key, view, quota, free);
    draw_words(sample, key, view);
    for (uint8_t kind = 0; kind < 2; ++kind) choose(kind, free[kind], quota[kind]);
    sampler::add(hidden_.data(), units_, covered_.data());
  }

  int covered_units(int view) const {
    if (plan_.regulation == Regulation::none) return 0;
    int covered = 0;
    for (int earlier = 0; earlier < view; ++earlier) covered += plan_.fresh[earlier];
    return covered;
  }

  void draw_rectangles(int64_t sample, PhiloxKey key, int view, int (&quota)[2], int (&free)[2]) {
    const RectangleLaw law = {plan_.unit_rows(), plan_.unit_columns(), plan_.smallest,
                              static_cast<int>(plan_.aspects.size()), plan_.aspects.data()};
    for (int attempt = 0, failures = 0; attempt < kMaxAttempts && failures < kMaxFailures; ++attempt) {
      const int remaining = quota[0] + quota[1];
      if (remaining == 0) return;
      const PhiloxCounter words = philox4x32(keyed_counter(attempt, Domain::rectangle, view, sample), key);
      const Rectangle rectangle = draw_rectangle(words, remaining, law);
      const int added = rectangle.units() - hidden_within(rectangle);
      const bool taken = added > 0 && added <= remaining && take(rectangle, quota, free);
      failures = taken ? 0 : failures + 1;
    }
  }

  int hidden_within(const Rectangle& rectangle) const {
    int hidden = 0;
    for (int row = 0; row < rectangle.height; ++row) {
      const uint8_t* line = &hidden_[(rectangle.top + row) * plan_.unit_columns() + rectangle.left];
      for (int column = 0; column < rectangle.width; ++column) hidden += line[column];
    }
    return hidden;
  }

  // Hides the rectangle's units in raster order while the quota of their kind lasts; false if none was left to take.
  bool take(const Rectangle& rectangle, int (&quota)[2], int (&free)[2]) {
    const int before = quota[0] + quota[1];
    for (int row = 0; row < rectangle.height; ++row) {
      const int first = (rectangle.top + row) * plan_.unit_columns() + rectangle.left;
      for (int unit = first; unit < first + rectangle.width; ++unit) {
        const uint8_t kind = covered_[unit];
        if (hidden_[unit] || quota[kind] == 0) continue;
        hidden_[unit] = 1;
        --quota[kind];
        --free[kind];
      }
    }
    return quota[0] + quota[1] < before;
  }

  // Hides the `count` lowest (word, unit) of the `free` units of a kind.
  void choose(uint8_t kind, int free, int count) {
    if (count == 0) return;
    sampler::find_eligible(covered_.data(), hidden_.data(), units_, kind, eligible_.data());
    if (count == free) return sampler::add(eligible_.data(), units_, hidden_.data());
    Cut cut = find_cut(free, count, [&](uint32_t limit) {
      return sampler::count_below(words_.data(), eligible_.data(), units_, limit);
    });
    sampler::choose_below(words_.data(), eligible_.data(), units_, cut.word, hidden_.data());
    for (int unit = 0; cut.ties > 0 && unit < units_; ++unit) {
      if (!eligible_[unit] || words_[unit] != cut.word) continue;
      hidden_[unit] = 1;
      --cut.ties;
    }
  }

  void write(const MaskRows& rows) {
    const int tokens = plan_.tokens(), visible = plan_.visible();
    const uint8_t* hidden = hidden_.data();
    if (tokens != units_) {
      for (int token = 0; token < tokens; ++token) token_hidden_[token] = hidden_[unit_of_[token]];
      hidden = token_hidden_.data();
    }
    sampler::list_tokens(hidden, tokens, shown_.data(), gone_.data());
    sampler::write_list(shown_.data(), visible, 0, rows.visible, rows.restore);
    sampler::write_list(gone_.data(), plan_.masked(), visible, rows.masked, rows.restore);
    std::copy_n(hidden, tokens, rows.mask);
  }

  const MaskPlan& plan_;
  const int units_;
  std::vector<uint32_t> words_;
  std::vector<uint8_t> covered_, hidden_, eligible_;  // 0 or 1 per unit
  std::vector<int> unit_of_;                          // of each token
  std::vector<uint8_t> token_hidden_;                 // 0 or 1 per token
  std::vector<int32_t> shown_, gone_;
};

}  // namespace dmjd
