#include "decoder.h"

#include <csetjmp>
#include <cstdio>  // jpeglib.h needs FILE and size_t and does not include them
#include <cstring>
#include <vector>

#include <jpeglib.h>

#include <jerror.h>  // asks what jpeglib.h has defined

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo >= 2.1 is needed: older ones return other pixels next to a crop, or have no crop at all"
#endif

namespace dmjd {
namespace {

struct ErrorManager {
  jpeg_error_mgr base;  // first, so that libjpeg's pointer to it is also one to this
  std::jmp_buf escape;
  char message[JMSG_LENGTH_MAX];
  bool truncated;
};

ErrorManager& manager_of(j_common_ptr info) { return *reinterpret_cast<ErrorManager*>(info->err); }

[[noreturn]] void leave(j_common_ptr info) {
  ErrorManager& errors = manager_of(info);
  errors.base.format_message(info, errors.message);
  errors.truncated = errors.base.msg_code == JWRN_JPEG_EOF || errors.base.msg_code == JERR_INPUT_EOF;
  std::longjmp(errors.escape, 1);
}

// Warnings after which libjpeg makes pixels up. The others are about bytes between segments or odd header fields, as some
// images of ImageNet have them, and the pixels are sound.
bool loses_pixels(int code) {
  switch (code) {
#ifdef D_ARITH_CODING_SUPPORTED
    case JWRN_ARITH_BAD_CODE:
#endif
    case JWRN_HIT_MARKER:
    case JWRN_HUFF_BAD_CODE:
    case JWRN_JPEG_EOF:
    case JWRN_MUST_RESYNC:
      return true;
    default:
      return false;
  }
}

void on_message(j_common_ptr info, int level) {
  if (level < 0 && loses_pixels(info->err->msg_code)) leave(info);
}

void say_nothing(j_common_ptr) {}

// libjpeg reports errors by longjmp, which runs no destructors. So everything that has one lives here or with the caller,
// and each method that calls libjpeg is one setjmp and plain C.
class Decoder {
 public:
  Decoder(const uint8_t* data, size_t size) {
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = leave;
    errors_.base.emit_message = on_message;
    errors_.base.output_message = say_nothing;
    if (setjmp(errors_.escape)) fail();
    jpeg_create_decompress(&info_);
    jpeg_mem_src(&info_, data, static_cast<unsigned long>(size));
    jpeg_read_header(&info_, TRUE);
  }

  ~Decoder() { jpeg_destroy_decompress(&info_); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  JpegHeader header() const {
    const bool grey_or_rgb = info_.jpeg_color_space == JCS_YCbCr || info_.jpeg_color_space == JCS_RGB ||
                             info_.jpeg_color_space == JCS_GRAYSCALE;
    const bool plain = grey_or_rgb && info_.max_h_samp_factor * info_.max_v_samp_factor <= 4;
    return {static_cast<int>(info_.image_height), static_cast<int>(info_.image_width), plain};
  }

  // A sequential file cut below the region would pass, and then fail for another region of it: whether a file is whole
  // must not depend on the region. In a scan 0xFF is never followed by 0xD9, so the marker is where a file ends.
  void require_end() const {
    const uint8_t* bytes = info_.src->next_input_byte;
    for (size_t i = info_.src->bytes_in_buffer; i >= 2; --i) {
      if (bytes[i - 2] == 0xFF && bytes[i - 1] == JPEG_EOI) return;
    }
    throw JpegError("Premature end of JPEG file", true);
  }

  bool grey() const { return info_.jpeg_color_space == JCS_GRAYSCALE; }

  void start(J_COLOR_SPACE colors, int scale) {
    if (setjmp(errors_.escape)) fail();
    info_.out_color_space = colors;
    info_.scale_num = 1;
    info_.scale_denom = static_cast<unsigned>(scale);
    jpeg_start_decompress(&info_);
  }

  int output_height() const { return static_cast<int>(info_.output_height); }
  int output_width() const { return static_cast<int>(info_.output_width); }

  // Restricts rows to columns [left, left + width), or some more; returns the first column they hold.
  int crop(int left, int width) {
    if (setjmp(errors_.escape)) fail();
    // The upsampling of chroma looks one sample, two pixels, to either side, and would take the crop for the image.
    constexpr int kContext = 2;
    JDIMENSION first = static_cast<JDIMENSION>(left > kContext ? left - kContext : 0);
    const JDIMENSION after = static_cast<JDIMENSION>(left + width + kContext);
    JDIMENSION count = (after < info_.output_width ? after : info_.output_width) - first;
    jpeg_crop_scanline(&info_, &first, &count);  // moves both to where blocks begin
    return static_cast<int>(first);
  }

  void skip(int rows) {
    if (setjmp(errors_.escape)) fail();
    jpeg_skip_scanlines(&info_, static_cast<JDIMENSION>(rows));
  }

  void read(uint8_t* row) {
    if (setjmp(errors_.escape)) fail();
    JSAMPROW rows[] = {row};
    jpeg_read_scanlines(&info_, rows, 1);
  }

 private:
  [[noreturn]] void fail() {
    // A constructor that throws runs no destructor of its own; to destroy twice is harmless.
    jpeg_destroy_decompress(&info_);
    throw JpegError(errors_.message, errors_.truncated);
  }

  jpeg_decompress_struct info_ = {};
  ErrorManager errors_ = {};
};

// ITU-R 601 luma in 16-bit fixed point, rounded as Pillow does. libjpeg could return the Y it has stored, which differs by
// what a round trip through RGB clips.
void to_grey(const uint8_t* rgb, int width, uint8_t* grey) {
  for (int x = 0; x < width; ++x, rgb += 3) {
    grey[x] = static_cast<uint8_t>((19595u * rgb[0] + 38470u * rgb[1] + 7471u * rgb[2] + 0x8000u) >> 16);
  }
}

}  // namespace

JpegHeader read_jpeg_header(const uint8_t* data, size_t size) { return Decoder(data, size).header(); }

void decode_jpeg_region(const uint8_t* data, size_t size, JpegRegion region, int channels, int scale, uint8_t* pixels) {
  Decoder decoder(data, size);
  if (!decoder.header().plain) throw JpegError("Only grey, RGB and common YCbCr files are decoded", false);
  decoder.require_end();
  const int stored = channels == 1 && decoder.grey() ? 1 : 3;
  decoder.start(stored == 1 ? JCS_GRAYSCALE : JCS_RGB, scale);
  if (region.top < 0 || region.left < 0 || region.height < 1 || region.width < 1 ||
      region.height > decoder.output_height() - region.top || region.width > decoder.output_width() - region.left) {
    throw std::invalid_argument("the region must lie inside the image of " + std::to_string(decoder.output_height()) +
                                "x" + std::to_string(decoder.output_width()) + " (height x width)");
  }
  const int first = decoder.crop(region.left, region.width);
  std::vector<uint8_t> row(static_cast<size_t>(decoder.output_width()) * stored);
  const uint8_t* wanted = row.data() + static_cast<size_t>(region.left - first) * stored;
  const size_t row_bytes = static_cast<size_t>(region.width) * channels;
  decoder.skip(region.top);
  for (int y = 0; y < region.height; ++y, pixels += row_bytes) {
    decoder.read(row.data());
    if (stored == channels) {
      std::memcpy(pixels, wanted, row_bytes);
    } else {
      to_grey(wanted, region.width, pixels);
    }
  }
}

}  // namespace dmjd
