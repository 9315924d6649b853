#include "generator.hpp"

#include <ATen/ATen.h>
#include <c10/core/GeneratorImpl.h>

#include <atomic>
#include <cstring>
#include <map>

#include "channel.hpp"
#include "storage.hpp"
#include "tree.hpp"

namespace ergo::rank {
namespace {

uint64_t next_generator_id() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(uint64_t id, c10::Device device = own_device())
      : GeneratorImpl(device, c10::DispatchKeySet(kDeviceKey)), id_(id) {
    if (id_ != 0) Channel::instance().send(Message::NewGenerator, 1, [&](uint64_t* body) { body[0] = id_; });
  }

  uint64_t id() const { return id_; }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    seeded_ = true;
    Channel& channel = Channel::instance();
    if (in_tree() && device().index() != bound_device()) return;  // sent when this becomes the process's device
    // torch.manual_seed in a DataLoader worker seeds every device that the parent had: not an error there.
    if (!channel.open()) return;
    channel.send(Message::Seed, 2, [&](uint64_t* body) {
      body[0] = id_;
      body[1] = seed;
    });
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    const uint64_t value = c10::detail::getNonDeterministicRandom(false);
    set_current_seed(value);
    return value;
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "ergosphere: a generator's offset cannot be set on the device proxy; use set_state");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "ergosphere: a generator's offset is not known in the rank; use get_state");
  }

  void send_seed() {
    if (seeded_) set_current_seed(seed_);
  }

  void set_state(const c10::TensorImpl& state) override {
    use_device(device());
    Channel& channel = Channel::instance();
    channel.require();
    const size_t n = state.numel();
    channel.send(Message::SetRng, 2 + (n + 7) / 8, [&](uint64_t* body) {
      body[0] = id_;
      body[1] = n;
      if (n % 8 != 0) body[2 + n / 8] = 0;
      std::memcpy(body + 2, state.data(), n);
    });
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    use_device(device());
    std::string bytes;
    Channel::instance().call(
        Message::GetRng, 1, [&](uint64_t* body) { body[0] = id_; },
        [&](const char* data, size_t n) { bytes.assign(data, n); });
    at::Tensor state = at::empty({static_cast<int64_t>(bytes.size())}, at::dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), bytes.data(), bytes.size());
    return state.getIntrusivePtr();
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(next_generator_id());
    const auto state = get_state();
    copy->set_state(*state);
    copy->seed_ = seed_;
    return copy;
  }

  uint64_t id_;
  uint64_t seed_ = c10::default_rng_seed_val;
  bool seeded_ = false;
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
