// A CUDA device for PyTorch's CPU build that stores nothing and computes nothing.
//
// Autograd and indexing ask the device's library for the current device and its streams. This file answers these
// questions, so fake tensors on `cuda:0` support the backward pass. It must be loaded before `import torch`, because
// PyTorch looks up the library only once.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::CUDA;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device only_device() { return c10::Device(kType, 0); }
  static c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, only_device()); }

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return only_device(); }
  c10::Device exchangeDevice(c10::Device) const override { return only_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only_stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 1; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex current_device() const override { return 0; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  void deviceSynchronize(at::DeviceIndex) const override {}
};

const bool registered = [] {
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs arguments) {
    return std::unique_ptr<at::CUDAHooksInterface>(new Hooks(arguments));
  });
  return true;
}();

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
