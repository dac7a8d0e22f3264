// Lets fake tensors be on "cuda" in a build of torch for CPUs, with a backward pass: torch aborts without a
// guard for the device, and its autograd engine asks the hooks whether there is an accelerator. Each thread
// has a current device and a current stream for each device, as with CUDA. Nothing is computed here.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>

namespace {

constexpr c10::DeviceIndex kGpus = 8;  // the local ranks of a node

thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kGpus> streams{};  // 0: the default stream

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;

  explicit Guard(c10::DeviceType) {}
  Guard() = default;

  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return kGpus; }
  c10::Device getDevice() const override { return {static_type, current}; }
  void setDevice(c10::Device device) const override { current = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = index_of(device); }

  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    c10::DeviceIndex index = index_of(device);
    return c10::Stream(c10::Stream::UNSAFE, {static_type, index}, streams[index]);
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {static_type, index_of(device)});
  }

  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }

  // Events of torch's engine are between threads of one stream here: nothing to order.
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// torch looks it up by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  // None that the engine would start a thread for.
  int getNumGPUs() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 0; }
};

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}

extern "C" {
int64_t current_stream() { return streams[current]; }
void set_current_stream(int64_t stream) { streams[current] = stream; }
}
