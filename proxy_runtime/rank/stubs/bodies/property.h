// The three parts of a library's version, as every NVIDIA library's GetProperty answers them (libraryPropertyType).
#pragma once

static inline int ergo_property(int property, int* value, int major, int minor, int patch) {
  enum { kInvalidValue = 1 };
  if (!value || property < 0 || property > 2) return kInvalidValue;
  *value = property == 0 ? major : property == 1 ? minor : patch;
  return 0;
}
