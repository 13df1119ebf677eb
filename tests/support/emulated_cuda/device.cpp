// A CUDA device made of host memory, for a torch that was built without CUDA.
//
// Tensors say "cuda:N" and lie in memory of the host. Operations run the CPU's kernels on it, through torch's own
// fallback, so that the numbers are real. What CUDA refuses is refused: operands on two devices, a step count on the
// host in a fused optimizer, an allocation beyond the device's memory, a random state of another device.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IntArrayRef;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

// ---- Devices. As with CUDA, each thread has a current one, at first number 0.

thread_local DeviceIndex current = 0;

DeviceIndex count() { return static_cast<DeviceIndex>(setting("EMULATED_CUDA_DEVICES", 4)); }

DeviceIndex switch_to(DeviceIndex device) {
  TORCH_CHECK(device < count(), "CUDA error: invalid device ordinal");
  return device < 0 ? current : std::exchange(current, device);
}

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  Device exchangeDevice(Device device) const override { return {CUDA, switch_to(device.index())}; }
  Device getDevice() const override { return {CUDA, current}; }
  void setDevice(Device device) const override { switch_to(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return count(); }
};

// ---- Memory. The size of a block is in front of it.

constexpr size_t ALIGNMENT = 512;
std::atomic<int64_t> allocated{0}, peak{0};

struct Memory final : c10::Allocator {
  static void release(void* data) {
    if (data == nullptr) return;
    char* block = static_cast<char*>(data) - ALIGNMENT;
    allocated -= *reinterpret_cast<int64_t*>(block);
    std::free(block);
  }
  c10::DataPtr allocate(size_t bytes) override {
    const Device device(CUDA, current);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    const int64_t size = static_cast<int64_t>(bytes), limit = setting("EMULATED_CUDA_MEMORY", int64_t(80) << 30);
    TORCH_CHECK_WITH(OutOfMemoryError, allocated + size <= limit, "CUDA out of memory. Tried to allocate ",
                     double(size) / (1 << 20), " MiB. GPU ", int(current), " has a total capacity of ",
                     double(limit) / (1 << 20), " MiB");
    void* block = std::aligned_alloc(ALIGNMENT, (bytes + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    TORCH_CHECK(block != nullptr, "the host has no memory left for the emulated device");
    *static_cast<int64_t*>(block) = size;
    const int64_t now = allocated += size;
    for (int64_t seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {
    }
    void* data = static_cast<char*>(block) + ALIGNMENT;
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;

// ---- Random numbers. As with CUDA, the state is a seed and an offset, which each random operation moves on.

struct RandomStream {
  uint64_t seed = 0, offset = 0;
} stream;

Tensor random_state() {
  const std::array<int64_t, 2> numbers{int64_t(stream.seed), int64_t(stream.offset)};
  Tensor state = at::empty({16}, at::kByte);
  std::memcpy(state.data_ptr(), numbers.data(), 16);
  return state;
}

void set_random_state(const Tensor& state) {
  TORCH_CHECK_TYPE(state.is_cpu() && state.scalar_type() == at::kByte, "RNG state must be a torch.ByteTensor");
  TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
  std::memcpy(&stream.seed, state.const_data_ptr(), 8);
  std::memcpy(&stream.offset, static_cast<const char*>(state.const_data_ptr()) + 8, 8);
}

void seed_random_stream(int64_t seed) { stream = {uint64_t(seed), 0}; }

bool is_random(const std::string& op) {
  static const std::set<std::string> names = {
      "aten::native_dropout", "aten::bernoulli", "aten::bernoulli_", "aten::normal", "aten::normal_",
      "aten::uniform_", "aten::random_", "aten::multinomial", "aten::exponential_", "aten::rand", "aten::randn",
      "aten::randint", "aten::randperm", "aten::rand_like", "aten::randn_like"};
  return names.count(op) > 0;
}

// Of this name, by which torch looks for it.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return count(); }
  DeviceIndex deviceCount() const override { return count(); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return switch_to(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return switch_to(device); }
  void setCurrentDevice(DeviceIndex device) const override { switch_to(device); }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// ---- What a device has to bring: memory, views of it, copies.

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* data = const_cast<void*>(tensor.const_data_ptr());
  return at::from_blob(data, tensor.sizes(), tensor.strides(), [owner = tensor.storage()](void*) {}, options);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  Tensor target = on_cpu(self);
  target.copy_(on_cpu(source));
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor self = target;
  return copy_(self, source, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size) return self;  // with its strides
  const int64_t elements = c10::multiply_integers(size) + self.storage_offset();
  const size_t needed = elements * self.dtype().itemsize();
  const at::Storage& storage = self.storage();
  if (needed > storage.nbytes()) {
    const c10::DeviceGuard guard(self.device());
    auto larger = memory.allocate(needed);
    if (storage.nbytes() > 0) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::cpu::view_symint(self, size); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::_reshape_alias_symint(self, size, stride);
}
Tensor& set_storage(Tensor& self, at::Storage source) { return at::cpu::set_(self, source); }
Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::cpu::set_(self, source); }
at::Scalar number(const Tensor& self) { return on_cpu(self).item(); }
void record_stream(Tensor&, at::Stream) {}

int64_t attention_kernel(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the one made of plain operations: the others are for GPUs alone
}

// ---- All other operations.

// Raises what CUDA does for an operand on another device. A tensor of the host passes as a single number, except in
// fused optimizers, which read by device address; and as an index.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::string& name = op.schema().name();
  if (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_") return;
  const bool fused = name.rfind("aten::_fused_", 0) == 0;
  std::optional<Device> device;
  const auto check = [&](const Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0 && !fused)) return;
    if (!device) device = tensor.device();
    TORCH_CHECK(tensor.device() == *device, "Expected all tensors to be on the same device, but found at least two "
                "devices, ", *device, " and ", tensor.device(), "! (", name, ")");
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) check(tensor);
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, *stack);
  if (!is_random(op.schema().name())) return at::native::cpu_fallback(op, stack);
  struct Lent {  // the CPU's generator, seeded from the device's state
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    Tensor kept = generator.get_state();
    ~Lent() { generator.set_state(kept); }
  } lent;
  lent.generator.set_current_seed(stream.seed * 0x9E3779B97F4A7C15 + stream.offset);
  stream.offset += 4;
  at::native::cpu_fallback(op, stack);
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
const bool allocates = (c10::SetAllocator(CUDA, &memory, 10), true);

}  // namespace

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("resize_", resize_);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", number);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_fused_sdp_choice", attention_kernel);
  library.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY(emulated_cuda, library) {
  library.def("on_cpu(Tensor tensor) -> Tensor", [](const Tensor& tensor) { return on_cpu(tensor.detach()); });
  library.def("current_device() -> int", []() { return int64_t(current); });
  library.def("set_device(int device) -> ()", [](int64_t device) { switch_to(static_cast<DeviceIndex>(device)); });
  library.def("device_count() -> int", []() { return int64_t(count()); });
  library.def("allocated() -> int", []() { return allocated.load(); });
  library.def("peak() -> int", []() { return peak.load(); });
  library.def("reset_peak() -> ()", []() { peak = allocated.load(); });
  library.def("random_state() -> Tensor", &random_state);
  library.def("set_random_state(Tensor state) -> ()", &set_random_state);
  library.def("seed(int seed) -> ()", &seed_random_stream);
}
