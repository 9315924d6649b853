// Recurrent networks for a device of kind "cpu". torch composes them of other operators for a CUDA tensor than for a
// CPU tensor: a CPU multiplies the inputs of all steps at once, or leaves a whole layer to oneDNN. These are the CPU's
// operators in the CPU's order (the order of autograd's nodes too), so that results and gradients have its bits.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace ergo::rank {
namespace {

using at::Tensor;
using at::TensorList;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

// One layer in one direction. `w_hr` projects an LSTM's output; it and the biases may be undefined.
struct Weights {
  Tensor w_ih, w_hh, b_ih, b_hh, w_hr;

  Tensor of_input(const Tensor& input) const { return at::linear(input, w_ih, b_ih); }
  Tensor of_hidden(const Tensor& hidden) const { return at::linear(hidden, w_hh, b_hh); }
};

// Hidden state: {h}, of an LSTM {h, c}.
using Hidden = Tensors;
// The next hidden state, from both products; may overwrite that of the hidden state.
using Cell = Hidden (*)(Tensor from_hidden, const Tensor& from_input, const Hidden& hidden, const Weights& weights);

Hidden tanh_step(Tensor from_hidden, const Tensor& from_input, const Hidden&, const Weights&) {
  return {at::tanh(from_hidden.add_(from_input))};
}

Hidden relu_step(Tensor from_hidden, const Tensor& from_input, const Hidden&, const Weights&) {
  return {at::relu(from_hidden.add_(from_input))};
}

Hidden lstm_step(Tensor from_hidden, const Tensor& from_input, const Hidden& hidden, const Weights& weights) {
  auto gates = from_hidden.add_(from_input).unsafe_chunk(4, 1);
  const Tensor input = gates[0].sigmoid_();
  const Tensor forget = gates[1].sigmoid_();
  const Tensor cell = gates[2].tanh_();
  const Tensor output = gates[3].sigmoid_();
  Tensor c = (forget * hidden[1]).add_(input * cell);
  Tensor h = output * c.tanh();
  if (weights.w_hr.defined()) h = at::matmul(h, weights.w_hr.t());
  return {h, c};
}

Hidden gru_step(Tensor from_hidden, const Tensor& from_input, const Hidden& hidden, const Weights&) {
  const auto in = from_input.unsafe_chunk(3, 1);
  auto old = from_hidden.unsafe_chunk(3, 1);
  const Tensor reset = old[0].add_(in[0]).sigmoid_();
  const Tensor update = old[1].add_(in[1]).sigmoid_();
  const Tensor candidate = in[2].add(old[2].mul_(reset)).tanh_();
  return {(hidden[0] - candidate).mul_(update).add_(candidate)};
}

Hidden narrowed(const Hidden& hidden, int64_t start, int64_t end) {
  Hidden part;
  for (const Tensor& t : hidden) part.push_back(t.narrow(0, start, end - start));
  return part;
}

Hidden concatenated(const std::vector<Hidden>& parts) {
  Hidden whole;
  for (size_t i = 0; i < parts[0].size(); ++i) {
    Tensors column;
    for (const Hidden& part : parts) column.push_back(part[i]);
    whole.push_back(at::cat(column, 0));
  }
  return whole;
}

struct LayerResult {
  Tensor output;
  Hidden last;
};

// `input` is (time, batch, features).
LayerResult full_layer(Cell cell, const Tensor& input, Hidden hidden, const Weights& weights, bool reverse) {
  auto steps = weights.of_input(input).unbind(0);
  TORCH_CHECK(!steps.empty(), "Expected sequence length to be larger than 0 in RNN");
  if (reverse) std::reverse(steps.begin(), steps.end());
  Tensors outputs;
  for (const Tensor& step : steps) {
    hidden = cell(weights.of_hidden(hidden[0]), step, hidden, weights);
    outputs.push_back(hidden[0]);
  }
  if (reverse) std::reverse(outputs.begin(), outputs.end());
  return {at::stack(outputs, 0), std::move(hidden)};
}

// `data` holds step after step; sequences are sorted by length, so that each step has at most the batch of the one
// before it. Sequences that have ended leave the hidden state.
LayerResult packed_layer(Cell cell, const Tensor& data, at::IntArrayRef sizes, Hidden hidden, const Weights& weights) {
  const Tensor from_input = weights.of_input(data);
  std::vector<Hidden> ended;
  Tensors outputs;
  int64_t at = 0, batch = sizes[0];
  for (const int64_t size : sizes) {
    const Tensor step = from_input.narrow(0, at, size);
    at += size;
    if (size < batch) {
      ended.push_back(narrowed(hidden, size, batch));
      hidden = narrowed(hidden, 0, size);
    }
    batch = size;
    hidden = cell(weights.of_hidden(hidden[0]), step, hidden, weights);
    outputs.push_back(hidden[0]);
  }
  ended.push_back(std::move(hidden));
  std::reverse(ended.begin(), ended.end());
  return {at::cat(outputs, 0), concatenated(ended)};
}

// From the last step to the first: sequences join.
LayerResult reversed_packed_layer(Cell cell, const Tensor& data, at::IntArrayRef sizes, const Hidden& initial,
                                  const Weights& weights) {
  const Tensor from_input = weights.of_input(data);
  Tensors outputs;
  int64_t at = data.size(0), batch = sizes.back();
  Hidden hidden = narrowed(initial, 0, batch);
  for (size_t i = sizes.size(); i-- > 0;) {
    const int64_t size = sizes[i];
    if (size > batch) hidden = concatenated({hidden, narrowed(initial, batch, size)});
    at -= size;
    const Tensor step = from_input.narrow(0, at, size);
    batch = size;
    hidden = cell(weights.of_hidden(hidden[0]), step, hidden, weights);
    outputs.push_back(hidden[0]);
  }
  std::reverse(outputs.begin(), outputs.end());
  return {at::cat(outputs, 0), std::move(hidden)};
}

std::vector<Weights> grouped(TensorList parameters, bool biases, bool projections) {
  const size_t n = 2 + (biases ? 2 : 0) + (projections ? 1 : 0);
  TORCH_CHECK(parameters.size() % n == 0, "got an incorrect number of RNN parameters");
  std::vector<Weights> groups;
  for (size_t i = 0; i < parameters.size(); i += n) {
    Weights w{parameters[i], parameters[i + 1], {}, {}, {}};
    if (biases) w.b_ih = parameters[i + 2], w.b_hh = parameters[i + 3];
    if (projections) w.w_hr = parameters[i + n - 1];
    groups.push_back(std::move(w));
  }
  return groups;
}

struct Options {
  bool biases;
  int64_t layers;
  double dropout;
  bool train, bidirectional;

  bool drops_after(int64_t layer) const { return dropout != 0 && train && layer < layers - 1; }
};

// Layers over each other. `states` are the hidden states' tensors, one row a layer and direction; `run` runs one
// layer in one direction. Returns the output and the last hidden states' tensors.
template <class Run>
std::pair<Tensor, Hidden> stacked(const Tensor& input, TensorList states, const std::vector<Weights>& weights,
                                  const Options& options, Run run) {
  const int64_t directions = options.bidirectional ? 2 : 1;
  const auto n = static_cast<size_t>(options.layers * directions);
  std::vector<Tensors> rows;
  for (const Tensor& state : states) rows.push_back(state.unbind(0));
  TORCH_CHECK(rows[0].size() == n, "Expected more hidden states in stacked_rnn");
  TORCH_CHECK(weights.size() == n, "Expected more weights in stacked_rnn");
  Tensor output = input;
  std::vector<Tensors> last(states.size());
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    Tensors sides;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const auto index = static_cast<size_t>(layer * directions + direction);
      Hidden hidden;
      for (const auto& row : rows) hidden.push_back(row[index]);
      LayerResult result = run(output, std::move(hidden), weights[index], direction == 1);
      for (size_t i = 0; i < last.size(); ++i) last[i].push_back(result.last[i]);
      sides.push_back(std::move(result.output));
    }
    output = directions == 1 ? sides[0] : at::cat(sides, -1);
    if (options.drops_after(layer)) output = at::dropout(output, options.dropout, /*train=*/true);
  }
  Hidden final_states;
  for (const Tensors& rows_of_state : last) final_states.push_back(at::stack(rows_of_state, 0));
  return {output, final_states};
}

std::pair<Tensor, Hidden> over_time(Cell cell, const Tensor& input, TensorList states,
                                    const std::vector<Weights>& weights, const Options& options) {
  return stacked(input, states, weights, options, [cell](const Tensor& x, Hidden h, const Weights& w, bool reverse) {
    return full_layer(cell, x, std::move(h), w, reverse);
  });
}

std::pair<Tensor, Hidden> over_packed(Cell cell, const Tensor& data, const Tensor& batch_sizes, TensorList states,
                                      const std::vector<Weights>& weights, const Options& options) {
  TORCH_CHECK(batch_sizes.device().is_cpu() && batch_sizes.numel() > 0, "batch_sizes should be a CPU tensor");
  const at::IntArrayRef sizes(batch_sizes.const_data_ptr<int64_t>(), static_cast<size_t>(batch_sizes.numel()));
  return stacked(
      data, states, weights, options, [cell, sizes](const Tensor& x, Hidden h, const Weights& w, bool reverse) {
        return reverse ? reversed_packed_layer(cell, x, sizes, h, w) : packed_layer(cell, x, sizes, std::move(h), w);
      });
}

template <Cell cell>
std::tuple<Tensor, Tensor> rnn_kernel(const Tensor& input, const Tensor& hx, TensorList parameters, bool biases,
                                      int64_t layers, double dropout, bool train, bool bidirectional,
                                      bool batch_first) {
  auto [output, last] = over_time(cell, batch_first ? input.transpose(0, 1) : input, {hx},
                                  grouped(parameters, biases, false), {biases, layers, dropout, train, bidirectional});
  if (batch_first) output.transpose_(0, 1);
  return {output, last[0]};
}

template <Cell cell>
std::tuple<Tensor, Tensor> packed_rnn_kernel(const Tensor& data, const Tensor& batch_sizes, const Tensor& hx,
                                             TensorList parameters, bool biases, int64_t layers, double dropout,
                                             bool train, bool bidirectional) {
  auto [output, last] = over_packed(cell, data, batch_sizes, {hx}, grouped(parameters, biases, false),
                                    {biases, layers, dropout, train, bidirectional});
  return {output, last[0]};
}

// ---- LSTM

void check_lstm_states(TensorList hx, int64_t layers, bool bidirectional) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  for (const Tensor& state : hx) {
    TORCH_CHECK(state.dim() == 3, "For batched 3-D input, hidden states should be 3-D but got ", state.dim(),
                "-D tensor");
    TORCH_CHECK(state.size(0) == layers * (bidirectional ? 2 : 1), "Expected hidden state size(0) to be ",
                layers * (bidirectional ? 2 : 1), " (num_layers * num_directions), but got ", state.size(0));
  }
}

// What oneDNN can do is asked of torch here, since the device is a CPU of this machine.
bool cpu_supports(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  if (!op.has_value()) return false;
  torch::jit::Stack stack;
  op->callBoxed(&stack);
  return stack.at(0).toBool();
}

bool takes_onednn(const Tensor& input) {
  if (!at::globalContext().userEnabledMkldnn() || input.numel() == 0) return false;
  switch (input.scalar_type()) {
    case at::kFloat:
      return true;
    case at::kBFloat16: {
      static const bool supported = cpu_supports("mkldnn::_is_mkldnn_bf16_supported");
      return supported;
    }
    case at::kHalf: {
      static const bool supported = cpu_supports("mkldnn::_is_mkldnn_fp16_supported");
      return supported && !at::GradMode::is_enabled();
    }
    default:
      return false;
  }
}

constexpr int64_t kOneDnnLstm = 2;  // ideep::rnn_kind::LSTM

// Layer by layer. The kernel prepares for a gradient if gradients are enabled, which they never are in the device
// proxy: its argument `train`, of which the kernel makes nothing, says so there (cpu_shims.cpp).
std::tuple<Tensor, Tensor, Tensor> onednn_lstm(const Tensor& input, TensorList hx, TensorList parameters,
                                               const Options& options, bool batch_first) {
  Tensor output = (batch_first ? input.transpose(0, 1) : input).contiguous();
  const Tensor h = hx[0].contiguous(), c = hx[1].contiguous();
  const int64_t directions = options.bidirectional ? 2 : 1;
  const auto weights = grouped(parameters, options.biases, false);
  const bool training = at::GradMode::is_enabled();
  Tensors last_h, last_c;
  for (int64_t layer = 0; layer < options.layers; ++layer) {
    Tensors sides;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const int64_t index = layer * directions + direction;
      const Weights& w = weights.at(static_cast<size_t>(index));
      const Tensor layer_h = h[index], layer_c = c[index];
      const Tensor b_ih = options.biases ? w.b_ih : at::zeros(w.w_ih.sizes(), w.w_ih.options());
      const Tensor b_hh = options.biases ? w.b_hh : at::zeros(w.w_hh.sizes(), w.w_hh.options());
      auto result = at::mkldnn_rnn_layer(output, w.w_ih, w.w_hh, b_ih, b_hh, layer_h, layer_c, direction == 1, {},
                                         kOneDnnLstm, hx[0].size(2), options.layers, options.biases,
                                         options.bidirectional, batch_first, training);
      sides.push_back(std::get<0>(result));
      last_h.push_back(std::get<1>(result));
      last_c.push_back(std::get<2>(result));
    }
    output = directions == 1 ? sides[0] : at::cat(sides, -1);
    if (options.drops_after(layer)) output = at::dropout(output, options.dropout, /*train=*/true);
  }
  Tensor last = at::stack(last_h, 0), last_cell = at::stack(last_c, 0);
  return {batch_first ? output.transpose(0, 1) : output, last, last_cell};
}

std::tuple<Tensor, Tensor, Tensor> lstm_kernel(const Tensor& input, TensorList hx, TensorList parameters, bool biases,
                                               int64_t layers, double dropout, bool train, bool bidirectional,
                                               bool batch_first) {
  check_lstm_states(hx, layers, bidirectional);
  const Options options{biases, layers, dropout, train, bidirectional};
  const bool projections = hx[0].size(2) != hx[1].size(2);
  if (!projections && takes_onednn(input)) return onednn_lstm(input, hx, parameters, options, batch_first);
  auto [output, last] = over_time(lstm_step, batch_first ? input.transpose(0, 1) : input, hx,
                                  grouped(parameters, biases, projections), options);
  return {batch_first ? output.transpose(0, 1) : output, last[0], last[1]};
}

std::tuple<Tensor, Tensor, Tensor> packed_lstm_kernel(const Tensor& data, const Tensor& batch_sizes, TensorList hx,
                                                      TensorList parameters, bool biases, int64_t layers,
                                                      double dropout, bool train, bool bidirectional) {
  check_lstm_states(hx, layers, bidirectional);
  const bool projections = hx[0].size(2) != hx[1].size(2);
  auto [output, last] = over_packed(lstm_step, data, batch_sizes, hx, grouped(parameters, biases, projections),
                                    {biases, layers, dropout, train, bidirectional});
  return {output, last[0], last[1]};
}

// ---- Cells

void check_cell(const Tensor& input, TensorList hx, const Tensor& w_ih, const Tensor& w_hh, int64_t gates) {
  const int64_t hidden = w_hh.size(1);
  TORCH_CHECK(input.size(1) == w_ih.size(1), "input has inconsistent input_size: got ", input.size(1), " expected ",
              w_ih.size(1));
  TORCH_CHECK(w_ih.size(0) == gates * hidden, "weight_ih first dim must be ", gates,
              " * hidden_size = ", gates * hidden, ", but got ", w_ih.size(0));
  TORCH_CHECK(w_hh.size(0) == gates * hidden, "weight_hh first dim must be ", gates,
              " * hidden_size = ", gates * hidden, ", but got ", w_hh.size(0));
  for (size_t i = 0; i < hx.size(); ++i) {
    TORCH_CHECK(input.size(0) == hx[i].size(0), "Input batch size ", input.size(0), " doesn't match hidden", i,
                " batch size ", hx[i].size(0));
    TORCH_CHECK(hx[i].size(1) == hidden, "hidden", i, " has inconsistent hidden_size: got ", hx[i].size(1),
                ", expected ", hidden);
  }
}

Hidden one_step(Cell cell, int64_t gates, const Tensor& input, Hidden hidden, const Tensor& w_ih, const Tensor& w_hh,
                const OptionalTensor& b_ih, const OptionalTensor& b_hh) {
  check_cell(input, hidden, w_ih, w_hh, gates);
  const Weights weights{w_ih, w_hh, b_ih.value_or(Tensor()), b_hh.value_or(Tensor()), {}};
  if (cell == gru_step) {  // the only cell that multiplies its input first
    const Tensor from_input = weights.of_input(input);
    return cell(weights.of_hidden(hidden[0]), from_input, hidden, weights);
  }
  const Tensor from_hidden = weights.of_hidden(hidden[0]);
  return cell(from_hidden, weights.of_input(input), hidden, weights);
}

std::tuple<Tensor, Tensor> lstm_cell_kernel(const Tensor& input, TensorList hx, const Tensor& w_ih, const Tensor& w_hh,
                                            const OptionalTensor& b_ih, const OptionalTensor& b_hh) {
  TORCH_CHECK(hx.size() == 2, "lstm_cell expects two hidden states");
  auto next = one_step(lstm_step, 4, input, hx.vec(), w_ih, w_hh, b_ih, b_hh);
  return {next[0], next[1]};
}

template <Cell cell, int64_t gates>
Tensor cell_kernel(const Tensor& input, const Tensor& hx, const Tensor& w_ih, const Tensor& w_hh,
                   const OptionalTensor& b_ih, const OptionalTensor& b_hh) {
  return one_step(cell, gates, input, {hx}, w_ih, w_hh, b_ih, b_hh)[0];
}

}  // namespace

void register_cpu_device_rnn(torch::Library& library, torch::Library& autograd) {
  // Composites are decided above autograd, so they are registered there too: their parts record gradients.
  for (torch::Library* target : {&library, &autograd}) {
    target->impl("lstm.input", lstm_kernel);
    target->impl("lstm.data", packed_lstm_kernel);
    target->impl("gru.input", rnn_kernel<gru_step>);
    target->impl("gru.data", packed_rnn_kernel<gru_step>);
    target->impl("rnn_tanh.input", rnn_kernel<tanh_step>);
    target->impl("rnn_tanh.data", packed_rnn_kernel<tanh_step>);
    target->impl("rnn_relu.input", rnn_kernel<relu_step>);
    target->impl("rnn_relu.data", packed_rnn_kernel<relu_step>);
    target->impl("lstm_cell", lstm_cell_kernel);
    target->impl("gru_cell", cell_kernel<gru_step, 3>);
    target->impl("rnn_tanh_cell", cell_kernel<tanh_step, 1>);
    target->impl("rnn_relu_cell", cell_kernel<relu_step, 1>);
  }
}

}  // namespace ergo::rank
