// What DeepSpeed's Adam needs of torch's header of this name, of which it includes all: a third of the time to compile.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
constexpr auto kBFloat16 = at::kBFloat16;
constexpr auto kFloat16 = at::kHalf;
} // namespace torch
