// csrc/core against published numbers and plain definitions. No torch, no framework: a failed check prints itself and
// fails the test.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "../core/cut.h"
#include "../core/mask_sampler.h"
#include "../core/philox.h"
#include "../core/philox_row.h"
#include "../core/rectangle.h"

namespace {

int failures = 0;

// Known-answer vectors of Random123 (kat_vectors, "philox4x32 10").
void check_philox(const char* name, dmjd::PhiloxCounter counter, dmjd::PhiloxKey key, dmjd::PhiloxCounter expected) {
  const dmjd::PhiloxCounter got = dmjd::philox4x32(counter, key);
  for (int i = 0; i < 4; ++i) {
    if (got.word[i] != expected.word[i]) {
      std::printf("philox4x32, %s, word %d: %08x, expected %08x\n", name, i, got.word[i], expected.word[i]);
      ++failures;
    }
  }
}

void check(bool good, const char* what) {
  if (good) return;
  std::printf("failed: %s\n", what);
  ++failures;
}

void check_philox_row() {
  const dmjd::PhiloxKey key = {{7, 0xfffffff0}};
  const dmjd::PhiloxCounter counter = dmjd::keyed_counter(0, dmjd::Domain::mask, 3, -5);
  for (int blocks = 1; blocks <= 3 * dmjd::kPhiloxStep; ++blocks) {
    std::vector<uint32_t> words(4 * (blocks + dmjd::kPhiloxStep));
    dmjd::philox_row(counter, key, blocks, words.data());
    for (int i = 0; i < 4 * blocks; ++i) {
      dmjd::PhiloxCounter one = counter;
      one.word[0] = i / 4;
      check(words[i] == dmjd::philox4x32(one, key).word[i % 4], "philox_row equals philox4x32");
    }
  }
}

// Words are spread, bunched at either end, or nearly all equal; sorting says which are lowest.
void check_cut() {
  for (const uint32_t range : {0u, 1u, 3u, 200u, 0xFFFFFFFFu}) {
    for (const bool high : {false, true}) {
      std::vector<uint32_t> words(53);
      for (size_t i = 0; i < words.size(); ++i) {
        const uint32_t draw = dmjd::philox4x32({{static_cast<uint32_t>(i), range, high, 0}}, {{1, 2}}).word[0];
        words[i] = range == 0xFFFFFFFFu ? draw : (high ? 0xFFFFFFFFu - draw % (range + 1) : draw % (range + 1));
      }
      std::vector<int> order(words.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return words[a] < words[b]; });
      for (int count = 1; count < static_cast<int>(words.size()); ++count) {
        dmjd::Cut cut = dmjd::find_cut(static_cast<int>(words.size()), count, [&](uint32_t limit) {
          return static_cast<int>(std::count_if(words.begin(), words.end(), [&](uint32_t w) { return w < limit; }));
        });
        std::vector<int> chosen, lowest(order.begin(), order.begin() + count);
        for (size_t i = 0; i < words.size(); ++i) {
          if (words[i] < cut.word || (words[i] == cut.word && cut.ties-- > 0)) chosen.push_back(static_cast<int>(i));
        }
        std::sort(lowest.begin(), lowest.end());
        check(chosen == lowest, "find_cut chooses the lowest words, ties to the first");
      }
    }
  }
}

void check_integer_root() {
  for (uint64_t root = 0; root < 65536; ++root) {
    const uint64_t square = root * root, last = std::min<uint64_t>((root + 1) * (root + 1) - 1, 0xFFFFFFFFu);
    check(dmjd::integer_root(static_cast<uint32_t>(square)) == root, "integer_root of a square");
    check(dmjd::integer_root(static_cast<uint32_t>(last)) == root, "integer_root below the next square");
  }
  check(dmjd::rounded_side(16 << 8, 1 << 16) == 4, "a side of 16 units at aspect 1");
  check(dmjd::rounded_side(16 << 8, 3 << 16) == 7, "sqrt(48) = 6.93 rounds up");
  check(dmjd::rounded_side(16 << 8, (1 << 16) / 3) == 2, "sqrt(5.33) = 2.31 rounds down");
}

void check_sampler(const char* regulation, int hidden, const std::vector<int64_t>& fresh, bool rectangles) {
  const std::vector<int64_t> aspects = {(1 << 16) / 2, 1 << 16, 2 << 16};
  const dmjd::MaskPlan plan =
      dmjd::make_mask_plan({6, 7}, {1, 1}, hidden, fresh, regulation, 4, rectangles ? aspects : std::vector<int64_t>());
  const int batch = 5, views = plan.views, tokens = plan.tokens();
  std::vector<int64_t> visible(views * batch * plan.visible()), masked(views * batch * plan.masked());
  std::vector<int64_t> restore(views * batch * tokens);
  std::vector<uint8_t> mask(views * batch * tokens);  // std::vector<bool> has no memory to point into
  const dmjd::MaskRows rows = {visible.data(), masked.data(), restore.data(), reinterpret_cast<bool*>(mask.data())};
  dmjd::MaskSampler sampler(plan);
  for (int row = 0; row < batch; ++row) sampler.draw(row, {{1, 2}}, batch, rows.advanced(row, plan));
  for (int row = 0; row < batch; ++row) {
    std::vector<bool> covered(tokens);
    for (int view = 0; view < views; ++view) {
      int fresh_tokens = 0, masked_tokens = 0;
      for (int token = 0; token < tokens; ++token) {
        const int64_t line = static_cast<int64_t>(view) * batch + row;
        const bool is_hidden = mask[line * tokens + token] != 0;
        const int64_t slot = restore[line * tokens + token];
        const int64_t listed =
            is_hidden ? masked[line * plan.masked() + slot - plan.visible()] : visible[line * plan.visible() + slot];
        check(listed == token, "restore finds each token in its list");
        masked_tokens += is_hidden;
        fresh_tokens += is_hidden && !covered[token];
        if (is_hidden) covered[token] = true;
      }
      check(masked_tokens == hidden, "every view hides as many as asked");
      check(plan.regulation == dmjd::Regulation::none || fresh_tokens == fresh[view], "new tokens are as many as asked");
    }
  }
}

void check_refusals() {
  const auto refused = [](int64_t hidden, const std::vector<int64_t>& fresh, const char* regulation) {
    try {
      dmjd::make_mask_plan({6, 7}, {1, 1}, hidden, fresh, regulation, 1, {});
      return false;
    } catch (const std::invalid_argument&) {
      return true;
    }
  };
  check(!refused(20, {20, 20}, "disjoint"), "a sound plan is taken");
  check(refused(42, {42}, "disjoint"), "a view that hides everything is refused");
  check(refused(20, {20, 21}, "disjoint"), "more new units than a view hides are refused");
  check(refused(30, {30, 13}, "disjoint"), "more new units than are left are refused");
  check(refused(30, {30, 12, 0, 0}, "complementary"), "more keep-sets than fit are refused");
}

}  // namespace

int main() {
  check_philox("zeros", {{0, 0, 0, 0}}, {{0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  check_philox("ones", {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, {{0xffffffff, 0xffffffff}},
               {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  check_philox("pi", {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {{0xa4093822, 0x299f31d0}},
               {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
  check_philox_row();
  check_cut();
  check_integer_root();
  for (const bool rectangles : {false, true}) {
    check_sampler("disjoint", 20, {20, 15, 7}, rectangles);
    check_sampler("none", 20, {20, 20}, rectangles);
  }
  check_sampler("complementary", 30, {30, 12, 0}, false);
  check_refusals();
  return failures == 0 ? 0 : 1;
}
