// Kernels with torch's own signatures for the operators that scripts call most. Boxing counts the references of every
// argument up and down, for a tensor that Python knows under the interpreter's lock: a fifth of a small call.
#pragma once

#include <torch/library.h>

#include <optional>
#include <string>

namespace ergo::rank {

// The kernel of an operator by its full name ("aten::add.Tensor"); nothing where it is forwarded boxed.
std::optional<torch::CppFunction> unboxed_kernel(const std::string& name);

}  // namespace ergo::rank
