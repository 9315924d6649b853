#include "template.hpp"

#include "failure.hpp"
#include "libraries.hpp"

namespace ergo::device {

std::shared_ptr<Template> parse_template(std::string name, const uint64_t* key, size_t n, c10::Device device) {
  size_t scope = name.find("::");
  if (scope == std::string::npos) throw ProtocolError("an operator name without namespace: " + name.substr(0, 80));
  size_t dot = name.find('.', scope);
  std::string base = name.substr(0, dot), overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  auto op = c10::Dispatcher::singleton().findSchema({base, overload});
  TORCH_CHECK_NOT_IMPLEMENTED(op.has_value(), "ergosphere: the operator ", name,
                              " has no kernel for CUDA tensors that could run in the device proxy: it was not "
                              "registered by a compiled library, but from Python. Register its Python function for "
                              "\"cuda\" too. ",
                              library_failures());
  auto result = std::make_shared<Template>(*op);
  try {
    WordReader reader(key, n);
    result->globals = reader.word();
    const auto& arguments = op->schema().arguments();
    result->arguments.reserve(arguments.size());
    for (const c10::Argument& argument : arguments) {
      result->arguments.push_back(parse_value(reader, device));
      check_type(*argument.type(), result->arguments.back(), argument);
    }
    if (reader.left() != 0) throw ProtocolError("a key with more words than arguments");
  } catch (const std::runtime_error& e) {
    throw ProtocolError(name + ": " + e.what());
  }
  result->name = std::move(name);
  result->key.assign(key, key + n);
  return result;
}

void TemplateTable::check_next(uint64_t id) const {
  if (id != templates_.size())
    throw ProtocolError("template " + std::to_string(id) + " was defined where " + std::to_string(templates_.size()) +
                        " is next");
  if (id >= kLimit) throw ProtocolError("more than " + std::to_string(kLimit) + " templates");
}

Template& TemplateTable::at(uint64_t id) const {
  if (id >= templates_.size())
    throw ProtocolError("template " + std::to_string(id) + " is unknown; " + std::to_string(templates_.size()) +
                        " are defined");
  return *templates_[id];
}

}  // namespace ergo::device
