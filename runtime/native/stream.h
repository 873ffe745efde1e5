// The stream that a call enqueues its kernels in. Not for exported packages: torch 2.4 has no native_handle.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

namespace attnforge {

// torch's current stream of `device` as a CUstream; null on the CPU.
inline void* current_stream(c10::Device device) {
    return device.is_cpu() ? nullptr : c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

}  // namespace attnforge
