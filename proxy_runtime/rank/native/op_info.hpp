// What the interposer must know about an operator beyond its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace ergo::rank {

// How an argument is written (channel/wire.hpp): values that change every step belong to the payload.
enum class ArgumentKind : uint8_t {
  Plain,
  Number,     // Scalar or float: its value goes to the payload
  NumberKey,  // a float that decides the output's shape (arange): its value goes to the key
};

struct OpInfo {
  std::string name;                 // "aten::add.Tensor"
  std::vector<ArgumentKind> kinds;  // by argument
  std::vector<bool> writes;         // by argument: the schema says that it is written
  bool one_off = false;             // output shapes depend on values: every call is synchronous
  bool one_off_with_mask = false;   // the same, if an index is a mask or on the host
};

// The cached facts about an operator; valid for as long as the operator is registered.
const OpInfo& op_info(const c10::OperatorHandle& op);
// To be called when any operator goes away: its schema's address may come back as another operator.
void forget_op_infos();

}  // namespace ergo::rank
