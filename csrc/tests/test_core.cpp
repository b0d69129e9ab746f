// csrc/core against published numbers. No torch, no framework: a failed check prints itself and fails the test.
#include <cstdio>

#include "../core/philox.h"

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

}  // namespace

int main() {
  check_philox("zeros", {{0, 0, 0, 0}}, {{0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  check_philox("ones", {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, {{0xffffffff, 0xffffffff}},
               {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  check_philox("pi", {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {{0xa4093822, 0x299f31d0}},
               {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
  return failures == 0 ? 0 : 1;
}
