// Bytes that several owners read: a rank's packed input, a received payload, a result. Allocated once,
// 64-byte aligned, not initialised (a zero-filled vector would touch every page twice).
#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <utility>

namespace ergo {

inline constexpr size_t kBufferAlign = 64;

inline constexpr size_t align_up(size_t n, size_t to = kBufferAlign) { return (n + to - 1) / to * to; }

class Buffer {
 public:
  static std::shared_ptr<Buffer> allocate(size_t size) { return std::shared_ptr<Buffer>(new Buffer(size)); }
  static std::shared_ptr<Buffer> copy_of(std::span<const std::byte> bytes) {
    auto buffer = allocate(bytes.size());
    if (!bytes.empty()) std::memcpy(buffer->data(), bytes.data(), bytes.size());
    return buffer;
  }
  // Somebody else's bytes; `release` is called when the last owner goes.
  static std::shared_ptr<Buffer> around(std::byte* data, size_t size, std::function<void()> release) {
    return std::shared_ptr<Buffer>(new Buffer(data, size, std::move(release)));
  }
  ~Buffer() {
    if (release_)
      release_();
    else
      ::operator delete(data_, std::align_val_t{kBufferAlign});
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  explicit Buffer(size_t size)
      : data_(static_cast<std::byte*>(::operator new(size ? size : 1, std::align_val_t{kBufferAlign}))), size_(size) {}
  Buffer(std::byte* data, size_t size, std::function<void()> release)
      : data_(data), size_(size), release_(std::move(release)) {}
  std::byte* data_;
  size_t size_;
  std::function<void()> release_;
};

// A range of a shared buffer that keeps the buffer alive.
class Slice {
 public:
  Slice() = default;
  Slice(std::shared_ptr<const Buffer> owner)  // NOLINT: a whole buffer is a slice
      : owner_(std::move(owner)),
        bytes_(owner_ ? std::span(owner_->data(), owner_->size()) : std::span<const std::byte>()) {}
  Slice(std::shared_ptr<Buffer> owner) : Slice(std::shared_ptr<const Buffer>(std::move(owner))) {}  // NOLINT
  // Throws nothing; the range must lie inside this slice.
  Slice part(size_t offset, size_t length) const {
    Slice s;
    s.owner_ = owner_;
    s.bytes_ = bytes_.subspan(offset, length);
    return s;
  }
  std::span<const std::byte> bytes() const { return bytes_; }
  const std::byte* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }

 private:
  std::shared_ptr<const Buffer> owner_;
  std::span<const std::byte> bytes_;
};

}  // namespace ergo
