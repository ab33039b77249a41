// kronattn's first and last stage on a CPU, as operators of PyTorch by its stable ABI: one build serves every PyTorch
// from TORCH_TARGET_VERSION on.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

namespace {

using torch::stable::parallel_for;
using torch::stable::Tensor;

// A batch of grids; `rows` where the channels of a position lie side by side.
struct Shape {
  long batch, channels, height, width;
  bool rows;
};

// What is compiled for each instruction set.
struct Stages {
  void (*pool)(const float*, float*, Shape);
  void (*attend)(const float*, const float*, const float*, const float*, float*, Shape, long, long, float);
  void (*outer)(const float*, const float*, float*, Shape, bool);
  void (*fused)(const float*, const float*, const float*, float*, Shape, long, float, bool, bool);
};

namespace baseline {
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#include "kernels.h"
#include "stages.h"
#undef VECTOR_BYTES
}  // namespace baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_SETS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define VECTOR_BYTES 32
#include "kernels.h"
#include "stages.h"
#undef VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
namespace avx512 {
#define VECTOR_BYTES 64
#include "kernels.h"
#include "stages.h"
#undef VECTOR_BYTES
}  // namespace avx512
#pragma GCC pop_options
#endif

// "avx512", "avx2" or "baseline": the widest that this machine has, or none above `KRONATTN_NATIVE_SET`.
Stages choose() {
#ifdef HAS_SETS
  const char* asked = std::getenv("KRONATTN_NATIVE_SET");
  const std::string most = asked ? asked : "avx512";
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (wide && most == "avx512") return {avx512::pool, avx512::attend, avx512::outer, avx512::fused};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && most != "baseline")
    return {avx2::pool, avx2::attend, avx2::outer, avx2::fused};
#endif
  return {baseline::pool, baseline::attend, baseline::outer, baseline::fused};
}

const Stages stages = choose();

const float* read(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }
const float* read(const std::optional<Tensor>& tensor) { return tensor ? read(*tensor) : nullptr; }
float* write(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

// Whoever calls this sees to dtypes and layouts; what slips through must not read or write where it should not.
void check(const Tensor& x, const char* name, std::vector<int64_t> sizes, bool rows = false) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, name, " must be float32");
  STD_TORCH_CHECK(x.dim() == static_cast<int64_t>(sizes.size()), name, " must have ", sizes.size(), " dimensions");
  // Channels are the second dimension; in rows they come last in memory.
  int64_t expected = rows ? sizes[1] : 1;
  for (int64_t axis = x.dim() - 1; axis >= 0; --axis) {
    STD_TORCH_CHECK(x.size(axis) == sizes[axis], name, " must be of size ", sizes[axis], " along dimension ", axis);
    const bool channels = rows && axis == 1;
    STD_TORCH_CHECK(sizes[axis] < 2 || x.numel() == 0 || x.stride(axis) == (channels ? 1 : expected), name,
                    " must be dense");
    if (!channels) expected *= sizes[axis];
  }
}

std::vector<int64_t> sizes_of(const Tensor& x) {
  std::vector<int64_t> sizes;
  for (int64_t axis = 0; axis < x.dim(); ++axis) sizes.push_back(x.size(axis));
  return sizes;
}

// The same grid with other channels.
std::vector<int64_t> with_channels(const Tensor& x, int64_t channels) {
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.at(1) = channels;
  return sizes;
}

// A grid of one or two axes.
Shape shape_of(const Tensor& x, bool rows) {
  STD_TORCH_CHECK(x.dim() == 3 || x.dim() == 4, "a grid must have one or two axes");
  check(x, "a grid", sizes_of(x), rows);
  return {x.size(0), x.size(1), x.dim() == 4 ? x.size(2) : 1, x.size(x.dim() - 1), rows};
}

// A new grid like `like`, in the layout that `rows` says.
Tensor grid_of(const Tensor& like, long channels, bool rows) {
  const std::vector<int64_t> sizes = with_channels(like, channels);
  std::vector<int64_t> strides(sizes.size());
  int64_t positions = 1;
  for (long axis = like.dim() - 1; axis > 1; --axis) {
    strides[axis] = positions * (rows ? channels : 1);
    positions *= sizes[axis];
  }
  strides[1] = rows ? 1 : positions;
  strides[0] = positions * channels;
  AtenTensorHandle handle;
  const auto failed = aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), aoti_torch_dtype_float32(),
                                               aoti_torch_device_type_cpu(), 0, &handle);
  STD_TORCH_CHECK(!failed, "no memory for a tensor");
  return Tensor(handle);
}

Tensor pool(Tensor x, bool rows) {
  STD_TORCH_CHECK(x.dim() == 4, "averages are of grids of two axes");
  const Shape shape = shape_of(x, rows);
  const std::vector<int64_t> sizes{shape.batch, shape.width + shape.height, shape.channels};
  Tensor averages = torch::stable::new_empty(x, sizes);
  stages.pool(read(x), write(averages), shape);
  return averages;
}

Tensor attend(Tensor query, Tensor keys, Tensor values, std::optional<Tensor> residual, double scale, bool rows) {
  const Shape shape = shape_of(query, rows);
  const long count = keys.size(1), out = values.size(2);
  STD_TORCH_CHECK(count > 0, "there must be a key");
  check(keys, "keys", {shape.batch, count, shape.channels});
  check(values, "values", {shape.batch, count, out});
  if (residual) check(*residual, "residual", with_channels(query, out), rows);
  Tensor y = grid_of(query, out, rows);
  stages.attend(read(query), read(keys), read(values), read(residual), write(y), shape, count, out,
                static_cast<float>(scale));
  return y;
}

Tensor outer(Tensor tokens, Tensor like, std::optional<Tensor> residual, bool mean_once, bool rows) {
  STD_TORCH_CHECK(like.dim() == 4, "outer sums are grids of two axes");
  const long channels = tokens.size(2);
  check(tokens, "tokens", {like.size(0), like.size(2) + like.size(3), channels});
  if (residual) check(*residual, "residual", with_channels(like, channels), rows);
  Tensor y = grid_of(like, channels, rows);
  stages.outer(read(tokens), read(residual), write(y), shape_of(y, rows), mean_once);
  return y;
}

// In place: y, like x in rows, is new to the network that calls this.
void fused_(Tensor y, Tensor x, Tensor weight, std::optional<Tensor> direct, double scale, bool qkv, bool mean_once) {
  STD_TORCH_CHECK(x.dim() == 4, "this is for grids of two axes");
  const Shape shape = shape_of(x, true);
  const long out = y.size(1);
  check(y, "y", with_channels(x, out), true);
  check(weight, "weight", {shape.channels, out});
  if (direct) check(*direct, "direct", {shape.channels, out});
  stages.fused(read(x), read(weight), read(direct), write(y), shape, out, static_cast<float>(scale), qkv, mean_once);
}

}  // namespace

STABLE_TORCH_LIBRARY(kronattn_cpu, library) {
  library.def("pool(Tensor x, bool rows) -> Tensor");
  library.def("attend(Tensor query, Tensor keys, Tensor values, Tensor? residual, float scale, bool rows) -> Tensor");
  library.def("outer(Tensor tokens, Tensor like, Tensor? residual, bool mean_once, bool rows) -> Tensor");
  library.def(
      "fused_(Tensor(a!) y, Tensor x, Tensor weight, Tensor? direct, float scale, bool qkv, bool mean_once) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kronattn_cpu, CPU, library) {
  library.impl("pool", TORCH_BOX(&pool));
  library.impl("attend", TORCH_BOX(&attend));
  library.impl("outer", TORCH_BOX(&outer));
  library.impl("fused_", TORCH_BOX(&fused_));
}
