#include "generator.hpp"

#include <ATen/ATen.h>
#include <c10/core/GeneratorImpl.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>

#include "channel.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

uint64_t next_generator_id() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

// A generator's state is in the proxy. Several generators may share one (graphsafe_get_state).
struct State {
  explicit State(uint64_t i) : id(i) {
    if (id != 0) Channel::instance().send(Message::NewGenerator, 1, [&](uint64_t* body) { body[0] = id; });
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    Channel& channel = Channel::instance();
    if (id == 0 || !channel.open()) return;
    try {
      channel.send(Message::FreeGenerator, 1, [&](uint64_t* body) { body[0] = id; });
    } catch (const std::exception&) {
      // The device is gone, and the generator with it.
    }
  }
  uint64_t id;
  uint64_t seed = c10::default_rng_seed_val;
  bool seeded = false;
};

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(uint64_t id, c10::Device device = own_device())
      : DeviceGenerator(std::make_shared<State>(id), device) {}
  DeviceGenerator(std::shared_ptr<State> state, c10::Device device)
      : GeneratorImpl(device, c10::DispatchKeySet(kDeviceKey)), state_(std::move(state)) {}

  uint64_t id() const { return state_->id; }

  void set_current_seed(uint64_t seed) override {
    state_->seed = seed;
    state_->seeded = true;
    Channel& channel = Channel::instance();
    if (in_tree() && device().index() != bound_device()) return;  // sent when this becomes the process's device
    // torch.manual_seed in a DataLoader worker seeds every device that the parent had: not an error there.
    if (!channel.open()) return;
    channel.send(Message::Seed, 2, [&](uint64_t* body) {
      body[0] = id();
      body[1] = seed;
    });
  }
  uint64_t current_seed() const override { return state_->seed; }
  uint64_t seed() override {
    const uint64_t value = c10::detail::getNonDeterministicRandom(false);
    set_current_seed(value);
    return value;
  }

  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<DeviceGenerator>(state_, device());
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    auto* ours = dynamic_cast<DeviceGenerator*>(other.get());
    TORCH_CHECK(ours != nullptr, "Provided generator is not a CUDA generator of this device");
    state_ = ours->state_;
  }

  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
    const auto state = counted_state();
    std::memcpy(static_cast<char*>(state->mutable_data()) + kSeedBytes, &offset, sizeof offset);
    set_state(*state);
  }
  uint64_t get_offset() const override {
    uint64_t offset = 0;
    std::memcpy(&offset, static_cast<const char*>(counted_state()->data()) + kSeedBytes, sizeof offset);
    return offset;
  }

  void send_seed() {
    if (state_->seeded) set_current_seed(state_->seed);
  }

  void set_state(const c10::TensorImpl& state) override {
    use_device(device());
    Channel& channel = Channel::instance();
    channel.require();
    const size_t n = state.numel();
    // A state of another generator would only be refused on the device, after this call has returned.
    TORCH_CHECK(state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.is_cpu() && state.is_contiguous(),
                "RNG state must be a contiguous torch.ByteTensor on the CPU");
    static const size_t expected = get_state()->numel();
    TORCH_CHECK(n == expected, "RNG state is wrong size: ", n, " bytes, not the ", expected,
                " of a generator of this device");
    channel.send(Message::SetRng, 2 + (n + 7) / 8, [&](uint64_t* body) {
      body[0] = id();
      body[1] = n;
      if (n % 8 != 0) body[2 + n / 8] = 0;
      std::memcpy(body + 2, state.data(), n);
    });
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    use_device(device());
    std::string bytes;
    Channel::instance().call(
        Message::GetRng, 1, [&](uint64_t* body) { body[0] = id(); },
        [&](const char* data, size_t n) { bytes.assign(data, n); });
    at::Tensor state = at::empty({static_cast<int64_t>(bytes.size())}, at::dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), bytes.data(), bytes.size());
    return state.getIntrusivePtr();
  }

 private:
  // A generator that counts (Philox) has a state of seed and offset.
  static constexpr size_t kSeedBytes = 8;
  c10::intrusive_ptr<c10::TensorImpl> counted_state() const {
    auto state = get_state();
    TORCH_CHECK(state->numel() == static_cast<int64_t>(kSeedBytes + sizeof(uint64_t)),
                "CPU Generator does not use offset (Ergosphere: the device of this job is a CPU accelerator, whose "
                "generators have none; use get_state and set_state)");
    return state;
  }

  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(next_generator_id());
    const auto state = get_state();
    copy->set_state(*state);
    copy->state_->seed = state_->seed;
    return copy;
  }

  std::shared_ptr<State> state_;
};

}  // namespace

const at::Generator& default_generator(int index) {
  static auto* generators = new std::map<int, at::Generator>;
  auto found = generators->find(index);
  if (found == generators->end()) {
    const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(index));
    found = generators->emplace(index, at::make_generator<DeviceGenerator>(0, device)).first;
  }
  return found->second;
}

void seed_on_device(int index) {
  static_cast<DeviceGenerator*>(default_generator(index).unsafeGetGeneratorImpl())->send_seed();
}

at::Generator new_generator() {
  Channel::instance().require();
  return at::make_generator<DeviceGenerator>(next_generator_id());
}

uint64_t generator_id(const at::Generator& generator, const std::string& op) {
  if (!generator.defined()) return 0;
  const auto* ours = dynamic_cast<const DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours != nullptr, "Expected a 'cuda' device type for generator but found '", generator.device(),
              "' or a generator that native code made, in a call of ", op,
              "; make it with torch.Generator(device='cuda')");
  TORCH_CHECK(ours->device() == own_device(), "ergosphere: a generator of ", ours->device(), " in a call of ", op,
              " on ", own_device());
  return ours->id();
}

}  // namespace ergo::rank
