// dmjd._jpeg: the decoder for numpy. A module of its own, so that dmjd._core does not depend on libjpeg.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "decoder.h"

namespace py = pybind11;

namespace {

struct Bytes {
  explicit Bytes(const py::buffer& buffer) : info(buffer.request()) {
    if (info.ndim != 1 || info.itemsize != 1 || info.strides[0] != 1) throw py::type_error("data must be bytes");
  }
  const uint8_t* begin() const { return static_cast<const uint8_t*>(info.ptr); }
  size_t size() const { return static_cast<size_t>(info.size); }
  const py::buffer_info info;
};

py::tuple header(const py::buffer& data) {
  const Bytes bytes(data);
  const dmjd::JpegHeader found = dmjd::read_jpeg_header(bytes.begin(), bytes.size());
  return py::make_tuple(found.height, found.width, found.plain);
}

py::array_t<uint8_t> decode_region(const py::buffer& data, int top, int left, int height, int width, int channels,
                                   int scale) {
  if (channels != 1 && channels != 3) throw py::value_error("channels must be 1 or 3");
  if (scale != 1 && scale != 2) throw py::value_error("scale must be 1 or 2");
  if (height < 1 || width < 1) throw py::value_error("the region must have pixels");
  const Bytes bytes(data);
  py::array_t<uint8_t> pixels({height, width, channels});
  uint8_t* out = pixels.mutable_data();
  {
    const py::gil_scoped_release release;
    dmjd::decode_jpeg_region(bytes.begin(), bytes.size(), {top, left, height, width}, channels, scale, out);
  }
  return pixels;
}

}  // namespace

PYBIND11_MODULE(_jpeg, m) {
  m.doc() = "JPEG files, decoded where they are wanted, by libjpeg-turbo.";
  // Local: a shared one would see the exceptions of other modules, which may have another C++ runtime.
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const dmjd::JpegError& error) {
      py::set_error(error.truncated ? PyExc_EOFError : PyExc_ValueError, error.what());
    }
  });
  m.def("header", &header, py::arg("data"),
        "(height, width, plain) of a JPEG file, read up to its first scan; plain: decode_region takes it, as it does all but\n"
        "CMYK, YCCK and chroma sampled more coarsely than one in four.\n\n"
        "Raises EOFError if the file ends there, ValueError if it is no JPEG file that libjpeg reads.");
  m.def("decode_region", &decode_region, py::arg("data"), py::arg("top"), py::arg("left"), py::arg("height"),
        py::arg("width"), py::arg("channels"), py::arg("scale") = 1,
        "uint8 [height, width, channels]: part of a JPEG file, bit for bit as in a decode of the whole.\n\n"
        "With scale=2 the image is half as large (rounded up), by a smaller inverse DCT, and the region is counted in\n"
        "its pixels. Grey is ITU-R 601 luma, as Pillow has it. The EXIF orientation is ignored. Releases the GIL.\n"
        "Raises EOFError if the file is cut short anywhere, ValueError if what was read is damaged or not plain, or the\n"
        "region does not lie inside.");
}
