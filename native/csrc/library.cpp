// kronattn's first and last stage on a CPU, as operators of PyTorch by its stable ABI: one build serves every PyTorch
// from TORCH_TARGET_VERSION on.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

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

// A grid of one or two axes. Python has seen to it that tensors are float32 and dense in one of the two layouts.
Shape shape_of(const Tensor& x, bool rows) {
  const long axes = x.dim() - 2;
  return {x.size(0), x.size(1), axes > 1 ? x.size(2) : 1, x.size(axes + 1), rows};
}

// (N, channels, *grid) as `like`, in the layout that `rows` says.
Tensor grid_of(const Tensor& like, long channels, bool rows) {
  std::vector<int64_t> sizes, strides;
  int64_t size = 1;
  for (long axis = 0; axis < like.dim(); ++axis) sizes.push_back(axis == 1 ? channels : like.size(axis));
  strides.resize(sizes.size());
  for (long axis = like.dim() - 1; axis > 1; --axis) {
    strides[axis] = size * (rows ? channels : 1);
    size *= sizes[axis];
  }
  strides[1] = rows ? 1 : size;
  strides[0] = size * channels;
  AtenTensorHandle handle;
  int32_t type = 0, index = 0;
  aoti_torch_get_device_type(like.get(), &type);
  aoti_torch_get_device_index(like.get(), &index);
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(),
                                                         aoti_torch_dtype_float32(), type, index, &handle));
  return Tensor(handle);
}

Tensor pool(Tensor x, bool rows) {
  const Shape shape = shape_of(x, rows);
  const std::vector<int64_t> sizes{shape.batch, shape.width + shape.height, shape.channels};
  Tensor averages = torch::stable::new_empty(x, sizes);
  stages.pool(read(x), write(averages), shape);
  return averages;
}

Tensor attend(Tensor query, Tensor keys, Tensor values, std::optional<Tensor> residual, double scale, bool rows) {
  Tensor y = grid_of(query, values.size(2), rows);
  stages.attend(read(query), read(keys), read(values), read(residual), write(y), shape_of(query, rows), keys.size(1),
                values.size(2), static_cast<float>(scale));
  return y;
}

Tensor outer(Tensor tokens, Tensor like, std::optional<Tensor> residual, bool mean_once, bool rows) {
  Tensor y = grid_of(like, tokens.size(2), rows);
  stages.outer(read(tokens), read(residual), write(y), shape_of(y, rows), mean_once);
  return y;
}

// In place: y, like x in rows, is new to the network that calls this.
void fused_(Tensor y, Tensor x, Tensor weight, std::optional<Tensor> direct, double scale, bool qkv, bool mean_once) {
  stages.fused(read(x), read(weight), read(direct), write(y), shape_of(x, true), y.size(1), static_cast<float>(scale), qkv,
               mean_once);
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
