// What cuSOLVER says of itself. Everything else of it runs in the device proxy.
#include "defines/cusolver_common.h"
#include "property.h"

int cusolverGetVersion(int* version) { return *version = CUSOLVER_VERSION, 0; }
int cusolverGetProperty(int property, int* value) {
  return ergo_property(property, value, CUSOLVER_VER_MAJOR, CUSOLVER_VER_MINOR, CUSOLVER_VER_PATCH);
}
