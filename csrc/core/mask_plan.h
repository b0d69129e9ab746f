// What the sampler is asked for: dmjd/ops/mask_plan.py's MaskPlan, checked once more because kernels index by it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "macros.h"

namespace dmjd {

enum class Regulation { disjoint, none, complementary };

// The part of a plan that a kernel takes by value. Units are what is hidden as a whole: a block of tokens, or one token.
struct MaskShape {
  int grid_rows, grid_columns;    // tokens
  int block_rows, block_columns;  // tokens of a unit
  int hidden;                     // units a view hides
  int views;
  int smallest;  // units of the smallest rectangle
  Regulation regulation;

  DMJD_HD int unit_rows() const { return grid_rows / block_rows; }
  DMJD_HD int unit_columns() const { return grid_columns / block_columns; }
  DMJD_HD int units() const { return unit_rows() * unit_columns(); }
  DMJD_HD int tokens() const { return grid_rows * grid_columns; }
  DMJD_HD int masked() const { return hidden * block_rows * block_columns; }
  DMJD_HD int visible() const { return tokens() - masked(); }
  DMJD_HD int unit_of(int token) const {
    if (block_rows * block_columns == 1) return token;
    return token / grid_columns / block_rows * unit_columns() + token % grid_columns / block_columns;
  }
};

struct MaskPlan : MaskShape {
  std::vector<int> fresh;    // per view, hidden units that no earlier view hid
  std::vector<int> aspects;  // of rectangles, 16 fractional bits, ascending; none: units are drawn one by one
};

// Throws std::invalid_argument naming the argument.
inline MaskPlan make_mask_plan(const std::vector<int64_t>& grid, const std::vector<int64_t>& block, int64_t hidden,
                               const std::vector<int64_t>& fresh, const std::string& regulation, int64_t smallest,
                               const std::vector<int64_t>& aspects) {
  const auto require = [](bool good, const char* problem) {
    if (!good) throw std::invalid_argument(std::string("disjoint_masks: ") + problem);
  };
  constexpr int64_t kMost = INT32_MAX;
  require(grid.size() == 2 && grid[0] >= 1 && grid[1] >= 1 && grid[0] <= kMost / grid[1],
          "grid must be (rows, columns) with 1 to 2^31 - 1 tokens");
  require(block.size() == 2 && block[0] >= 1 && block[1] >= 1 && grid[0] % block[0] == 0 && grid[1] % block[1] == 0,
          "block must be (rows, columns) that divide the grid");
  const int64_t units = (grid[0] / block[0]) * (grid[1] / block[1]);
  require(hidden >= 1 && hidden < units, "hidden must leave at least one unit, and hide one");
  require(!fresh.empty() && fresh.size() < (1u << 24), "fresh must have one entry for each of 1 to 2^24 - 1 views");

  MaskPlan plan;
  plan.grid_rows = static_cast<int>(grid[0]);
  plan.grid_columns = static_cast<int>(grid[1]);
  plan.block_rows = static_cast<int>(block[0]);
  plan.block_columns = static_cast<int>(block[1]);
  plan.hidden = static_cast<int>(hidden);
  plan.views = static_cast<int>(fresh.size());
  plan.fresh.assign(fresh.begin(), fresh.end());

  if (regulation == "none") {
    plan.regulation = Regulation::none;
  } else if (regulation == "complementary") {
    plan.regulation = Regulation::complementary;
    require(static_cast<int64_t>(fresh.size()) <= units / (units - hidden), "fresh has more views than keep-sets fit");
    require(aspects.empty(), "aspects must be empty for complementary views: keep-sets are not rectangles");
  } else {
    require(regulation == "disjoint", "regulation must be one of disjoint, none, complementary");
    plan.regulation = Regulation::disjoint;
    int64_t covered = 0;
    for (const int64_t entry : fresh) {
      require(entry >= 0 && entry <= hidden && entry <= units - covered && hidden - entry <= covered,
              "fresh asks a view for more new or more old units than there are");
      covered += entry;
    }
  }

  if (!aspects.empty()) {
    // Areas below 2^30 times aspects below 2^22, as rectangle.h needs.
    require(units <= 1 << 22 && smallest >= 1 && smallest <= units && aspects.size() < 1 << 16,
            "rectangles need at most 2^22 units and a smallest area of 1 to all of them");
    for (const int64_t aspect : aspects) {
      require(aspect >= 1 && aspect < 1 << 22, "aspects must be above 0 and below 64, with 16 fractional bits");
    }
  }
  plan.smallest = aspects.empty() ? 1 : static_cast<int>(smallest);
  plan.aspects.assign(aspects.begin(), aspects.end());
  return plan;
}

}  // namespace dmjd
