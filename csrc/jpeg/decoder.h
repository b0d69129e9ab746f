// Region-of-interest decoding on libjpeg-turbo: what lies outside the region is entropy-decoded, since there is no way
// around that, but neither transformed nor upsampled nor colour-converted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace dmjd {

struct JpegHeader {
  int height;
  int width;
  bool plain;  // grey, RGB, or YCbCr with at most four samples of luma to one of chroma; the rest is exotic
};

// In pixels of the decoded image, which is 1 / scale of the file's, rounded up.
struct JpegRegion {
  int top;
  int left;
  int height;
  int width;
};

// What is wrong with the file, in libjpeg's words.
class JpegError : public std::runtime_error {
 public:
  JpegError(const std::string& message, bool truncated) : std::runtime_error(message), truncated(truncated) {}
  const bool truncated;  // the file ends too early
};

// Reads up to the first scan. Throws JpegError.
JpegHeader read_jpeg_header(const uint8_t* data, size_t size);

// Writes region.height * region.width * channels bytes to `pixels`, the same as those of a whole decode. channels is 1 or
// 3, scale 1 or 2. Throws JpegError for a damaged file or one that is not plain, std::invalid_argument for a region outside.
void decode_jpeg_region(const uint8_t* data, size_t size, JpegRegion region, int channels, int scale, uint8_t* pixels);

}  // namespace dmjd
