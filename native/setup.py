"""The one part of the build that pyproject.toml cannot say: what is compiled, and how."""

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

kernels = CppExtension(
    "kronattn_cpu._kernels",
    ["csrc/library.cpp"],
    depends=["csrc/kernels.h", "csrc/stages.h"],
    # PyTorch's stable ABI as of 2.11: one build serves that version and every later one, and every Python.
    define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000")],
    # A product and a sum may be one rounding. Nothing else that "fast math" would allow: the exponential rounds by
    # adding a large number and taking it off again.
    extra_compile_args=["-O3", "-std=c++20", "-fno-math-errno", "-ffp-contract=fast", "-Wno-unknown-pragmas"],
    py_limited_api=True,
)

setup(
    ext_modules=[kernels],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
