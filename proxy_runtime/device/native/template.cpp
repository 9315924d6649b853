#include "template.hpp"

#include "failure.hpp"

namespace ergo::device {

std::unique_ptr<Template> parse_template(std::string name, const uint64_t* key, size_t n, c10::Device device) {
  size_t scope = name.find("::");
  if (scope == std::string::npos) throw ProtocolError("an operator name without namespace: " + name.substr(0, 80));
  size_t dot = name.find('.', scope);
  std::string base = name.substr(0, dot), overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  auto op = c10::Dispatcher::singleton().findSchema({base, overload});
  TORCH_CHECK_NOT_IMPLEMENTED(op.has_value(), "the operator ", name,
                              " is not registered on the device side; only operators of torch itself can run there");
  auto result = std::make_unique<Template>(*op);
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
